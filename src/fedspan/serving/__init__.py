"""Serving: trained models loaded again, for predictions, evaluation and export."""
