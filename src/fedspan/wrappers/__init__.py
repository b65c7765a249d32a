"""Wrappers: methods around other methods."""
