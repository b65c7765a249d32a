"""The comparison of the engines at a size of seconds; what its parts count."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evidence.pages.engines.watch import Watch


def test_the_engine_s_seconds_leave_out_what_it_calls_back() -> None:
    def train_all(examples: Any, sizes: Any, opened: Any, finished: Any) -> None:
        time.sleep(0.1)
        opened("client")
        finished(None, None)

    engine = SimpleNamespace(train_all=train_all, predict=lambda: time.sleep(0.1), stacking=None)
    watch = Watch(engine)
    engine.train_all(None, {}, lambda _: time.sleep(0.3), lambda *_: time.sleep(0.3))
    assert 0.1 <= watch.take() < 0.3
    engine.predict()
    assert 0.1 <= watch.take() < 0.3
    assert watch.take() == 0.0


@pytest.mark.slow
def test_a_page_comes_of_every_section(tmp_path: Path) -> None:
    for name, count in (("train", 64), ("test", 8)):
        rows = [
            f"how do I change the {'limit' if number % 2 else 'address'} {number},{number % 2}"
            for number in range(count)
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,category", *rows]) + "\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    sizes = ["--clients", "2", "--threads", "1", "--examples", "4", "4", "--examples", "32", "32", "--registered", "20"]
    runs = ["--at-once", "2", "--accuracy-examples", "16", "--accuracy-rounds", "1", "--accuracy-seeds", "0"]
    places = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--page", str(tmp_path / "page.md")]
    command = [sys.executable, "-m", "evidence.pages.engines", *places, *sizes, *runs, "--repetitions", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.md").read_text()
    assert "FAIL" not in page
    judged = [line for line in page.splitlines() if line.endswith(("| pass |", "| not judged |"))]
    assert [line for line in judged if line.endswith("| pass |")] == [
        line for line in judged if "float32 losses" in line
    ]
