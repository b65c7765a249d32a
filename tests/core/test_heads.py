import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from torch import Tensor

from fedspan.core.heads import (
    HeadKind,
    HeadStatistics,
    choose_ridge,
    compute_statistics_shapes,
    fit_cosine_discriminant,
    fit_least_squares,
    solve_head,
    summarize_features,
)

CLASSES, FEATURES = 5, 7


def examples(count: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features around a mean of each class, with one covariance that is far from a multiple of the identity."""
    rng = torch.Generator().manual_seed(seed)
    means = 2 * torch.randn(CLASSES, FEATURES, generator=rng)
    mixing = torch.randn(FEATURES, FEATURES, generator=rng)
    labels = torch.arange(count) % CLASSES
    return means[labels] + torch.randn(count, FEATURES, generator=rng) @ mixing + 3.0, labels


def indicate(labels: Tensor) -> Tensor:
    """The labels as any number of labels for an example: its class and the one before it, or none."""
    own, other = (torch.nn.functional.one_hot(numbers % CLASSES, CLASSES) for numbers in (labels, labels - 1))
    return torch.where((labels == 2)[:, None], 0, own + other).to(torch.uint8)


def pooled(parts: list[HeadStatistics], sizes: list[int]) -> HeadStatistics:
    """The mean of clients' statistics, weighted by examples, as a reduction computes it from float32 messages."""
    total = sum(sizes)
    named = [{name: value.float().double() for name, value in part.to_tensors().items()} for part in parts]
    return HeadStatistics.from_tensors(
        {name: sum(size / total * one[name] for size, one in zip(sizes, named, strict=True)) for name in named[0]}
    )


@pytest.mark.parametrize("kind", ["class-means", "lda", "least-squares", "by-label"])
@pytest.mark.parametrize("cuts", [[20, 40], [1, 2, 3, 59], [30]])
def test_the_mean_of_clients_statistics_is_that_of_all_examples(kind: HeadKind, cuts: list[int]) -> None:
    features, labels = examples()
    order = labels.argsort()  # clients with few classes each
    features, labels = features[order], labels[order]
    answers = labels if kind != "least-squares" else features[:, 0] * 2 - features[:, 3]
    answers = answers if kind != "by-label" else indicate(labels)
    outputs = CLASSES if kind != "least-squares" else 1
    whole = summarize_features(features, answers, outputs, kind)
    bounds = [0, *cuts, len(labels)]
    ranges = list(pairwise(bounds))
    parts = [summarize_features(features[start:stop], answers[start:stop], outputs, kind) for start, stop in ranges]
    together = pooled(parts, [stop - start for start, stop in ranges])
    assert {name: tuple(value.shape) for name, value in whole.to_tensors().items()} == compute_statistics_shapes(
        kind, outputs, FEATURES
    )
    for name, value in whole.to_tensors().items():
        torch.testing.assert_close(together.to_tensors()[name], value, rtol=1e-6, atol=1e-6)
    one, other = solve_head(kind, whole, 60), solve_head(kind, together, 60)
    torch.testing.assert_close(other.weight, one.weight, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(other.bias, one.bias, rtol=1e-4, atol=1e-3)


def to_ridge(features: Tensor, labels: Tensor, shrinkage: float) -> float:
    """The ridge as large as a covariance that scikit-learn shrinks towards its mean variance."""
    within = features.double() - torch.stack([features[labels == label].double().mean(0) for label in labels])
    return shrinkage / (1 - shrinkage) * float(within.square().mean()) if shrinkage < 1 else math.inf


@pytest.mark.parametrize("shrinkage", [0.2, 1.0])
def test_the_heads_directions_are_those_of_lda_and_of_one_length(shrinkage: float) -> None:
    features, labels = examples(61)
    statistics = summarize_features(features, labels, CLASSES, "lda")
    ours = fit_cosine_discriminant(statistics, len(labels), to_ridge(features, labels, shrinkage)).weight.double()
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage)
    theirs.fit(features.double().numpy(), labels.numpy())
    lda = torch.from_numpy(theirs.coef_).double()
    means = torch.stack([features[labels == label].double().mean(0) for label in range(CLASSES)])
    centered = lda - lda.mean(0)  # weights of LDA about their mean are S^-1 (mu_c - m)
    cosine = torch.nn.functional.cosine_similarity(ours, centered)
    torch.testing.assert_close(cosine, torch.ones(CLASSES, dtype=torch.float64), rtol=0, atol=1e-5)
    away = means - means.mean(0)
    lengths = (ours * away).sum(1) / (centered * away).sum(1).sqrt()  # in the metric of S: w^T (mu - m) = k v
    torch.testing.assert_close(lengths, lengths[:1].expand(CLASSES), rtol=1e-4, atol=0)


@pytest.mark.parametrize("shrinkage", [0.2, 1.0])
@pytest.mark.parametrize("apart", [0.1, 3.0])
@pytest.mark.parametrize("unit", [1e-3, 1.0, 20.0])
def test_a_head_s_length_is_that_of_its_formula_in_any_unit(shrinkage: float, apart: float, unit: float) -> None:
    """W is estimated with n - C degrees of freedom, and class means use its trace alone."""
    features, labels = examples(61)
    features = features.double()
    noise = features - torch.stack([features[labels == label].mean(0) for label in labels])
    means = apart * torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    features = unit * (means[labels] + noise)
    ridge = to_ridge(features, labels, shrinkage)
    head = fit_cosine_discriminant(summarize_features(features, labels, CLASSES, "lda"), 61, ridge)

    W, identity = unit**2 * noise.T @ noise / 61, torch.eye(FEATURES, dtype=torch.float64)
    round = W.trace() / FEATURES * identity
    S = (1 - shrinkage) * W + shrinkage * round
    W = (W if shrinkage < 1 else round) * 61 / (61 - CLASSES)
    d = torch.linalg.solve(S, unit * (means - means.mean(0)).T).T
    counts = torch.bincount(labels).double()
    p, v = counts / 61, (d * unit * (means - means.mean(0))).sum(1).sqrt()
    q = (1 - shrinkage) * torch.linalg.solve(S, W).trace() * (61 - CLASSES) / 61
    g = 1 / (1 - q / (61 - CLASSES))
    spread, length = g * torch.linalg.solve(S, W).trace(), p @ v**2
    signal = max(p @ (v**2 - spread / counts).clamp(min=0), length / 10)
    along = sum(share * one @ W @ one for share, one in zip(p, d, strict=True)) / length
    k = min(20 / (spread + signal) ** 0.5, signal / length**0.5 / (g**2 * along))
    expected = k * d / v[:, None]  # up to 1e-6 of the variance that is added to S
    torch.testing.assert_close(head.weight.double(), expected, rtol=5e-4, atol=0)


def test_class_means_need_no_products() -> None:
    features, labels = examples()
    lean, full = (summarize_features(features, labels, CLASSES, kind) for kind in ("class-means", "lda"))
    one, other = solve_head("class-means", lean, 60), fit_cosine_discriminant(full, 60, math.inf)
    assert torch.equal(one.weight, other.weight)
    assert torch.equal(one.bias, other.bias)


def test_a_head_separates_what_the_features_separate_and_is_unsure_of_the_rest() -> None:
    features, labels = examples(400)
    test, truth = features[200:], labels[200:]
    head = solve_head("lda", summarize_features(features[:200], labels[:200], CLASSES, "lda"), 200)
    outputs = test @ head.weight.T + head.bias
    assert float((outputs.argmax(1) == truth).float().mean()) > 0.85
    rng = torch.Generator().manual_seed(1)
    noise, random = torch.randn(200, FEATURES, generator=rng), torch.randint(0, CLASSES, (200,), generator=rng)
    for kind in ("class-means", "lda"):
        blind = solve_head(kind, summarize_features(noise[:100], random[:100], CLASSES, "lda"), 100)
        loss = torch.nn.functional.cross_entropy(noise[100:] @ blind.weight.T + blind.bias, random[100:])
        assert float(loss) < 1.25 * float(np.log(CLASSES))
        assert blind.weight.any(dim=1).all()  # else no gradient would reach the adapters


# Classes further apart would need a larger scale than that of the cosines.
@pytest.mark.parametrize(("features", "count", "apart"), [(300, 600, 0.05), (300, 600, 0.08), (40, 400, 0.2)])
def test_the_scale_suits_examples_that_the_covariance_was_not_estimated_from(
    features: int, count: int, apart: float
) -> None:
    rng = torch.Generator().manual_seed(0)
    means = apart * torch.randn(CLASSES, features, generator=rng)
    spectrum = torch.linspace(0.1, 2, features)  # a covariance that shrinkage keeps in part
    labels = torch.arange(count + 1000) % CLASSES
    drawn = means[labels] + torch.randn(len(labels), features, generator=rng) * spectrum
    head = solve_head("lda", summarize_features(drawn[:count], labels[:count], CLASSES, "lda"), count)

    def loss(factor: float) -> float:
        outputs = factor * (drawn[count:] @ head.weight.T + head.bias)  # classes of equal size: the bias scales as well
        return float(torch.nn.functional.cross_entropy(outputs, labels[count:]))

    assert loss(1.0) < 1.1 * min(loss(factor) for factor in (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0))


def test_shares_of_classes_enter_the_bias_and_one_without_examples_is_improbable() -> None:
    rng = torch.Generator().manual_seed(0)
    labels = (torch.rand(2000, generator=rng) < 0.1).long()
    features = torch.randn(2000, 3, generator=rng) + labels[:, None] * torch.tensor([0.6, 0.0, 0.0])
    for kind in ("class-means", "lda"):
        head = solve_head(kind, summarize_features(features, labels, 2, "lda"), 2000)
        guess = (features @ head.weight.T + head.bias).argmax(1)
        assert float((guess == labels).float().mean()) > 0.89  # a threshold between the means would have 0.6
    features, labels = examples()
    kept = labels != 2
    for kind in ("class-means", "lda"):
        head = solve_head(kind, summarize_features(features[kept], labels[kept], CLASSES, kind), int(kept.sum()))
        assert torch.isfinite(head.weight).all()
        assert torch.isfinite(head.bias).all()
        assert not head.weight[2].any()
        assert 2 not in (features @ head.weight.T + head.bias).argmax(1)


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_a_few_examples_give_finite_heads(count: int) -> None:
    features, labels = examples(count)
    for kind in ("class-means", "lda"):
        head = solve_head(kind, summarize_features(features, labels, CLASSES, kind), count)
        assert torch.isfinite(head.weight).all()
        assert torch.isfinite(head.bias).all()
        assert count >= CLASSES or float(head.bias[-1]) == pytest.approx(-np.log(2 * count))
    regression = solve_head("least-squares", summarize_features(features, features[:, 0], 1, "least-squares"), count)
    assert torch.isfinite(regression.weight).all()
    features, labels = examples(10)  # without a ridge as many directions as degrees of freedom: corrected up to 100
    assert fit_cosine_discriminant(summarize_features(features, labels, CLASSES, "lda"), 10, 0.0).weight.norm() > 10


def test_labels_are_decided_as_by_lda_of_each() -> None:
    count = 40_000  # so that shrinkage and what the fit explains by chance are negligible
    features, labels = examples(count)
    indicators = indicate(labels)
    head = solve_head("by-label", summarize_features(features, indicators, CLASSES, "by-label"), count)
    for label in range(CLASSES):
        theirs = LinearDiscriminantAnalysis(solver="lsqr").fit(features.numpy(), indicators[:, label].numpy())
        np.testing.assert_allclose(head.weight[label], theirs.coef_[0], rtol=0.02, atol=0.02)
        assert float(head.bias[label]) == pytest.approx(theirs.intercept_[0], abs=0.05)


@pytest.mark.parametrize("count", [1, 3, 30])
def test_labels_of_few_examples_or_without_any_are_finite_and_improbable(count: int) -> None:
    features, labels = examples(count)
    indicators = torch.cat([indicate(labels)[:, :-1], torch.zeros(count, 1, dtype=torch.uint8)], 1)
    head = solve_head("by-label", summarize_features(features, indicators, CLASSES, "by-label"), count)
    assert torch.isfinite(head.weight).all()
    assert not head.weight[-1].any()
    assert float(head.bias[-1]) == pytest.approx(-np.log(2 * count - 1), abs=1e-5)


@pytest.mark.parametrize("power", [0, 2])
def test_labels_that_nothing_explains_start_near_their_shares(power: int) -> None:
    rng, spectrum = torch.Generator().manual_seed(1), torch.linspace(0.1, 2, 200) ** power
    features, labels = torch.randn(300, 200, generator=rng) * spectrum, torch.rand(300, 4, generator=rng) < 0.3
    head = solve_head("by-label", summarize_features(features, labels.to(torch.uint8), 4, "by-label"), 300)
    outputs = (torch.randn(2000, 200, generator=rng) * spectrum) @ head.weight.T + head.bias
    loss = torch.nn.functional.binary_cross_entropy_with_logits(outputs, torch.full_like(outputs, 0.3))
    assert float(loss) < 0.75  # 0.61 with the shares alone


@pytest.mark.parametrize("count", [8, 20, 60, 400])
def test_least_squares_are_the_ridge_regression_that_predicts_each_example_best(count: int) -> None:
    """By generalized cross-validation from the matrix that fits the answers, for each of the ridges."""
    rng = torch.Generator().manual_seed(count)
    features, _ = examples(count)
    answers = features @ torch.linspace(-1, 1, FEATURES) + 4.0 + 3 * torch.randn(count, generator=rng)
    head = fit_least_squares(summarize_features(features, answers, 1, "least-squares"), count)
    double, y = features.double().numpy(), answers.double().numpy()
    scale = count * float(np.cov(double.T, bias=True).trace()) / FEATURES
    centered = double - double.mean(0)
    hats = {
        ridge: centered @ np.linalg.solve(centered.T @ centered + ridge * np.eye(FEATURES), centered.T)
        for ridge in scale * np.logspace(-5, 3, 81)
    }
    scores = {
        ridge: np.square(y - y.mean() - hat @ (y - y.mean())).mean() / (1 - (1 + hat.trace()) / count) ** 2
        for ridge, hat in hats.items()
    }
    theirs = Ridge(alpha=min(scores, key=lambda ridge: scores[ridge])).fit(double, y)
    np.testing.assert_allclose(head.weight.numpy()[0], theirs.coef_, rtol=1e-4, atol=1e-5)
    assert float((features @ head.weight.T + head.bias).mean()) == pytest.approx(y.mean(), rel=1e-5)


def test_without_a_bias_outputs_at_the_mean_are_those_with_one() -> None:
    features, labels = examples()
    statistics = summarize_features(features, labels, CLASSES, "lda")
    with_bias, without = (solve_head("lda", statistics, 60, bias=bias) for bias in (True, False))
    g = features.mean(0)
    torch.testing.assert_close(without.weight @ g, with_bias.weight @ g + with_bias.bias, rtol=1e-4, atol=1e-4)
    assert not without.bias.any()


@pytest.mark.parametrize(("count", "noise"), [(30, 0.1), (80, 10.0), (300, 0.1), (300, 10.0)])
def test_the_ridge_is_near_the_best_for_other_examples(count: int, noise: float) -> None:
    rng = torch.Generator().manual_seed(0)
    features = torch.randn(count + 5000, 40, generator=rng, dtype=torch.float64) * torch.logspace(-1, 1, 40)
    answers = features @ torch.randn(40, generator=rng, dtype=torch.float64)
    answers += noise * torch.randn(len(answers), generator=rng, dtype=torch.float64)
    X, y = (part[:count] - part[:count].mean(0) for part in (features, answers))
    chosen = choose_ridge(X.T @ X / count, (y @ X / count)[None], y.square().mean(), count)

    def measure(ridge: float) -> float:
        theirs = Ridge(alpha=count * ridge).fit(features[:count], answers[:count])
        return float(np.square(theirs.predict(features[count:]) - answers[count:].numpy()).mean())

    unit = float(X.square().mean())
    assert measure(chosen) < 1.1 * min(measure(unit * factor) for factor in np.logspace(-3, 3, 25))
    assert (
        choose_ridge(unit * torch.eye(40).double(), torch.zeros(1, 40).double(), y.square().mean(), count) > 100 * unit
    )


def test_rescaled_statistics_are_those_of_longer_features() -> None:
    features, labels = examples()
    scaled = summarize_features(features / 4.0, labels, CLASSES, "lda").rescale(4.0)
    whole = summarize_features(features, labels, CLASSES, "lda")
    for name, value in whole.to_tensors().items():
        torch.testing.assert_close(scaled.to_tensors()[name], value, rtol=1e-6, atol=1e-9)
