"""FedGaLore: AdamW in a low-rank subspace of the gradient on the clients, its second moments synchronized by AJIVE.

Peng et al., "Rethinking LoRA for Data Heterogeneous Federated Learning: Subspace and State Alignment",
arXiv:2602.01746; GaLore is arXiv:2403.03507.

For a layer of m x n, m >= n (for m < n transpose everything):

    client i:  g~ = g P^T (m, r);  m~, v~ by Adam, from m~ = 0, v~ = vbar;  W <- W - eta (scale u~ P + lambda W)
               P (r, n) renewed every ``period`` steps; T = P_old P_new^T maps m~ and v~
    server:    W <- W + sum_i p_i (W_i - W);   vbar = AJIVE({v~_i P_i}, joint rank r)

Under one projector that is AdamW on acc in W + scale acc P, so no dense gradient is needed between refreshes and the
update is transmitted as its accumulators. The first ``adaptive_refreshes`` projectors come from the gradient, later
ones from a seed, which both sides have: then P is not transmitted.

Deviations: the update of a round with J projectors has rank J r and is not truncated. vbar is sum_i p_i (J_i + column
means), clamped at 0; after projectors of the clients' own, its coordinates are the r directions that these cover best,
which are transmitted too. The paper maps v~ by T, which makes entries negative, and the step unbounded where they are
clamped at 0: ``moments: linear``. The default maps v~ by the squared entries of T. Between independent random
projectors about r / n of vbar is then left, so a random refresh almost re-initializes the second moments. ``keep``
leaves them (GaLore's code). Over five seeds of a small network, no other reading was measurably better. Bias correction
is off as in algorithm 4, also for the head. Clipping bounds the projected gradients. Weight decay reaches the frozen
weight (W <- rho W), which no adapter can express; a client's rho is at least the median's to the power of 4.
``lora_alpha`` is not used; ``scale`` is GaLore's.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from fedspan.core.base import Delta, Increment
from fedspan.core.factors import list_tensor_names
from fedspan.core.lowrank import LowRank, concatenate
from fedspan.core.method import Claims, Memory, Quantity, RegisteredMethod, declare_bounded
from fedspan.core.parametrization import Projected
from fedspan.core.projectors import choose_side, draw_projector
from fedspan.core.second_moments import MomentSynchronizer
from fedspan.core.tensors import Tensors, create_generator, join_tensor_name, select_slots
from fedspan.core.values import (
    Client,
    Contribution,
    Group,
    Job,
    LayerSpec,
    Message,
    OptimizerState,
    Reduced,
    Refresh,
    ServerState,
    StackItem,
    Trained,
    Weights,
)
from fedspan.errors import FedspanError

_MAX_STEPS = 10**9
"""Largest number of steps that a reply may state where the run's epochs decide."""
_MAX_DECAY = 4
"""Largest number of times that a client may decay the base, in multiples of the median: the norm of a change, which is
limited, does not contain it. Honest decays differ by the clients' numbers of steps alone."""
_LONGEST = 1.01
"""Largest eigenvalue of P P^T for a projector P; the rows of honest ones are orthonormal to rounding. So acc P is no
longer than acc, whose norm is limited; a round's J products together are at most J^0.5 times as long."""
_ROUND = "round"
"""Layer name of the counts of a round in a reply."""


def _limit_decays(stack: Sequence[StackItem]) -> list[float]:
    """Return the clients' factors on the base, of which none is below the median to the power of ``_MAX_DECAY``.

    The median is that of the clients that made any steps; of an even number, the one of the middle two that decays the
    base less.
    """
    decays, steps = ([float(item.tensors[f"{_ROUND}/{name}"]) for item in stack] for name in ("decay", "steps"))
    least = statistics.median_high([decay for decay, count in zip(decays, steps, strict=True) if count] or [1.0])
    return [max(decay, least**_MAX_DECAY) for decay in decays]


def _transpose_wide(value: Tensor, layer: LayerSpec) -> Tensor:
    """Transpose a wide layer's tensor, so that the projector is always on the right; its own inverse."""
    return value if choose_side(layer.shape) == "right" else value.T


