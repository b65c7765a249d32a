"""Many runs: comparisons, hyperparameter searches, series and their tables."""
