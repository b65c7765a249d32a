"""The immutable values that server, engines and clients exchange; tensors inside them are never written to.

Checkpoints, the wire format and tests use the same plain data: dicts of named tensors (``core.tensors``) and scalars.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from torch import Tensor

from fedspan.core.base import BasePatch, BaseUpdate
from fedspan.core.parametrization import Parametrization
from fedspan.core.penalties import Penalty
from fedspan.core.tensors import Tensors
from fedspan.errors import FedspanError

Scalar = int | float | str | bool


@dataclass(frozen=True)
class Client:
    """A client, as both the server and the client itself know it.

    Args:
        id: Stable name of the client.
        rank: LoRA rank of the client.
        scaling: The client's factor on B A (alpha / rank, or alpha / sqrt(rank)).
        examples: Number of training examples.
        weight: The client's weight in the average before normalization (examples, or 1 for a plain mean).
        last_round: Round of the last server state that reached the client and whose reply was accepted; None: never.
    """

    id: str
    rank: int
    scaling: float
    examples: int
    weight: float
    last_round: int | None = None


@dataclass(frozen=True)
class ServerState:
    """The complete state of the server between rounds.

    Args:
        round: Number of finished rounds, and of the next one: rounds and their attempts are numbered from 0 everywhere.
        tensors: The global model without its base, by name (``Message``).
        base: The accumulated change of the frozen base.
        memory: The server's own tensors, which are not part of the model (momenta, control variates, second moments).
        scalars: Small plain values.
        generation: Number of times that the tensors got new coordinates (re-initialized or decomposed again; not where
            a method rotates them towards the former ones); the server's moments of an older generation are invalid.
    """

    round: int = 0
    tensors: Tensors = field(default_factory=dict)
    base: BaseUpdate = BaseUpdate()
    memory: Tensors = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    generation: int = 0

    def advance_round(self, **changes: object) -> ServerState:
        """Return the state after one more round, with changes."""
        return replace(self, round=self.round + 1, **changes)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Message:
    """The data transmitted in one direction, for one client and round.

    Args:
        tensors: Tensors by name: ``<module path>/<slot>`` for a target layer (O, I), such as LoRA's ``A`` (r, I) and
            ``B`` (O, r), and ``extras/<parameter path>``, in the parameter's shape.
        scalars: Small plain values.
        base: The part of the base update that the client lacks (downlink only).
    """

    tensors: Tensors = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    base: BasePatch | None = None


@dataclass(frozen=True)
class Group:
    """Trainable tensors that share optimizer settings.

    A group that is not active in a step behaves in it as if it were frozen: its tensors do not move, accumulate no
    moments and do not decay, and their gradients count in no clipping norm and are no part of a private sum.

    Args:
        names: Tensor names.
        lr_scale: Multiplier on the learning rate.
        weight_decay: Weight decay instead of the run's; None: the run's.
        turns: Number of turns in a cycle of optimizer steps; 1: the group is active in every step.
        turn: The turn in which the group is active, from 0; every job begins with turn 0.
        smoothed_axis: Axis along which gradients are smoothed (``core.smoothing``) after clipping and noise; None:
            they are not.
    """

    names: tuple[str, ...]
    lr_scale: float = 1.0
    weight_decay: float | None = None
    turns: int = 1
    turn: int = 0
    smoothed_axis: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.turn < self.turns:
            problem = f"turn {self.turn} is not one of the {self.turns} turns: the group would never train"
            raise FedspanError("turn", self.turn, f"0 to {self.turns - 1}", problem=problem)

    def is_active(self, step: int) -> bool:
        """Return whether the group trains in a job's optimizer step, counted from 0."""
        return step % self.turns == self.turn

    def count_steps(self, steps: int) -> int:
        """Count the steps in which the group is active among a job's first ``steps``."""
        return len(range(self.turn, steps, self.turns))


