"""benchmarks/engines.py, cluster.py and galore.py at a size of seconds; what their parts count."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.scripts import ROOT, load_script

BENCHMARKS = ROOT / "benchmarks"


def test_the_engine_s_seconds_leave_out_what_it_calls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "engines"))
    from watch import Watch

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
    command = [sys.executable, str(BENCHMARKS / "engines.py"), *places, *sizes, *runs, "--repetitions", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.md").read_text()
    assert "FAIL" not in page
    judged = [line for line in page.splitlines() if line.endswith(("| pass |", "| not judged |"))]
    assert [line for line in judged if line.endswith("| pass |")] == [
        line for line in judged if "float32 losses" in line
    ]


@pytest.mark.slow
def test_the_page_judges_nothing_of_a_quick_try(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra fedspan[cluster] is not installed")
    rows = [f"how do I change the {'limit' if number % 2 else 'address'} {number},{number % 2}" for number in range(96)]
    (tmp_path / "train.csv").write_text("\n".join(["text,category", *rows]) + "\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    places = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--page", str(tmp_path / "page.md")]
    command = [sys.executable, str(BENCHMARKS / "cluster.py"), *places, "--quick"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.md").read_text()
    assert page.count("| not judged |") == 3
    for line in ("| 1 worker, float32 |", "| 2 workers, float32 |", "| 1 |", "| 2 |"):
        assert f"\n{line}" in page


@pytest.mark.parametrize(
    ("period", "scale", "bias_correction"), [(1000, 1.0, False), (1000, 0.25, True), (3, 1.0, True), (3, 0.25, False)]
)
def test_galore_torch_takes_the_same_steps(period: int, scale: float, bias_correction: bool) -> None:
    pytest.importorskip("galore_torch", reason="needs `pip install --no-deps galore-torch`", exc_type=ImportError)
    benchmark = load_script("benchmarks/galore.py")
    for steps in (1, 2, 7):
        assert benchmark.compute_distance(steps, period, scale, bias_correction) < 1e-6
