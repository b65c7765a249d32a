"""Statements of papers that a script can test."""
