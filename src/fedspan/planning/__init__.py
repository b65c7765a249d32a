"""Cost estimates before a run: parameters, traffic, compute, memory and time."""
