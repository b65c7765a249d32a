"""Users' own trainers as an engine: each client's jobs are trained by its trainer, on its own model and data."""
