"""Memory as planned is what a client's round takes at its peak, in a process that is watched."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedspan
from helpers.planned_memory import CASES, EXAMPLES, TOLERANCE, save_models, settings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux' /proc"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models and texts."""
    place = tmp_path_factory.mktemp("planned-memory")
    save_models(place)
    return place


def test_memory_of_a_client_is_what_its_process_takes(folder: Path) -> None:
    configs = [settings(folder, changes) for changes in CASES.values()]
    script = Path(__file__).parents[1] / "helpers" / "measured_client.py"
    run = subprocess.run(
        [sys.executable, str(script), json.dumps([settings(folder, {"model": {"name": "small"}}), *configs])],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    assert run.returncode == 0, run.stderr
    ratios: dict[str, float] = {}
    for (name, values), line in zip(zip(CASES, configs, strict=True), run.stdout.splitlines(), strict=True):
        real, examples = map(int, line.split())
        assert examples == EXAMPLES
        labels = None if values.get("task") else 2
        ratios[name] = fedspan.plan(values, labels=labels, examples=EXAMPLES).client.total / real
    assert ratios == {name: pytest.approx(1, abs=TOLERANCE) for name in CASES}
