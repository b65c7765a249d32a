"""What a run leaves in its folder, to be compared with another run."""

import json
import re
from pathlib import Path

from fedspan.run_folder import CARD

_TIMED = {"seconds", "chain", "logs", "sha256"}  # the time, and digests that cover it
_REPEATED = {"config", "files"}  # what report.json names of files that are compared themselves


def content(folder: Path) -> dict[str, object]:
    """What a run left, without wall-clock time and without what names the machine and the moment."""
    found: dict[str, object] = {}
    for path in sorted(entry for entry in folder.rglob("*") if entry.is_file()):
        name = str(path.relative_to(folder))
        if name in ("environment.json", "run.lock") or path.name == "checkpoint.json":
            continue
        if name.startswith("tensorboard/"):  # files whose very names are machine and moment
            continue
        if path.name == "metrics.jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [{key: value for key, value in row.items() if key not in _TIMED} for row in rows]
        elif path.name == "report.json":
            report = json.loads(path.read_text())
            found[name] = {key: value for key, value in report.items() if key not in _TIMED | _REPEATED}
        elif path.name == CARD:  # it ends with the command, or the call in Python
            found[name] = re.split(r"^## (?:Command|Python)$", path.read_text(), maxsplit=1, flags=re.MULTILINE)[0]
        else:
            found[name] = path.read_bytes()
    return found
