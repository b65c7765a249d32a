"""The base update: how a method moves the frozen base without anybody writing into the weights of record.

``base = rho * W0 + total``. A ``BaseUpdate`` accumulates increments, each tagged with the round whose state first holds
it; a client that holds the base of round h is sent the increments tagged later than h, or, where that is shorter or
they are no longer kept, the whole total. Whoever applies the same increments in the same order holds the same bits: the
representation of the total (factors while rank * (O + I) <= O * I, dense beyond) follows from the increments alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedspan.core.lowrank import LowRank, concatenate

__all__ = ["BasePatch", "BaseUpdate", "Delta", "Increment", "Total", "apply_patch", "as_dense", "materialise"]

Delta = LowRank | Tensor
"""A layer's change of weight, (O, I): a pair of factors, or the dense matrix."""


def as_dense(delta: Delta) -> Tensor:
    """The matrix (O, I) of either form."""
    return delta.dense() if isinstance(delta, LowRank) else delta


class Total(Mapping[str, Delta]):
    """The sum of all increments, by layer: one pair of factors, or the dense matrix.

    Pairs are held as they were added, not copied (a server holds the recent ones as increments too), and joined when a
    layer is asked for.

    Args:
        deltas: what there is already.
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
        """Elements over all layers."""
        return sum(
            parts.numel() if isinstance(parts, Tensor) else sum(pair.numel() for pair in parts)
            for parts in self._parts.values()
        )

    def after(self, increment: Increment) -> Total:
        """The sum after one more increment; a layer turns dense where its factors would outgrow the matrix."""
        total = Total() if increment.decay != 1.0 else Total(self)
        if increment.decay != 1.0:
            total._parts = {layer: _decayed(parts, increment.decay) for layer, parts in self._parts.items()}
        for layer, delta in increment.deltas.items():
            total._parts[layer] = _accumulate(total._parts.get(layer, ()), delta)
        return total


def _accumulate(parts: tuple[LowRank, ...] | Tensor, delta: Delta) -> tuple[LowRank, ...] | Tensor:
    if isinstance(parts, Tensor):
        return parts + as_dense(delta)
    if isinstance(delta, LowRank):
        rows, columns = delta.shape
        joined = (*parts, delta.folded())
        fits = sum(pair.numel() for pair in joined) <= rows * columns
        return joined if fits else concatenate(joined).dense()
    return concatenate(parts).dense() + delta if parts else delta


def _decayed(parts: tuple[LowRank, ...] | Tensor, factor: float) -> tuple[LowRank, ...] | Tensor:
    if isinstance(parts, Tensor):
        return parts * factor
    return tuple(LowRank(pair.B * factor, pair.A, pair.scale) for pair in parts)


@dataclass(frozen=True)
class Increment:
    """One change of the base: ``rho <- decay * rho``, ``total <- decay * total + deltas``.

    Args:
        round: the round number of the first server state that holds it (0: from ``init``, 1: after the first round).
        deltas: change by layer; layers that do not move are left out.
        decay: factor on everything before (weight decay of the base; 1 for all methods without it).
    """

    round: int
    deltas: Mapping[str, Delta]
    decay: float = 1.0

    def numel(self) -> int:
        """Elements stored."""
        return sum(delta.numel() for delta in self.deltas.values())


@dataclass(frozen=True)
class BasePatch:
    """What a client is sent of the base: increments to replay, or (``whole``) rho and total, in place of its own."""

    round: int
    increments: tuple[Increment, ...] = ()
    whole: bool = False
    rho: float = 1.0
    total: Mapping[str, Delta] = field(default_factory=dict)

    def numel(self) -> int:
        """Elements that travel."""
        return Total(self.total).numel() + sum(inc.numel() for inc in self.increments)


@dataclass(frozen=True)
class BaseUpdate:
    """The accumulated change of the base, with the recent increments kept for clients that were absent.

    Args:
        round: tag of the last increment (-1: the base is W0).
        rho: factor on W0.
        total: the sum of all increments, by layer.
        recent: the last increments, as many as together are no larger than the total (always the last one).
        recent_from: whoever holds the base of this round or a later one catches up by replaying ``recent``.
    """

    round: int = -1
    rho: float = 1.0
    total: Mapping[str, Delta] = field(default_factory=dict)
    recent: tuple[Increment, ...] = ()
    recent_from: int = -1

    @property
    def moved(self) -> bool:
        """Whether the base differs from W0."""
        return self.round >= 0

    def add(self, increment: Increment) -> BaseUpdate:
        """The base after one more increment.

        Raises:
            ValueError: if the increment's round is not later than the base's.
        """
        if increment.round <= self.round:
            raise ValueError(f"increment of round {increment.round} on a base of round {self.round}")
        deltas = {layer: delta.contiguous() for layer, delta in increment.deltas.items()}
        if any(delta is not increment.deltas[layer] for layer, delta in deltas.items()):
            increment = replace(increment, deltas=deltas)
        total = Total(self.total).after(increment)
        limit = total.numel()
        recent, recent_from = (*self.recent, increment), self.recent_from
        while len(recent) > 1 and sum(kept.numel() for kept in recent) > limit:
            recent_from, recent = recent[0].round, recent[1:]
        return BaseUpdate(increment.round, self.rho * increment.decay, total, recent, recent_from)

    def since(self, held: int | None) -> BasePatch | None:
        """What a client must be sent whose last accepted state was that of round ``held`` (None: it holds only W0)."""
        held = -1 if held is None else held
        if held >= self.round:
            return None
        whole = BasePatch(self.round, whole=True, rho=self.rho, total=self.total)
        missing = tuple(increment for increment in self.recent if increment.round > held)
        if held < self.recent_from or sum(increment.numel() for increment in missing) > whole.numel():
            return whole
        return BasePatch(self.round, missing)


def apply_patch(base: BaseUpdate, patch: BasePatch | None) -> BaseUpdate:
    """The base that a client holds after a patch (clients keep no history: ``recent`` stays empty)."""
    if patch is None:
        return base
    if patch.whole:
        return BaseUpdate(patch.round, patch.rho, patch.total, recent_from=patch.round)
    for increment in patch.increments:
        base = base.add(increment)
    return replace(base, recent=(), recent_from=base.round)


def materialise(weight_OI: Tensor, base: BaseUpdate, layer: str) -> Tensor:
    """``rho * W0 + total`` of one layer in W0's device and float32 or better, (O, I)."""
    dtype = torch.promote_types(weight_OI.dtype, torch.float32)
    moved = weight_OI.to(dtype) if base.rho == 1.0 else weight_OI.to(dtype) * base.rho
    delta = base.total.get(layer)
    return moved if delta is None else moved + as_dense(delta).to(moved.device, dtype)
