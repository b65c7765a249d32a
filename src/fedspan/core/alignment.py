"""Aligning subspaces and factors across clients: Procrustes rotations and AJIVE's joint component.

Shapes: N rows, D columns of a view, R rank, K views.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedspan.core.lowrank import fix_signs

__all__ = ["ajive_joint_basis", "gram_factor", "procrustes"]


def procrustes(source_RI: Tensor, target_RI: Tensor) -> Tensor:
    """Orthogonal Procrustes: the S with orthonormal rows that maximises ``<S source, target>``.

    For ``source`` (R', I), ``target`` (R, I), R <= R', and ``target source^T = U Sigma V^T``: S = U V^T, (R, R').
    For R = R' that also minimises ``||S source - target||_F``; for R < R' it need not (FLoRG's ``paper`` variant).
    """
    U, _, Vt = torch.linalg.svd(target_RI @ source_RI.T, full_matrices=False)
    return U @ Vt


def gram_factor(stack_QK: Tensor) -> Tensor:
    """Lambda^(1/2) P (R', K) with ``stack^T stack = P^T Lambda P``, eigenvalues descending, without forming that.

    From the SVD of the stack, which keeps the digits that squaring would lose; in float64, signs fixed. R' is the
    rank of the stack, and at least 1.
    """
    U, S, Vt = torch.linalg.svd(stack_QK.double(), full_matrices=False)
    V_KR = fix_signs(Vt.T, U.T)[0]
    present = int((S[:1] * max(stack_QK.shape) * torch.finfo(S.dtype).eps < S).sum())
    return (S[:, None] * V_KR.T)[: max(1, present)]


def ajive_joint_basis(views: Sequence[Tensor], joint_rank: int, view_rank: int | None = None) -> Tensor:
    """AJIVE with a given joint rank: an orthonormal basis of the column space that the views share.

    Feng et al., "Angle-based joint and individual variation explained", J. Multivariate Analysis 2018. Each view is
    column-centred and replaced by its top left singular vectors; the joint basis is the top of the SVD of their
    concatenation. View i's joint component is ``U U^T X_i``. Computed in float64.

    Args:
        views: K matrices (N, D_k).
        joint_rank: columns of the result.
        view_rank: singular vectors kept of each view; all (min(N, D_k)) by default.

    Returns:
        U (N, joint_rank), signs fixed, in float64.
    """
    bases: list[Tensor] = []
    for view in views:
        centred = view.double() - view.double().mean(0, keepdim=True)
        U, S, _ = torch.linalg.svd(centred, full_matrices=False)
        tiny = S[:1] * max(centred.shape) * torch.finfo(S.dtype).eps
        present = tiny < S  # null directions are arbitrary ones
        bases.append(U[:, present][:, :view_rank])
    U, _, Vt = torch.linalg.svd(torch.cat(bases, 1), full_matrices=False)
    return fix_signs(U, Vt)[0][:, :joint_rank]
