"""The methods, one paper per file; the registry lists them all."""
