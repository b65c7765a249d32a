"""A config that is valid, and what changes of it are refused."""

from typing import Any

from fedspan.core.values import LayerSpec, Spec

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
    "baselines": ["local-only"],
}
SPEC = Spec((LayerSpec("wide", 6, 20), LayerSpec("tall", 30, 5)))
