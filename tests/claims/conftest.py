"""Let tests import the scripts of ``claims/``, as those import each other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "claims"))