@dataclass(frozen=True)
class OptimizerSpec:
    """A local optimizer. ``lr`` is the run's, after its schedule; methods that prescribe an optimizer set the rest.

    Args:
        name: ``sgd`` or ``adamw``.
        lr: Learning rate of the round.
        momentum: Momentum of SGD.
        betas: Decay rates of AdamW's two moments.
        eps: Term that AdamW adds to the denominator.
        weight_decay: Weight decay, decoupled for AdamW, L2 for SGD, as in ``torch.optim``.
        bias_correction: Whether AdamW corrects the bias of its two moments (first, second).
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

    A name with a second moment but no first moment starts its first moment, and the bias correction of it, at zero.
    """

    moments: Mapping[str, Tensors] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Refresh:
    """When and how projectors are renewed during local training (``Projected`` layers).

    Args:
        period: Steps between refreshes; the first is at step 0 if ``at_start``. None: no further refresh.
        rule: ``svd`` (top singular vectors of the minibatch gradient), ``rsvd`` (the same by a randomized SVD) or
            ``random`` (seeded, orthonormal).
        until: Index (from 0) from which on refreshes are ``random`` whatever the rule; None: no such refreshes.
        seed: Seed of the random rule; it advances by one at each refresh.
        moments: ``keep``, ``reset``, ``linear`` (transform by V_old V_new^T, second moment clamped at 0) or
            ``squared`` (second moment by the squared entries).
        at_start: Whether step 0 refreshes.
    """

    period: int | None
    rule: Literal["svd", "rsvd", "random"] = "svd"
    until: int | None = None
    seed: int = 0
    moments: Literal["keep", "reset", "linear", "squared"] = "keep"
    at_start: bool = True


@dataclass(frozen=True)
class Job:
    """The training job of a client, for any engine.

    Args:
        parametrization: Mapping from slots to weights, by target layer.
        tensors: Initial values of the slots of all target layers, and of the extras.
        trainable: The tensors that train, in groups.
        steps: Optimizer steps; None: the run's epochs or steps; 0: no step, only the mean raw gradient.
        epochs: Local epochs instead of the run's (for a phase of a method); None: the run's.
        masks: 0/1 tensors by name, in the tensors' shapes; masked entries neither move nor gather moments.
        penalties: Terms added to the loss.
        gradient_offset: Offset added to trained tensors' gradients after clipping (SCAFFOLD's c - c_i).
        optimizer: Changes to the run's optimizer (by field of ``OptimizerSpec``).
        clips: Whether gradients are clipped as the run says.
        optimizer_state: Initial moments (FedGaLore's second moment).
        generation: Generation of the client's moments; an engine drops stored moments of another generation.
        refresh: Renewal of projectors during the job.
        want_gradient: Whether to also return the mean raw gradient over the steps.
        want_moments: Whether to also return the moments at the end; an engine may omit them if no run stores them.
        phase: Name of the phase, part of the key of every random draw.
        extras: Whether the extras' parameters train in this phase (where their policy permits training at all). Norms
            among them are in training mode in any case: ``buffers`` decides that, not this field.
        buffers: Names of tensors that training forward passes update (running statistics of norms); a norm whose
            statistics are not named is in evaluation mode.
        decay_base: Whether AdamW's decay acts on the target layers' whole weights, the frozen part included (GaLore).
        scalars: Small values of the message that ``finish`` needs; engines ignore them.
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
    clips: bool = True
    optimizer_state: OptimizerState | None = None
    generation: int = 0
    refresh: Refresh | None = None
    want_gradient: bool = False
    want_moments: bool = False
    phase: str = "train"
    extras: bool = True
    buffers: frozenset[str] = frozenset()
    decay_base: bool = False
    scalars: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def trainable_names(self) -> tuple[str, ...]:
        """Names of all trainable tensors, group by group."""
        return tuple(name for group in self.trainable for name in group.names)

    def list_active_names(self, step: int) -> tuple[str, ...]:
        """Return the names of the tensors that train in an optimizer step, counted from 0, group by group."""
        return tuple(name for group in self.trainable if group.is_active(step) for name in group.names)


@dataclass(frozen=True)
class Trained:
    """The result of local training.

    Args:
        tensors: All of the job's tensors after training (frozen ones as they were; projectors as last refreshed).
        optimizer_state: Counts of steps at the end, and moments (``Job.want_moments``).
        steps: Number of optimizer steps taken.
        lr_sum: Sum of the learning rate over steps.
        gradient: Mean raw gradient over steps (before clipping, penalties and offsets); empty unless requested.
        metrics: ``loss`` (mean over examples) and ``examples`` (seen, with repetition).
        decay: Factor on the frozen base at the end (``Job.decay_base``), for ``Increment.decay``.
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
    """A reply in the form in which replies are combined.

    A sum tensor with the name of a tensor of ``start(...).tensors`` is that tensor's new value; a change of it, or
    anything else, has another name (wrappers rely on it). A client that omits a sum tensor counts as 0.

    Args:
        sum: Tensors of which only the weighted mean over clients is needed (so secure aggregation suffices).
        stack: Tensors that the server needs individually for each client.
        weight: The client's weight before normalization; None: ``Client.weight``.
    """

    sum: Tensors = field(default_factory=dict)
    stack: Tensors = field(default_factory=dict)
    weight: float | None = None


