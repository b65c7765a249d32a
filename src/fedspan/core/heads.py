"""Output layers in closed form from pooled statistics of the features that enter them.

Legate et al., "Guiding The Last Layer in Federated Learning with Pre-Trained Models", NeurIPS 2023, arXiv:2306.03937
(FedNCM: class means). Statistics are averages over examples, so their mean over clients, weighted by examples, is
exactly that of all examples together, whatever the heterogeneity. Shapes: C outputs, D features; f is an example's
features, y its label or number, p_c the share of class c and n_c its examples.

The ridge r is the one with which ridge regressions of the targets y on f would predict other examples best, by
generalized cross-validation (Golub, Heath and Wahba, Technometrics 1979). Targets are indicators of the classes or
labels, or the numbers; with g the mean and F the covariance of f, c_y the covariance of y and f, v_y the variance of y,

    V(r) = sum_y (v_y - 2 u_y c_y + u_y F u_y) / (1 - (1 + tr((F + r I)^-1 F)) / n)^2,   u_y = (F + r I)^-1 c_y

Classes. One covariance within all classes; weights along the discriminants of LDA, of one length in the metric of S:

    S = W + r I,   W = E[f f^T] - sum_c p_c mu_c mu_c^T,   m = mean of the class means
    d_c = S^-1 (mu_c - m),   v_c^2 = d_c^T (mu_c - m)
    w_c = k d_c / v_c,   b_c = -w_c m + log p_c

``class-means`` has S = tr(W) / D I, where W enters by its trace alone. The scale k is 20 over the root mean square of
|f - m| in the metric of S: outputs are 20 times a cosine. It is at most LDA's own, the separation of the classes over
the variance of the outputs, so that classes that the features do not separate start with outputs near log p_c. Both are
estimated for examples that S was not fitted to: there W is larger by h in the metric of S, and by h^2 along the
discriminants (q is the number of directions that S was fitted to, n that of examples, less the classes):

    q = tr(S^-1 W),   h = 1 / (1 - q / n),   s^2 = sum_c p_c max(0, v_c^2 - h tr(S^-1 W) / n_c)
    k = min(20 / (h tr(S^-1 W) + s^2)^(1/2),   s^2 / v / (h^2 sum_c p_c d_c^T W d_c / v^2)),   v^2 = sum_c p_c v_c^2

s^2 is at least v^2 / 10. Without h, a head on a few hundred examples of a thousand features is several times too sure
of itself.

Numbers (least squares): w = (F + r I)^-1 c_y, b = E[y] - w g.

Several labels of an example (``by-label``). Each label c is a class and its absence another: LDA for the two, from
least squares, where 1 - R_c^2 is the share of the label's variance that these leave unexplained. With S = F + r I,
v_c = p_c (1 - p_c), c_c = E[y_c f] - p_c g, u_c = S^-1 c_c and R_c^2 = u_c c_c / v_c,

    e_c = h^2 (1 - 2 R_c^2 + u_c F u_c / v_c),   h = 1 / (1 - tr(S^-1 F) / n)
    w_c = u_c (1 - e_c) / R_c^2 / (v_c e_c),   b_c = log(p_c / (1 - p_c)) - w_c (mu_c + mu_not_c) / 2

where e_c is 1 - R_c^2 for examples that S was not fitted to, from 1 / 100 to 1, and (1 - e_c) / R_c^2 from 1 / 10 to 1.
Words with a label each are examples like any others.

Deviations: FedNCM normalizes the means and takes outputs as they are. Without the center m all weights have a large
part in common, and without k fine-tuning starts from nearly equal probabilities.
"""

from __future__ import annotations

import math
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
        head = fit_cosine_discriminant(statistics, examples, math.inf if kind == "class-means" else None)
    if bias:
        return head
    g = statistics.sums[-1] if kind == "by-label" else _compute_mean(statistics)
    projection = torch.outer(head.bias.double(), g) / g.square().sum().clamp(min=_TINY)
    return OutputWeights((head.weight.double() + projection).float(), torch.zeros_like(head.bias))


def fit_cosine_discriminant(statistics: HeadStatistics, examples: float, ridge: float | None = None) -> OutputWeights:
    """Compute a head for classes, with weights along LDA's discriminants and of equal length.

    A class without examples has zero weights, and the bias of half an example.

    Args:
        statistics: Pooled statistics; with products if the ridge is not infinite.
        ridge: Ridge r of the covariance, in the features' squared unit; None: ``choose_ridge``.
    """
    present, means = _compute_class_means(statistics)
    m, free = means[present].mean(0), examples - int(present.sum())
    centered = torch.where(present[:, None], means - m, 0.0)
    trace = (statistics.square.squeeze() - (statistics.shares * means.square().sum(1)).sum()).clamp(min=0)
    spread = (statistics.square.squeeze() - 2 * _compute_mean(statistics) @ m + m @ m).clamp(min=0)
    if ridge == math.inf or free <= 0:
        variance = (trace if free > 0 and trace > 1e-9 * spread else spread).clamp(min=_TINY) / len(m)
        d, noise, fitted = centered / variance, trace / variance, torch.zeros_like(trace)
        along = (statistics.shares @ d.square().sum(1)) * variance
    else:
        if ridge is None:
            p = statistics.shares
            F, cross = _compute_covariances(statistics, _compute_mean(statistics), statistics.sums, p)
            ridge = choose_ridge(F, cross, (p * (1 - p)).sum(), examples)
        assert statistics.products is not None
        W = statistics.products - statistics.sums.T @ means  # the covariance within classes
        S = _add_ridge(W, ridge)
        d = torch.linalg.solve(S, centered.T).T
        noise = fitted = torch.linalg.solve(S, W).trace()
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


