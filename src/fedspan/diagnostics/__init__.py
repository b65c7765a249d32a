"""Diagnostics of client updates, layer by layer."""
