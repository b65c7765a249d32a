"""Measurements of this repository: pages of results, claims of papers, and regressions of a deployment."""
