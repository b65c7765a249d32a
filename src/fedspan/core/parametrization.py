"""Parametrizations, from trainable tensors to a layer's weight: where most low-rank methods differ on the client.

A parametrization maps one layer's tensors (by slot) to an ``Effective``: whether the frozen base is included, a pair of
factors (or a matrix) added to it, and, for full-weight methods, a weight that replaces it. Shapes: O output features, I
input features, (o, i) the rectangle of a convolution, R rank, P personal rank, K = min(O, I), N = max(O, I) or a number
of entries, H heads, Q a sum of ranks. ``slots`` has the letters of each slot's shape, by which a client checks
what a server sends. Everything is differentiable in the slots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedspan.core.base import Delta, to_dense
from fedspan.core.lowrank import LowRank, concatenate
from fedspan.core.projectors import draw_random_projector
from fedspan.core.tensors import create_generator

Slots = Mapping[str, Tensor]


@dataclass(frozen=True)
class Effective:
    """The function of a layer: ``x @ (weight or W)^T + pair(x)``, W being the frozen base where ``base`` is true."""

    pair: Delta | None = None
    """Factors or matrix (O, I) added to the weight, or None."""
    weight: Tensor | None = None
    """Weight (O, I) that replaces the base's, or None."""
    base: bool = True
    """Whether the base's own product is included (never together with ``weight``)."""
    dropout: bool = True
    """Whether the pair is an adapter, so that adapter dropout acts on its input."""


@runtime_checkable
class Parametrization(Protocol):
    """A mapping from one layer's tensors by slot to the layer's function."""

    def compute_effective(self, slots: Slots) -> Effective:
        """Compute the layer's weight, differentiable in ``slots``."""
        ...


@dataclass(frozen=True)
class LoRA:
    """``W + scaling * B A`` with A (R, I) and B (O, R) (arXiv:2106.09685)."""

    scaling: float
    slots: ClassVar[Mapping[str, str]] = {"A": "RI", "B": "OR"}

    def compute_effective(self, slots: Slots) -> Effective:
        return Effective(LowRank(slots["B"], slots["A"], self.scaling))


@dataclass(frozen=True)
class PairSum:
    """``W + scaling * B A + personal_scaling * L U``: two pairs; L (O, P), U (P, I) is personal or frozen."""

    scaling: float
    personal_scaling: float
    slots: ClassVar[Mapping[str, str]] = {"A": "RI", "B": "OR", "L": "OP", "U": "PI"}

    def compute_effective(self, slots: Slots) -> Effective:
        shared = LowRank(slots["B"], slots["A"], self.scaling)
        return Effective(concatenate([shared, LowRank(slots["L"], slots["U"], self.personal_scaling)]))


@dataclass(frozen=True)
class Nested:
    """``W + scaling * (B + n B_d B_u) (A + n A_d A_u)`` with n the nested scaling (mFedLoRU).

    The outer A (R, I) and B (O, R) are fixed; A_d (R, P), A_u (P, I), B_d (O, P) and B_u (P, R) train.
    """

    scaling: float
    nested_scaling: float
    slots: ClassVar[Mapping[str, str]] = {"A": "RI", "B": "OR", "A_d": "RP", "A_u": "PI", "B_d": "OP", "B_u": "PR"}

    def compute_outer(self, slots: Slots, slot: str) -> Tensor:
        """Compute A or B with its nested update."""
        return slots[slot] + self.nested_scaling * slots[f"{slot}_d"] @ slots[f"{slot}_u"]

    def compute_effective(self, slots: Slots) -> Effective:
        return Effective(LowRank(self.compute_outer(slots, "B"), self.compute_outer(slots, "A"), self.scaling))


@dataclass(frozen=True)
class Core:
    """``W + scaling * B R A`` with a trainable core R (R, R) between fixed B (O, R) and A (R, I) (Fed-SB)."""

    scaling: float
    slots: ClassVar[Mapping[str, str]] = {"A": "RI", "B": "OR", "R": "RR"}

    def compute_effective(self, slots: Slots) -> Effective:
        return Effective(LowRank(slots["B"] @ slots["R"], slots["A"], self.scaling))


@dataclass(frozen=True)
class MultiHeadCore:
    """``W + scaling * sum_h c_h B_h R_h A_h``: H cores R (H, R, R) with a scale c (H,) each (RAVAN).

    B (O, H R) and A (H R, I), fixed, hold the heads' factors side by side.
    """

    scaling: float
    slots: ClassVar[Mapping[str, str]] = {"A": "QI", "B": "OQ", "R": "HRR", "c": "H"}

    def compute_effective(self, slots: Slots) -> Effective:
        cores = slots["c"][:, None, None] * slots["R"]
        B_OHR = slots["B"].unflatten(1, cores.shape[:2])
        return Effective(LowRank(torch.einsum("ohr,hrq->ohq", B_OHR, cores).flatten(1), slots["A"], self.scaling))


