"""Local training, reduction and the rounds; they know no method by name."""
