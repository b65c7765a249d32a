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
are 20 times a cosine. It is at most LDA's own, the separation of the classes over the variance of the outputs, so that
classes that the features do not separate start with outputs near log p_c. Both are estimated for examples that S was
not fitted to: there W is larger by g in the metric of S, and by g^2 along the discriminants (as in generalized
cross-validation; q is the number of directions that S was fitted to, n that of examples, less the classes):

    q = (1 - a) tr(S^-1 W),   g = 1 / (1 - q / n),   s^2 = sum_c p_c max(0, v_c^2 - g tr(S^-1 W) / n_c)
    k = min(20 / (g tr(S^-1 W) + s^2)^(1/2),   s^2 / v / (g^2 sum_c p_c d_c^T W d_c / v^2)),   v^2 = sum_c p_c v_c^2

s^2 is at least v^2 / 10. Without g, a head on a few hundred examples of a thousand features is several times too sure
of itself.

Numbers (least squares), with the mean g and the covariance F of f:

    w = ((1 - a) F + a tr(F) / D I)^-1 (E[y f] - E[y] g),   b = E[y] - w g

Several labels of an example (``by-label``). Each label c is a class and its absence another: LDA for the two, from
least squares, where 1 - R_c^2 is the share of the label's variance that these leave unexplained. With g, F and
S = (1 - a) F + a tr(F) / D I as for numbers, v_c = p_c (1 - p_c), c_c = E[y_c f] - p_c g, u_c = S^-1 c_c and
R_c^2 = u_c c_c / v_c,

    e_c = h^2 (1 - 2 R_c^2 + u_c F u_c / v_c),   h = 1 / (1 - (1 - a) tr(S^-1 F) / n)
    w_c = u_c (1 - e_c) / R_c^2 / (v_c e_c),   b_c = log(p_c / (1 - p_c)) - w_c (mu_c + mu_not_c) / 2

where e_c is 1 - R_c^2 for examples that S was not fitted to (generalized cross-validation), here from 1 / 100 to 1, and
(1 - e_c) / R_c^2 from 1 / 10 to 1. Words with a label each are examples like any others.

Deviations: FedNCM normalizes the means and takes outputs as they are. Without the center m all weights have a large
part in common, and without k fine-tuning starts from nearly equal probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

HeadKind = Literal["class-means", "lda", "least-squares", "by-label"]

SCALE = 20.0
"""Factor on the cosines that a head for classes starts with."""

_LEAST_SIGNAL = 0.1
"""Share of the discriminants' squared length that counts as separation at least: a head of zeros would let no gradient
through to the adapters."""
_LEAST_ERROR = 0.01
"""Share of a label's variance that counts as unexplained at least: it may be an exact function of the features."""
_TINY = 1e-300


@dataclass(frozen=True)
class HeadStatistics:
    """Averages over examples of the features that enter an output layer, float64."""

    shares: Tensor
    """Share of the examples of each class, (C,); for a regression 1, (1,). By label, that of each label, and 1 for all
    examples, (C + 1,)."""
    sums: Tensor
    """Mean of f over all examples, counting only those of class c in row c, (C, D). By label, the last row counts all,
    (C + 1, D)."""
    square: Tensor
    """Mean of |f|^2."""
    products: Tensor | None = None
    """Mean of f f^T, (D, D); None if the kind of start does not use it."""
    targets: Tensor | None = None
    """For a regression the means of y f, (D,), y and y^2, together (D + 2,); else None."""

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> HeadStatistics:
        """Build statistics from named tensors, where the products are the upper triangle."""
        doubles = {name: value.double() for name, value in tensors.items()}
        triangle = doubles.get("products")
        features = doubles["sums"].shape[1]
        products = None if triangle is None else _expand_triangle(triangle, features)
        return cls(doubles["shares"], doubles["sums"], doubles["square"], products, doubles.get("targets"))

    def rescale(self, bound: float) -> HeadStatistics:
        """Convert statistics of features that were divided by ``bound`` (0: not divided) to those of the features."""
        if not bound:
            return self
        products = None if self.products is None else self.products * bound**2
        return HeadStatistics(self.shares, self.sums * bound, self.square * bound**2, products, self.targets)

    def count(self, kind: HeadKind) -> Tensor:
        """Return the number of counted examples, or words, for each example of the clients."""
        return self.shares[-1] if kind == "by-label" else self.shares.sum()

    def normalize(self, kind: HeadKind) -> HeadStatistics:
        """Return averages over the counted examples alone, if clients left out examples of small classes, or words."""
        total = self.count(kind)
        return HeadStatistics(
            self.shares / total,
            self.sums / total,
            self.square / total,
            None if self.products is None else self.products / total,
            None if self.targets is None else self.targets / total,
        )

    def to_tensors(self) -> dict[str, Tensor]:
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
    """Weights of an output layer."""

    weight: Tensor
    """Weight, (C, D) float32."""
    bias: Tensor
    """Bias, (C,) float32."""


