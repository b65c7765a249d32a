"""``python -m fedspan.cli`` is ``fedspan``."""

from fedspan.cli import app

app(prog_name="fedspan")
