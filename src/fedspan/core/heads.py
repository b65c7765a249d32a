"""Output layers in closed form from pooled statistics of the features that enter them.

Legate et al., "Guiding The Last Layer in Federated Learning with Pre-Trained Models", NeurIPS 2023, arXiv:2306.03937
(FedNCM: class means). Statistics are averages over examples, so their mean over clients, weighted by examples, is
exactly that of all examples together, whatever the heterogeneity. Shapes: C outputs, D features; f is an example's
features, y its label or number, p_c the share of class c and n_c its examples.

Classes. One covariance within all classes, shrunk towards a multiple of the identity; weights along the discriminants
of LDA, all of one length in the metric of S:

    S = (1 - a) W + a tr(W) / D I,   W = E[f f^T] - sum_c p_c mu_c mu_c^T,   m = mean of the class means
    d_c = S^-1 (mu_c - m),   v_c^2 = d_c^T (mu_c - m)
    w_c = k d_c / v_c,   b_c = -w_c m + log p_c

``class-means`` is a = 1, where W enters by its trace alone. ``lda`` takes the shrinkage of Chen et al., "Shrinkage
algorithms for MMSE covariance estimation", IEEE Transactions on Signal Processing 2010 (OAS), which needs tr(W),
tr(W^2) and the number of examples. The scale k is 20 over the root mean square of |f - m| in the metric of S: outputs
are 20 times a cosine. It is at most LDA's own, the root mean square of v_c without the part that comes from estimating
the means,

    k <= (sum_c p_c max(0, v_c^2 - tr(S^-1 W) / n_c))^(1/2),

so that classes that the features do not separate start with outputs near log p_c.

Numbers (least squares), with the mean g and the covariance F of f:

    w = ((1 - a) F + a tr(F) / D I)^-1 (E[y f] - E[y] g),   b = E[y] - w g

Deviations: FedNCM normalizes the means and takes outputs as they are. Without the centre m all weights have a large
part in common, and without k fine-tuning starts from nearly equal probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "SCALE",
    "HeadKind",
    "HeadStatistics",
    "OutputWeights",
    "cosine_discriminant",
    "least_squares",
    "linear_discriminant",
    "oas_shrinkage",
    "solve_head",
    "statistics_shapes",
    "summarize",
]

HeadKind = Literal["class-means", "lda", "least-squares"]

SCALE = 20.0
"""Factor on the cosines that a head for classes starts with."""

_TINY = 1e-300


@dataclass(frozen=True)
class HeadStatistics:
    """Averages over examples of the features that enter an output layer, float64.

    Args:
        shares: Share of the examples of each class, (C,); of a regression, (1,), all of them.
        sums: Mean of f over all examples, counting only those of class c in row c, (C, D).
        square: Mean of |f|^2.
        products: Mean of f f^T, (D, D); None if the kind of start does not use it.
        targets: Of a regression, the mean of y f, (D,), followed by those of y and y^2, (D + 2,); else None.
    """

    shares: Tensor
    sums: Tensor
    square: Tensor
    products: Tensor | None = None
    targets: Tensor | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> HeadStatistics:
        """Build statistics from named tensors, where the products are the upper triangle."""
        doubles = {name: value.double() for name, value in tensors.items()}
        triangle = doubles.get("products")
        features = doubles["sums"].shape[1]
        products = None if triangle is None else _whole(triangle, features)
        return cls(doubles["shares"], doubles["sums"], doubles["square"], products, doubles.get("targets"))

    def rescaled(self, bound: float) -> HeadStatistics:
        """Return the statistics of features that were divided by ``bound``, for the features themselves (0: as is)."""
        if not bound:
            return self
        products = None if self.products is None else self.products * bound**2
        return HeadStatistics(self.shares, self.sums * bound, self.square * bound**2, products, self.targets)

    def normalized(self) -> HeadStatistics:
        """Return the averages over the counted examples alone, where clients left out examples of small classes."""
        total = self.shares.sum()
        return HeadStatistics(
            self.shares / total,
            self.sums / total,
            self.square / total,
            None if self.products is None else self.products / total,
            None if self.targets is None else self.targets / total,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the statistics as named float64 tensors, with the upper triangle of the products."""
        tensors = {"shares": self.shares, "sums": self.sums, "square": self.square.reshape(1)}
        if self.products is not None:
            rows, columns = torch.triu_indices(*self.products.shape)
            tensors["products"] = self.products[rows, columns]
        if self.targets is not None:
            tensors["targets"] = self.targets
        return tensors


