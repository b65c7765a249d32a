"""Transports: how orders reach hosts and replies come back."""