def compute_statistics_shapes(kind: HeadKind, outputs: int, features: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the named tensors of ``HeadStatistics.to_tensors``."""
    rows = outputs + 1 if kind == "by-label" else outputs
    shapes: dict[str, tuple[int, ...]] = {"shares": (rows,), "sums": (rows, features), "square": (1,)}
    if kind != "class-means":
        shapes["products"] = (features * (features + 1) // 2,)
    if kind == "least-squares":
        shapes["targets"] = (features + 2,)
    return shapes


def summarize_features(features: Tensor, answers: Tensor, outputs: int, kind: HeadKind) -> HeadStatistics:
    """Compute the statistics of some examples.

    Args:
        features: Features, (examples, D).
        answers: Labels, or numbers of a regression, (examples,); by label, 1 where an example has it, (examples, C).
        kind: Kind of start, which determines the statistics.
    """
    f, count = features.double(), len(features)
    if kind == "by-label":
        counted = torch.cat([answers.double(), torch.ones(count, 1, dtype=torch.float64)], 1)
        return HeadStatistics(counted.mean(0), counted.T @ f / count, f.square().sum() / count, f.T @ f / count)
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
        bias: Whether the layer has a bias; without one, the weights' part along the mean of all features is adjusted so
            that the outputs at that mean are the same.
    """
    if kind == "least-squares":
        head = fit_least_squares(statistics, examples)
    elif kind == "by-label":
        head = fit_labels(statistics, examples)
    else:
        head = fit_cosine_discriminant(statistics, examples, 1.0 if kind == "class-means" else None)
    if bias:
        return head
    g = statistics.sums[-1] if kind == "by-label" else _compute_mean(statistics)
    projection = torch.outer(head.bias.double(), g) / g.square().sum().clamp(min=_TINY)
    return OutputWeights((head.weight.double() + projection).float(), torch.zeros_like(head.bias))


def fit_cosine_discriminant(
    statistics: HeadStatistics, examples: float, shrinkage: float | None = None
) -> OutputWeights:
    """Compute a head for classes, with weights along LDA's discriminants and of equal length.

    A class without examples has zero weights, and the bias of half an example.

    Args:
        statistics: Pooled statistics; with products if the shrinkage is not 1.
        shrinkage: Shrinkage a of the covariance; None: ``compute_oas_shrinkage``.
    """
    present, means = _compute_class_means(statistics)
    m, free = means[present].mean(0), examples - int(present.sum())
    centered = torch.where(present[:, None], means - m, 0.0)
    trace = (statistics.square.squeeze() - (statistics.shares * means.square().sum(1)).sum()).clamp(min=0)
    spread = (statistics.square.squeeze() - 2 * _compute_mean(statistics) @ m + m @ m).clamp(min=0)
    if shrinkage == 1.0 or free <= 0:
        variance = (trace if free > 0 and trace > 1e-9 * spread else spread).clamp(min=_TINY) / len(m)
        d, noise, fitted = centered / variance, trace / variance, torch.zeros_like(trace)
        along = (statistics.shares @ d.square().sum(1)) * variance
    else:
        W = _compute_within_covariance(statistics)
        a = compute_oas_shrinkage(W, free) if shrinkage is None else shrinkage
        S = _shrink_covariance(W, a)
        d = torch.linalg.solve(S, centered.T).T
        noise = torch.linalg.solve(S, W).trace()
        fitted = (1 - a) * noise
        along = statistics.shares @ ((d @ W) * d).sum(1)
    v = (d * centered).sum(1).clamp(min=0).sqrt()
    k = _scale(statistics.shares * examples, v, noise, along, fitted) if free > 0 else SCALE / len(m) ** 0.5
    weight = torch.where(v[:, None] > 1e-9, k * d / v[:, None].clamp(min=_TINY), 0.0)
    return _to_weights(weight, _compute_log_shares(statistics, present, examples) - weight @ m)


def _scale(counts: Tensor, v: Tensor, noise: Tensor, along: Tensor, fitted: Tensor) -> Tensor:
    """Compute the scale k of a head for classes.

    Args:
        counts: Number of examples of each class, (C,).
        v: Lengths v_c of the discriminants in the metric of S, (C,).
        noise: tr(S^-1 W).
        along: Mean of d_c^T W d_c over examples.
        fitted: Number of directions that S was fitted to.
    """
    examples, free = counts.sum(), counts.sum() - (counts > 0).sum()
    shares, unbiased = counts / examples, examples / free
    beyond = 1 / (1 - (fitted / free).clamp(max=0.99))
    noise = unbiased * beyond * noise
    length = (shares @ v.square()).clamp(min=_TINY)
    signal = (shares * (v.square() - noise / counts.clamp(min=1e-9)).clamp(min=0)).sum()
    signal = torch.maximum(signal, _LEAST_SIGNAL * length)
    variance = (unbiased * beyond.square() * along / length).clamp(min=_TINY)
    return torch.minimum(SCALE / (noise + signal).clamp(min=_TINY).sqrt(), signal / length.sqrt() / variance)


def fit_least_squares(statistics: HeadStatistics, examples: float, shrinkage: float | None = None) -> OutputWeights:
    """Compute the head that minimizes the squared error, with its ridge relative to the features' variance.

    Args:
        shrinkage: Shrinkage a of the covariance; None: ``compute_oas_shrinkage``.
    """
    assert statistics.products is not None
    assert statistics.targets is not None
    g, y = _compute_mean(statistics), statistics.targets[-2]
    covariance = statistics.products - torch.outer(g, g)
    S = _shrink_covariance(
        covariance, compute_oas_shrinkage(covariance, examples - 1) if shrinkage is None else shrinkage
    )
    weight = torch.linalg.solve(S, statistics.targets[:-2] - y * g)[None]
    return _to_weights(weight, y - weight @ g)


def fit_labels(statistics: HeadStatistics, examples: float) -> OutputWeights:
    """Compute a head for labels that are decided one by one.

    A label that all examples have or none has zero weights, and the bias of half an example.
    """
    assert statistics.products is not None
    g, half = statistics.sums[-1], 0.5 / max(1.0, examples)
    covariance = statistics.products - torch.outer(g, g)
    a = compute_oas_shrinkage(covariance, examples - 1)
    S = _shrink_covariance(covariance, a)
    p = statistics.shares[:-1].clamp(half, 1 - half)
    v, cross = p * (1 - p), statistics.sums[:-1] - statistics.shares[:-1, None] * g
    u = torch.linalg.solve(S, cross.T).T
    fitted = (1 - a) * torch.linalg.solve(S, covariance).trace()
    beyond = 1 / (1 - (fitted / max(1.0, examples - 1)).clamp(max=0.99))
    explained = (u * cross).sum(1) / v
    error = beyond.square() * (1 - 2 * explained + ((u @ covariance) * u).sum(1) / v)
    signal = ((1 - error) / explained.clamp(min=_TINY)).clamp(_LEAST_SIGNAL, 1.0)
    weight = u * (signal / (v * error.clamp(_LEAST_ERROR, 1.0)))[:, None]
    means = statistics.sums[:-1] / p[:, None], (g - statistics.sums[:-1]) / (1 - p)[:, None]
    return _to_weights(weight, (p / (1 - p)).log() - (weight * (means[0] + means[1])).sum(1) / 2)


def compute_oas_shrinkage(covariance: Tensor, examples: float) -> float:
    """Compute OAS's shrinkage of an empirical covariance, from 0 to 1.

    Args:
        covariance: Empirical covariance, (D, D).
        examples: Number of examples, less the means that were estimated from them.
    """
    size = len(covariance)
    mean, square = float(covariance.trace()) / size, float(covariance.square().mean())
    rest = (max(1.0, examples) + 1) * (square - mean**2 / size)
    return 1.0 if rest <= 0 else min(1.0, (square + mean**2) / rest)


def _compute_mean(statistics: HeadStatistics) -> Tensor:
    """Return the mean of all features, (D,)."""
    return statistics.sums.sum(0) / statistics.shares.sum().clamp(min=_TINY)


def _compute_class_means(statistics: HeadStatistics) -> tuple[Tensor, Tensor]:
    """Return which classes have examples, (C,), and the class means, (C, D); of others, the mean of all."""
    present = statistics.shares > 0
    means = statistics.sums / statistics.shares.clamp(min=_TINY)[:, None]
    return present, torch.where(present[:, None], means, _compute_mean(statistics))


def _compute_log_shares(statistics: HeadStatistics, present: Tensor, examples: float) -> Tensor:
    """Return the logarithm of the classes' shares, (C,); a class without examples counts as half an example."""
    return torch.where(present, statistics.shares, 0.5 / max(1.0, examples)).log()


def _compute_within_covariance(statistics: HeadStatistics) -> Tensor:
    """Return the covariance within classes, (D, D)."""
    assert statistics.products is not None
    return statistics.products - statistics.sums.T @ _compute_class_means(statistics)[1]


def _shrink_covariance(covariance: Tensor, shrinkage: float) -> Tensor:
    size = len(covariance)
    mean = covariance.trace() / size
    identity = torch.eye(size, dtype=covariance.dtype)
    # Float32 messages leave an error of about 1e-7 of the largest eigenvalue; the floor is above it.
    return (1 - shrinkage) * covariance + (shrinkage + 1e-6) * mean.clamp(min=1e-30) * identity


def _expand_triangle(triangle: Tensor, features: int) -> Tensor:
    rows, columns = torch.triu_indices(features, features)
    symmetric = triangle.new_zeros(features, features)
    symmetric[rows, columns] = triangle
    symmetric[columns, rows] = triangle
    return symmetric


def _to_weights(weight: Tensor, bias: Tensor) -> OutputWeights:
    return OutputWeights(weight.float().contiguous(), bias.float().contiguous())
