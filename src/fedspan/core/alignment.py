"""Aligning subspaces and factors across clients: Procrustes rotations and AJIVE's joint component.

Shapes: N rows, D columns of a view, Q of its factors, R rank, K views; in Gram matrices K columns, R and Q rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedspan.core.lowrank import LowRank, fix_signs


def solve_procrustes(source_RI: Tensor, target_RI: Tensor) -> Tensor:
    """Solve orthogonal Procrustes: the S with orthonormal rows that maximizes ``<S source, target>``.

    For ``source`` (R', I), ``target`` (R, I), R <= R', and ``target source^T = U Sigma V^T``: S = U V^T, (R, R').
    For R = R' that also minimizes ``||S source - target||_F``; for R < R' it need not (FLoRG's
    ``untruncated`` variant).
    """
    U, _, Vt = torch.linalg.svd(target_RI @ source_RI.T, full_matrices=False)
    return U @ Vt


def find_nearest_rotation(matrix_RR: Tensor) -> Tensor:
    """Find the rotation (orthogonal, determinant 1) nearest to a matrix in Frobenius norm; it maximizes ``<R, M>``.

    ``U diag(1, ..., 1, det(U V^T)) V^T`` for ``M = U Sigma V^T`` (Kabsch). In float64.
    """
    U, _, Vt = torch.linalg.svd(matrix_RR.double())
    U[:, -1] *= torch.sign(torch.linalg.det(U @ Vt))
    return U @ Vt


def compute_gram_factor(stack_QK: Tensor) -> Tensor:
    """Compute Lambda^(1/2) P (R', K) of ``stack^T stack = P^T Lambda P``, eigenvalues descending, without forming it.

    It uses the SVD of the stack, which retains the digits that squaring would lose; in float64, signs fixed. R' is the
    rank of the stack, and at least 1.
    """
    U, S, Vt = torch.linalg.svd(stack_QK.double(), full_matrices=False)
    V_KR = fix_signs(Vt.T, U.T)[0]
    present = int((S[:1] * max(stack_QK.shape) * torch.finfo(S.dtype).eps < S).sum())
    return (S[:, None] * V_KR.T)[: max(1, present)]


def factorize_gram(gram_KK: Tensor) -> Tensor:
    """Compute the result of ``compute_gram_factor`` from ``stack^T stack``, of which only the symmetric part counts.

    In float64. Eigenvalues below the rounding of the largest one, and negative ones, count as 0.
    """
    gram = gram_KK.double()
    eigenvalues, vectors_KR = torch.linalg.eigh((gram + gram.T) / 2)
    values, V_KR = eigenvalues.flip(0), vectors_KR.flip(1)
    V_KR = fix_signs(V_KR, V_KR.T)[0]
    present = int((values[:1].clamp_min(0) * len(gram) * torch.finfo(values.dtype).eps < values).sum())
    return (values.clamp_min(0).sqrt()[:, None] * V_KR.T)[: max(1, present)]


@dataclass(frozen=True)
class View:
    """One client's matrix (N, D) for AJIVE, as ``left @ right`` where it is of low rank."""

    left: Tensor
    """Matrix (N, Q)."""
    right: Tensor | None = None
    """Matrix (Q, D) with orthonormal rows; None: the matrix is ``left`` itself. AJIVE can work on the columns of
    ``left`` instead of those of the matrix: centring, left singular vectors and singular values are the same."""

    @staticmethod
    def from_matrix(matrix: Tensor | LowRank) -> View:
        """Create a view in float64 from a matrix, or from any pair of factors (whose right one is orthonormalized)."""
        if isinstance(matrix, Tensor):
            return View(matrix.double())
        pair = matrix.to(torch.float64).fold_scale()
        Q, R = torch.linalg.qr(pair.A.T)
        return View(pair.B @ R.T, Q.T)

    @property
    def columns(self) -> int:
        """Number of columns D."""
        return self.left.shape[1] if self.right is None else self.right.shape[1]

    def compute_mean(self) -> Tensor:
        """Compute the column means in the coordinates of ``left``, (1, Q)."""
        return self.left.mean(0, keepdim=True)


@dataclass(frozen=True)
class Ajive:
    """The joint component of the views, and what the individual ones follow from."""

    basis: Tensor
    """Orthonormal basis U (N, joint rank) of the joint column space, signs fixed, float64."""
    thresholds: tuple[float, ...]
    """Threshold tau of every view: the mean of its last retained and first dropped singular value."""
    views: tuple[View, ...]
    """The (uncentered) views."""
    means: tuple[Tensor, ...]
    """Subtracted column means, in the views' coordinates."""

    def compute_joint(self, number: int) -> Tensor:
        """Compute J_i = U U^T (X_i - mean), in the coordinates of the view's ``left``."""
        centered = self.views[number].left - self.means[number]
        return self.basis @ (self.basis.T @ centered)


def compute_ajive(
    matrices: Sequence[Tensor | LowRank],
    joint_rank: int | None,
    view_rank: int | Sequence[int] | None = None,
    *,
    center: bool = True,
    identifiable: bool = False,
    samples: int = 1000,
    rng: torch.Generator | None = None,
) -> Ajive:
    """Compute angle-based joint and individual variation explained (AJIVE).

    Feng et al., J. Multivariate Analysis 2018. Every view is column-centered and replaced by its top left singular
    vectors; the joint basis is the top of the SVD of their concatenation. In float64. Views of low rank are given as
    factors; nothing of size N x D is formed, and the result is that of the dense matrices.

    Args:
        matrices: K views (N, D_k), dense or as factors.
        joint_rank: Columns of the basis; None: as many as have a squared singular value above both bounds, the 5th
            percentile of Wedin's (directions drawn outside the views' spaces) and the 95th of that of random spaces.
        view_rank: Singular vectors retained of each view; by default all but null directions. For a ``joint_rank`` of
            None it must be below the views' ranks: a view without a remainder has a Wedin bound of 0 (no noise), and
            only identical spaces pass.
        center: Whether to subtract column means.
        identifiable: Whether to drop directions along which some view varies by less than its threshold.
        samples: Number of draws for each bound.
        rng: Generator of those draws; None: one of seed 0.
    """
    views = tuple(View.from_matrix(matrix) for matrix in matrices)
    means = tuple(view.compute_mean() if center else torch.zeros_like(view.compute_mean()) for view in views)
    ranks = [view_rank] * len(views) if view_rank is None or isinstance(view_rank, int) else list(view_rank)
    spaces = [_build_space(view.left - mean, rank) for view, mean, rank in zip(views, means, ranks, strict=True)]
    U, S, Vt = torch.linalg.svd(torch.cat([space.U for space in spaces], 1), full_matrices=False)
    U = fix_signs(U, Vt)[0]
    if joint_rank is None:
        rng = torch.Generator().manual_seed(0) if rng is None else rng
        cutoff = max(
            _compute_wedin_bound(views, means, spaces, samples, rng), _compute_random_bound(spaces, samples, rng)
        )
        joint_rank = int((S.square() > cutoff).sum())
    basis = U[:, :joint_rank]
    thresholds = tuple(space.threshold for space in spaces)
    if identifiable:
        retained = torch.ones(basis.shape[1], dtype=torch.bool)
        for view, mean, threshold in zip(views, means, thresholds, strict=True):
            retained &= ((view.left - mean).T @ basis).norm(dim=0) >= threshold
        basis = basis[:, retained]
    return Ajive(basis, thresholds, views, means)


@dataclass(frozen=True)
class _Space:
    """The retained singular triples of a centered view, in the coordinates of its ``left``, and its threshold."""

    U: Tensor
    S: Tensor
    V: Tensor
    threshold: float


def _build_space(left: Tensor, rank: int | None) -> _Space:
    U, S, Vt = torch.linalg.svd(left, full_matrices=False)
    tiny = S[:1] * max(left.shape) * torch.finfo(S.dtype).eps
    present = int((tiny < S).sum())  # null directions are arbitrary
    retained = present if rank is None else min(rank, present)
    following = float(S[retained]) if retained < S.numel() else 0.0
    threshold = (float(S[retained - 1]) + following) / 2 if retained else 0.0
    return _Space(U[:, :retained], S[:retained], Vt[:retained].T, threshold)


def _draw_orthogonal(space: Tensor, size: int, count: int, rng: torch.Generator) -> Tensor:
    """Draw ``count`` random directions (size, count) orthogonal to a space (size, R), fewer where there are fewer."""
    normals = torch.randn((size, min(count, size - space.shape[1])), generator=rng, dtype=torch.float64)
    return torch.linalg.qr(normals - space @ (space.T @ normals))[0]


def _compute_largest_singular_value(matrix: Tensor) -> float:
    """Compute the largest singular value; 0 for an empty matrix."""
    return float(torch.linalg.matrix_norm(matrix, 2)) if matrix.numel() else 0.0


def _compute_wedin_bound(
    views: Sequence[View], means: Sequence[Tensor], spaces: Sequence[_Space], samples: int, rng: torch.Generator
) -> float:
    lost = torch.zeros(samples, dtype=torch.float64)
    for view, mean, space in zip(views, means, spaces, strict=True):
        centered, rank = view.left - mean, space.S.numel()
        if not rank:
            lost += 1
            continue
        V = space.V if view.right is None else view.right.T @ space.V
        for number in range(samples):
            left = centered.T @ _draw_orthogonal(space.U, len(centered), rank, rng)
            directions = _draw_orthogonal(V, view.columns, rank, rng)
            right = centered @ (directions if view.right is None else view.right @ directions)
            noise = max(_compute_largest_singular_value(left), _compute_largest_singular_value(right))
            lost[number] += min(1.0, noise / float(space.S[-1])) ** 2
    return float(torch.quantile(len(views) - lost, 0.05))


def _compute_random_bound(spaces: Sequence[_Space], samples: int, rng: torch.Generator) -> float:
    largest = torch.empty(samples, dtype=torch.float64)
    for number in range(samples):
        normals = [torch.randn(space.U.shape, generator=rng, dtype=torch.float64) for space in spaces]
        concatenated = torch.cat([torch.linalg.qr(normal)[0] for normal in normals], 1)
        largest[number] = _compute_largest_singular_value(concatenated) ** 2
    return float(torch.quantile(largest, 0.95))