@dataclass(frozen=True)
class Gram:
    """``W + scaling * L A^T A R`` with one trainable A (R, K) and fixed L (O, K), R (K, I) (FLoRG)."""

    scaling: float = 1.0
    slots: ClassVar[Mapping[str, str]] = {"A": "RK", "L": "OK", "R": "KI"}

    def compute_effective(self, slots: Slots) -> Effective:
        # Both thin products once a step, 2 R K (O + I) operations, instead of two K-wide products for every token.
        A_RK = slots["A"]
        return Effective(LowRank(slots["L"] @ A_RK.T, A_RK @ slots["R"], self.scaling))


@dataclass(frozen=True)
class MixedGram:
    """``Gram`` with the identity as the shorter side's basis and a structured basis M, from keys, on the longer one.

    ``right`` (O <= I): ``W + scaling * A^T A M``, so L = I and R = M (K, I). ``left``: ``W + scaling * M^T A^T A``. In
    L X R only the product of a square basis with the other one matters, as A absorbs any rotation; so nothing is
    lost with the identity.
    """

    scaling: float
    side: str
    slots: ClassVar[Mapping[str, str]] = {"A": "RK", "places": "K", "signs": "N"}

    def compute_effective(self, slots: Slots) -> Effective:
        A_RK = slots["A"]
        mixed = multiply_by_mixing(A_RK, slots["places"], slots["signs"])
        B, A = (A_RK.T, mixed) if self.side == "right" else (mixed.T, A_RK)
        return Effective(LowRank(B, A, self.scaling))


@dataclass(frozen=True)
class Projected:
    """GaLore as LoRA: an accumulator trained under a projector, plus the segments trained under earlier projectors.

    ``right``: ``W + scaling acc P`` with acc (O, R), P (R, I). ``left``: ``W + scaling P acc`` with P (O, R),
    acc (R, I). ``done_B`` (O, Q) and ``done_A`` (Q, I) hold the finished segments (Q grows by R at each refresh).
    ``scaling`` is GaLore's ``scale`` of the step: the gradient of acc is that of ``W + acc P``, without it.
    A projected weight change is not an adapter: with dropout on its input alone, its gradient would no longer be that
    of the weight.
    """

    side: str
    scaling: float = 1.0

    @property
    def slots(self) -> Mapping[str, str]:
        """Shapes of the slots; only their order depends on the side."""
        own = {"acc": "OR", "P": "RI"} if self.side == "right" else {"P": "OR", "acc": "RI"}
        return {**own, "done_A": "QI", "done_B": "OQ"}

    @property
    def finished(self) -> tuple[str, str]:
        """The slots of the finished segments' accumulators and of their projectors."""
        return ("done_B", "done_A") if self.side == "right" else ("done_A", "done_B")

    def pair(self, acc: Tensor, P: Tensor) -> LowRank:
        """Return a segment as (B, A), without the scaling."""
        return LowRank(acc, P) if self.side == "right" else LowRank(P, acc)

    def compute_effective(self, slots: Slots) -> Effective:
        acc = slots["acc"]
        if self.scaling != 1.0:
            acc = acc + ((self.scaling - 1.0) * acc).detach()
        current = self.pair(acc, slots["P"])
        if "done_B" in slots:
            current = concatenate([LowRank(slots["done_B"], slots["done_A"], self.scaling), current])
        return Effective(current, dropout=False)


@dataclass(frozen=True)
class Factorized:
    """``U V`` in place of the weight, no frozen base: U (O, R), V (R, I) (FedHM)."""

    slots: ClassVar[Mapping[str, str]] = {"U": "oR", "V": "Ri"}

    def compute_effective(self, slots: Slots) -> Effective:
        return Effective(LowRank(slots["U"], slots["V"]), base=False)


def reshape_to_rectangle(weight_OI: Tensor, kernel: tuple[int, int]) -> Tensor:
    """Reshape a convolution's weight (O, channels * k1 * k2) to FedHM's matrix (O * k1, channels * k2).

    A pair of factors of that matrix is a k2-wide convolution along one axis and a k1-wide one along the other.
    """
    k1, k2 = kernel
    rows, columns = weight_OI.shape
    channels = columns // (k1 * k2)
    return weight_OI.reshape(rows, channels, k1, k2).permute(0, 2, 1, 3).reshape(rows * k1, channels * k2)


def reshape_to_convolution(matrix: Tensor, kernel: tuple[int, int]) -> Tensor:
    """Invert ``reshape_to_rectangle``."""
    k1, k2 = kernel
    rows, channels = matrix.shape[0] // k1, matrix.shape[1] // k2
    return matrix.reshape(rows, k1, channels, k2).permute(0, 2, 1, 3).reshape(rows, channels * k1 * k2)


@dataclass(frozen=True)
class FactorizedConv:
    """``U V`` in place of a convolution's weight, no frozen base: U (O * k1, R), V (R, channels * k2) (FedHM)."""

    kernel: tuple[int, int]
    slots: ClassVar[Mapping[str, str]] = {"U": "oR", "V": "Ri"}

    def compute_effective(self, slots: Slots) -> Effective:
        return Effective(weight=reshape_to_convolution(slots["U"] @ slots["V"], self.kernel), base=False)


