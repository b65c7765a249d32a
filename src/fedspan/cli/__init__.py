"""The command line, ``fedspan``. Commands import torch and Transformers when they run, so that help comes at once."""

from fedspan.cli.app import app

__all__ = ["app"]
