"""Progress: what a run reports while it runs, and the bars, views, files and trackers that show it."""
