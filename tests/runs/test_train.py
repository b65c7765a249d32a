"""The same config and seed give the same bits: every file of a run, whatever ran before and in whichever process."""

import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedspan
from fedspan.methods.registry import METHODS
from helpers import tiny, tiny_decoders
from helpers.run_content import content


def perturb_generators(number: int) -> None:
    """Global generators in some state or other, and memory that was used."""
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)
    torch.full((1000,), float("nan"))


@st.composite
def changes(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    method = draw(st.sampled_from(sorted(METHODS)))
    return {
        "method": {"name": method} | ({"tau": 1} if method == "fedloru" else {}),
        "federation": {"rounds": 2, "clients_per_round": draw(st.sampled_from([None, 2]))},
        "training": {
            "optimizer": draw(st.sampled_from(["adamw", "sgd"])),
            "lora_dropout": draw(st.sampled_from([0.0, 0.3])),
            "group_by_length": draw(st.booleans()),
            "optimizer_state": draw(st.sampled_from(["reset", "keep"])),
            "local_steps": 2,
        },
    }


@pytest.mark.parametrize("task", ["sequence-classification", pytest.param("causal-lm", marks=pytest.mark.slow)])
@settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(change=changes(), seed=st.integers(0, 2**63 - 1))
def test_a_repeated_run_has_the_same_bits(
    task: str, change: dict[str, Any], seed: int, tiny_folder: Path, decoders: Path
) -> None:
    made = tiny_decoders.settings(decoders, **change) if task == "causal-lm" else tiny.settings(tiny_folder, **change)
    with tempfile.TemporaryDirectory() as name:
        contents: list[dict[str, object]] = []
        for number in range(2):
            perturb_generators(number)
            folder = Path(name) / "run"
            fedspan.run({**made, "seed": seed}, folder)
            contents.append(content(folder))
            shutil.rmtree(folder)
        assert contents[0].keys() == contents[1].keys()
        assert [path for path in contents[0] if contents[0][path] != contents[1][path]] == []
        assert any(path.endswith("adapter_model.safetensors") for path in contents[0])


def test_another_seed_gives_other_bits(tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(tiny_folder, federation={"rounds": 1})
    for seed in (1, 2):
        fedspan.run({**values, "seed": seed}, tmp_path / str(seed))
    files = [(tmp_path / seed / "adapter" / "adapter_model.safetensors").read_bytes() for seed in ("1", "2")]
    assert files[0] != files[1]


@pytest.mark.slow  # a process that imports everything
def test_another_process_with_another_hash_seed(tiny_folder: Path, tmp_path: Path) -> None:
    """Sets and dicts of strings come in another order there."""
    values = tiny.settings(tiny_folder, federation={"rounds": 2})
    values["partition"] = {"partitioner": "dirichlet", "clients": 4}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**values, "threads": 1, "baselines": ["local-only"]}))
    fedspan.run(tmp_path / "config.yaml", tmp_path / "here")
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": other, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "fedspan", "run", str(tmp_path / "config.yaml"), "--out"]
    subprocess.run([*command, str(tmp_path / "there")], env=environment, check=True, capture_output=True)
    here, there = content(tmp_path / "here"), content(tmp_path / "there")
    assert [path for path in here if here[path] != there.get(path)] == []
    assert here.keys() == there.keys()
