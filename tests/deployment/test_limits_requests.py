"""A server's names of modules are no regexes, and its steps and replies are of several examples."""

import time
from pathlib import Path
from typing import Any

import pytest

from fedspan.config.node import NodeLimits
from fedspan.deployment.node import NodeService
from helpers.node_service import introduced, node, values

SIZES = {name: getattr(NodeLimits(), name) for name in ("min_batch", "train_examples")}
SLOW = "(([a-z0-9.]+)+)+!"


@pytest.mark.parametrize(
    "model",
    [
        {"target_modules": SLOW},
        {"target_modules": ["query", SLOW]},
        {"exclude_modules": SLOW},
        {"layers_pattern": [SLOW], "layers_to_transform": [0]},
        {"target_modules": ["query"] * 1001},
    ],
)
def test_a_server_s_pattern_is_refused_before_it_is_matched(
    model: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    service = NodeService(node(tiny_folder, tmp_path))
    started = time.monotonic()
    refused = introduced(service, values(tiny_folder, model=model)).refused or ""
    assert time.monotonic() - started < 5
    assert "names of modules" in refused
    assert introduced(service, values(tiny_folder, model={"target_modules": "all-linear"})).refused is None


@pytest.mark.parametrize(
    ("training", "reason"),
    [
        ({"batch_size": 1, "local_steps": 1}, "`limits.min_batch`: the run's steps are of 1 examples"),
        ({"batch_size": 1, "local_steps": 100}, "`limits.min_batch`: the run's steps are of 1 examples"),
        ({"batch_size": 8, "local_steps": 1}, "`limits.train_examples`: the run's replies are of 8 examples"),
    ],
)
def test_a_reply_is_no_single_example_s_gradient(
    training: dict[str, int], reason: str, tiny_folder: Path, tmp_path: Path
) -> None:
    service = NodeService(node(tiny_folder, tmp_path, limits=SIZES))
    assert reason in (introduced(service, values(tiny_folder, training=training)).refused or "")


@pytest.mark.parametrize(
    "training", [{"batch_size": 8, "local_steps": 2}, {"batch_size": 1, "gradient_accumulation_steps": 8}, {}]
)
def test_ordinary_steps_are_allowed(training: dict[str, int], tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node(tiny_folder, tmp_path, limits=SIZES))
    config = values(tiny_folder)
    config["training"] = {"lr": 0.1, **training}
    assert introduced(service, config).refused is None
