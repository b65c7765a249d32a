"""A config that is valid, and what changes of it are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fedspan.config import parse_config
from fedspan.core.values import LayerSpec, Spec
from fedspan.errors import FedspanError

VALID: dict[str, Any] = {
    "task": "sequence-classification",
    "seed": 3,
    "device": "cpu",
    "model": {"name": "org/model", "target_modules": ["query", "value"], "extras": "average"},
    "data": {"train": "train.csv", "label": "topic", "labels": ["a", "b"]},
    "partition": {"partitioner": "dirichlet", "clients": 4, "alpha": 0.3},
    "method": {"name": "fedloru", "r": 4, "lora_alpha": 8, "tau": 2},
    "federation": {"rounds": 6, "clients_per_round": 2, "ranks": {"client-00": 4}},
    "training": {"optimizer": "adamw", "lr": 0.01, "betas": [0.9, 0.99], "local_steps": 3},
    "evaluation": {"every": 2, "batch_size": 8},
    "baselines": ["local"],
}
SPEC = Spec((LayerSpec("wide", 6, 20), LayerSpec("tall", 30, 5)))


def refused(changes: dict[str, Any], field: str, value: object, *words: str) -> None:
    """``changes`` go into the valid config by dotted path."""
    values = copy.deepcopy(VALID)
    for path, new in changes.items():
        *sections, last = path.split(".")
        place = values
        for section in sections:
            place = place[section]
        place[last] = new
    with pytest.raises(FedspanError) as caught:
        parse_config(values)
    assert (caught.value.field, caught.value.value) == (field, value)
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)
