"""Rounds through users' own trainers: equal to the loop engine for every method and wrapper, and what is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from fedspan.assembly.run import Prepared
from fedspan.config import RunConfig
from fedspan.methods.registry import METHODS
from fedspan.wrappers.registry import WRAPPERS
from helpers import tiny
from helpers.families import others_slow
from helpers.trainer_clients import spare_the_collector, with_trainers
from helpers.watched_rounds import OPTIONS
from helpers.wrapped_configs import TRAINING

TRAINABLE = [key for key in METHODS if key != "fedgalore"]
"""Methods without projectors that are renewed within a round."""
SGD: Mapping[str, Any] = {"optimizer": "sgd", "lr": 0.02, "local_steps": 2, "group_by_length": False}
ADAMW: Mapping[str, Any] = {"optimizer": "adamw", "lr": 0.005, "local_steps": 2, "group_by_length": False}
QUICK: Mapping[str, Any] = {"federation": {"rounds": 2, "clients_per_round": 2}}


@pytest.fixture(scope="module", autouse=True)
def spared() -> None:
    """The collector does not walk over what earlier tests of this process imported."""
    spare_the_collector()


def gap(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    assert expected.keys() == found.keys()
    return max(
        float((value.double() - found[name].double()).norm() / value.double().norm().clamp(min=1e-3))
        for name, value in expected.items()
    )


def require_equal(prepared: Prepared, config: RunConfig, folder: Path, limit: float, **changes: Any) -> None:
    """A federation of trainers ends as one of the loop engine."""
    expected = tiny.final_tensors(tiny.variant(prepared, config))
    found = tiny.final_tensors(with_trainers(prepared, config, folder, **changes))
    assert gap(expected, found) < limit


@pytest.mark.slow  # those below run some methods under AdamW
@pytest.mark.parametrize("key", TRAINABLE)
def test_every_method_ends_as_with_the_loop_engine_under_sgd(
    key: str, prepared: Prepared, tiny_folder: Path, tmp_path: Path
) -> None:
    method = {"name": key, **OPTIONS.get(key, {})}
    require_equal(prepared, tiny.config(tiny_folder, **QUICK, method=method, training=SGD), tmp_path, 1e-5)


@pytest.mark.parametrize("key", others_slow(TRAINABLE, ["fedit", "florg", "pfedloru"]))
def test_every_method_ends_as_with_the_loop_engine_under_adamw(
    key: str, prepared: Prepared, tiny_folder: Path, tmp_path: Path
) -> None:
    method = {"name": key, **OPTIONS.get(key, {})}
    require_equal(prepared, tiny.config(tiny_folder, **QUICK, method=method, training=ADAMW), tmp_path, 1e-3)


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=() if key in ("fedprox", "scaffold") else pytest.mark.slow) for key in WRAPPERS]
)  # the two that change what a client trains
def test_every_wrapper_ends_as_with_the_loop_engine(
    key: str, prepared: Prepared, tiny_folder: Path, tmp_path: Path
) -> None:
    training = {**ADAMW, **TRAINING.get(key, {}), "group_by_length": False}
    config = tiny.config(tiny_folder, **QUICK, method={"wrappers": [key]}, training=training)
    require_equal(prepared, config, tmp_path, 1e-3)


@pytest.mark.parametrize(
    "training",
    [
        {"optimizer_state": "keep", "weight_decay": 0.1, "schedule": "cosine", "warmup_rounds": 1},
        {"local_steps": None, "local_epochs": 2},
        pytest.param({"max_grad_norm": 0.01}, marks=pytest.mark.slow),
    ],
)
def test_settings_of_training_are_honored_as_by_the_loop_engine(
    training: dict[str, Any], prepared: Prepared, tiny_folder: Path, tmp_path: Path
) -> None:
    federation = {"rounds": 3 if "warmup_rounds" in training else 2, "clients_per_round": 2}
    config = tiny.config(tiny_folder, federation=federation, training={**ADAMW, **training})
    require_equal(prepared, config, tmp_path, 1e-3)


def test_accumulated_gradients_are_those_of_the_loop_engine(
    prepared: Prepared, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under SGD, whose steps are as large as the gradients: AdamW and clipping would hide a factor.

    The loss of the model is a mean, which Transformers would otherwise take for a sum over the accumulated batches.
    """
    monkeypatch.setattr(prepared.engine.adapted.model, "accepts_loss_kwargs", False, raising=False)
    training = {**SGD, "gradient_accumulation_steps": 2, "max_grad_norm": 0}
    config = tiny.config(tiny_folder, **QUICK, training=training)
    require_equal(prepared, config, tmp_path, 1e-5)
