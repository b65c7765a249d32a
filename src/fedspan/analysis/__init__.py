"""Looking at methods and their results from outside a run."""
