"""Comparison of the clients' updates of one layer, by their inner products and singular vectors.

Notation: client i's update of a layer in a round is D_i (O, I), its weight in the average w_i (the weights sum to 1),
the mean update D = sum_i w_i D_i, and the server's aggregate G. Low-rank updates remain factors: they are compared by
inner products and thin SVDs, never as an O x I matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from fedspan.core.base import Delta, to_dense
from fedspan.core.lowrank import LowRank, compute_inner_product, concatenate, svd


@dataclass(frozen=True)
class UpdateComparison:
    """Measures of one layer's updates in a round."""

    aggregation_error: float
    """||G - D|| / ||D||: the error of factor averaging relative to averaging the products (RoLoRA, arXiv:2502.01755,
    section 3.2: interference); 0 for an exact method. NaN where there is no global model."""
    drift: float
    """The relative spread sqrt(sum_i w_i ||D_i - D||^2) / ||D|| of the clients' updates around their mean."""
    alignment: float
    """Mean over clients of cos(D_i, G), or of cos(D_i, D) where there is no global model (FedLoRU, arXiv:2409.12371,
    figure 8)."""
    agreement: float
    """Mean over pairs of clients of cos(D_i, D_j); NaN for one client."""
    angle_out: float
    """Mean principal angle between two clients' column spaces, in degrees; NaN for one client."""
    angle_in: float
    """Mean principal angle between two clients' row spaces, in degrees; NaN for one client."""
    products: Mapping[str, tuple[float, float, float]]
    """<D_i, G>, ||D_i||^2 and ||G||^2 by client, from which the alignment of several layers is computed."""


@dataclass(frozen=True)
class Shape:
    """Norm, stable rank and effective rank of an update; the ranks measure how many directions it has."""

    norm: float
    stable_rank: float
    """||D||_F^2 / ||D||_2^2 (Rudelson and Vershynin, 2007)."""
    effective_rank: float
    """Exponential of the entropy of the singular values' shares (Roy and Vetterli, 2007)."""


def combine_deltas(parts: Sequence[tuple[float, Delta]], shape: tuple[int, int]) -> Delta:
    """Return a linear combination of updates, as factors if all of them are factors.

    Args:
        shape: (O, I), for an empty combination.
    """
    pairs = [LowRank(part.B, part.A, factor * part.scale) for factor, part in parts if isinstance(part, LowRank)]
    if not parts:
        return torch.zeros(shape)
    if len(pairs) == len(parts):
        return concatenate(pairs)
    return sum((factor * to_dense(part).double() for factor, part in parts), torch.zeros(shape, dtype=torch.float64))


def compute_form_inner_product(left: Delta, right: Delta) -> float:
    """Return <left, right>, in float64."""
    if isinstance(left, LowRank) and isinstance(right, LowRank):
        return float(compute_inner_product(left, right))
    pair, dense = (left, right) if isinstance(left, LowRank) else (right, left)
    matrix = to_dense(dense).double()
    if isinstance(pair, LowRank):  # <B A, M> = <B, M A^T>
        return float((pair.B.double() * (matrix @ pair.A.double().T)).sum() * pair.scale)
    return float((matrix * pair.double()).sum())