@dataclass(frozen=True)
class StackItem:
    """One client's stacked tensors with its normalized weight.

    Args:
        client: The client.
        weight: Its share of the cohort's weight; all shares sum to 1.
        tensors: Its ``stack`` tensors, in the shapes of its own rank.
    """

    client: Client
    weight: float
    tensors: Tensors


@dataclass(frozen=True)
class Reduced:
    """The cohort's contributions after reduction, in client-id order.

    Args:
        mean: Weighted mean of every ``sum`` tensor (weights normalized over the replies).
        stack: Every client's ``stack`` tensors.
        count: Number of replies; under central privacy the expected number, because the true one is not protected.
        max_weight_ratio: Largest weight that a method may derive from a reply, as a multiple of the replies' median;
            None: no limit.
    """

    mean: Tensors = field(default_factory=dict)
    stack: tuple[StackItem, ...] = ()
    count: float = 0
    max_weight_ratio: float | None = None


@dataclass(frozen=True)
class LayerSpec:
    """A target layer: its module path and its weight's shape as (O, I), in whichever orientation the module stores it.

    A convolution is its unfolded matrix, as in PEFT's LoRA: I = channels * k1 * k2, in the order of its weight
    (O, channels, k1, k2). An embedding is (dimension, vocabulary), the matrix that a one-hot input meets.

    Args:
        name: Module path in the model.
        out_features: O.
        in_features: I.
        kernel: Kernel size (k1, k2) of a convolution.
    """

    name: str
    out_features: int
    in_features: int
    kernel: tuple[int, int] = (1, 1)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (O, I) of the weight."""
        return self.out_features, self.in_features

    @property
    def rectangle(self) -> tuple[int, int]:
        """Shape (O k1, channels * k2) of the more nearly square matrix of the same numbers; (O, I) without a kernel."""
        return self.out_features * self.kernel[0], self.in_features // self.kernel[0]


@dataclass(frozen=True)
class Spec:
    """The model and the federation, as every party knows them.

    Args:
        layers: The target layers.
        extras: Shapes of the parameters that train beside them, and of their buffers, by path.
        buffers: Extras that are buffers: the forward pass updates them, no optimizer does.
        variances: Buffers that hold variances, which are never negative.
        clients: Number of clients in the federation, selected or not; 0 if unknown.
    """

    layers: tuple[LayerSpec, ...]
    extras: Mapping[str, tuple[int, ...]] = field(default_factory=dict, hash=False)  # equal specs hash alike without it
    buffers: frozenset[str] = frozenset()
    variances: frozenset[str] = frozenset()
    clients: int = 0


class Weights(Protocol):
    """Read access to the pretrained model, for a server's ``init``."""

    def get_weight(self, layer: str) -> Tensor:
        """Return W0 of a target layer, (O, I), float32; a copy."""
        ...

    def get_extra(self, parameter: str) -> Tensor:
        """Return the initial value of one of the extras; a copy."""
        ...
