"""Runs: the run folder, and everything that takes a run from its config to its report."""
