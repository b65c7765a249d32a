"""A federation of 100,000 clients costs what its cohort costs."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest

import fedspan
from fedspan.assembly.run import Prepared
from fedspan.clients.mappings import LazyMapping
from fedspan.core.values import Client
from fedspan.data import PartitionConfig
from fedspan.data.partition import Partition, partition
from fedspan.federation.evaluation import Evaluator
from fedspan.federation.federation import Federation
from fedspan.federation.progress import ClientData
from fedspan.run_folder import RunFolder
from fedspan.runs.checkpoint import prune, resume, save, store_clients
from fedspan.runs.checkpoint_format import Checkpoint
from fedspan.transports.in_process import simulate
from helpers import tiny
from helpers.plain_data import plain
from helpers.refusals import refused

CLIENTS = 100_000
COHORT = 4


def test_a_partition_among_many_is_made_and_read_at_once() -> None:
    clients = CLIENTS // 5
    data = datasets.Dataset.from_dict({"text": ["t"] * 2 * clients, "label": np.arange(2 * clients) % 5})
    divided = partition(data, PartitionConfig(clients=clients, validation=0, test=0), seed=0)
    assert np.array_equal(np.sort(divided.parts.rows), np.arange(2 * clients))
    assert (divided.parts.sizes == [2, 0, 0]).all()
    assert divided.clients[clients - 1].id == f"client-{clients - 1}"
    assert Partition.from_json(divided.to_json()).fingerprint == divided.fingerprint


def large(prepared: Prepared, folder: Path, asked: list[str]) -> Federation:
    """Two examples each, which many clients share; ``asked`` is told who is made."""
    changes = {"federation": {"rounds": 6, "clients_per_round": COHORT}, "training": {"optimizer_state": "keep"}}
    made = tiny.variant(prepared, tiny.config(folder, method={"name": "fedsa-lora", "r": 2}, **changes))
    one = next(iter(made.federation.clients.values())).client

    def create_client(at: int) -> ClientData:
        asked.append(f"client-{at:05}")
        rows = np.array([at, at + 1]) % len(made.train)
        return ClientData(Client(asked[-1], one.rank, one.scaling, 2, 2.0), rows, rows[:1], rows[1:])

    ids = (f"client-{at:05}" for at in range(CLIENTS))
    old = made.federation
    return simulate(old.method, old.engine, LazyMapping(ids, create_client), old.examples, old.settings)


def test_rounds_and_checkpoints_touch_the_cohort_alone(prepared: Prepared, tiny_folder: Path, tmp_path: Path) -> None:
    asked: list[str] = []
    federation, run = large(prepared, tiny_folder, asked), RunFolder(tmp_path)
    in_memory = progress = federation.begin()
    for number in range(3):
        asked.clear()
        result = federation.run_round(progress)
        assert set(asked) == set(result.cohort)
        progress = store_clients(run, result.progress)
        save(run, Checkpoint(progress.state, progress.states, progress.last_rounds))
        written = [path for path in run.clients.glob(f"round-{number + 1:05}/*")]
        assert len(written) == COHORT
        prune(run)
        in_memory = federation.run_round(in_memory).progress
    assert plain(in_memory) == plain(progress)
    kept = resume(run)
    assert plain(federation.run_round(kept.progress).progress) == plain(federation.run_round(in_memory).progress)


def test_a_sample_of_the_clients_is_measured(prepared: Prepared, tiny_folder: Path) -> None:
    asked: list[str] = []
    federation = large(prepared, tiny_folder, asked)
    evaluator = Evaluator(federation, 32, 7)
    assert len(set(evaluator.ids)) == 7
    assert list(evaluator.ids) == sorted(evaluator.ids)
    assert Evaluator(federation, 8, 7).ids == evaluator.ids
    validation, own = evaluator.evaluate_clients(federation.begin())
    assert tuple(validation.by_client) == tuple(own.by_client) == evaluator.ids
    assert set(asked) == set(evaluator.ids)
    assert tuple(evaluator.evaluate_heldout(federation.begin(), prepared.test)) == evaluator.ids


PEAK = """
import sys
from pathlib import Path
import fedspan
from fedspan.config import load_config
fedspan.run(load_config(sys.argv[1], sys.argv[3:]), sys.argv[2])
print(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")).split()[1])
"""
"""A process's peak of resident memory, in KiB; ``ru_maxrss`` would be that of the process that began it, too."""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own account of memory")
@pytest.mark.parametrize("method", ["fedit", "fedsa-lora"])
def test_peak_memory_is_that_of_fifty_clients(method: str, tiny_folder: Path, tmp_path: Path) -> None:
    """The same examples, divided among 50 clients and among 100,000, with a cohort of 50 of either."""
    path = tmp_path / "corpus.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        labels = (tiny.LABELS[number % 4] for number in range(2 * CLIENTS))
        writer.writerows([f"{label}{number % 8} word{number % 12}", label] for number, label in enumerate(labels))
    config = tmp_path / "config.yaml"
    config.write_text(
        f"device: cpu\nthreads: 1\nmodel: {{name: {tiny_folder / 'bert'}, target_modules: [query, value], "
        f"head_init: random}}\n"  # the statistics of 100,000 clients are as many passes
        f"data: {{train: {path}, test_fraction: 0}}\nmethod: {{name: {method}, r: 2}}\n"
        "federation: {rounds: 2, clients_per_round: 50}\ntraining: {local_steps: 2, optimizer_state: keep}\n"
        "evaluation: {every: 2, clients: 20}\n"
    )
    peaks = []
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for clients in (50, CLIENTS):
        command = [
            sys.executable,
            "-c",
            PEAK,
            str(config),
            str(tmp_path / str(clients)),
            f"partition.clients={clients}",
        ]
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        peaks.append(int(done.stdout.split()[-1]))
    print(f"peak memory in KiB: {peaks[0]} with 50 clients, {peaks[1]} with {CLIENTS}")
    assert peaks[1] < 1.1 * peaks[0]


def test_models_of_clients_that_were_not_measured_are_exported_on_demand(tiny_folder: Path, tmp_path: Path) -> None:
    changes = {"method": {"name": "fedsa-lora", "r": 2}, "federation": {"rounds": 1}, "evaluation": {"clients": 2}}
    report = fedspan.run(tiny.settings(tiny_folder, **changes), tmp_path / "run")
    assert len(report.adapters) == len(report.by_client) == 2
    others = sorted(set(tiny.SITES) - set(report.adapters))
    with refused("client", "fedspan export --client first"):
        fedspan.predict(tmp_path / "run", ["lab1"], client=others[0])
    for id in tiny.SITES:
        out = fedspan.export(tmp_path / "run", tmp_path / id, client=id)
        assert (out / "adapter_model.safetensors").is_file()
        if id in report.adapters:
            same = tmp_path / "run" / report.adapters[id] / "adapter_model.safetensors"
            assert (out / "adapter_model.safetensors").read_bytes() == same.read_bytes()
