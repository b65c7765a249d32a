"""Plain PyTorch loops: the batches of a round, its mean loss, and loops that do not do what was planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fedspan.errors import FedspanError
from fedspan.training.trainers.local import RoundPlan
from fedspan.training.trainers.torch_loop import TorchTrainer, TrainingRound


class Counted:
    """An optimizer that counts."""

    def __init__(self) -> None:
        self.steps = self.examples = self._pending = self.cleared = 0

    def count_examples(self, examples: int) -> None:
        self._pending += examples

    def step(self) -> None:
        self.steps, self.examples, self._pending = self.steps + 1, self.examples + self._pending, 0

    def zero_grad(self) -> None:
        self.cleared += 1


def plan(epochs: int = 1, steps: int | None = None) -> RoundPlan:
    return RoundPlan("east", 4, "train", 0.1, epochs, steps, 5)


def begin(epochs: int = 1, steps: int | None = None) -> tuple[TrainingRound, Any]:
    optimizer: Any = Counted()
    return TrainingRound(plan(epochs, steps), optimizer, nn.Linear(2, 3)), optimizer


@pytest.mark.parametrize(("epochs", "steps", "batches"), [(1, None, 3), (2, None, 6), (1, 2, 2), (1, 7, 7)])
def test_a_round_has_the_batches_of_its_epochs_or_of_its_steps(epochs: int, steps: int | None, batches: int) -> None:
    round, optimizer = begin(epochs, steps)
    seen = []
    for batch in round.batches("abc"):
        seen.append(batch)
        round.step(torch.tensor(1.0), 2)
    assert "".join(seen) == ("abc" * 3)[:batches]
    assert (optimizer.steps, optimizer.cleared, optimizer.examples) == (batches, batches, 2 * batches)
    assert round.is_cut is False


def test_the_mean_loss_weighs_examples() -> None:
    round, _ = begin()
    assert round.mean_loss == 0.0
    round.step(torch.tensor(1.0), 1)
    round.step(torch.tensor(3.0), 3)
    assert round.mean_loss == 2.5


def test_a_loop_that_takes_no_step_for_a_thousand_batches_is_ended_with_the_reason() -> None:
    round, _ = begin(steps=5)
    with pytest.raises(FedspanError, match=r"east in round 5 took no step in 1000 batches\. Call round\.step"):
        list(round.batches(range(100)))


@pytest.mark.parametrize(
    ("epochs", "steps", "done"), [(2, None, "1 of 2 planned epochs"), (1, 9, "3 of 9 planned steps")]
)
def test_a_loader_that_is_used_up_is_named(epochs: int, steps: int | None, done: str) -> None:
    round, _ = begin(epochs, steps)

    def train() -> None:
        for _ in round.batches(iter("abc")):
            round.step(torch.tensor(1.0), 1)

    with pytest.raises(FedspanError, match=f"took {done}. Pass round.batches a loader".replace(".", r"\.")):
        train()


def trainer(train: Callable[[TrainingRound], None], **options: Any) -> TorchTrainer:
    return TorchTrainer(nn.Linear(2, 3), train, 6, **options)


def stepping(examples: int, limit: int = 10**6) -> Callable[[TrainingRound], None]:
    def train(round: TrainingRound) -> None:
        for number, _ in enumerate(round.batches([0, 1, 2])):
            if number == limit:
                return
            round.step(torch.tensor(0.5), examples)

    return train


def test_a_loop_that_does_what_was_planned_returns_its_mean_loss() -> None:
    for planned in (plan(2), plan(steps=4)):
        assert trainer(stepping(2)).train(planned, Counted()) == 0.5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("planned", "train", "why"),
    [
        (plan(steps=4), stepping(2, 3), r"took 3 of 4 planned steps"),
        (plan(2), stepping(2, 4), r"left round\.batches before the end of its 2 planned epochs"),
        (plan(1), stepping(3), r"counted 9 examples, and at most 6 were possible"),
        (plan(steps=2), stepping(7), r"counted 14 examples, and at most 12 were possible"),
    ],
)
def test_other_loops_are_refused(planned: RoundPlan, train: Callable[[TrainingRound], None], why: str) -> None:
    with pytest.raises(FedspanError, match=why) as caught:
        trainer(train).train(planned, Counted())  # type: ignore[arg-type]
    assert (caught.value.field, caught.value.value) == ("trainer", "east")


def test_every_round_has_random_draws_of_its_own() -> None:
    drawn: list[float] = []

    def train(round: TrainingRound) -> None:
        drawn.append(float(torch.rand(())))

    made = trainer(train)
    for _ in range(2):
        torch.rand(3)
        made.train(plan(), Counted())  # type: ignore[arg-type]
    assert drawn[0] == drawn[1]


def test_passes_are_steps_or_the_batches_of_the_epochs() -> None:
    assert trainer(stepping(1)).count_passes(2, None) == 12  # one for each example
    assert trainer(stepping(1), batches=3).count_passes(2, None) == 6
    assert trainer(stepping(1), batches=3).count_passes(2, 5) == 5


@pytest.mark.parametrize(
    ("examples", "options", "field"),
    [
        (0, {}, "examples"),
        (3, {"batches": 0}, "batches"),
        (3, {"validation_examples": 2}, "validation_examples"),
        (3, {"evaluate": dict}, "validation_examples"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(examples: int, options: dict[str, Any], field: str) -> None:
    with pytest.raises(FedspanError) as caught:
        TorchTrainer(nn.Linear(2, 3), stepping(1), examples, **options)
    assert caught.value.field == field


def test_an_evaluation_runs_in_evaluation_mode_and_knows_its_metrics() -> None:
    modes: list[tuple[bool, bool]] = []
    metrics: dict[str, Any] = {"loss": torch.tensor(0.5), "accuracy": 1}

    def evaluate() -> dict[str, Any]:
        modes.append((made.root.training, torch.is_grad_enabled()))
        return metrics

    made = trainer(stepping(1), evaluate=evaluate, validation_examples=2)
    assert made.evaluate() == {"loss": 0.5, "accuracy": 1.0}
    assert modes == [(False, False)]
    metrics["lss"] = 1.0
    with pytest.raises(FedspanError, match=r"metrics with names of .*loss"):
        made.evaluate()
    assert trainer(stepping(1)).evaluate() == {}


def test_batches_that_are_left_are_noticed() -> None:
    round, _ = begin()
    batches: Iterator[Any] = round.batches("abc")
    next(batches)
    assert round.is_cut is True
