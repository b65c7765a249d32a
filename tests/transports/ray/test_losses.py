"""Workers, machines and drivers that die in mid-round."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="the extra fedspan[cluster] is not installed")

import ray

import fedspan
from fedspan.federation.progress import RoundResult
from fedspan.runs.cluster import connect_workers, resources_of
from fedspan.runs.setup import Prepared, prepare
from fedspan.transports.ray.team import open_team
from helpers import tiny
from helpers.plain_data import plain
from helpers.run_content import content

pytestmark = pytest.mark.slow


def config(folder: Path, **cluster: Any) -> Any:
    """All four clients, for long enough that a worker can die meanwhile."""
    changes = {"federation": {"clients_per_round": None}, "training": {"local_steps": 40}}
    return tiny.config(folder, **changes, cluster={"workers": 2, "start_seconds": 60.0, **cluster})


def undisturbed(prepared: Prepared) -> list[RoundResult]:
    """Two rounds in this process."""
    results = [prepared.federation.run_round(prepared.federation.begin())]
    return [*results, prepared.federation.run_round(results[0].progress)]


def require_same_rounds(prepared: Prepared, connected: Prepared, interrupt: Any) -> None:
    """Two rounds on workers, one of which is lost in the first, have the bits of undisturbed ones."""
    expected = undisturbed(prepared)
    pending = [interrupt]
    first = connected.federation.run_round(
        connected.federation.begin(), lambda client, loss: pending.pop()() if pending else None
    )
    second = connected.federation.run_round(first.progress)
    assert not pending
    for made, wanted in zip((first, second), expected, strict=True):
        assert plain(made.progress.state) == plain(wanted.progress.state)
        assert made.failures == ()
        assert made.transfers == wanted.transfers


def test_a_worker_that_dies_costs_its_stack(tiny_folder: Path) -> None:
    prepared = prepare(config(tiny_folder))
    with open_team(resources_of(prepared.config)) as team:
        busiest = team.members[0]
        require_same_rounds(
            prepared, connect_workers(prepared, team), lambda: ray.kill(busiest.actor, no_restart=False)
        )


def test_a_driver_that_is_killed_goes_on_to_the_same_bits(tiny_folder: Path, tmp_path: Path) -> None:
    settings = tiny.settings(tiny_folder, training={"local_steps": 60}, cluster={"workers": 2})
    fedspan.run({key: value for key, value in settings.items() if key != "cluster"}, tmp_path / "whole")
    code = "import json, sys, fedspan; fedspan.run(json.loads(sys.argv[1]), sys.argv[2])"
    command = [sys.executable, "-c", code, json.dumps(settings), str(tmp_path / "killed")]
    metrics = tmp_path / "killed" / "metrics.jsonl"
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
    try:
        until = time.monotonic() + 120
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 1):
            assert process.poll() is None, "the run ended before it was killed"
            assert time.monotonic() < until
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    fedspan.resume(tmp_path / "killed", progress=False)

    def files(folder: Path) -> dict[str, object]:
        return {name: value for name, value in content(folder).items() if not name.endswith("config.yaml")}

    assert files(tmp_path / "killed") == files(tmp_path / "whole")
