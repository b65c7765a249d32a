"""A trainer in two processes on loopback (DDP over gloo): equal to one process, and what fails in one ends both."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedspan
from fedspan.core.base import BaseUpdate
from fedspan.core.lowrank import LowRank
from fedspan.core.parametrization import FactorisedConv, LoRA, MixedGram
from fedspan.core.values import Group, Job
from fedspan.training.trainers.processes import Processes, describe_job, read_job
from helpers import two_processes
from helpers.trainer_clients import make_trainer

ROOT = Path(__file__).resolve().parents[3]
DEADLINE = 240


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment(rank: int, port: int) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    values = {key: str(value) for key, value in world.items()}
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **values}


def run_two(*arguments: object) -> list[tuple[int, str]]:
    """Run ``helpers.two_processes`` twice; the exit status and output of each rank."""
    port = free_port()
    command = [sys.executable, "-m", "helpers.two_processes", *map(str, arguments)]
    started = [
        subprocess.Popen(
            command, env=environment(rank, port), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rolora", "fedex-lora"])
def test_two_processes_train_what_one_trains(method: str, tiny_folder: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    two_processes.serve(tiny_folder, one, {"name": method}, None)
    for status, output in run_two(tiny_folder, two, method):
        assert status == 0, output
    expected, found = load_file(one / "result.safetensors"), load_file(two / "result.safetensors")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.allclose(value, found[name], rtol=1e-3, atol=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_fails_ends_both_with_the_reason(rank: int, tiny_folder: Path, tmp_path: Path) -> None:
    results = run_two(tiny_folder, tmp_path, "fedit", "--fail", rank)
    assert all(status != 0 for status, _ in results), results
    assert "the disk of this process is full" in results[rank][1]
    assert "all processes of this client end. Start the script again" in results[0][1]
    assert not (tmp_path / "result.safetensors").exists()


def test_a_simulation_in_several_processes_is_refused(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tiny_folder, "east")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(fedspan.FedspanError, match=r"in 2 processes, and fedspan\.simulate runs a federation in one"):
        fedspan.simulate({}, tmp_path / "run", trainers={"east": trainer})


def test_a_trainer_of_one_process_in_a_script_of_two_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(fedspan.FedspanError, match="runs in 2 processes, and its trainer in one of them only"):
        Processes()


def test_a_job_is_read_as_it_was_described() -> None:
    torch.manual_seed(0)
    forms = {"a.b": LoRA(0.5), "conv": FactorisedConv((3, 1)), "mixed": MixedGram(2.0, "left")}
    tensors = {"a.b/A": torch.randn(2, 5), "a.b/B": torch.randn(3, 2).bfloat16(), "conv/U": torch.tensor(1.5)}
    job = Job(forms, tensors, (Group(("a.b/A",)), Group(("a.b/B",), 2.0)), steps=0, epochs=3, phase="probe")
    pair = LowRank(torch.randn(3, 2), torch.randn(2, 5), 0.25)
    base = BaseUpdate(4, 0.5, {"a.b": pair, "conv": torch.randn(2, 3)})
    header, sent = describe_job(job, base)
    found, moved = read_job((json.loads(json.dumps(header)), sent), BaseUpdate())
    assert found.parametrization == forms
    assert all(torch.equal(value, found.tensors[name]) for name, value in tensors.items())
    assert (found.trainable_names, found.steps, found.epochs, found.phase) == (("a.b/A", "a.b/B"), 0, 3, "probe")
    assert (moved.round, moved.rho) == (4, 0.5)
    restored = moved.total["a.b"]
    assert isinstance(restored, LowRank)
    assert torch.equal(restored.to_dense(), pair.to_dense())
    assert read_job(describe_job(job, None), moved)[1] is moved