def compare_updates(
    updates: Mapping[str, Delta], weights: Mapping[str, float], global_update: Delta | None
) -> UpdateComparison:
    """Compare the clients' updates of one layer.

    Args:
        updates: D_i by client.
        weights: Weights w_i by client, with any positive sum.
        global_update: G; None where the clients have personal models.
    """
    ids = sorted(updates)
    if not ids:
        raise ValueError("updates of no client")
    w = torch.tensor([weights[id] for id in ids], dtype=torch.float64)
    w = w / w.sum()
    products = [[compute_form_inner_product(updates[left], updates[right]) for right in ids] for left in ids]
    gram = torch.tensor(products, dtype=torch.float64)
    mean2 = float(w @ gram @ w)
    with_mean, norms = gram @ w, gram.diagonal().clamp(min=0).sqrt()
    spread2 = float((w * (gram.diagonal() - 2 * with_mean + mean2)).sum())
    error, target, target2 = math.nan, with_mean, mean2
    if global_update is not None:
        shape = get_shape(global_update)
        gap = combine_deltas(
            [(1.0, global_update), *((-float(left), updates[id]) for left, id in zip(w, ids, strict=True))], shape
        )
        # not ||G||^2 - 2 <G, D> + ||D||^2, which cancels numerically where the two are nearly equal
        error = _divide(float(compute_singular_values(gap).norm()), math.sqrt(max(mean2, 0)))
        target = torch.tensor(
            [compute_form_inner_product(updates[id], global_update) for id in ids], dtype=torch.float64
        )
        target2 = compute_form_inner_product(global_update, global_update)
    pairs = list(combinations(range(len(ids)), 2))
    cosines = [_divide(float(gram[i, j]), float(norms[i] * norms[j])) for i, j in pairs]
    frames = [_compute_bases(updates[id]) for id in ids] if pairs else []
    return UpdateComparison(
        aggregation_error=error,
        drift=_divide(math.sqrt(max(spread2, 0)), math.sqrt(max(mean2, 0))),
        alignment=_compute_mean(
            [_divide(float(target[i]), float(norms[i]) * math.sqrt(target2)) for i in range(len(ids))]
        ),
        agreement=_compute_mean(cosines),
        angle_out=_compute_mean([float(compute_principal_angles(frames[i][0], frames[j][0]).mean()) for i, j in pairs]),
        angle_in=_compute_mean([float(compute_principal_angles(frames[i][1], frames[j][1]).mean()) for i, j in pairs]),
        products={id: (float(target[i]), float(gram[i, i]), target2) for i, id in enumerate(ids)},
    )


def compute_alignment(layers: Sequence[Mapping[str, tuple[float, float, float]]]) -> float:
    """Return the alignment of all layers as one vector, from their updates' ``products``; NaN without a layer."""
    cosines: list[float] = []
    for id in layers[0] if layers else ():
        dot, squared_norm, global_squared_norm = (sum(layer[id][part] for layer in layers) for part in range(3))
        cosines.append(_divide(dot, math.sqrt(squared_norm * global_squared_norm)))
    return _compute_mean(cosines)


def get_shape(delta: Delta) -> tuple[int, int]:
    """Return the shape (O, I) of an update in either form."""
    return delta.shape if isinstance(delta, LowRank) else (delta.shape[0], delta.shape[1])


def compute_singular_values(delta: Delta) -> Tensor:
    """Return the singular values in descending order, in float64."""
    if isinstance(delta, LowRank):
        return svd(delta)[1]
    return torch.linalg.svdvals(delta.double())


def measure_shape(delta: Delta) -> Shape:
    """Return the norm, stable rank and effective rank of an update; the ranks of a zero update are NaN."""
    values = compute_singular_values(delta)
    norm = float(values.norm())
    if norm == 0:
        return Shape(0.0, math.nan, math.nan)
    shares = values / values.sum()
    entropy = -float(torch.special.xlogy(shares, shares).sum())
    return Shape(norm, (norm / float(values[0])) ** 2, math.exp(entropy))


def compute_principal_angles(left: Tensor, right: Tensor) -> Tensor:
    """Return the angles between two subspaces, ascending, in degrees (Bjorck and Golub, 1973).

    Args:
        left: Orthonormal columns, (O, R).
        right: Orthonormal columns, (O, Q).

    Returns:
        The angles, (min(R, Q),); cosines above 1 due to rounding count as 1.
    """
    return torch.rad2deg(torch.linalg.svdvals(left.T @ right).clamp(max=1.0).arccos())


def measure_moment_mismatch(moments: Mapping[str, Tensor], weights: Mapping[str, float]) -> float:
    """Return sqrt(sum_i w_i ||v_i - v||^2) / ||v|| of the clients' second moments v_i, v their mean; NaN for zero.

    It measures the error of one shared optimizer state for all clients (FedGaLore, arXiv:2602.01746).
    """
    total = sum(weights[id] for id in moments)
    mean = sum((weights[id] / total * value.double() for id, value in moments.items()), torch.zeros(()).double())
    spread2 = sum(weights[id] / total * float((value.double() - mean).norm()) ** 2 for id, value in moments.items())
    return _divide(math.sqrt(spread2), float(mean.norm()))


def _compute_bases(delta: Delta) -> tuple[Tensor, Tensor]:
    """Return orthonormal bases of an update's column space (O, k) and row space (I, k), without rounding noise."""
    if isinstance(delta, LowRank):
        U, S, Vt = svd(delta)
    else:
        U, S, Vt = torch.linalg.svd(delta.double(), full_matrices=False)
    retained = 1e-6 * S[0] < S
    return U[:, retained], Vt[retained].T


def _divide(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else math.nan


def _compute_mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
