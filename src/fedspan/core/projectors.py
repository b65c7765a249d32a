"""Projectors of gradients onto r directions (GaLore, FedGaLore), and how moments follow a change of projector.

The gradient of a whole weight is ``G = dY^T X``, stored as that pair of factors (``LowRank``, rank N = tokens) as long
as computing with them is cheaper than forming G. Shapes: O output features, I input features, R rank, N tokens. A right
projector P (R, I) has orthonormal rows, ``g P^T`` is (O, R); a left one P (O, R) has orthonormal columns, ``P^T g`` is
(R, I).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedspan.core.lowrank import LowRank, fix_signs, svd
from fedspan.core.tensors import create_generator

_OVERSAMPLING = 8
_POWER_STEPS = 2


def choose_side(shape: tuple[int, int]) -> str:
    """Apply GaLore's ``std`` rule: project the shorter side; square counts as tall, so ``right``."""
    return "right" if shape[0] >= shape[1] else "left"


def compute_svd_projector(gradient: LowRank, rank: int, side: str) -> Tensor:
    """Compute the top singular directions of a gradient: (R, I) for ``right``, (O, R) for ``left``; float32.

    The SVD is that of the factors where their rank is at most half the gradient's shorter side (``lowrank.svd``), else
    that of the gradient itself in float32.
    """
    if rank <= gradient.rank <= min(gradient.shape) // 2:
        U, _, Vt = svd(gradient, rank)
    else:
        U, _, Vt = torch.linalg.svd(gradient.to(torch.float32).to_dense(), full_matrices=False)
        U, Vt = fix_signs(U[:, :rank], Vt[:rank])
    return (Vt if side == "right" else U).float().contiguous()


def compute_sketched_projector(gradient: LowRank, rank: int, side: str, rng: torch.Generator) -> Tensor:
    """Approximate ``compute_svd_projector`` by a randomized SVD (Halko, Martinsson, Tropp, SIAM Review 2011).

    8 extra columns and 2 power steps: 6 products of the gradient with R + 8 columns, through its factors (N (O + I) a
    column) or after forming it once (N O I, then O I a column), whichever needs fewer operations.
    """
    rows, columns = gradient.shape
    width, products = min(rank + _OVERSAMPLING, rows, columns), 2 * _POWER_STEPS + 2
    through = products * width * gradient.rank * (rows + columns)
    formed = gradient.rank * rows * columns + products * width * rows * columns
    tall = gradient if side == "left" else LowRank(gradient.A.T, gradient.B.T)
    factors = (tall.B, tall.A) if through <= formed else (tall.to_dense(),)

    def times(x: Tensor) -> Tensor:
        for factor in reversed(factors):
            x = factor @ x
        return x

    def times_transposed(x: Tensor) -> Tensor:
        for factor in factors:
            x = factor.T @ x
        return x

    start = torch.randn((tall.shape[1], width), generator=rng).to(tall.A)
    Q = torch.linalg.qr(times(start))[0]
    for _ in range(_POWER_STEPS):
        Q = torch.linalg.qr(times(torch.linalg.qr(times_transposed(Q))[0]))[0]
    u, _, vt = torch.linalg.svd(times_transposed(Q).T, full_matrices=False)
    P = fix_signs((Q @ u)[:, :rank], vt[:rank])[0].float()
    return (P.T if side == "right" else P).contiguous()


def draw_random_projector(shape: tuple[int, int], rank: int, side: str, rng: torch.Generator) -> Tensor:
    """Draw a uniformly random orthonormal projector from a CPU generator (QR in float64, signs fixed); float32."""
    size = shape[1] if side == "right" else shape[0]
    Q, R = torch.linalg.qr(torch.randn((size, rank), generator=rng, dtype=torch.float64))
    Q = (Q * torch.sign(torch.diagonal(R))).float()
    return (Q.T if side == "right" else Q).contiguous()


def draw_projector(layer: str, shape: tuple[int, int], rank: int, side: str, seed: int) -> Tensor:
    """Draw the projector of an integer seed: the server regenerates it, so a client never sends it."""
    return draw_random_projector(shape, rank, side, create_generator(seed, "projector", layer))


def reproject(moment: Tensor, old: Tensor, new: Tensor, side: str, rule: str, second: bool) -> Tensor:
    """Transform a moment of the accumulator from the old projector's coordinates to the new one's.

    ``keep`` leaves it (GaLore's code), ``reset`` zeroes it, ``linear`` multiplies by T = V_old V_new^T (FedGaLore's
    paper; the second moment is clamped at 0, since a linear map of a nonnegative buffer may be negative), ``squared``
    multiplies the second moment by T's squared entries, which keeps it nonnegative.
    """
    if rule == "keep":
        return moment
    if rule == "reset":
        return torch.zeros_like(moment)
    if rule not in ("linear", "squared"):
        raise ValueError(f"unknown rule {rule!r}: keep, reset, linear or squared")
    T_RR = old @ new.T if side == "right" else old.T @ new
    if second and rule == "squared":
        T_RR = T_RR.square()
    rotated = moment @ T_RR if side == "right" else T_RR.T @ moment
    return rotated.clamp_min(0.0) if second else rotated
