"""Let tests import the scripts of ``benchmarks/``, as those import each other."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
