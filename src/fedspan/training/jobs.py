"""Settings of local training, and the jobs that a federation gives an engine."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fedspan.core.noise import derive_seed_key
from fedspan.core.values import Job, OptimizerSpec, OptimizerState
from fedspan.errors import FedspanError
from fedspan.training.accounting import Accounting


@dataclass(frozen=True)
class Privacy:
    """Differential privacy of the released updates; the first fields are those of the config section ``privacy``."""

    mechanism: Literal["central", "local", "dp-sgd"]
    clip: float
    noise: float | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    accounting: Accounting = "rdp"
    rounds: int = 1
    key: bytes = derive_seed_key(0)
    """Key of the noise, 32 bytes."""
    secret: bool = False
    """Whether the key is secret; if so, noise also depends on what it is added to, so that it is never reused."""


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of local training: those of the config section ``training``, if they have no description here."""

    optimizer: OptimizerSpec
    """Algorithm and hyperparameters; ``lr`` is the peak of the schedule."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_rounds: int = 0
    min_lr: float = 0.0
    cycle_rounds: int | None = None
    """Rounds after which a schedule restarts (SGDR, arXiv:1608.03983); None: it falls once."""
    batch_size: int = 16
    accumulate: int = 1
    """Number of passes in one optimizer step."""
    epochs: int = 1
    """Local epochs a round, unless ``steps`` is given."""
    steps: int | None = None
    max_grad_norm: float = 1.0
    keep_optimizer: bool = False
    """Whether a client's moments persist between its rounds, unless its tensors were re-initialized."""
    dropout: float = 0.0
    """Dropout rate on the adapters' input (PEFT's ``lora_dropout``)."""
    group_by_length: bool = True
    """Use batches of similar length, drawn from windows of a few shuffled batches."""
    logit_adjustment: float = 0.0
    label_smoothing: float = 0.0
    class_weights: Literal["none", "balanced"] | tuple[tuple[str, float], ...] = "none"
    """As in the config, where weights are pairs of a label and its weight."""
    privacy: Privacy | None = None
    """Privacy settings of the run; with ``dp-sgd``, batches are Poisson samples of ``batch_size * accumulate`` examples
    on average, and ``max_grad_norm`` has no effect."""

    def compute_workload(self, count: int, added_epochs: int = 0) -> int:
        """Return how many examples a client trains on in a round, counting repeated uses.

        Args:
            added_epochs: Epochs that the method adds (the sum of ``Method.list_added_epochs``).
        """
        if self.steps is None:
            return (self.epochs + added_epochs) * count
        return self.steps * min(count, self.batch_size * self.accumulate) + added_epochs * count

    def compute_lr(self, round: int, rounds: int) -> float:
        """Compute the learning rate of a round (counted from 0) of ``rounds``."""
        peak = self.optimizer.lr
        if round < self.warmup_rounds:
            return peak * (round + 1) / (self.warmup_rounds + 1)
        position, length = round - self.warmup_rounds, max(1, rounds - self.warmup_rounds)
        if self.cycle_rounds is not None:
            position, length = position % self.cycle_rounds, self.cycle_rounds
        progress = position / length
        if self.schedule == "linear":
            return self.min_lr + (peak - self.min_lr) * (1 - progress)
        if self.schedule == "cosine":
            return self.min_lr + (peak - self.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))
        return peak


@dataclass(frozen=True)
class PrefixSettings:
    """Storage of the hidden states that leave a model's frozen prefix."""

    budget: int = 2 << 30
    """Memory in bytes, for all data sets together."""
    folder: Path | None = None
    """Folder for the hidden states of data sets that exceed the budget; None: those are not cached."""
    batch_size: int = 32
    """Number of examples in the forward passes that compute them."""


@dataclass
class TrainingTotals:
    """Numbers that grow while a job trains."""

    passes: int = 0
    steps: int = 0
    loss_sum: float = 0.0
    """Sum over the passes of mean loss times number of examples."""
    examples: float = 0.0
    decay: float = 1.0
    """Factor by which decoupled weight decay has scaled what does not train."""


@dataclass(frozen=True)
class TrainingProgress:
    """A job between two optimizer steps, from which training continues with the same bits.

    Batches and dropout depend on the number of a pass and not on earlier draws, so no generator is part of it.
    """

    totals: TrainingTotals
    tensors: Mapping[str, Tensor]
    """All installed tensors by name, on the CPU."""
    optimizer_state: OptimizerState
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    """Sums of gradients by name, if the job reports them."""


class JobCheckpoint(Protocol):
    """The stored progress of one job, which survives the process that trains it."""

    def load(self) -> TrainingProgress | None:
        """Load the progress of an interrupted training of the same job; None: there is none."""
        ...

    def is_due(self, steps: int) -> bool:
        """Return whether progress should be stored after this number of steps."""
        ...

    def store(self, progress: TrainingProgress) -> None:
        """Replace the stored progress, if the disk allows it."""
        ...


@dataclass(frozen=True)
class Assignment:
    """One job of one client, with all that its training depends on."""

    client: str
    """The client's id, for random draws and errors."""
    round: int
    """The round's number, for random draws and errors."""
    job: Job
    indices: np.ndarray
    """The client's training examples, (examples,)."""
    lr: float
    moments: OptimizerState | None = None
    """Moments of the client's earlier rounds, if the run stores them."""
    noise: float = 0.0
    """Noise of DP-SGD over the clipping norm."""
    checkpoint: JobCheckpoint | None = None
    """Storage of the job's progress; None: an interrupted job starts over."""
    origin: str = ""
    """Digest of the order and of the client's stored state, from which the job was computed."""


def build_not_finite_error(assignment: Assignment, value: float) -> FedspanError:
    """Build the error for a loss that is infinite or NaN."""
    problem = (
        f"the loss of client {assignment.client} in round {assignment.round + 1} became {value} with {assignment.lr:g}"
    )
    return FedspanError(
        "training.lr", assignment.lr, "a lower learning rate, or training.max_grad_norm", problem=problem
    )


@contextmanager
def convert_out_of_memory(
    device: torch.device, field: str, value: int, content: str, remedy: str = ""
) -> Generator[None]:
    """Raise an error that names a setting if a device's memory does not suffice within this context.

    Args:
        content: What a pass holds, after the value ("clients in a pass").
        remedy: What would need less memory, after "a smaller number".
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        problem = f"{device} has too little memory for {value} {content} ({error})"
        raise FedspanError(field, value, f"a smaller number{remedy}", problem=problem) from error
