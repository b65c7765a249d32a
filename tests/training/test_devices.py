"""Every method, wrapper, task and way of training on a device other than the CPU, with the CPU's results.

The device is a pretend one in CPU memory (``helpers.pretend_device``), which refuses tensors on two devices in one
operator. It finds tensors that were left on the CPU, results that were left on the device, and waits of the host. It
does not cover real kernels, streams and memory: CUDA's own numbers, pinned copies, varlen attention, autocast, 4- and
8-bit bases (bitsandbytes has kernels for real devices only) and MPS. Users' own trainers choose their
device themselves; ``test_cuda.py`` has them.

Its registration lasts as long as the process, so the runs are compared in a process of their own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedspan.tasks.registry import BUILT_IN
from fedspan.tasks.trainer import TRAINER
from helpers.device_runs import ENGINES, RUNS, WAITS
from helpers.pass_counts import PASSES

pytestmark = pytest.mark.slow  # a process that imports everything, and minutes of runs
ALL = [f"{name}/{engine}" for name in RUNS for engine in ENGINES]
OTHER_KERNELS = {"task causal-lm", "task causal-lm packed", "conv1d", "fused attention"}
"""Runs in which PyTorch takes other CPU kernels where it does not see that a tensor is on the CPU."""
DIFFERENCES = {"task preference"}
"""Runs whose loss and metrics are small differences of log-probabilities, with as much rounding as these have."""


def compare(folder: Path, names: list[str]) -> dict[str, Any]:
    """What ``helpers.pretend_runs`` finds out about some runs."""
    target, tests = folder / "compared.json", Path(__file__).parents[1]
    path = os.pathsep.join(filter(None, [str(tests), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-W", "ignore", "-m", "helpers.pretend_runs", str(target), *names]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(target.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All runs that are asked for, in one process."""
    asked = {item.name for item in request.session.items if item.path == Path(__file__)}
    names = [name for name in ALL if f"test_a_run_ends_as_on_the_cpu[{name}]" in asked]
    return compare(tmp_path_factory.mktemp("compared"), names or ALL[:1])  # without names it would run all


@pytest.mark.parametrize("name", ALL)
def test_a_run_ends_as_on_the_cpu(name: str, compared: dict[str, Any]) -> None:
    gap = compared["runs"][name]["gap"]
    assert not isinstance(gap, str), gap
    run = name.partition("/")[0]
    assert gap <= (1e-3 if run in DIFFERENCES else 1e-5 if run in OTHER_KERNELS else 0.0)


def test_the_device_refuses_what_accelerators_refuse(compared: dict[str, Any]) -> None:
    refusals = compared["refusals"]
    assert refusals["sum"] == "aten::add: a CPU tensor of shape (2, 2) beside tensors on pretend:0"
    assert all(refusals.values())


@pytest.mark.parametrize("name", WAITS)
def test_the_host_waits_for_no_step(name: str, compared: dict[str, Any]) -> None:
    """More steps, no more waits: batches are copied from pinned memory, and losses are read when a job has ended.

    Jobs that end with the same pass are read together, and which do depends on the number of steps.
    """
    mask, results = "_local_scalar_dense in transformers.masking_utils", "_to_copy in fedspan.training.client_slot"
    assert set(compared["waits"][name]) <= {mask, results}  # Transformers' mask of a pass with little padding


def test_most_runs_wait_nowhere(compared: dict[str, Any]) -> None:
    assert all(compared["waits"][name] == {} for name in ("task causal-lm", "task images"))
    assert compared["waits"]["clock"] == {"synchronize": 1}


@pytest.mark.parametrize("name", PASSES)
def test_clients_of_a_pass_share_its_copies_and_waits(name: str, compared: dict[str, Any]) -> None:
    counts = compared["passes"][name]
    for kind in ("copies", "waits"):
        assert counts[kind]["by client"] == counts[kind]["by client and step"] == 0
        assert counts[kind]["fixed"] > 0
    assert counts["operators"]["by client"] == 3  # rows in memory of their own: values and two moments
    assert counts["operators"]["by client and step"] == 0
    read = counts["bytes to the host"]
    assert read["by client"] == counts["bytes of a row"]["fixed"]  # values, without moments
    assert read["by client and step"] == 8  # a loss


def test_the_table_holds_every_task(compared: dict[str, Any]) -> None:
    assert set(compared["tasks"]) == {definition.name for definition in BUILT_IN} - {TRAINER.name}
