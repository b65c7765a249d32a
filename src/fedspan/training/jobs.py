"""Settings of local training, and the jobs that a federation gives an engine."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Protocol

import numpy as np
import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from fedspan.core.noise import derive_seed_key
from fedspan.core.values import Job, OptimizerSpec, OptimizerState
from fedspan.errors import FedspanError
from fedspan.section import Section
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


_Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainingSettings(Section):
    """Local training of one client in one round: the config section ``training``."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """SGD uses training.momentum."""
    lr: float | Literal["auto"] = 2e-3
    """Peak learning rate. auto: selected before the first round by a range test, which trains a few steps with each of
    several rates and selects the lowest loss on the clients' validation parts. Only for clients in this process,
    without privacy."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate across rounds."""
    warmup_rounds: int = Field(default=0, ge=0)
    """Rounds of linear warm-up."""
    min_lr: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Final learning rate of a schedule; at most lr."""
    cycle_rounds: int | None = Field(default=None, ge=1)
    """Rounds after which a schedule restarts."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Momentum of SGD."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    """Betas of AdamW."""
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """Epsilon of AdamW."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight decay: decoupled for AdamW, L2 for SGD."""
    batch_size: int = Field(default=16, ge=1)
    """Examples per forward and backward pass."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Passes per optimizer step."""
    local_epochs: int = Field(default=1, ge=1)
    """Epochs over a client's examples per round."""
    local_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps per round, instead of local_epochs."""
    max_grad_norm: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Norm to which gradients are clipped; 0: no clipping."""
    optimizer_state: Literal["reset", "keep"] = "reset"
    """reset: re-initialize a client's moments every round. keep: store them on the client."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapters' input."""
    logit_adjustment: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """For clients with different classes: add this multiple of the logarithm of a class's share of the client's
    examples to its logit in local training, so that a client does not unlearn classes that it lacks (logit calibration;
    usually 1). 0: off."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of a target that is spread over all classes (language models: over the vocabulary) in training, as in
    torch.nn.CrossEntropyLoss. With several labels each is spread over its two answers. For tasks whose targets are
    labels, tags or tokens."""
    class_weights: Literal["none", "balanced"] | dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = "none"
    """Classification and tags: weights of classes in the loss, as in torch.nn.CrossEntropyLoss. balanced: by the counts
    of the client's own examples (tags: words), as in scikit-learn, so that no client learns those of others. Or weights
    by label, the same for all clients; other labels have weight 1. With several labels: of the examples that have the
    label (pos_weight of torch.nn.BCEWithLogitsLoss); balanced: examples without it over those with it."""
    checkpoint_steps: int | None = Field(default=None, ge=1)
    """Nodes of a deployment: optimizer steps after which a node stores the progress of its training. A node that is
    killed within a round, and is back before the server has given up its order, then continues after the last
    checkpoint with the same bits. Not with privacy.mechanism: dp-sgd, and not on nodes with trainers of their own. A
    simulation continues after its last round."""
    checkpoint_minutes: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """As checkpoint_steps, after a number of minutes; with both, whichever comes first."""
    group_by_length: bool = True
    """Put texts of similar length into a batch, which reduces padding."""

    @field_validator("lr", mode="before")
    @classmethod
    def _parse_lr(cls, value: object) -> object:
        try:
            positive = value == "auto" or (not isinstance(value, bool) and 0 < float(value) < math.inf)  # pyright: ignore
        except (TypeError, ValueError):
            positive = False
        if not positive:
            raise ValueError("a number above 0, or auto")
        return value if value == "auto" else float(value)  # pyright: ignore

    @field_validator("min_lr")
    @classmethod
    def _validate_min_lr(cls, value: float, info: ValidationInfo) -> float:
        if info.data.get("lr") != "auto" and value > info.data.get("lr", value):
            raise ValueError(f"at most training.lr, {info.data['lr']:g}")
        return value

    @property
    def optimizer_spec(self) -> OptimizerSpec:
        """Algorithm and hyperparameters; ``lr``, a number by now, is the peak of the schedule."""
        return OptimizerSpec(self.optimizer, float(self.lr), self.momentum, self.betas, self.eps, self.weight_decay)

    def compute_workload(self, count: int, added_epochs: int = 0) -> int:
        """Return how many examples a client trains on in a round, counting repeated uses.

        Args:
            added_epochs: Epochs that the method adds (the sum of ``Method.list_added_epochs``).
        """
        if self.local_steps is None:
            return (self.local_epochs + added_epochs) * count
        return self.local_steps * min(count, self.batch_size * self.gradient_accumulation_steps) + added_epochs * count

    def compute_lr(self, round: int, rounds: int) -> float:
        """Compute the learning rate of a round (counted from 0) of ``rounds``."""
        peak = float(self.lr)
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
    ignored: int = 0
    """Number of further examples, whose labels the run does not have: DP-SGD draws them, too, with gradients of zero.
    Otherwise its noise would tell the server, which names the labels, how many examples have them."""

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
