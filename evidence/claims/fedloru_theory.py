"""FedLoRU's Proposition 3.1 and Theorems 3.2 and 3.3 on synthetic spectra. Takes a minute.

A true Hessian of few non-zero eigenvalues, a server's and a client's with symmetric noise on it, s_N X and s_M X, as in
the paper's equation (1). Letters: R dimension, s scale of the noise (larger for fewer examples), sigma = 1.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from evidence.claims import report
from fedspan.core.tensors import create_generator
from fedspan.experiments.intervals import Verdict, Within, compare_pairs, compare_to

SPECTRA: Mapping[str, tuple[float, ...]] = {
    "10, 6, 3, 1.5": (10.0, 6.0, 3.0, 1.5),
    "5, 2, 1, -1.5, -4": (5.0, 2.0, 1.0, -1.5, -4.0),
}
HIDDEN = (0.4,)
"""Below the client's noise."""
SERVER, CLIENTS = 0.2, (0.3, 0.5, 0.8)
TOLERANCE = 0.02


@dataclass(frozen=True)
class Noisy:
    """A Hessian with noise.

    Args:
        values: Eigenvalues (R,), largest magnitude first.
        vectors: Eigenvectors (R, R), columns in that order.
    """

    values: Tensor
    vectors: Tensor

    @property
    def stable_rank(self) -> float:
        return float((self.values**2).sum() / self.values[0] ** 2)


