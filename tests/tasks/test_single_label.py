"""Class weights and label smoothing of classifiers: losses are torch's, balanced weights scikit-learn's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

from fedspan import FedspanError
from fedspan.config import parse_config
from fedspan.config.rates import get_training_defaults
from fedspan.runs.setup import prepare
from fedspan.tasks import registry
from fedspan.tasks.classification import SEQUENCE_CLASSIFICATION, SequenceClassification
from fedspan.tasks.losses import CLASS_WEIGHTS, SMOOTHING
from fedspan.tasks.single_label import compute_class_weights
from helpers import tiny
from helpers.families import others_slow

NONE: Any = None
CASES = [
    {"label_smoothing": 0.2},
    {"class_weights": "balanced"},
    {"class_weights": {"lab": 3.0, "admin": 0.5}, "label_smoothing": 0.1},
]


class Fixed(SequenceClassification):
    """A classifier whose batches hold its logits."""

    def predict(self, model: Any, batch: Any, *, generate: bool = False) -> torch.Tensor:
        return batch["logits"]


@pytest.mark.parametrize("smoothing", [0.0, 0.15])
def test_losses_with_weights_are_torchs(smoothing: float) -> None:
    rng = torch.Generator().manual_seed(4)
    logits, labels = torch.randn(7, 3, generator=rng), torch.tensor([2, 0, 1, 1, 0, 2, 1])
    weights_CK = torch.tensor([[0.5, 2.0, 1.0], [1.0, 4.0, 0.25]])
    owners = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    task = Fixed(NONE, ("a", "b", "c"), 8)
    smoothing_B = torch.full((7,), smoothing, dtype=torch.float64)
    batch = {"logits": logits, "labels": labels, CLASS_WEIGHTS: weights_CK[owners], SMOOTHING: smoothing_B}
    mask_CB = (owners == torch.arange(2)[:, None]).float()
    expected = [
        nn.CrossEntropyLoss(weight=weights, label_smoothing=smoothing)(logits[owners == at], labels[owners == at])
        for at, weights in enumerate(weights_CK)
    ]
    torch.testing.assert_close(task.compute_client_losses(NONE, batch, mask_CB), torch.stack(expected))
    own = {name: value[:3] for name, value in batch.items()}
    torch.testing.assert_close(task.compute_loss(NONE, own), expected[0])


def test_balanced_weights_are_scikit_learns() -> None:
    labels = np.array([0, 2, 2, 2, 3, 0, 2])
    expected = compute_class_weight("balanced", classes=np.array([0, 2, 3]), y=labels)
    weights = compute_class_weights(labels, 5)
    assert weights[[0, 2, 3]].tolist() == pytest.approx(expected.tolist())
    assert weights[[1, 4]].tolist() == [0, 0]


@pytest.mark.parametrize("training", others_slow(CASES, CASES[2:]))
def test_engines_train_alike_and_other_than_without(training: dict[str, Any], tiny_folder: Path) -> None:
    def train(engine: str, **changes: Any) -> Any:
        # SGD, since AdamW divides rounding by rounding where a gradient is nearly zero.
        training = {"optimizer": "sgd", "lr": 0.3, **changes}
        values = tiny.settings(tiny_folder, federation={"rounds": 2}, training=training)
        return tiny.final_tensors(prepare(parse_config({**values, "engine": {"name": engine}})))

    loop, batched, plain = train("loop", **training), train("batched", **training), train("loop")
    for name, value in loop.items():
        torch.testing.assert_close(batched[name], value, rtol=1e-4, atol=2e-5)
    assert any(not torch.allclose(value, plain[name], atol=1e-3) for name, value in loop.items())


@pytest.mark.parametrize("engine", [{"name": "loop"}, {"name": "batched", "clients_per_pass": 2, "workers": 1}])
def test_balanced_weights_are_not_computed_again_for_each_batch(
    engine: dict[str, Any], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def count(labels: np.ndarray, classes: int) -> torch.Tensor:
        calls.append(len(labels))
        return compute_class_weights(labels, classes)

    monkeypatch.setattr("fedspan.training.services.compute_class_weights", count)
    counts: list[int] = []
    for epochs in (1, 3):
        calls.clear()
        training = {"class_weights": "balanced", "local_epochs": epochs}
        values = tiny.settings(tiny_folder, federation={"rounds": 1}, training=training)
        tiny.final_tensors(prepare(parse_config({**values, "engine": engine})))
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0


def test_what_does_not_apply_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(FedspanError, match=r"`training\.class_weights\.labs`: no label is named 'labs'\. Did you"):
        prepare(parse_config(tiny.settings(tiny_folder, training={"class_weights": {"labs": 2.0}})))
    for task, more, reason in (
        ("regression", {}, "regression has no classes"),
        ("text-embedding", {}, "text-embedding has no classes"),
        ("sequence-classification", {"logit_adjustment": 1.0}, r"training\.logit_adjustment corrects for shares"),
    ):
        training = {"label_smoothing": 0.1, **more}
        with pytest.raises(FedspanError, match=rf"`training\.label_smoothing`: {reason}"):
            parse_config(tiny.settings(tiny_folder, training=training) | {"task": task})
    privacy = {"mechanism": "dp-sgd", "noise": 1.0, "clip": 0.5}
    for training in ({"label_smoothing": 0.1}, {"class_weights": "balanced"}):
        with pytest.raises(FedspanError, match="dp-sgd computes each example's loss without it"):
            parse_config(tiny.settings(tiny_folder, training=training, privacy=privacy))


class Squared(SequenceClassification):
    """A task of a user's own that computes another loss, and says so."""

    loss_options = ()

    def compute_loss(self, model: Any, batch: Any) -> torch.Tensor:
        probabilities = self.predict(model, batch).softmax(1)
        return (probabilities - nn.functional.one_hot(batch["labels"], len(self.labels))).square().mean()


