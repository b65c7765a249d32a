"""HTML report of runs: read from their folders, grouped, drawn, and summarized in words."""
