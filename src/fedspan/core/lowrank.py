"""Low-rank matrices as pairs of factors, and computations on them that need not form the matrix.

Shapes: O output features, I input features, R rank, Q total rank of a stack of pairs. A pair represents
``scale * B_OR @ A_RI``. Identities and costs: docs/architecture/mathematics.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """The matrix ``scale * B @ A``, stored as its factors."""

    B: Tensor
    """Factor (O, R) that is applied last ("up")."""
    A: Tensor
    """Factor (R, I) that is applied first ("down")."""
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.B.ndim != 2 or self.A.ndim != 2 or self.B.shape[1] != self.A.shape[0]:
            raise ValueError(f"B {tuple(self.B.shape)} and A {tuple(self.A.shape)} do not multiply as (O, R) @ (R, I)")

    @property
    def rank(self) -> int:
        """Inner dimension R (an upper bound of the matrix's rank)."""
        return self.A.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (O, I) of the matrix that the pair represents."""
        return self.B.shape[0], self.A.shape[1]

    def numel(self) -> int:
        """Count the stored elements: R (O + I)."""
        return self.B.numel() + self.A.numel()

    def to_dense(self) -> Tensor:
        """Compute the matrix itself, (O, I)."""
        return (self.B @ self.A) * self.scale

    def fold_scale(self) -> LowRank:
        """Return the same matrix with ``scale`` 1, the scalar moved into B."""
        return self if self.scale == 1.0 else LowRank(self.B * self.scale, self.A)

    def contiguous(self) -> LowRank:
        """Return the same pair in row-major order, as after transmission: the last bits of products depend on it."""
        if self.B.is_contiguous() and self.A.is_contiguous():
            return self
        return LowRank(self.B.contiguous(), self.A.contiguous(), self.scale)

    def to(self, target: torch.dtype | torch.device) -> LowRank:
        """Convert the pair to another dtype or device."""
        return LowRank(self.B.to(target), self.A.to(target), self.scale)


def concatenate(pairs: Sequence[LowRank]) -> LowRank:
    """Add pairs as one pair of rank Q = sum of ranks; exact, no arithmetic beyond the scales."""
    if not pairs:
        raise ValueError("concatenate needs at least one pair")
    folded = [pair.fold_scale() for pair in pairs]
    return LowRank(torch.cat([pair.B for pair in folded], 1), torch.cat([pair.A for pair in folded], 0))


def compute_inner_product(left: LowRank, right: LowRank) -> Tensor:
    """Compute the Frobenius inner product by R x R Gram matrices, in float64: tr((B_l^T B_r)(A_r A_l^T))."""
    left, right = left.to(torch.float64), right.to(torch.float64)
    return ((left.B.T @ right.B) * (left.A @ right.A.T)).sum() * (left.scale * right.scale)


_TIE = 1e-4
"""Relative distance from a vector's largest entry within which another counts as equally large: wider than what
rounding in float32 moves either."""


def fix_signs(U_OQ: Tensor, Vt_QI: Tensor) -> tuple[Tensor, Tensor]:
    """Make the largest entry (by magnitude) of every left singular vector positive, flipping its partner with it.

    Of entries that are equally large to a relative 1e-4, the first decides: signs of a gradient give vectors with exact
    ties, where rounding would choose. No convention is continuous, so other machines may still choose another sign;
    the product of the pair is the same.
    """
    magnitudes = U_OQ.abs()
    first = (magnitudes >= magnitudes.amax(0) * (1 - _TIE)).to(torch.uint8).argmax(0)
    signs = torch.where(U_OQ.gather(0, first[None]).squeeze(0) < 0, -1.0, 1.0).to(U_OQ.dtype)
    return U_OQ * signs, Vt_QI * signs[:, None]


def svd(pair: LowRank, rank: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the SVD of a pair from its factors, in float64, with deterministic signs.

    Householder QR of both factors, then an SVD of a Q x Q core: about 4 (O + I) Q^2 + O(Q^3) operations, never an O x I
    matrix. The orthogonal factors are stored as reflectors and applied only to the k requested vectors.
    From Q = min(O, I) on, the SVD is that of the dense matrix, which is cheaper and equally exact.

    Args:
        pair: A pair of rank Q.
        rank: Number of singular triples to return (all min(Q, O, I) of them by default).

    Returns:
        ``U`` (O, k), ``S`` (k,) descending, ``Vt`` (k, I).
    """
    if pair.rank >= min(pair.shape):
        U, S, Vt = torch.linalg.svd(pair.to(torch.float64).to_dense(), full_matrices=False)
        retained = S.numel() if rank is None else min(rank, S.numel())
        U, Vt = U[:, :retained], Vt[:retained]
    else:
        # Few large temporaries at a time: servers do this for several layers at once.
        B, A = torch.geqrf(pair.B.to(torch.float64)), torch.geqrf(pair.A.to(torch.float64).T)
        R_B, R_A = B[0][: pair.rank].triu(), A[0][: pair.rank].triu()
        u, S, vt = torch.linalg.svd(R_B @ R_A.T * pair.scale)
        retained = S.numel() if rank is None else min(rank, S.numel())
        U = _apply_reflectors(*B, u[:, :retained])
        del B
        Vt = _apply_reflectors(*A, vt[:retained].T).T
        del A
    U, Vt = fix_signs(U, Vt)
    return U, S[:retained], Vt


def _apply_reflectors(reflectors: Tensor, scales: Tensor, core: Tensor) -> Tensor:
    """Compute ``Q @ core`` for the thin Q of ``torch.geqrf``, which is never formed."""
    padded = core.new_zeros(reflectors.shape[0], core.shape[1])
    padded[: core.shape[0]] = core
    return torch.ormqr(reflectors, scales, padded)


def compute_leading_svd(
    matrix_OI: Tensor, rank: int, rng: torch.Generator | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the largest singular triples of a dense matrix, in float64, with deterministic signs.

    Args:
        matrix_OI: Any dense matrix, such as a pretrained weight.
        rank: Number of triples, at most min(O, I).
        rng: None for the full SVD, O(O I min(O, I)); else randomized subspace iteration from this generator (Halko,
            Martinsson and Tropp, arXiv:0909.4061; 10 vectors more than requested, 8 iterations), O(O I (rank + 10)),
            unless these are min(O, I) vectors or more.

    Returns:
        ``U`` (O, rank), ``S`` (rank,) descending, ``Vt`` (rank, I).
    """
    matrix = matrix_OI.double()
    wide = rank + 10
    if rng is None or wide >= min(matrix.shape):
        U, S, Vt = torch.linalg.svd(matrix, full_matrices=False)
    else:
        Q = torch.linalg.qr(matrix @ torch.randn((matrix.shape[1], wide), generator=rng, dtype=torch.float64))[0]
        for _ in range(8):
            Q = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ Q)[0])[0]
        u, S, Vt = torch.linalg.svd(Q.T @ matrix, full_matrices=False)
        U = Q @ u
    U, Vt = fix_signs(U[:, :rank], Vt[:rank])
    return U, S[:rank], Vt


def find_energy_rank(S: Tensor, share: float) -> int:
    """Find the smallest rank, at least 1, of which the squared singular values are a share of the sum of all squares.

    Args:
        S: Singular values (Q,), descending.
        share: Share, from 0 to 1; at 1 only values of 0 are left out.
    """
    tails = S.square().flip(0).cumsum(0).flip(0)  # from the smallest on, so that small tails are not rounded away
    limit, rank = tails[0] * (1 - share), len(S)
    while rank > 1 and bool(tails[rank - 1] <= limit):
        rank -= 1
    return rank


def balance_factors(U: Tensor, S: Tensor, Vt: Tensor) -> LowRank:
    """Convert ``U S V^T`` to a pair whose factors share the singular values: ``U S^(1/2)``, ``S^(1/2) V^T``.

    Where a singular value is 0 to rounding, B is 0 but A retains the unit vector: with both at 0, neither would ever
    receive a gradient again.
    """
    size = max(U.shape[0], Vt.shape[1])
    null = torch.finfo(S.dtype).eps * size * S[:1] >= S
    root = S.sqrt().masked_fill(null, 0.0)
    return LowRank(U * root, root.masked_fill(null, 1.0)[:, None] * Vt).contiguous()


def assign_values_to_B(U: Tensor, S: Tensor, Vt: Tensor) -> LowRank:
    """Convert ``U S V^T`` to a pair with the singular values in B: ``U S``, ``V^T``."""
    return LowRank(U * S, Vt)
