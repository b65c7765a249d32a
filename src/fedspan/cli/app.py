"""The app with all commands. Each registers itself on import; help lists them in the order of the imports."""
# ruff: noqa: F401, I001
# pyright: reportUnusedImport=false

from fedspan.cli.commands import app

from fedspan.cli import train
from fedspan.cli import compare
from fedspan.cli import reproduce
from fedspan.cli import methods
from fedspan.cli import plan
from fedspan.cli import doctor
from fedspan.cli import data
from fedspan.cli import trained_model
from fedspan.cli import report
from fedspan.cli import deploy
from fedspan.cli import admission
from fedspan.cli import operation
