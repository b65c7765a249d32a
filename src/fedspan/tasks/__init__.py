"""Kinds of learning problems."""
