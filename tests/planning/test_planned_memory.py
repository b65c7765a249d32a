"""Memory as planned is what a client's round takes at its peak, in a process that is watched."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import fedspan
from helpers import tiny

TOLERANCE = 0.15
WORDS = 60  # beyond the greatest length
EXAMPLES = 48

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux' /proc")


CASES: dict[str, dict[str, Any]] = {
    "lora": {},
    "recomputed": {"model": {"gradient_checkpointing": True}, "engine": {"name": "loop"}},
    "upper-layers": {"model": {"layers_to_transform": [4, 5]}},
    "whole-weights": {"method": {"name": "fedavg"}},
    "decoder": {"task": "causal-lm", "data": {"prompt": "{text}", "answer": "text"}, "model": {"name": "llama"}},
}
QUICK = ("upper-layers",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of some 45 MB without values worth anything, with a tokenizer, and texts longer than they take."""
    place = tmp_path_factory.mktemp("planned-memory")
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    small = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    words = {"vocab_size": 2000, "max_position_embeddings": 64}
    BertModel(BertConfig(**words, **small)).save_pretrained(place / "small")
    BertModel(BertConfig(**words, **shape)).save_pretrained(place / "bert")
    LlamaForCausalLM(LlamaConfig(**words, **shape)).save_pretrained(place / "llama")
    for name in ("small", "bert", "llama"):
        tiny.save_tokenizer(place / name, pairs=name != "llama")
    with (place / "texts.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows([" ".join(["word1"] * WORDS), "ab"[number % 2]] for number in range(EXAMPLES))
    return place


def settings(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "device": "cpu",
        "threads": 1,
        "data": {"train": str(folder / "texts.csv"), "test_fraction": 0},
        "model": {"name": "bert", "max_length": 32},
        "partition": {"partitioner": "iid", "clients": 1, "validation": 0, "test": 0},
        "training": {"batch_size": EXAMPLES, "local_steps": 2},
        "federation": {"rounds": 1},
    }
    for section, change in changes.items():
        values[section] = {**values.get(section, {}), **change} if isinstance(change, dict) else change
    values["model"]["name"] = str(folder / values["model"]["name"])
    return values


@pytest.mark.parametrize("names", [QUICK, pytest.param(tuple(CASES), marks=pytest.mark.slow)], ids=["quick", "all"])
def test_memory_of_a_client_is_what_its_process_takes(names: tuple[str, ...], folder: Path) -> None:
    configs = [settings(folder, CASES[name]) for name in names]
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
    for (name, values), line in zip(zip(names, configs, strict=True), run.stdout.splitlines(), strict=True):
        real, examples = map(int, line.split())
        assert examples == EXAMPLES
        labels = None if values.get("task") else 2
        ratios[name] = fedspan.plan(values, labels=labels, examples=EXAMPLES).client.total / real
    assert ratios == {name: pytest.approx(1, abs=TOLERANCE) for name in names}
