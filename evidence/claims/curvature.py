"""The stable rank of a loss's Hessian, from products with vectors alone.

The stable rank of H, ||H||_F^2 / ||H||_2^2, measures how many directions share the curvature; it is larger for fewer
examples according to FedLoRU (arXiv:2409.12371, section 3.1). Here ||H||_F^2 = tr(H^2) is Hutchinson's mean of
||H v||^2 over random signs v, and ||H||_2 is the largest magnitude that Lanczos with full reorthogonalisation finds,
which is never too large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Curvature", "estimate_largest_magnitude", "estimate_norms", "make_hessian_product"]

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Curvature:
    """Estimated norms of a symmetric matrix.

    Args:
        frobenius: Frobenius norm.
        error: Standard error of ``frobenius ** 2`` over Hutchinson's draws.
        spectral: Magnitude of the largest eigenvalue, estimated from below.
    """

    frobenius: float
    error: float
    spectral: float

    @property
    def stable_rank(self) -> float:
        """||H||_F^2 / ||H||_2^2; NaN for 0."""
        return math.nan if self.spectral == 0 else (self.frobenius / self.spectral) ** 2


def make_hessian_product(loss: Tensor, parameters: Sequence[Tensor]) -> tuple[Product, int]:
    """Return a function that multiplies a loss's Hessian by a vector.

    Args:
        loss: Scalar loss with its graph, which stays alive as long as the function.
        parameters: Parameters of the derivatives, all of them part of the graph.

    Returns:
        A function of a vector (P,), over all parameters in order, and P.
    """
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    sizes = [parameter.numel() for parameter in parameters]

    def product(vector: Tensor) -> Tensor:
        parts = [part.view_as(one) for part, one in zip(vector.split(sizes), parameters, strict=True)]
        products = torch.autograd.grad(gradients, parameters, parts, retain_graph=True)
        return torch.cat([one.reshape(-1) for one in products])

    return product, sum(sizes)


def estimate_norms(
    product: Product, size: int, draw: torch.Generator, *, probes: int = 16, iterations: int = 16
) -> Curvature:
    """Estimate the norms of a symmetric matrix.

    Args:
        product: Product of the matrix with a vector.
        size: Number of rows.
        draw: Generator of the random vectors.
        probes: Number of Hutchinson's random vectors, at least 2.
        iterations: Largest number of Lanczos iterations.
    """
    squares = torch.stack([(product(_draw_signs(size, draw)) ** 2).sum() for _ in range(probes)]).double()
    error = float(squares.std() / math.sqrt(probes))
    spectral = estimate_largest_magnitude(product, torch.randn(size, generator=draw), iterations)
    return Curvature(math.sqrt(float(squares.mean())), error, spectral)


def estimate_largest_magnitude(product: Product, start: Tensor, iterations: int) -> float:
    """Estimate the largest magnitude of a symmetric matrix's eigenvalues by Lanczos, never too large.

    Args:
        product: Product of the matrix with a vector.
        start: Random start vector, (P,).
        iterations: Largest number of products.
    """
    basis = [start / start.norm()]
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(min(iterations, len(start))):
        following = product(basis[-1])
        diagonal.append(float(following @ basis[-1]))
        for _ in range(2):  # two reorthogonalisations are enough
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


def _draw_signs(size: int, draw: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (size,), generator=draw).mul_(2).sub_(1).to(torch.get_default_dtype())
