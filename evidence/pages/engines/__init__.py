"""What `evidence/pages/engines` is made of. Files named `peers_*` run in an environment without fedspan."""
