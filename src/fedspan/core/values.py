"""The values that a federation passes around. All are immutable; tensors inside are never written to.

A checkpoint, the wire and a test see the same plain data: dicts of named tensors (``core.tensors``) and scalars.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from fedspan.core.base import BasePatch, BaseUpdate
from fedspan.core.parametrization import Parametrization
from fedspan.core.penalties import Penalty
from fedspan.core.spec import LayerSpec, Spec, Weights
from fedspan.core.tensors import Tensors

__all__ = [
    "Client",
    "Contribution",
    "Group",
    "Job",
    "LayerSpec",
    "Message",
    "OptimizerSpec",
    "OptimizerState",
    "Reduced",
    "Refresh",
    "Scalar",
    "ServerState",
    "Spec",
    "StackItem",
    "Trained",
    "Weights",
]

Scalar = int | float | str | bool


@dataclass(frozen=True)
class Client:
    """What server and client both know of a client.

    Args:
        id: stable name.
        rank: its LoRA rank.
        scaling: its factor on B A (alpha / rank, or alpha / sqrt(rank)).
        examples: number of training examples.
        weight: its weight in the average before normalisation (examples, or 1 for a plain mean).
        held: round of the last server state that reached it and whose reply was accepted; None: never.
    """

    id: str
    rank: int
    scaling: float
    examples: int
    weight: float
    held: int | None = None


@dataclass(frozen=True)
class ServerState:
    """All that the server knows between rounds.

    Args:
        round: finished rounds (0 before the first).
        tensors: the global model beside its base.
        base: the accumulated change of the frozen base.
        memory: the server's own tensors, no part of the model (momenta, control variates, second moments).
        scalars: small plain values.
        generation: how often the tensors were re-initialised or rotated; moments older than that mean nothing.
    """

    round: int = 0
    tensors: Tensors = field(default_factory=dict)
    base: BaseUpdate = BaseUpdate()
    memory: Tensors = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    generation: int = 0

    def next(self, **changes: object) -> ServerState:
        """The state after one more round, with changes."""
        return replace(self, round=self.round + 1, **changes)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Message:
    """All that crosses the network in one direction, for one client and round.

    Args:
        tensors: named tensors.
        scalars: small plain values.
        base: what the client misses of the base update (downlink only).
    """

    tensors: Tensors = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    base: BasePatch | None = None


@dataclass(frozen=True)
class Group:
    """Trainable tensors that share optimizer settings.

    Args:
        names: tensor names.
        lr_scale: multiplier on the learning rate.
        weight_decay: overrides the run's weight decay; None keeps it.
    """

    names: tuple[str, ...]
    lr_scale: float = 1.0
    weight_decay: float | None = None


@dataclass(frozen=True)
class OptimizerSpec:
    """A local optimizer. ``lr`` is the run's, after its schedule; methods that prescribe an optimizer change the rest.

    Args:
        name: ``sgd`` or ``adamw``.
        lr: learning rate of the round.
        momentum: of SGD.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: decoupled for AdamW, L2 for SGD, as in ``torch.optim``.
        bias_correction: of AdamW's two moments (first, second).
    """

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-3
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    bias_correction: tuple[bool, bool] = (True, True)


@dataclass(frozen=True)
class OptimizerState:
    """Moments by kind and tensor name: ``{"exp_avg": {...}, "exp_avg_sq": {...}}``, and steps taken by tensor name.

    A name whose second moment is here and whose first is not begins its first moment, and that one's bias correction,
    at zero.
    """

    moments: Mapping[str, Tensors] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Refresh:
    """When and how projectors are renewed during local training (``Projected`` layers).

    Args:
        period: steps between refreshes; the first is at step 0 if ``at_start``. None: no further one.
        rule: ``svd`` (top singular vectors of the minibatch gradient), ``rsvd`` (the same by a randomised SVD) or
            ``random`` (seeded, orthonormal).
        until: refreshes from this one on (counted from 0) are ``random``, whatever the rule; None: none of them.
        seed: of the random rule; advances by one at each refresh.
        moments: ``keep``, ``reset``, ``linear`` (transform by V_old V_new^T, second moment clamped at 0) or
            ``squared`` (second moment by the squared entries).
        at_start: whether step 0 refreshes.
    """

    period: int | None
    rule: Literal["svd", "rsvd", "random"] = "svd"
    until: int | None = None
    seed: int = 0
    moments: Literal["keep", "reset", "linear", "squared"] = "keep"
    at_start: bool = True


@dataclass(frozen=True)
class Job:
    """What a client trains, for any engine.

    Args:
        parametrization: how slots become weights, by target layer.
        tensors: initial values of everything: slots of all target layers, and the extras.
        trainable: which of them move.
        steps: optimizer steps; None: the run's epochs or steps; 0: no step, only the mean raw gradient.
        epochs: overrides the run's local epochs (a phase of a method), None keeps them.
        masks: 0/1 tensors by name; masked entries neither move nor gather moments.
        penalties: added to the loss.
        gradient_offset: added to the gradient after clipping (SCAFFOLD's c - c_i); that of what does not train is not.
        optimizer: changes to the run's optimizer (by field of ``OptimizerSpec``).
        optimizer_state: initial moments (FedGaLore's second moment).
        generation: moments kept by an engine from another generation are dropped.
        refresh: renewal of projectors in mid-job.
        want_gradient: also return the mean raw gradient over the steps.
        phase: name of the phase, part of the key of every draw.
        extras: whether the extras train in this phase (where their policy lets them train at all).
        buffers: names of tensors that forward passes move in training (running statistics of norms).
        decay_base: AdamW's decay acts on the target layers' whole weights, the frozen part included (GaLore).
        scalars: small values of the message that ``finish`` needs; engines pass over them.
    """

    parametrization: Mapping[str, Parametrization]
    tensors: Tensors
    trainable: tuple[Group, ...]
    steps: int | None = None
    epochs: int | None = None
    masks: Tensors = field(default_factory=dict)
    penalties: tuple[Penalty, ...] = ()
    gradient_offset: Tensors = field(default_factory=dict)
    optimizer: Mapping[str, object] = field(default_factory=dict)
    optimizer_state: OptimizerState | None = None
    generation: int = 0
    refresh: Refresh | None = None
    want_gradient: bool = False
    phase: str = "train"
    extras: bool = True
    buffers: frozenset[str] = frozenset()
    decay_base: bool = False
    scalars: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def trainable_names(self) -> tuple[str, ...]:
        """Names of all trainable tensors, group by group."""
        return tuple(name for group in self.trainable for name in group.names)


@dataclass(frozen=True)
class Trained:
    """What local training gives back.

    Args:
        tensors: all of the job's tensors after training (frozen ones as they were; projectors as last refreshed).
        optimizer_state: moments at the end.
        steps: optimizer steps taken.
        lr_sum: sum over steps of the learning rate.
        gradient: mean over steps of the raw gradient (before clipping, penalties and offsets); empty unless wanted.
        metrics: ``loss`` (mean over examples) and ``examples`` (seen, with repetition).
        decay: factor on the frozen base at the end (``Job.decay_base``), for ``Increment.decay``.
    """

    tensors: Tensors
    optimizer_state: OptimizerState = OptimizerState()
    steps: int = 0
    lr_sum: float = 0.0
    gradient: Tensors = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    decay: float = 1.0


@dataclass(frozen=True)
class Contribution:
    """A reply in the form in which replies combine.

    A sum tensor under the name of a tensor of ``start(...).tensors`` is that tensor's new value; a change of it, or
    anything else, goes under another name (wrappers rely on it). A client that leaves a sum tensor out counts as 0.

    Args:
        sum: tensors of which only the weighted mean over clients is needed (so a secure sum is enough).
        stack: tensors that the server needs client by client.
        weight: the client's weight before normalisation; None: ``Client.weight``.
    """

    sum: Tensors = field(default_factory=dict)
    stack: Tensors = field(default_factory=dict)
    weight: float | None = None


@dataclass(frozen=True)
class StackItem:
    """One client's stacked tensors with its normalised weight."""

    client: Client
    weight: float
    tensors: Tensors


@dataclass(frozen=True)
class Reduced:
    """The cohort's contributions after reduction, in client-id order.

    Args:
        mean: weighted mean of every ``sum`` tensor (weights normalised over the replies).
        stack: every client's ``stack`` tensors.
        count: number of replies.
    """

    mean: Tensors = field(default_factory=dict)
    stack: tuple[StackItem, ...] = ()
    count: int = 0
