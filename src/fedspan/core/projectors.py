"""Projectors of gradients onto r directions (GaLore, FedGaLore), and how moments follow a change of projector.

Shapes: O output features, I input features, R rank. A right projector P (R, I) has orthonormal rows, ``g P^T`` is
(O, R); a left one P (O, R) has orthonormal columns, ``P^T g`` is (R, I).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedspan.core.lowrank import fix_signs
from fedspan.core.tensors import generator

__all__ = ["random_projector", "reproject", "seeded_projector", "side_of", "svd_projector"]


def side_of(shape: tuple[int, int]) -> str:
    """GaLore's ``std`` rule: project the shorter side; square counts as tall, so ``right``."""
    return "right" if shape[0] >= shape[1] else "left"


def svd_projector(gradient_OI: Tensor, rank: int, side: str) -> Tensor:
    """The top singular directions of a gradient: (R, I) for ``right``, (O, R) for ``left``; float32."""
    U, _, Vt = torch.linalg.svd(gradient_OI.float(), full_matrices=False)
    U, Vt = fix_signs(U[:, :rank], Vt[:rank])
    return (Vt if side == "right" else U).contiguous()


def random_projector(shape: tuple[int, int], rank: int, side: str, rng: torch.Generator) -> Tensor:
    """A uniformly random orthonormal projector from a CPU generator (QR in float64, signs fixed); float32."""
    size = shape[1] if side == "right" else shape[0]
    Q, R = torch.linalg.qr(torch.randn((size, rank), generator=rng, dtype=torch.float64))
    Q = (Q * torch.sign(torch.diagonal(R))).float()
    return (Q.T if side == "right" else Q).contiguous()


def seeded_projector(layer: str, shape: tuple[int, int], rank: int, side: str, seed: int) -> Tensor:
    """The projector that stands for an integer seed: what a server rebuilds and a client never sends."""
    return random_projector(shape, rank, side, generator(seed, "projector", layer))


def reproject(moment: Tensor, old: Tensor, new: Tensor, side: str, rule: str, second: bool) -> Tensor:
    """A moment of the accumulator, carried from the old projector's coordinates to the new one's.

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
    moved = moment @ T_RR if side == "right" else T_RR.T @ moment
    return moved.clamp_min(0.0) if second else moved
