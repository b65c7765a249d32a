"""FLoRG's theorem 2: its constant, the steps of its proof, and whether the gradient vanishes. Takes a minute.

Algorithm 1 with f_n(W) = ||W - W*_n||^2 / 2, one exact gradient step a client and round. L and R are square and
orthogonal; with H = A^T A - L^T W* R^T they drop out, so both are the identity here.
"""

import argparse
from functools import cache

import torch

from evidence.claims import report
from fedspan.core.alignment import compute_gram_factor, solve_procrustes
from fedspan.core.tensors import create_generator
from fedspan.experiments.intervals import Within, compare_pairs, compare_to

SIZE, RANK, CLIENTS = 16, 4, 4
STEP = 0.5  # divided by the root of the number of rounds
COLUMNS = ("Omega / eta", "squared gradient", "covariance", "Jensen")


@cache
def run(seed: int, rank: int, rounds: int, drift: float, *, positive: bool = False) -> torch.Tensor:
    """The ``COLUMNS`` of every round, (rounds, 4).

    The covariance of the clients' factors is relative to the step of the Gram matrix; the last column is the mean
    gradient's squared norm over (17c)'s bound. ``positive``: W* = half^T half, of rank ``RANK``.
    """
    draw, step = create_generator(seed, "gram"), STEP / rounds**0.5

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64) / SIZE**0.5

    half, target, own, A = normal(RANK, SIZE), normal(SIZE, SIZE), normal(CLIENTS, SIZE, SIZE), normal(rank, SIZE)
    target, own = half.T @ half if positive else target, drift * (own - own.mean(0))
    rows: list[list[float]] = []
    for _ in range(rounds):
        H = A.T @ A - target - own
        gradients = A @ (H + H.mT)
        replies = A - step * gradients
        gram, mean = (replies.mT @ replies).mean(0), replies.mean(0)
        omega = 4 * float(torch.linalg.eigvalsh(A.T @ A)[0]) - step / 2 - 0.5
        covariance = (gram - mean.T @ mean).norm() / (gram - A.T @ A).norm()
        bound = gradients.square().sum() / CLIENTS**2
        rows.append(
            [omega, *map(float, (H.mean(0).square().sum(), covariance, gradients.mean(0).square().sum() / bound))]
        )
        factor = compute_gram_factor(torch.cat(list(replies)) / CLIENTS**0.5)[:rank]
        A = solve_procrustes(factor, A) @ factor
    return torch.tensor(rows, dtype=torch.float64)


def measure_lemma(seed: int) -> float:
    """Lemma 1's inner product over its bound, for a Gaussian H and A^T A = I."""
    H = torch.randn(SIZE, SIZE, generator=create_generator(seed, "lemma"), dtype=torch.float64)
    return float((H * 2 * (H + H.T)).sum() / (4 * H.square().sum()))


def show(one: Within) -> str:
    return f"{one.mean:.3f} ± {one.half_width:.3f}"


def main() -> None:
    """Findings, and the gradient by the number of rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--rounds", type=int, nargs="+", default=[10, 100, 1000])
    args = parser.parse_args()
    seeds, rounds = args.seeds, args.rounds
    torch.set_num_threads(1)
    findings: list[report.Finding] = []
    for rank in (RANK, SIZE):
        omega = max(float(run(seed, rank, rounds[-1], 0.0)[:, 0].max()) for seed in seeds)
        text = f"Theorem 2: Omega > 0 for some step size; A is {rank} x {SIZE}"
        verdict = "holds" if omega > 0 else "contradicted"
        findings.append(report.Finding(text, f"largest Omega / eta of all rounds: {omega:.3f}", verdict))
    one = compare_pairs([measure_lemma(seed) for seed in seeds], [1.0] * len(seeds))
    findings.append(
        report.Finding("Lemma 1", f"{1 + one.mean:.3f} ± {one.half_width:.3f} times its bound", one.verdict)
    )
    drifted = [run(seed, RANK, rounds[1], 1.0).mean(0) for seed in seeds]
    one = compare_to([float(row[2]) for row in drifted], 0.0, 0.01)
    findings.append(
        report.Finding("(15): no covariance of the clients' factors", f"{show(one)} of the step", one.verdict)
    )
    for drift, runs in ((0.0, [run(seed, RANK, rounds[1], 0.0).mean(0) for seed in seeds]), (1.0, drifted)):
        one = compare_pairs([1.0] * len(seeds), [float(row[3]) for row in runs])
        text = f"(17c): the mean gradient is within its bound, drift {drift:g}"
        findings.append(report.Finding(text, f"{1 - one.mean:.2f} ± {one.half_width:.2f} times the bound", one.verdict))
    rows: list[list[str]] = []
    for name, positive in (("positive semidefinite, of rank r", True), ("Gaussian", False)):
        shares: list[Within] = []
        for count in rounds:
            norms = [run(seed, RANK, count, 0.0, positive=positive)[:, 1] for seed in seeds]
            shares.append(compare_to([float(one.mean() / one[0]) for one in norms], 0.0, 0.05))
        text = f"Theorem 2: the mean squared gradient vanishes (below 5 % of the first, {rounds[-1]} rounds); W* {name}"
        findings.append(report.Finding(text, f"{show(shares[-1])} of the first", shares[-1].verdict))
        rows.append([name, *map(show, shares)])
    header = ("W*", *(f"{count} rounds" for count in rounds))
    report.show(findings, [report.format_table(header, rows)])


if __name__ == "__main__":
    main()
