"""One second moment of Adam out of those of several clients that optimize in low-rank subspaces (FedGaLore's server).

Peng et al., "Rethinking LoRA for Data Heterogeneous Federated Learning: Subspace and State Alignment",
arXiv:2602.01746; AJIVE is ``alignment.compute_ajive``. For the second moments v_i of a layer and the shares p_i:

    ajive:        vbar = sum_i p_i (J_i + column means of v_i),  J_i of AJIVE({v_i}) with a joint rank
    average:      vbar = sum_i p_i v_i
    average-svd:  the nearest matrix of the joint rank to that

Shapes, in the orientation in which projectors are on the right: M rows and N columns of the weight, M >= N, R rank of
the moments, so v_i is (M, R) and P_i (R, N), with orthonormal rows; K clients. In float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedspan.core.alignment import Ajive, compute_ajive
from fedspan.core.lowrank import LowRank, concatenate, fix_signs, svd
from fedspan.core.projectors import reproject

_SAMPLES = 200


@dataclass(frozen=True, kw_only=True)
class MomentSynchronizer:
    """Joins the clients' second moments of a layer."""

    rule: Literal["ajive", "average", "average-svd"]
    """The rule by which they are joined: ajive, average or average-svd."""
    joint_rank: int
    """Joint rank of ajive and average-svd; R at most."""
    estimate_joint_rank: bool
    """Whether AJIVE's two bounds determine its joint rank instead."""
    view_rank: int
    """Number of directions that AJIVE retains per client."""
    identifiable: bool
    """Whether AJIVE drops directions along which some client varies too little."""

    def join(self, moments: Sequence[Tensor], weights: Sequence[float], rng: torch.Generator) -> Tensor:
        """Join moments that have the same coordinates.

        Args:
            moments: K moments (M, R).
            weights: The clients' shares.
            rng: Generator of the draws from which AJIVE estimates a joint rank.

        Returns:
            vbar (M, R), not negative, in the same coordinates.
        """
        rank = moments[0].shape[1]
        if self.rule == "ajive":
            moments = _compute_joint_parts(self._decompose(moments, rank, rng))
        v = torch.stack([weight * part for weight, part in zip(weights, moments, strict=True)]).sum(0)
        return self._truncate(v, rank).clamp_min(0.0)

    def join_projected(
        self,
        moments: Sequence[Tensor],
        projectors: Sequence[Tensor],
        weights: Sequence[float],
        rng: torch.Generator,
        *,
        linear: bool,
    ) -> tuple[Tensor, Tensor]:
        """Join moments of which each has the coordinates of its client's own projector.

        Args:
            moments: K moments (M, R).
            projectors: K projectors (R, N).
            weights: The clients' shares.
            rng: Generator of the draws from which AJIVE estimates a joint rank.
            linear: Whether moments change coordinates as vectors do, otherwise by the squared entries of the change.

        Returns:
            vbar (M, R) and the projector (R, N) whose coordinates it has. If ``linear``, vbar may have negative
            entries: they are clamped after a client has transformed it to its own coordinates.
        """
        rank = moments[0].shape[1]
        pairs = [LowRank(v, P) for v, P in zip(moments, projectors, strict=True)]
        if self.rule == "ajive":
            decomposition = self._decompose(pairs, rank, rng)
            bases = [view.right for view in decomposition.views if view.right is not None]
            pairs = [LowRank(v, basis) for v, basis in zip(_compute_joint_parts(decomposition), bases, strict=True)]
        if linear:
            stacked = concatenate(
                [LowRank(pair.B, pair.A, weight) for pair, weight in zip(pairs, weights, strict=True)]
            )
            U, S, P_RN = svd(stacked, rank)
            return self._truncate(U * S, rank), P_RN
        P_RN = compute_covering_projector(projectors, weights)
        v = torch.zeros_like(moments[0])
        for pair, P, weight in zip(pairs, projectors, weights, strict=True):
            moment = (pair.B @ (pair.A @ P.T)).clamp_min(0.0)
            v += weight * reproject(moment, P, P_RN, "right", "squared", second=True)
        return self._truncate(v, rank).clamp_min(0.0), P_RN

    def _decompose(self, views: Sequence[Tensor | LowRank], rank: int, rng: torch.Generator) -> Ajive:
        """Decompose the clients' moments (M, R), or their dense ones (M, N) as factors."""
        joint = None if self.estimate_joint_rank else min(self.joint_rank, rank)
        return compute_ajive(views, joint, self.view_rank, identifiable=self.identifiable, samples=_SAMPLES, rng=rng)

    def _truncate(self, v: Tensor, rank: int) -> Tensor:
        """Compute the nearest matrix of the joint rank, for ``average-svd``."""
        if self.rule != "average-svd":
            return v
        joint = min(self.joint_rank, rank)
        U, S, Vt = torch.linalg.svd(v, full_matrices=False)
        return (U[:, :joint] * S[:joint]) @ Vt[:joint]


def _compute_joint_parts(decomposition: Ajive) -> list[Tensor]:
    """Compute J_i and the column means of every view, (M, R), in the coordinates of the view's ``left``."""
    return [decomposition.compute_joint(number) + mean for number, mean in enumerate(decomposition.means)]


def compute_covering_projector(projectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Compute the R directions (R, N) that K projectors (R, N) cover best on average."""
    stack = torch.cat([weight**0.5 * P.T for weight, P in zip(weights, projectors, strict=True)], 1)
    U, _, _ = torch.linalg.svd(stack, full_matrices=False)  # three times faster than that of the wide transpose
    U = U[:, : len(projectors[0])]
    return fix_signs(U, U.T)[0].T