@dataclass(frozen=True)
class Sparse:
    """``W`` plus trained values (N,) at fixed entries (N,), row-major positions in an (O, I) weight (SLoRA)."""

    shape: tuple[int, int]
    slots: ClassVar[Mapping[str, str]] = {"values": "N", "entries": "N"}

    def compute_effective(self, slots: Slots) -> Effective:
        return Effective(scatter_entries(slots["values"], slots["entries"], self.shape))


@dataclass(frozen=True)
class Dense:
    """The whole weight W (O, I), trained."""

    slots: ClassVar[Mapping[str, str]] = {"W": "OI"}

    def compute_effective(self, slots: Slots) -> Effective:
        return Effective(weight=slots["W"], base=False)


@dataclass(frozen=True)
class DenseChange:
    """``W + D`` with D (O, I); the gradient with respect to D equals that of the whole weight."""

    slots: ClassVar[Mapping[str, str]] = {"D": "OI"}

    def compute_effective(self, slots: Slots) -> Effective:
        return Effective(slots["D"], dropout=False)


@dataclass(frozen=True)
class DenseLoRA:
    """The whole weight plus a personal pair: ``W + personal_scaling * L U`` (pFedLoRA)."""

    personal_scaling: float
    slots: ClassVar[Mapping[str, str]] = {"W": "OI", "L": "OP", "U": "PI"}

    def compute_effective(self, slots: Slots) -> Effective:
        return Effective(LowRank(slots["L"], slots["U"], self.personal_scaling), slots["W"], base=False)


def compute_dense_change(effective: Effective, weight_OI: Tensor) -> Tensor:
    """Compute the weight change, (O, I), relative to a base weight; for oracles and for exporting dense updates."""
    changed = weight_OI if effective.base else torch.zeros_like(weight_OI)
    if effective.weight is not None:
        changed = effective.weight
    if effective.pair is not None:
        changed = changed + to_dense(effective.pair).to(changed.dtype)
    return changed - weight_OI


@lru_cache(maxsize=256)
def draw_dense_bases(shape: tuple[int, int], seed: int, layer: str) -> tuple[Tensor, Tensor]:
    """Draw random L (O, K) with orthonormal columns and R (K, I) with orthonormal rows, K = min(O, I); float32.

    Both are uniformly distributed. Each takes a QR of a matrix as large as the layer, so the last ones are cached.
    """
    k = min(shape)
    L_OK = draw_random_projector(shape, k, "left", create_generator(seed, "L", layer))
    return L_OK, draw_random_projector(shape, k, "right", create_generator(seed, "R", layer))


def draw_mixing_keys(longer: int, shorter: int, seed: int, layer: str) -> tuple[Tensor, Tensor]:
    """Draw the keys of ``multiply_by_mixing``'s basis: K of N positions, (K,) int64, and signs, (N,) float32."""
    rng = create_generator(seed, "mixing", layer)
    positions_K = torch.randperm(longer, generator=rng)[:shorter]
    signs = torch.randint(0, 2, (longer,), generator=rng).float() * 2 - 1
    return positions_K, signs


def multiply_by_mixing(A_RK: Tensor, positions_K: Tensor, signs_N: Tensor) -> Tensor:
    """Compute ``A M`` (R, N) for the basis M = S C D (K, N), which has orthonormal rows and is not formed.

    S puts the K columns at their positions among N, C is the orthonormal cosine transform (its rows in the order in
    which one FFT of length N takes them), D flips signs. R N log N operations; every entry of M is of the order of 1 /
    sqrt(N), as in a random basis. Differentiable in A.
    """
    length = signs_N.numel()
    spread_RN = A_RK.new_zeros(*A_RK.shape[:-1], length).index_copy(-1, positions_K.long(), A_RK)
    number_N = torch.arange(length, device=A_RK.device, dtype=A_RK.dtype)
    phase_N = torch.polar(torch.full_like(number_N, math.sqrt(2 / length)), number_N * (-math.pi / (2 * length)))
    mixed_RN = (torch.fft.fft(spread_RN) * phase_N).real
    level_N = torch.ones_like(number_N).masked_fill(number_N == 0, math.sqrt(0.5))
    return mixed_RN * level_N * signs_N.to(A_RK.dtype)


def count_entries(shape: tuple[int, int], density: float) -> int:
    """Return the number of entries of a weight that a density means: at least one."""
    return max(1, round(density * shape[0] * shape[1]))


def draw_entries(shape: tuple[int, int], density: float, seed: int, layer: str) -> Tensor:
    """Draw distinct entries of a weight, uniformly at random, as sorted row-major positions: (N,) int64.

    The same seed gives the same entries.
    """
    rows, columns = shape
    order = torch.randperm(rows * columns, generator=create_generator(seed, "mask", layer))
    return order[: count_entries(shape, density)].sort().values


def scatter_entries(values_N: Tensor, entries_N: Tensor, shape: tuple[int, int]) -> Tensor:
    """Build the (O, I) matrix with these values at these entries and zeros elsewhere; differentiable in the values."""
    return values_N.new_zeros(shape[0] * shape[1]).index_put((entries_N,), values_N).view(shape)
