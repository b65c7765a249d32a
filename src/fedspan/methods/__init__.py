"""One paper, one file; the registry names them all."""