@final
@dataclass(frozen=True, kw_only=True)
class FedGaLore(RegisteredMethod):
    """GaLore on clients, summed updates, synchronized second moments.

    Args:
        projectors: Algorithm for projectors from the gradient: svd or rsvd (randomized).
        adaptive_refreshes: Number of refreshes with projectors from the gradient; later ones use the seed.
        adaptive_in: Whether these are counted per run or per round.
        steps: Local steps per round; 0: the run's epochs or steps, under one projector a round.
        period: Steps between refreshes (0: one refresh per round); needs ``steps``.
        rounds_per_seed: Number of rounds that use the same seeded projectors.
        moments: Transformation of the second moment to a new projector: squared, linear (the paper's, clamped) or keep.
        scale: Scale of the step (GaLore's ``scale``).
        bias_correction: Whether to correct the bias of Adam's moments, those of the extras included.
        decay_base: Whether weight decay acts on the target layers' whole weights, as in the paper, or not at all.
        synchronization: Synchronization of second moments: ajive, average, average-svd or none (FedGaLore-).
        joint_rank: Joint rank of ajive and average-svd; 0: r.
        estimate_joint_rank: Whether AJIVE's two bounds determine the joint rank, from views of rank ``view_rank``.
        view_rank: Number of directions that AJIVE retains per client; 0: r, or r / 2 to estimate the joint rank.
        identifiable: Whether AJIVE drops directions along which some client varies too little.
    """

    claims: ClassVar[Claims] = Claims(
        paper="Rethinking LoRA for Data Heterogeneous Federated Learning: Subspace and State Alignment "
        "(arXiv:2602.01746)",
        exact=True,
        reduction="stack",
        reinitializes=True,
        moves_base=True,
        sends_base=True,
        sends="other",
        directions=("P",),
        quantities=(Quantity("second moments", slots=("v",), is_squared=True),),
    )

    projectors: Literal["rsvd", "svd"] = "rsvd"
    adaptive_refreshes: int = declare_bounded(5, minimum=0)
    adaptive_in: Literal["run", "round"] = "run"
    steps: int = declare_bounded(0, minimum=0)
    period: int = declare_bounded(0, minimum=0)
    rounds_per_seed: int = 1
    moments: Literal["squared", "linear", "keep"] = "squared"
    scale: float = 1.0
    bias_correction: bool = False
    decay_base: bool = True
    synchronization: Literal["ajive", "average", "average-svd", "none"] = "ajive"
    joint_rank: int = declare_bounded(0, minimum=0)
    estimate_joint_rank: bool = False
    view_rank: int = declare_bounded(0, minimum=0)
    identifiable: bool = False

    def __post_init__(self) -> None:
        if self.period and not self.steps:
            raise FedspanError(
                "method.period", self.period, "0, or method.steps beside it (the local steps of every client)"
            )

    @property
    def segments(self) -> int:
        """Number J of projectors in a round."""
        return -(-self.steps // self.period) if self.period else 1

    def count_adaptive(self, round: int) -> int:
        """Return the number of a round's first projectors that come from the gradient."""
        before = 0 if self.adaptive_in == "round" else round * self.segments
        return min(self.segments, max(0, self.adaptive_refreshes - before))

    def is_basis_fitted(self, round: int) -> bool:
        """Return whether a round ends with clients' own projectors, so that vbar needs a transmitted basis."""
        return self.count_adaptive(round) == self.segments and self.moments != "keep" and self.synchronization != "none"

    def draw_projector_seed(self, round: int) -> int:
        """Return the seed of a round's first projector; later projectors have the next integers."""
        rng = create_generator(self.seed, "projector seed", max(0, round) // self.rounds_per_seed)
        return int(torch.randint(2**62, (), generator=rng))

    def draw_seeded_projector(self, layer: LayerSpec, round: int, segment: int) -> Tensor:
        """Draw a seeded projector, (R, n) whatever the layer's orientation."""
        rank, side = min(self.r, *layer.shape), choose_side(layer.shape)
        return _transpose_wide(
            draw_projector(layer.name, layer.shape, rank, side, self.draw_projector_seed(round) + segment), layer
        )

    def init(self, weights: Weights) -> ServerState:
        return ServerState(scalars={"steps": 0})

    def sync(self, state: ServerState, client: Client | None) -> Message:
        known_round = None if client is None else client.last_round
        return Message(state.memory, state.scalars, state.base.build_patch(known_round))

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        steps = int(message.scalars["steps"])
        tensors: dict[str, Tensor] = {}
        second: dict[str, Tensor] = {}
        for layer in self.spec.layers:
            slots, acc = select_slots(message.tensors, layer.name), join_tensor_name(layer.name, "acc")
            P = slots["P"] if "P" in slots else self.draw_seeded_projector(layer, round - 1, self.segments - 1)
            tensors[acc] = _transpose_wide(torch.zeros(max(layer.shape), min(len(P), self.r)), layer)
            tensors[join_tensor_name(layer.name, "P")] = _transpose_wide(P, layer)
            if "v" in slots:
                second[acc] = _transpose_wide(slots["v"], layer)
        return Job(
            parametrization={layer.name: Projected(choose_side(layer.shape), self.scale) for layer in self.spec.layers},
            tensors=tensors,
            trainable=(Group(list_tensor_names(self.spec, "acc"), weight_decay=None if self.decay_base else 0.0),),
            steps=self.steps or None,
            optimizer={"name": "adamw", "bias_correction": (self.bias_correction, self.bias_correction)},
            optimizer_state=OptimizerState({"exp_avg_sq": second}, dict.fromkeys(second, steps)) if second else None,
            generation=round,
            refresh=Refresh(
                self.period or None,
                self.projectors,
                self.count_adaptive(round),
                self.draw_projector_seed(round),
                self.moments,
            ),
            want_moments=self.synchronization != "none",
            decay_base=self.decay_base,
        )

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory, round: int) -> tuple[Message, Memory]:
        adaptive, reply = self.count_adaptive(round), dict[str, Tensor]()
        for layer in self.spec.layers:
            accs, Ps = self._concatenate_segments(layer, select_slots(trained.tensors, layer.name))
            reply[join_tensor_name(layer.name, "acc")] = accs
            if adaptive:  # the other projectors follow from the seed
                reply[join_tensor_name(layer.name, "P")] = Ps[: adaptive * min(self.r, *layer.shape)]
            if self.synchronization != "none":
                moment = trained.optimizer_state.moments["exp_avg_sq"][join_tensor_name(layer.name, "acc")]
                reply[join_tensor_name(layer.name, "v")] = _transpose_wide(moment, layer)
        return Message(reply, {"decay": trained.decay, "steps": trained.steps}), memory

    def _concatenate_segments(self, layer: LayerSpec, slots: Tensors) -> tuple[Tensor, Tensor]:
        """Return the round's accumulators (m, J R) and projectors (J R, n)."""
        accs, Ps = Projected(choose_side(layer.shape)).finished
        pairs = [(_transpose_wide(slots[accs], layer), _transpose_wide(slots[Ps], layer))] if accs in slots else []
        parts = [*pairs, (_transpose_wide(slots["acc"], layer), _transpose_wide(slots["P"], layer))]
        return torch.cat([acc for acc, _ in parts], 1), torch.cat([P for _, P in parts], 0)

    def contribute(self, message: Message, client: Client) -> Contribution:
        decay, steps = float(message.scalars["decay"]), int(message.scalars["steps"])
        if not 0.0 <= decay <= 1.0 or not 0 <= steps <= (self.steps or _MAX_STEPS):
            raise ValueError(f"a decay of {decay:g} after {steps} steps")
        for layer in self.spec.layers:
            rank = min(self.r, *layer.shape)
            for P in message.tensors.get(join_tensor_name(layer.name, "P"), torch.empty(0, 1)).double().split(rank):
                if len(P) and not float(torch.linalg.eigvalsh(P @ P.T)[-1]) <= _LONGEST:
                    raise ValueError(f"a projector of {layer.name} whose rows are longer than 1 or not orthogonal")
        counts = {name: torch.tensor(float(message.scalars[name]), dtype=torch.float64) for name in ("decay", "steps")}
        return Contribution(stack={**message.tensors, **{f"{_ROUND}/{name}": value for name, value in counts.items()}})

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        steps = sum(item.weight * float(item.tensors[f"{_ROUND}/steps"]) for item in reduced.stack)
        decays = zip(reduced.stack, _limit_decays(reduced.stack), strict=True)
        decay = sum(item.weight * value for item, value in decays)
        deltas = {layer.name: self._compute_delta(layer, reduced.stack, state.round) for layer in self.spec.layers}
        moments: dict[str, Tensor] = {}
        if (synchronizer := self._create_synchronizer()) is not None:
            for layer in self.spec.layers:
                joined = self._join_moments(synchronizer, layer, reduced.stack, state.round)
                dtype = reduced.stack[0].tensors[join_tensor_name(layer.name, "v")].dtype
                moments |= {join_tensor_name(layer.name, slot): value.to(dtype) for slot, value in joined.items()}
        return state.advance_round(
            memory=moments,
            base=state.base.add(Increment(state.round + 1, deltas, decay)),
            scalars={"steps": int(state.scalars["steps"]) + round(steps)},
            generation=state.generation + 1,
        )

    def _compute_delta(self, layer: LayerSpec, stack: Sequence[StackItem], round: int) -> Delta:
        """sum_i p_i (W_i - rho_i W): accumulators under the seed's projectors add up, the others stay separate."""
        acc, P = join_tensor_name(layer.name, "acc"), join_tensor_name(layer.name, "P")
        adaptive_rows, rank = self.count_adaptive(round) * min(self.r, *layer.shape), min(self.r, *layer.shape)
        pairs = (
            [LowRank(item.tensors[acc][:, :adaptive_rows], item.tensors[P], item.weight) for item in stack]
            if adaptive_rows
            else []
        )
        for segment in range(self.count_adaptive(round), self.segments):
            columns = slice(segment * rank, (segment + 1) * rank)
            summed = torch.stack([item.weight * item.tensors[acc][:, columns].double() for item in stack]).sum(0)
            shared = self.draw_seeded_projector(layer, round, segment)
            pairs.append(LowRank(summed.to(stack[0].tensors[acc].dtype), shared.to(stack[0].tensors[acc].dtype)))
        tall = concatenate([LowRank(pair.B, pair.A, pair.scale * self.scale) for pair in pairs])
        pair = tall if choose_side(layer.shape) == "right" else LowRank(tall.A.T, tall.B.T)
        return pair if pair.numel() <= layer.out_features * layer.in_features else pair.to_dense()

    def _create_synchronizer(self) -> MomentSynchronizer | None:
        if self.synchronization == "none":
            return None
        return MomentSynchronizer(
            rule=self.synchronization,
            joint_rank=self.joint_rank or self.r,
            estimate_joint_rank=self.estimate_joint_rank,
            view_rank=self.view_rank or (max(1, self.r // 2) if self.estimate_joint_rank else self.r),
            identifiable=self.identifiable,
        )

    def _join_moments(
        self, synchronizer: MomentSynchronizer, layer: LayerSpec, stack: Sequence[StackItem], round: int
    ) -> dict[str, Tensor]:
        """Return vbar as ``v`` (m, R), and ``P`` (R, n) where its coordinates are not a seeded projector's."""
        moments = [item.tensors[join_tensor_name(layer.name, "v")].double() for item in stack]
        weights, rng = [item.weight for item in stack], create_generator(self.seed, "ajive", layer.name, round)
        if not self.is_basis_fitted(round):  # one projector for all, or unchanged coordinates
            return {"v": synchronizer.join(moments, weights, rng)}
        rank = moments[0].shape[1]
        Ps = [item.tensors[join_tensor_name(layer.name, "P")][-rank:].double() for item in stack]
        v, P = synchronizer.join_projected(moments, Ps, weights, rng, linear=self.moments == "linear")
        return {"v": v, "P": P}
