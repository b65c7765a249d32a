"""Federations across machines: the data owner's node, the handshake and the status of a run."""
