"""The run folder, and a run from config to report."""