def fit_least_squares(statistics: HeadStatistics, examples: float) -> OutputWeights:
    """Compute the ridge regression of numbers."""
    assert statistics.targets is not None
    *sums, y, square = statistics.targets
    g = _compute_mean(statistics)
    covariance, cross = _compute_covariances(statistics, g, torch.stack(sums)[None], y[None])
    S = _add_ridge(covariance, choose_ridge(covariance, cross, square - y**2, examples))
    weight = torch.linalg.solve(S, cross.T).T
    return _to_weights(weight, y - weight @ g)


def fit_labels(statistics: HeadStatistics, examples: float) -> OutputWeights:
    """Compute a head for labels that are decided one by one.

    A label that all examples have or none has zero weights, and the bias of half an example.
    """
    g, half = statistics.sums[-1], 0.5 / max(1.0, examples)
    covariance, cross = _compute_covariances(statistics, g, statistics.sums[:-1], statistics.shares[:-1])
    p = statistics.shares[:-1].clamp(half, 1 - half)
    v = p * (1 - p)
    S = _add_ridge(covariance, choose_ridge(covariance, cross, v.sum(), examples))
    u = torch.linalg.solve(S, cross.T).T
    fitted = torch.linalg.solve(S, covariance).trace()
    beyond = 1 / (1 - (fitted / max(1.0, examples - 1)).clamp(max=0.99))
    explained = (u * cross).sum(1) / v
    error = beyond.square() * (1 - 2 * explained + ((u @ covariance) * u).sum(1) / v)
    signal = ((1 - error) / explained.clamp(min=_TINY)).clamp(_LEAST_SIGNAL, 1.0)
    weight = u * (signal / (v * error.clamp(_LEAST_ERROR, 1.0)))[:, None]
    means = statistics.sums[:-1] / p[:, None], (g - statistics.sums[:-1]) / (1 - p)[:, None]
    return _to_weights(weight, (p / (1 - p)).log() - (weight * (means[0] + means[1])).sum(1) / 2)


def choose_ridge(covariance: Tensor, cross: Tensor, variance: Tensor, examples: float) -> float:
    """Choose the ridge of regressions on the features by generalized cross-validation.

    Args:
        covariance: Empirical covariance F of the features, (D, D).
        cross: Covariance of each target with the features, (targets, D).
        variance: Sum of the targets' variances.

    Returns:
        From 1e-5 to 1e3 times the mean variance of a feature.
    """
    values_D, vectors = torch.linalg.eigh(covariance)
    values_D = values_D.clamp(min=0)
    squares_D = (cross @ vectors).square().sum(0)
    ridges_R = torch.logspace(-5, 3, 81, dtype=torch.float64) * values_D.mean().clamp(min=1e-30)
    sums_RD = values_D + ridges_R[:, None]
    errors_R = variance - (squares_D * (values_D + 2 * ridges_R[:, None]) / sums_RD.square()).sum(1)
    free_R = 1 - (1 + (values_D / sums_RD).sum(1)) / max(1.0, examples)
    # A fit of nearly all examples leaves errors that are no more than rounding.
    scores_R = torch.where(free_R > 0.01, errors_R / free_R.square(), math.inf)
    return float(ridges_R[scores_R.argmin()])


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


def _compute_covariances(statistics: HeadStatistics, g: Tensor, sums: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
    """Return the covariance of the features, of mean g, and that of targets y with them, from E[y f] and E[y]."""
    assert statistics.products is not None
    return statistics.products - torch.outer(g, g), sums - torch.outer(means, g)


def _add_ridge(covariance: Tensor, ridge: float) -> Tensor:
    # Float32 messages leave an error of about 1e-7 of the largest eigenvalue; the floor is above it.
    least = 1e-6 * covariance.trace() / len(covariance)
    return covariance + (ridge + least.clamp(min=1e-30)) * torch.eye(len(covariance), dtype=covariance.dtype)


def _expand_triangle(triangle: Tensor, features: int) -> Tensor:
    rows, columns = torch.triu_indices(features, features)
    symmetric = triangle.new_zeros(features, features)
    symmetric[rows, columns] = triangle
    symmetric[columns, rows] = triangle
    return symmetric


def _to_weights(weight: Tensor, bias: Tensor) -> OutputWeights:
    return OutputWeights(weight.float().contiguous(), bias.float().contiguous())
