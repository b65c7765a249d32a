"""Aggregation of replies: how they are reduced, in plaintext or under secure aggregation."""
