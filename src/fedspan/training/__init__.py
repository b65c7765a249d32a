"""Local training of one model: the engine protocol, the loop and batched engines, and what both share."""