@cache
def draw_noisy(theta: tuple[float, ...], scale: float, size: int, seed: int, who: str) -> Noisy:
    """diag(theta, 0, ...) + scale * X, X symmetric with entries of variance 1 / R."""
    draw = create_generator(seed, "noise", who, scale)
    upper = torch.randn(size, size, generator=draw, dtype=torch.float64).triu()
    noise = (upper + upper.triu(1).T) / size**0.5
    true = torch.zeros(size, dtype=torch.float64)
    true[: len(theta)] = torch.tensor(theta, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(torch.diag(true) + scale * noise)
    order = values.abs().argsort(descending=True)
    return Noisy(values[order], vectors[:, order])


def compute_outlier(theta: float, scale: float) -> float:
    """The paper's g^-1: where an eigenvalue of the true Hessian goes."""
    return theta + scale**2 / theta


def estimate(theta: Sequence[float], scale: float, size: int) -> float:
    """Equation (35): the limiting stable rank, with all of the bulk at its edges."""
    apart = [compute_outlier(value, scale) for value in theta if abs(value) > scale]
    top = max((abs(value) for value in apart), default=2 * scale)
    return (sum(value**2 for value in apart) + (size - len(apart)) * (2 * scale) ** 2) / top**2


def bound(theta: Sequence[float], client: float, server: float, size: int) -> float:
    """Equation (4): by how much the client's stable rank exceeds the server's, at least."""
    apart = [value for value in theta if abs(value) > server]
    top = max(theta, key=abs)
    inner = sum(8 * client * server * abs(top / value - value / top) for value in apart)
    inner += 4 * (size - len(apart)) * (top**2 - (client * server / top) ** 2)
    return (client**2 - server**2) / (compute_outlier(top, client) * compute_outlier(top, server)) ** 2 * inner


def compute_gaps(theta: tuple[float, ...], client: float, size: int, seeds: Sequence[int]) -> list[float]:
    """By how much a client's stable rank exceeds the server's, for each seed."""
    return [
        draw_noisy(theta, client, size, seed, "client 0").stable_rank
        - draw_noisy(theta, SERVER, size, seed, "server").stable_rank
        for seed in seeds
    ]


def compute_alignment(
    clients: Sequence[Noisy], derivatives: Sequence[Tensor], rank: int, signs: Sequence[Tensor]
) -> float:
    """Mean cosine between clients' gradients, cut to the leading eigenvectors.

    Args:
        clients: Hessians of the clients.
        derivatives: Derivatives of each Hessian along its eigenvectors (R,).
        rank: Number of eigenvectors that are retained.
        signs: Signs of each client's eigenvectors (R,).
    """
    cut = [
        (one.vectors[:, :rank] * (slope * sign)[:rank]).sum(1)
        for one, slope, sign in zip(clients, derivatives, signs, strict=True)
    ]
    pairs = list(combinations(cut, 2))
    return float(sum(torch.nn.functional.cosine_similarity(one, other, dim=0) for one, other in pairs) / len(pairs))


def compute_alignments(
    theta: tuple[float, ...], scale: float, size: int, seed: int, count: int, most: int, spread: float
) -> list[float]:
    """Alignment by rank, 1 to ``most``.

    The derivative along every eigenvector is 1, as the paper assumes of its expectation; with a ``spread`` its mean
    along the first is 0.2 and it varies between clients by so much. Outliers' eigenvectors point as the true ones.
    """
    clients = [draw_noisy(theta, scale, size, seed, f"client {number}") for number in range(count)]
    slopes, signs = [], []
    for number, one in enumerate(clients):
        slope = torch.ones(size, dtype=torch.float64)
        if spread:
            draw = torch.randn((), generator=create_generator(seed, "slope", number), dtype=torch.float64)
            slope[0] = 0.2 + spread * draw
        sign = torch.ones(size, dtype=torch.float64)
        by_size = sorted(range(len(theta)), key=lambda index: -abs(theta[index]))
        for position, index in enumerate(by_size):
            sign[position] = 1.0 if one.vectors[index, position] >= 0 else -1.0
        slopes.append(slope)
        signs.append(sign)
    return [compute_alignment(clients, slopes, rank, signs) for rank in range(1, most + 1)]


def select_worst(verdicts: Sequence[Within]) -> Verdict:
    """Of several steps that a theorem says all hold."""
    if any(one.verdict == "contradicted" for one in verdicts):
        return "contradicted"
    return "holds" if all(one.verdict == "holds" for one in verdicts) else "inconclusive"


def check_eigenvalues(size: int, seeds: Sequence[int]) -> list[report.Finding]:
    """Proposition 3.1 and equation (5)."""
    findings: list[report.Finding] = []
    client = CLIENTS[-1]

    def add(text: str, ratios: Sequence[float]) -> None:
        one = compare_to(ratios, 1.0, TOLERANCE)
        findings.append(report.Finding(text, f"{one.mean:.4f} ± {one.half_width:.4f} of it", one.verdict))

    for name, theta in SPECTRA.items():
        by_size = sorted(theta, key=abs, reverse=True)
        ratios, overlaps = [], []
        for seed in seeds:
            one = draw_noisy(theta, client, size, seed, "client 0")
            ratios.append(
                sum(float(one.values[index]) / compute_outlier(v, client) for index, v in enumerate(by_size))
                / len(theta)
            )
            inner = [float(one.vectors[theta.index(v), index]) ** 2 for index, v in enumerate(by_size)]
            overlaps.append(sum(x - (1 - (client / v) ** 2) for x, v in zip(inner, by_size, strict=True)) / len(theta))
        text = f"Proposition 3.1: eigenvalues above sigma s go to g^-1(theta) (within {TOLERANCE:.0%}); theta = {name}"
        add(text, ratios)
        off = compare_to(overlaps, 0.0, TOLERANCE)
        text = f"Equation (5): squared cosines go to 1 - sigma^2 s^2 / theta^2 (within {TOLERANCE}); theta = {name}"
        findings.append(report.Finding(text, f"{off.mean:+.4f} ± {off.half_width:.4f} off", off.verdict))
    tops = [float(draw_noisy(HIDDEN, client, size, seed, "client 0").values[0].abs()) for seed in seeds]
    target = compute_outlier(HIDDEN[0], client)
    text = f"Proposition 3.1 as stated: theta = {HIDDEN[0]} goes to g^-1(theta), as that is above U"
    add(text, [top / target for top in tops])
    text = f"The same with theta > sigma s as the condition: theta = {HIDDEN[0]} goes to the edge U"
    add(text, [top / (2 * client) for top in tops])
    theta = next(iter(SPECTRA.values()))
    drawn = [draw_noisy(theta, client, size, seed, "client 0") for seed in seeds]
    text = "Proposition 3.1: all other eigenvalues go to the edges (read as: their mean square to U^2)"
    add(text, [float((one.values[len(theta) :] ** 2).mean()) / (2 * client) ** 2 for one in drawn])
    limit = estimate(theta, client, size)
    add("Equation (35) gives the stable rank", [one.stable_rank / limit for one in drawn])
    return findings


def check_ranks(size: int, seeds: Sequence[int]) -> list[report.Finding]:
    """Theorem 3.2."""
    findings: list[report.Finding] = []
    few, many = CLIENTS[-1], CLIENTS[0]
    for name, theta in SPECTRA.items():
        gap = compute_gaps(theta, few, size, seeds)
        one = compare_pairs(gap, [0.0] * len(gap))
        text = f"Theorem 3.2: the client's stable rank is above the server's; theta = {name}"
        findings.append(report.Finding(text, f"by {one.mean:+.2f} ± {one.half_width:.2f}", one.verdict))
        least = bound(theta, few, SERVER, size)
        one = compare_pairs(gap, [least] * len(gap))
        text = f"Theorem 3.2: ... by at least equation (4); theta = {name}"
        findings.append(report.Finding(text, f"{sum(gap) / len(gap):.2f}, where (4) says {least:.2f}", one.verdict))
        one = compare_pairs(gap, compute_gaps(theta, many, size, seeds))
        text = f"Theorem 3.2: ... by more where the client has fewer examples (s {few} against {many}); theta = {name}"
        findings.append(report.Finding(text, f"by {one.mean:+.2f} ± {one.half_width:.2f}", one.verdict))
    return findings


def compute_falls(curves: Sequence[Sequence[float]]) -> list[Within]:
    """How much alignment falls with each rank more, over seeds."""
    return [
        compare_pairs([curve[index] for curve in curves], [curve[index + 1] for curve in curves])
        for index in range(len(curves[0]) - 1)
    ]


def check_gradients(
    curves: Mapping[tuple[str, float], Sequence[Sequence[float]]], spread: float
) -> list[report.Finding]:
    """Theorem 3.3."""
    findings: list[report.Finding] = []
    for name in SPECTRA:
        steps = compute_falls(curves[name, 0.0])
        least = min(steps, key=lambda one: one.mean)
        text = f"Theorem 3.3: alignment falls with every rank, 1 to {len(steps) + 1}, derivatives of 1; theta = {name}"
        findings.append(
            report.Finding(text, f"at least by {least.mean:+.4f} ± {least.half_width:.4f}", select_worst(steps))
        )
        varied = curves[name, spread]
        one = compare_pairs([curve[0] for curve in varied], [curve[1] for curve in varied])
        text = (
            f"... also from 1 to 2 where the derivative along the first varies between clients (0.2 ± {spread:g}); "
            f"theta = {name}"
        )
        findings.append(report.Finding(text, f"by {one.mean:+.3f} ± {one.half_width:.3f}", one.verdict))
    return findings


def draw(curves: Mapping[tuple[str, float], Sequence[Sequence[float]]]) -> Figure:
    """Alignment by rank."""
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    for (name, spread), alignments in curves.items():
        means = [sum(values) / len(values) for values in zip(*alignments, strict=True)]
        style, label = ("--", "first varies") if spread else ("-", "all 1")
        axes.plot(range(1, len(means) + 1), means, style, marker="o", label=f"{name}; {label}")
    axes.set(xlabel="eigenvectors kept", ylabel="mean cosine between clients' gradients")
    axes.legend(fontsize="small")
    return figure


def main() -> None:
    """Findings and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=report.OUT)
    parser.add_argument("--size", type=int, default=800, help="dimension R")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--most", type=int, default=8, help="largest rank of the gradients' approximation")
    parser.add_argument("--spread", type=float, default=1.0, help="of the varying derivative")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    args = parser.parse_args()
    torch.set_num_threads(1)
    curves = {
        (name, spread): [
            compute_alignments(theta, CLIENTS[-1], args.size, seed, args.clients, args.most, spread)
            for seed in args.seeds
        ]
        for name, theta in SPECTRA.items()
        for spread in (0.0, args.spread)
    }
    results = [
        *check_eigenvalues(args.size, args.seeds),
        *check_ranks(args.size, args.seeds),
        *check_gradients(curves, args.spread),
    ]
    report.save_figure(draw(curves), args.out, "fedloru")
    report.show(results)


if __name__ == "__main__":
    main()
