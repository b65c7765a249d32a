"""Values, parametrizations and low-rank algebra that all methods use."""
