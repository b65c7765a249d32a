"""The jobs that a federation gives an engine."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedspan.core.values import Job, OptimizerState
from fedspan.errors import FedspanError


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
    ignored: int = 0
    """Number of further examples, whose labels the run does not have: DP-SGD draws them, too, with gradients of zero.
    Otherwise its noise would tell the server, which names the labels, how many examples have them."""
    min_batch: int = 1
    """Fewest examples of a step, by the data owner's limits."""

    @property
    def count(self) -> int:
        """Number of all examples."""
        return len(self.indices) + self.ignored


class NotFiniteError(FedspanError):
    """A loss, or what was trained, is infinite or NaN."""


def is_explained(error: Exception) -> bool:
    """Check whether an error is of the run's config or the client's machine; any other may tell of an example."""
    return isinstance(error, FedspanError | torch.OutOfMemoryError) and not isinstance(error, NotFiniteError)


def build_not_finite_error(assignment: Assignment, value: float) -> NotFiniteError:
    """Build the error for a loss that is infinite or NaN."""
    problem = (
        f"the loss of client {assignment.client} in round {assignment.round + 1} became {value} with {assignment.lr:g}"
    )
    return NotFiniteError(
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
