"""Values, parametrizations and low-rank algebra that every method is written in."""
