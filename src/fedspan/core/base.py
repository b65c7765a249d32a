"""The base update: how a method moves the frozen base without writing into the original weights.

``base = rho * W0 + total``. A ``BaseUpdate`` accumulates increments, each tagged with the round whose state first holds
it. A client that holds the base of round h receives the increments tagged later than h, or the whole total where that
is smaller or those increments are no longer stored. Applying the same increments in the same order gives the same bits:
the representation of the total (factors while rank * (O + I) <= O * I, dense beyond) depends on the increments alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedspan.core.lowrank import LowRank, concatenate

Delta = LowRank | Tensor
"""A layer's weight change, (O, I): a pair of factors, or the dense matrix."""


def to_dense(delta: Delta) -> Tensor:
    """Return either form as the matrix (O, I)."""
    return delta.to_dense() if isinstance(delta, LowRank) else delta


class Total(Mapping[str, Delta]):
    """The sum of all increments by layer: one pair of factors, or the dense matrix.

    Pairs are stored as they were added, without a copy (a server also holds the recent ones as increments), and joined
    when a layer is requested.
    """

    def __init__(self, deltas: Mapping[str, Delta] | None = None) -> None:
        self._parts: dict[str, tuple[LowRank, ...] | Tensor] = (
            dict(deltas._parts)
            if isinstance(deltas, Total)
            else {layer: (delta,) if isinstance(delta, LowRank) else delta for layer, delta in (deltas or {}).items()}
        )

    def __getitem__(self, layer: str) -> Delta:
        parts = self._parts[layer]
        if isinstance(parts, Tensor):
            return parts
        return parts[0] if len(parts) == 1 else concatenate(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def numel(self) -> int:
        """Count the elements over all layers."""
        return sum(
            parts.numel() if isinstance(parts, Tensor) else sum(pair.numel() for pair in parts)
            for parts in self._parts.values()
        )

    def add(self, increment: Increment) -> Total:
        """Return the sum after one more increment; a layer becomes dense where its factors would outgrow the matrix."""
        total = Total() if increment.decay != 1.0 else Total(self)
        if increment.decay != 1.0:
            total._parts = {layer: _scale_parts(parts, increment.decay) for layer, parts in self._parts.items()}
        for layer, delta in increment.deltas.items():
            total._parts[layer] = _accumulate(total._parts.get(layer, ()), delta)
        return total


def _accumulate(parts: tuple[LowRank, ...] | Tensor, delta: Delta) -> tuple[LowRank, ...] | Tensor:
    if isinstance(parts, Tensor):
        return parts + to_dense(delta)
    if isinstance(delta, LowRank):
        rows, columns = delta.shape
        joined = (*parts, delta.fold_scale())
        fits = sum(pair.numel() for pair in joined) <= rows * columns
        return joined if fits else concatenate(joined).to_dense()
    return concatenate(parts).to_dense() + delta if parts else delta


def _scale_parts(parts: tuple[LowRank, ...] | Tensor, factor: float) -> tuple[LowRank, ...] | Tensor:
    if isinstance(parts, Tensor):
        return parts * factor
    return tuple(LowRank(pair.B * factor, pair.A, pair.scale) for pair in parts)


@dataclass(frozen=True)
class Increment:
    """One change of the base: ``rho <- decay * rho``, ``total <- decay * total + deltas``."""

    round: int
    """Number of the first server state that holds the increment (0: from ``init``, 1: after the first round)."""
    deltas: Mapping[str, Delta]
    """Change by layer; layers that do not move are left out."""
    decay: float = 1.0
    """Factor on everything before (weight decay of the base; 1 for all methods without it)."""

    def numel(self) -> int:
        """Count the stored elements."""
        return sum(delta.numel() for delta in self.deltas.values())


@dataclass(frozen=True)
class BasePatch:
    """The base update for one client: increments to apply, or (``whole``) rho and total that replace its own."""

    round: int
    increments: tuple[Increment, ...] = ()
    whole: bool = False
    rho: float = 1.0
    total: Mapping[str, Delta] = field(default_factory=dict)

    def numel(self) -> int:
        """Count the transmitted elements."""
        return Total(self.total).numel() + sum(inc.numel() for inc in self.increments)


@dataclass(frozen=True)
class BaseUpdate:
    """The accumulated change of the base, with recent increments stored for clients that were absent."""

    round: int = -1
    """Tag of the last increment (-1: the base is W0)."""
    rho: float = 1.0
    """Factor on the pretrained weights W0."""
    total: Mapping[str, Delta] = field(default_factory=dict)
    recent: tuple[Increment, ...] = ()
    """The last increments, together no larger than the total (but always at least one)."""
    recent_from: int = -1
    """Earliest round from whose base a client catches up by applying ``recent``."""

    @property
    def moved(self) -> bool:
        """Whether the base differs from W0."""
        return self.round >= 0

    def add(self, increment: Increment) -> BaseUpdate:
        """Return the base after one more increment.

        Raises:
            ValueError: If the increment's round is not later than the base's.
        """
        if increment.round <= self.round:
            raise ValueError(f"increment of round {increment.round} on a base of round {self.round}")
        deltas = {layer: delta.contiguous() for layer, delta in increment.deltas.items()}
        if any(delta is not increment.deltas[layer] for layer, delta in deltas.items()):
            increment = replace(increment, deltas=deltas)
        total = Total(self.total).add(increment)
        limit = total.numel()
        recent, recent_from = (*self.recent, increment), self.recent_from
        while len(recent) > 1 and sum(past.numel() for past in recent) > limit:
            recent_from, recent = recent[0].round, recent[1:]
        return BaseUpdate(increment.round, self.rho * increment.decay, total, recent, recent_from)

    def build_patch(self, known_round: int | None) -> BasePatch | None:
        """Return the patch for a client whose last accepted state is that of round ``known_round`` (None: only W0)."""
        known_round = -1 if known_round is None else known_round
        if known_round >= self.round:
            return None
        full_patch = BasePatch(self.round, whole=True, rho=self.rho, total=self.total)
        missing = tuple(increment for increment in self.recent if increment.round > known_round)
        if known_round < self.recent_from or sum(increment.numel() for increment in missing) > full_patch.numel():
            return full_patch
        return BasePatch(self.round, missing)


def apply_patch(base: BaseUpdate, patch: BasePatch | None) -> BaseUpdate:
    """Return a client's base after a patch (clients store no history: ``recent`` stays empty)."""
    if patch is None:
        return base
    if patch.whole:
        return BaseUpdate(patch.round, patch.rho, patch.total, recent_from=patch.round)
    for increment in patch.increments:
        base = base.add(increment)
    return replace(base, recent=(), recent_from=base.round)


def materialize(weight_OI: Tensor, base: BaseUpdate, layer: str) -> Tensor:
    """Compute ``rho * W0 + total`` of one layer, (O, I), on W0's device and in float32 or better."""
    dtype = torch.promote_types(weight_OI.dtype, torch.float32)
    decayed = weight_OI.to(dtype) if base.rho == 1.0 else weight_OI.to(dtype) * base.rho
    delta = base.total.get(layer)
    return decayed if delta is None else decayed + to_dense(delta).to(decayed.device, dtype)
