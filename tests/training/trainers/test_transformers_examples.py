"""What a Transformers trainer is set to in a round; rounds through users' trainers equal the loop engine's."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from fedspan.assembly.run import Prepared
from fedspan.config import RunConfig
from fedspan.methods.registry import METHODS
from fedspan.training.trainers.transformers import count_examples, get_length, translate_metrics
from fedspan.training.trainers.transformers_round import restore_losses
from fedspan.wrappers.registry import WRAPPERS
from helpers import tiny
from helpers.families import others_slow
from helpers.refusals import refused
from helpers.trainer_clients import spare_the_collector, with_trainers
from helpers.watched_rounds import OPTIONS
from helpers.wrapped_configs import TRAINING


class Unsized:
    """A data set of unknown length."""

    def __iter__(self) -> Any:
        return iter(())


def test_lengths_of_data_sets_are_added() -> None:
    assert get_length([1, 2, 3]) == 3
    assert get_length({"pairs": [1, 2], "scores": {"a": [3], "b": []}}) == 3
    with refused("trainer", "the trainer has no train_dataset"):
        get_length(None)
    with refused("trainer", "the number of examples of an IterableDataset is unknown"):
        get_length({"pairs": [1, 2], "stream": Unsized()})


class Trainer:
    """A trainer that hands out batches, and calls what was added to it when training begins."""

    def __init__(self, *batches: Any) -> None:
        self.batches = list(batches)
        self.callback_handler = SimpleNamespace(callbacks=list[TrainerCallback]())

    def add_callback(self, callback: TrainerCallback) -> None:
        self.callback_handler.callbacks.append(callback)

    def remove_callback(self, callback: TrainerCallback) -> None:
        self.callback_handler.callbacks.remove(callback)

    def get_batch_samples(self, *_: Any) -> tuple[list[Any], int]:
        return self.batches, 5


class Counter:
    """Counts the examples of each step."""

    def __init__(self) -> None:
        self.counted: list[int] = []

    def count_examples(self, examples: int) -> None:
        self.counted.append(examples)


@pytest.mark.parametrize(
    ("batches", "examples"),
    [
        ([{"ids": torch.zeros(3, 2)}, {"ids": torch.zeros(2, 2)}], 5),
        ([{"number": torch.tensor(1.0), "ids": torch.zeros(4, 2)}], 4),  # a scalar has no rows
        ([[torch.zeros(2, 3), torch.zeros(9)]], 2),
        ([], 0),
    ],
)
def test_rows_of_the_first_tensor_count_without_a_collator(batches: list[Any], examples: int) -> None:
    trainer: Any = Trainer(*batches)
    counter: Any = Counter()
    with count_examples(trainer, counter):
        assert trainer.get_batch_samples(None) == (batches, 5)
    assert counter.counted == [examples]
    assert "get_batch_samples" not in vars(trainer)
    assert trainer.callback_handler.callbacks == []


def test_batches_without_a_tensor_are_refused() -> None:
    trainer: Any = Trainer({"prompt": ["a", "b"]})
    counter: Any = Counter()
    with (
        count_examples(trainer, counter),
        refused("trainer", r"its batches \(dict\) hold no tensor, by whose rows examples are counted"),
    ):
        trainer.get_batch_samples()


def test_a_collator_s_examples_count_whatever_rows_its_tensors_have() -> None:
    """Two rows of each of three examples; afterwards the loader has its own collator, and the batch its own entries."""

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {"ids": torch.zeros(2 * len(rows), 4)}

    loader = SimpleNamespace(collate_fn=collate)
    trainer: Any = Trainer()
    counter: Any = Counter()
    with count_examples(trainer, counter):
        (callback,) = trainer.callback_handler.callbacks
        callback.on_train_begin(None, None, None, train_dataloader=SimpleNamespace(base_dataloader=loader))
        trainer.batches = [loader.collate_fn([1, 2, 3])]
        (batch,), _ = trainer.get_batch_samples()
        assert batch.keys() == {"ids"}
    assert counter.counted == [3]
    assert loader.collate_fn is collate


def test_a_metric_of_several_evaluators_is_none_of_fedspan_s() -> None:
    several = {"dev_spearman_cosine": 0.2, "test_spearman_cosine": 0.4}
    values = {**several, "cosine_ndcg@10": 0.5, "search_cosine_recall@10": 0.6, "rewards/accuracies": 0.7}
    expected = {**several, "ndcg_at_10": 0.5, "recall_at_10": 0.6, "reward_accuracy": 0.7}
    assert translate_metrics(values) == expected
    own = {"spearman": 0.1, "dev_spearman_cosine": 0.2, "rewards/margins": 1.0, "reward_margin": 2.0}
    assert translate_metrics(own) == own


def test_losses_in_a_dict_and_in_other_losses_hold_the_model_again() -> None:
    model, wrapper = torch.nn.Linear(3, 2), torch.nn.Sequential()
    inner, outer = torch.nn.Module(), torch.nn.Module()
    inner.model = outer.model = model
    outer.loss = inner
    with restore_losses(SimpleNamespace(loss={"pairs": outer}), model):
        inner.model = outer.model = wrapper
    assert inner.model is outer.model is model
    assert outer.loss is inner


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
