"""The command line, ``fedspan``. Commands import torch and Transformers only when they run, so that help is fast."""

from fedspan.cli.app import app

__all__ = ["app"]
