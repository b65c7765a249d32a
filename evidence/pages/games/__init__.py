"""Games of privacy."""
