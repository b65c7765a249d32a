"""The stable rank of a loss's Hessian, from products with vectors alone.

The stable rank of H is ||H||_F^2 / ||H||_2^2: how many directions share the curvature (FedLoRU, arXiv:2409.12371,
section 3.1, has it larger for fewer examples). Here ||H||_F^2 = tr(H^2) is Hutchinson's mean of ||H v||^2 over random
signs v, and ||H||_2 the largest magnitude that Lanczos finds with full reorthogonalisation, never too large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Curvature", "curvature", "largest_magnitude", "products"]

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Curvature:
    """What was estimated of a symmetric matrix.

    Args:
        frobenius: its Frobenius norm.
        error: standard error of ``frobenius ** 2``, of Hutchinson's draws.
        spectral: its largest eigenvalue's magnitude, from below.
    """

    frobenius: float
    error: float
    spectral: float

    @property
    def stable_rank(self) -> float:
        """||H||_F^2 / ||H||_2^2; NaN for 0."""
        return math.nan if self.spectral == 0 else (self.frobenius / self.spectral) ** 2


def products(loss: Tensor, parameters: Sequence[Tensor]) -> tuple[Product, int]:
    """Products of a loss's Hessian with vectors.

    Args:
        loss: a scalar whose graph is there; it is kept as long as the function is.
        parameters: with respect to which, all of them part of the graph.

    Returns:
        A function of a vector (P,), over all parameters in order, and P.
    """
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    sizes = [parameter.numel() for parameter in parameters]

    def product(vector: Tensor) -> Tensor:
        parts = [part.view_as(one) for part, one in zip(vector.split(sizes), parameters, strict=True)]
        found = torch.autograd.grad(gradients, parameters, parts, retain_graph=True)
        return torch.cat([one.reshape(-1) for one in found])

    return product, sum(sizes)


def curvature(
    product: Product, size: int, draw: torch.Generator, *, probes: int = 16, iterations: int = 16
) -> Curvature:
    """Norms of a symmetric matrix.

    Args:
        product: with it.
        size: rows.
        draw: of the random vectors.
        probes: Hutchinson's, at least 2.
        iterations: Lanczos'.
    """
    squares = torch.stack([(product(_signs(size, draw)) ** 2).sum() for _ in range(probes)]).double()
    error = float(squares.std() / math.sqrt(probes))
    spectral = largest_magnitude(product, torch.randn(size, generator=draw), iterations)
    return Curvature(math.sqrt(float(squares.mean())), error, spectral)


def largest_magnitude(product: Product, start: Tensor, iterations: int) -> float:
    """Of a symmetric matrix' eigenvalues, by Lanczos, never more than it is.

    Args:
        product: with the matrix.
        start: a vector (P,), random.
        iterations: at most; products to take.
    """
    basis = [start / start.norm()]
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(min(iterations, len(start))):
        following = product(basis[-1])
        diagonal.append(float(following @ basis[-1]))
        for _ in range(2):  # twice is enough
            for one in basis:
                following = following - (following @ one) * one
        length = float(following.norm())
        beside.append(length)
        if length <= 1e-6 * max(map(abs, diagonal)):
            break
        basis.append(following / length)
    off = torch.tensor(beside[: len(diagonal) - 1], dtype=torch.float64)
    small = torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(off, 1) + torch.diag(off, -1)
    return float(torch.linalg.eigvalsh(small).abs().max())


def _signs(size: int, draw: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (size,), generator=draw).mul_(2).sub_(1).to(torch.get_default_dtype())