@dataclass(frozen=True)
class OutputWeights:
    """Weights of an output layer.

    Args:
        weight: Weight, (C, D) float32.
        bias: Bias, (C,) float32.
    """

    weight: Tensor
    bias: Tensor


def statistics_shapes(kind: HeadKind, outputs: int, features: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the named tensors of ``HeadStatistics.tensors``.

    Args:
        kind: Kind of start.
        outputs: Number of outputs C.
        features: Number of features D.
    """
    shapes: dict[str, tuple[int, ...]] = {"shares": (outputs,), "sums": (outputs, features), "square": (1,)}
    if kind != "class-means":
        shapes["products"] = (features * (features + 1) // 2,)
    if kind == "least-squares":
        shapes["targets"] = (features + 2,)
    return shapes


def summarize(features: Tensor, answers: Tensor, outputs: int, kind: HeadKind) -> HeadStatistics:
    """Compute the statistics of some examples.

    Args:
        features: Features, (examples, D).
        answers: Labels, or numbers of a regression, (examples,).
        outputs: Number of outputs C.
        kind: Kind of start, which determines the statistics.
    """
    f, count = features.double(), len(features)
    rows = torch.zeros_like(answers, dtype=torch.int64) if kind == "least-squares" else answers.to(torch.int64)
    shares = torch.bincount(rows, minlength=outputs).double() / count
    sums = torch.zeros(outputs, f.shape[1], dtype=torch.float64).index_add_(0, rows, f) / count
    products = None if kind == "class-means" else f.T @ f / count
    targets = None
    if kind == "least-squares":
        y = answers.double()
        targets = torch.cat([y @ f / count, y.mean()[None], y.square().mean()[None]])
    return HeadStatistics(shares, sums, f.square().sum() / count, products, targets)


def solve_head(kind: HeadKind, statistics: HeadStatistics, examples: float, *, bias: bool = True) -> OutputWeights:
    """Compute an output layer.

    Args:
        kind: Kind of start.
        statistics: Pooled statistics.
        examples: Number of examples in them.
        bias: Whether the layer has a bias; without one, the weights' part along the mean of all features is adjusted so
            that the outputs at that mean are the same.
    """
    if kind == "least-squares":
        head = least_squares(statistics, examples)
    else:
        head = cosine_discriminant(statistics, examples, 1.0 if kind == "class-means" else None)
    if bias:
        return head
    g = _mean(statistics)
    projection = torch.outer(head.bias.double(), g) / g.square().sum().clamp(min=_TINY)
    return OutputWeights((head.weight.double() + projection).float(), torch.zeros_like(head.bias))


def cosine_discriminant(statistics: HeadStatistics, examples: float, shrinkage: float | None = None) -> OutputWeights:
    """Compute a head for classes, with weights along LDA's discriminants and of equal length.

    A class without examples has zero weights, and the bias of half an example.

    Args:
        statistics: Pooled statistics; with products if the shrinkage is not 1.
        examples: Number of examples in them.
        shrinkage: Shrinkage a of the covariance; None: ``oas_shrinkage``.
    """
    present, means = _class_means(statistics)
    m, free = means[present].mean(0), examples - int(present.sum())
    centred = torch.where(present[:, None], means - m, 0.0)
    trace = (statistics.square.squeeze() - (statistics.shares * means.square().sum(1)).sum()).clamp(min=0)
    spread = (statistics.square.squeeze() - 2 * _mean(statistics) @ m + m @ m).clamp(min=0)
    if shrinkage == 1.0 or free <= 0:
        variance = (trace if free > 0 and trace > 1e-9 * spread else spread).clamp(min=_TINY) / len(m)
        d, noise, rho = centred / variance, trace / variance, (spread / variance).sqrt()
    else:
        W = _within(statistics)
        S = _shrunk(W, oas_shrinkage(W, free) if shrinkage is None else shrinkage)
        d = torch.linalg.solve(S, centred.T).T
        about = W + (centred * statistics.shares[:, None]).T @ centred
        noise, both = (torch.linalg.solve(S, one).trace() for one in (W, about))
        rho = both.clamp(min=0).sqrt()
    v = (d * centred).sum(1).clamp(min=0).sqrt()
    counts = (statistics.shares * examples).clamp(min=1e-9)
    own = (statistics.shares * (v.square() - noise * examples / max(1.0, free) / counts).clamp(min=0)).sum().sqrt()
    k = torch.minimum(SCALE / rho.clamp(min=_TINY), own) if free > 0 else SCALE / rho.clamp(min=_TINY)
    weight = torch.where(v[:, None] > 1e-9, k * d / v[:, None].clamp(min=_TINY), 0.0)
    return _to_weights(weight, _log_shares(statistics, present, examples) - weight @ m)


def linear_discriminant(statistics: HeadStatistics, examples: float, shrinkage: float | None = None) -> OutputWeights:
    """Compute the head of linear discriminant analysis, whose outputs are log-probabilities up to a common constant.

    With few examples per feature it is far too sure of itself; ``cosine_discriminant`` has its directions.

    Args:
        statistics: Pooled statistics with products.
        examples: Number of examples in them.
        shrinkage: Shrinkage a of the covariance; None: ``oas_shrinkage``.
    """
    present, means = _class_means(statistics)
    W = _within(statistics)
    S = _shrunk(W, oas_shrinkage(W, examples - int(present.sum())) if shrinkage is None else shrinkage)
    weight = torch.linalg.solve(S, means.T).T
    return _to_weights(weight, _log_shares(statistics, present, examples) - (weight * means).sum(1) / 2)


def least_squares(statistics: HeadStatistics, examples: float, shrinkage: float | None = None) -> OutputWeights:
    """Compute the head that minimises the squared error, with its ridge relative to the features' variance.

    Args:
        statistics: Pooled statistics with products and targets.
        examples: Number of examples in them.
        shrinkage: Shrinkage a of the covariance; None: ``oas_shrinkage``.
    """
    assert statistics.products is not None
    assert statistics.targets is not None
    g, y = _mean(statistics), statistics.targets[-2]
    covariance = statistics.products - torch.outer(g, g)
    S = _shrunk(covariance, oas_shrinkage(covariance, examples - 1) if shrinkage is None else shrinkage)
    weight = torch.linalg.solve(S, statistics.targets[:-2] - y * g)[None]
    return _to_weights(weight, y - weight @ g)


def oas_shrinkage(covariance: Tensor, examples: float) -> float:
    """Compute OAS's shrinkage of an empirical covariance, from 0 to 1.

    Args:
        covariance: Empirical covariance, (D, D).
        examples: Number of examples, less the means that were estimated from them.
    """
    size = len(covariance)
    mean, square = float(covariance.trace()) / size, float(covariance.square().mean())
    rest = (max(1.0, examples) + 1) * (square - mean**2 / size)
    return 1.0 if rest <= 0 else min(1.0, (square + mean**2) / rest)


def _mean(statistics: HeadStatistics) -> Tensor:
    """Return the mean of all features, (D,)."""
    return statistics.sums.sum(0) / statistics.shares.sum().clamp(min=_TINY)


def _class_means(statistics: HeadStatistics) -> tuple[Tensor, Tensor]:
    """Return which classes have examples, (C,), and the class means, (C, D); of others, the mean of all."""
    present = statistics.shares > 0
    means = statistics.sums / statistics.shares.clamp(min=_TINY)[:, None]
    return present, torch.where(present[:, None], means, _mean(statistics))


def _log_shares(statistics: HeadStatistics, present: Tensor, examples: float) -> Tensor:
    """Return the logarithm of the classes' shares, (C,); a class that nobody has counts as half an example."""
    return torch.where(present, statistics.shares, 0.5 / max(1.0, examples)).log()


def _within(statistics: HeadStatistics) -> Tensor:
    """Return the covariance within classes, (D, D)."""
    assert statistics.products is not None
    return statistics.products - statistics.sums.T @ _class_means(statistics)[1]


def _shrunk(covariance: Tensor, shrinkage: float) -> Tensor:
    size = len(covariance)
    mean = covariance.trace() / size
    identity = torch.eye(size, dtype=covariance.dtype)
    # Float32 messages leave an error of about 1e-7 of the largest eigenvalue; the floor is above it.
    return (1 - shrinkage) * covariance + (shrinkage + 1e-6) * mean.clamp(min=1e-30) * identity


def _whole(triangle: Tensor, features: int) -> Tensor:
    rows, columns = torch.triu_indices(features, features)
    whole = triangle.new_zeros(features, features)
    whole[rows, columns] = triangle
    whole[columns, rows] = triangle
    return whole


def _to_weights(weight: Tensor, bias: Tensor) -> OutputWeights:
    return OutputWeights(weight.float().contiguous(), bias.float().contiguous())
