"""``python -m fedspan`` is ``fedspan``."""

from fedspan.cli import app

if __name__ == "__main__":
    app(prog_name="fedspan")