OPTIONS = [("logit_adjustment", 1.0), ("class_weights", "balanced"), ("label_smoothing", 0.9)]


@pytest.mark.parametrize(("option", "value"), OPTIONS)
@pytest.mark.parametrize("declared", [(), SEQUENCE_CLASSIFICATION.loss_options])
def test_a_task_whose_loss_does_not_take_an_option_refuses_it_before_training(
    declared: tuple[Any, ...], option: str, value: Any, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its definition was copied from one that takes them."""
    definition = replace(
        SEQUENCE_CLASSIFICATION,
        name="squared",
        loss_options=declared,
        build=lambda tokenizer, settings, data: Squared(tokenizer, settings.labels, settings.max_length),
    )
    monkeypatch.setitem(registry._tasks, "squared", definition)
    values = tiny.settings(tiny_folder, training={option: value}) | {"task": "squared"}
    with pytest.raises(FedspanError, match="does not take it") as caught:
        prepare(parse_config(values))
    assert caught.value.field == f"training.{option}"
    prepare(parse_config(tiny.settings(tiny_folder) | {"task": "squared"}))
    assert get_training_defaults("squared", "fedit").logit_adjustment == (1.0 if declared else 0.0)


@dataclass(frozen=True)
class Unlabeled:
    """Examples of a user's own that name their labels otherwise."""

    text: Any

    def __len__(self) -> int:
        return len(self.text)

    @property
    def lengths(self) -> np.ndarray:
        return self.text.lengths


class Renamed(SequenceClassification):
    """A task of a user's own whose examples have no ``labels``."""

    def encode(self, dataset: Any) -> Any:
        return Unlabeled(super().encode(dataset))

    def collate(self, examples: Any, indices: Any, device: torch.device) -> dict[str, torch.Tensor]:
        return super().collate(examples.text, indices, device)


def test_examples_without_labels_are_named(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    definition = replace(
        SEQUENCE_CLASSIFICATION,
        name="renamed",
        build=lambda tokenizer, settings, data: Renamed(tokenizer, settings.labels, settings.max_length),
    )
    monkeypatch.setitem(registry._tasks, "renamed", definition)
    values = tiny.settings(tiny_folder, training={"class_weights": "balanced"}) | {"task": "renamed"}
    with pytest.raises(FedspanError, match="Unlabeled, the encoded examples of this task, has no array `labels`"):
        tiny.final_tensors(prepare(parse_config(values)))
    flipped = {
        **tiny.settings(tiny_folder),
        "task": "renamed",
        "simulation": {"faults": {"kind": "label-flip", "share": 0.5}},
    }
    with pytest.raises(FedspanError, match="has no array `labels`"):
        prepare(parse_config(flipped))
