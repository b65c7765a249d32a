"""A run's folder as a run leaves it, without a run."""

import os
import socket
from pathlib import Path
from typing import Any

import yaml

from fedspan.files import to_json
from fedspan.logs import JsonLines
from fedspan.run_folder import RunFolder

HOSTILE = '<img src=x onerror="window.hit=1">\x1b[31m\''


class PretendRun:
    """Writes the files that a run writes."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        path.mkdir()
        values = {"method": {"name": "fedit"}, "model": {"name": "tiny"}, "task": "classification"}
        values |= {"federation": {"rounds": 5}, "partition": {"clients": 3}}
        self.folder.config.write_text(yaml.safe_dump(values))
        self.start()

    def start(self, pid: int | None = None) -> None:
        self.folder.lock.write_text(f"{os.getpid() if pid is None else pid}\n{socket.gethostname()}\n")

    def add(self, number: int, accuracy: float = 0.5, **more: Any) -> None:
        moved = {"down": 1000 * number, "up": 500 * number}
        row = {"round": number, "loss": 1.0 / number, "cohort": ["east", "north"], "seconds": 2.0 * number}
        row |= {"test": {"accuracy": accuracy}, "validation": {"accuracy": accuracy + 0.1, "loss": 1.0}}
        with JsonLines(self.folder.metrics) as lines:
            lines.append({**row, "bytes": moved, **more})
            lines.commit()

    def write_progress(self, **values: Any) -> None:
        content = {"state": "running", "metric": "accuracy", "round": 1, "rounds": 5, "clients": 3, **values}
        self.folder.progress.write_text(to_json(content))
