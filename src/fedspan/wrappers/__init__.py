"""Methods around methods."""
