"""What the pages of results are made from."""
