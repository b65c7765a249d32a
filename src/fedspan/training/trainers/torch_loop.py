"""A plain PyTorch training loop as a client's trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedspan.errors import FedspanError
from fedspan.tasks.metrics import METRICS
from fedspan.training.trainers.local import RoundPlan
from fedspan.training.trainers.optimizer import JobOptimizer

Batch = TypeVar("Batch")

_MIN_BATCHES = 1000
"""Number of batches whose gradients a loop may accumulate over several epochs: a client may have fewer than a step
takes."""


class TrainingRound:
    """One round of a plain PyTorch loop.

    Args:
        plan: What is to be trained.
        optimizer: The optimizer of the round, over the parameters that train.
        module: The module that trains.

    Examples:
        >>> for batch in round.batches(loader):
        ...     loss = model(**batch).loss
        ...     loss.backward()
        ...     round.step(loss, examples=len(batch["labels"]))
    """

    def __init__(self, plan: RoundPlan, optimizer: JobOptimizer, module: nn.Module) -> None:
        self.plan, self.optimizer, self._module = plan, optimizer, module
        self._loss = 0.0
        self._examples = 0
        self.is_cut = False
        """Whether the loop has left ``batches`` before their end."""

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the round's batches, in training mode: a loader's, for the planned epochs or until the planned steps.

        Args:
            loader: Batches of one epoch; torch's random state is that of the round, so shuffled orders differ.

        Raises:
            FedspanError: If the loader is empty before the round's planned end, or steps are planned and the loop took
                none in a whole epoch of ``_MIN_BATCHES`` batches, or in several smaller ones with so many.
        """
        self._module.train()
        self.is_cut = True
        yield from self._draw(loader)
        self.is_cut = False

    def _draw(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        epoch = idle = steps = 0  # batches since the last step
        while self.plan.steps is not None or epoch < self.plan.epochs:
            is_empty = True
            for batch in loader:
                if self.plan.steps is not None and self.optimizer.steps >= self.plan.steps:
                    return
                is_empty = False
                idle, steps = (idle + 1 if self.optimizer.steps == steps else 1), self.optimizer.steps
                yield batch
            if is_empty:
                is_complete = epoch == 0 if self.plan.steps is None else self.optimizer.steps >= self.plan.steps
                if is_complete:  # an empty first epoch is one without a step, which the engine refuses
                    return
                raise _build_incomplete_error(self.plan, epoch if self.plan.steps is None else self.optimizer.steps)
            epoch += 1
            if self.plan.steps is not None and self.optimizer.steps == steps and idle >= _MIN_BATCHES:
                problem = (
                    f"the loop of client {self.plan.client} in round {self.plan.round + 1} took no step in {idle} "
                    "batches. Call round.step(loss, examples) after loss.backward()"
                )
                raise FedspanError("trainer", self.plan.client, problem=problem)

    def step(self, loss: Tensor, examples: int) -> None:
        """Step the optimizer after ``loss.backward()``, and clear the gradients.

        Args:
            loss: The mean loss over the step's examples, a scalar.
            examples: Number of examples whose gradients the step uses.
        """
        self.optimizer.count_examples(examples)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._loss += float(loss.detach()) * examples
        self._examples += examples

    @property
    def mean_loss(self) -> float:
        """Mean loss over the examples so far; 0 before the first step."""
        return self._loss / max(1, self._examples)


class TorchTrainer:
    """A client that trains with a plain PyTorch loop.

    Args:
        model: The model.
        train: Trains one round: it calls ``backward`` and ``TrainingRound.step`` on each of ``TrainingRound.batches``.
        examples: Number of training examples.
        evaluate: Measures the model on the client's own evaluation examples; its metrics have names as in a report
            (``loss``, ``accuracy``, ...). None: the client has no evaluation.
        validation_examples: Number of examples that ``evaluate`` measures.
        processor: The tokenizer or image processor that is exported with the model; None: there is none.
        batches: Number of batches of an epoch, by which a node limits a round (``limits.steps``); None: one for each
            example.

    Examples:
        >>> def train(round):
        ...     for batch in round.batches(loader):
        ...         loss = model(**batch).loss
        ...         loss.backward()
        ...         round.step(loss, examples=len(batch["labels"]))
        >>> trainers = {"clinic-a": fedspan.TorchTrainer(model, train, examples=len(data))}
        >>> fedspan.simulate(config, "runs/loop", trainers=trainers)

    Raises:
        FedspanError: If there are no examples or batches, or ``evaluate`` and ``validation_examples`` do not fit
            together.
    """

    def __init__(
        self,
        model: nn.Module,
        train: Callable[[TrainingRound], None],
        examples: int,
        *,
        evaluate: Callable[[], Mapping[str, float]] | None = None,
        validation_examples: int = 0,
        processor: object | None = None,
        batches: int | None = None,
    ) -> None:
        if examples < 1:
            raise FedspanError("examples", examples, "the number of training examples, at least 1")
        if batches is not None and batches < 1:
            raise FedspanError("batches", batches, "the number of batches of an epoch, at least 1")
        if (evaluate is None) != (validation_examples == 0):
            expected = "the number of examples that evaluate= measures, and 0 without evaluate="
            raise FedspanError("validation_examples", validation_examples, expected)
        self.root = self.model = model
        self.examples, self.validation_examples, self.processor = examples, validation_examples, processor
        self._train, self._evaluate, self._batches = train, evaluate, batches or examples

    def count_passes(self, epochs: int, steps: int | None) -> int:
        """``LocalTrainer.count_passes``; accumulation is the loop's own, so a step counts as one pass."""
        return epochs * self._batches if steps is None else steps

    def train(self, plan: RoundPlan, optimizer: JobOptimizer) -> float:
        """Train the installed tensors with ``optimizer`` by the user's loop, and return the mean loss.

        Raises:
            FedspanError: If the loop took other steps than were planned, left its batches before the end, or counted
                more examples than there are.
        """
        from transformers import set_seed

        round = TrainingRound(plan, optimizer, self.root)
        set_seed(plan.seed)
        self._train(round)
        if plan.steps is not None and optimizer.steps != plan.steps:
            raise _build_incomplete_error(plan, optimizer.steps)
        if plan.steps is None and round.is_cut:
            problem = (
                f"the loop of client {plan.client} in round {plan.round + 1} left round.batches before the end of its "
                f"{plan.epochs} planned epochs. Plan fewer steps with training.local_steps"
            )
            raise FedspanError("trainer", plan.client, problem=problem)
        limit = self.examples * (plan.epochs if plan.steps is None else plan.steps)
        if optimizer.examples > limit:
            context = f"of client {plan.client} in round {plan.round + 1}"
            problem = f"the loop {context} counted {optimizer.examples} examples, and at most {limit} were possible"
            raise FedspanError("trainer", plan.client, "round.step(loss, examples of the batch)", problem=problem)
        return round.mean_loss

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Measure the installed tensors by the user's ``evaluate``; without one, nothing is measured.

        Raises:
            FedspanError: If a metric has an unknown name.
        """
        if self._evaluate is None:
            return {}
        self.root.eval()
        metrics = dict(self._evaluate())
        for name in metrics:
            if name not in METRICS:
                raise FedspanError(
                    "evaluate", name, f"metrics with names of {', '.join(METRICS)}, or of fedspan.register_metrics"
                )
        return {name: float(value) for name, value in metrics.items()}


def _build_incomplete_error(plan: RoundPlan, done: int) -> FedspanError:
    """Build the error of a round that ended after other steps or epochs than were planned."""
    planned = f"{plan.epochs} planned epochs" if plan.steps is None else f"{plan.steps} planned steps"
    problem = (
        f"the loop of client {plan.client} in round {plan.round + 1} took {done} of {planned}. Pass round.batches a "
        "loader that can be iterated again in each epoch, and call round.step once for each of its batches"
    )
    return FedspanError("trainer", plan.client, problem=problem)
