"""Series of runs: comparisons, hyperparameter searches and their tables."""
