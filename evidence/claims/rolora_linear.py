"""RoLoRA's theory on rank-1 linear regression: what its lemmas say, measured.

Takes a minute or two. The model is ``linear_model.py``. Shares of a step size are of 1 / ||b*||^2; delta is the sine of
the angle between a and a*; eps' and eps~ are the largest errors that occurred, in lemma 5.3's units, whose premise is
that both are below (1 - (delta^0)^2) / 16.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from evidence.claims import report
from evidence.claims.linear_model import (
    LinearFederation,
    compute_angle_distance,
    compute_ffa_loss,
    compute_ffa_solution,
    compute_gradient_a,
    create_population,
    from_samples,
    losses,
    minimize_b,
    run_fedit_round,
    run_rolora_round,
)
from fedspan.core.tensors import create_generator
from fedspan.experiments.intervals import Verdict

D, CLIENTS, DELTA = 20, 5, 0.9
TARGET = 1e-6
SHARES = (0.1, 0.25, 0.5, 1.0)


def draw_gaussian(seed: int, purpose: str, *shape: int) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(shape, generator=create_generator(seed, purpose, *shape), dtype=torch.float64)


def start(seed: int, delta: float) -> tuple[Tensor, Tensor]:
    """(a*, a0), unit vectors at a given angle distance."""
    a_star = draw_gaussian(seed, "a*", D)
    a_star = a_star / a_star.norm()
    across = draw_gaussian(seed, "a0", D)
    across = across - a_star * (a_star @ across)
    return a_star, math.sqrt(1 - delta**2) * a_star + delta * across / across.norm()


def create_homogeneous(seed: int, samples: int) -> tuple[LinearFederation, Tensor]:
    """Clients with one target, and a0."""
    a_star, a = start(seed, DELTA)
    b_star = draw_gaussian(seed, "b*", 1, D).expand(CLIENTS, -1)
    return from_samples(draw_gaussian(seed, "X", CLIENTS, samples, D), a_star, b_star), a


def create_heterogeneous(seed: int) -> tuple[LinearFederation, Tensor]:
    """Clients with targets b_i* of their own and infinitely many samples, and a0."""
    a_star, a = start(seed, DELTA)
    b_star = draw_gaussian(seed, "b*", 1, D) + draw_gaussian(seed, "b_i*", CLIENTS, D)
    return create_population(a_star, b_star), a


@dataclass(frozen=True)
class Trajectory:
    """Angle distances before every iteration and after the last, and the worst errors that the lemma bounds.

    Args:
        deltas: The values delta^0, delta^1, ...
        b_error: The largest ``||b - g|| / (delta ||b*||)``, the lemma's epsilon'.
        a_error: The largest ``||gradient - its mean|| / (2 (1 + b_error)^2 delta ||b*||^2)``, its epsilon tilde.
    """

    deltas: tuple[float, ...]
    b_error: float
    a_error: float

    def worst(self, bound: float) -> float:
        """The largest ratio of successive distances, as a multiple of a bound on it."""
        return max(after / before for before, after in itertools.pairwise(self.deltas)) / bound

    def reached(self, target: float) -> int | None:
        """Iterations until the distance is at most ``target``."""
        return next((number for number, delta in enumerate(self.deltas) if delta <= target), None)


def descend(problem: LinearFederation, a: Tensor, eta: float, iterations: int) -> Trajectory:
    """Algorithm 2 until float64 has no digits left in the distance."""
    b_star = problem.b_NP.mean(0)
    size, deltas, b_error, a_error = float(b_star.norm()), [compute_angle_distance(a, problem.a_D)], 0.0, 0.0
    for _ in range(iterations):
        delta = deltas[-1]
        if delta < 1e-9:
            break
        b = minimize_b(problem, a).mean(0)
        b_error = max(b_error, float((b - b_star * (a @ problem.a_D)).norm()) / (delta * size))
        mean = 2 * (a * (b @ b) - problem.a_D * (b_star @ b))
        noise = float((compute_gradient_a(problem, a, b).mean(0) - mean).norm())
        a_error = max(a_error, noise / (2 * (1 + b_error) ** 2 * delta * size**2))
        a, _ = run_rolora_round(problem, a, eta)
        deltas.append(compute_angle_distance(a, problem.a_D))
    return Trajectory(tuple(deltas), b_error, a_error)


def check_contraction(seeds: Sequence[int], sizes: Sequence[int]) -> tuple[report.Finding, str]:
    """Lemma 5.3 and Theorem 5.4 on samples."""
    limit = (1 - DELTA**2) / 16
    rows: list[list[object]] = []
    proven: list[bool] = []
    for samples in sizes:
        problems = [create_homogeneous(seed, samples) for seed in seeds]
        for share in SHARES:
            needed = math.ceil(2 / (share * (1 - DELTA**2)) * math.log(DELTA / TARGET))
            paths = [
                descend(problem, a, share / float(problem.b_NP[0].square().sum()), needed) for problem, a in problems
            ]
            bound = math.sqrt(1 - share * (1 - DELTA**2))
            worst = max(path.worst(bound) for path in paths)
            b_error, a_error = max(path.b_error for path in paths), max(path.a_error for path in paths)
            premise = max(b_error, a_error) < limit
            if premise and share <= 0.5:
                proven.append(worst <= 1)
            reached = [path.reached(TARGET) for path in paths]
            slowest = "not reached" if None in reached else max(one for one in reached if one is not None)
            marks = "yes" if premise else "no"
            errors = f"{b_error:.3f}, {a_error:.3f}"
            rows.append([samples, share, errors, marks, f"{worst:.3f}", slowest, needed])
    verdict: Verdict = "inconclusive" if not proven else "holds" if all(proven) else "contradicted"
    clean = f"bound kept in {sum(proven)} of {len(proven)} settings that meet the premise"
    finding = report.Finding(
        "Lemma 5.3: delta contracts by its factor, step size up to 1 / (2 \\|b*\\|^2)", clean, verdict
    )
    header = (
        "m",
        "eta \\|b*\\|^2",
        "eps', eps~",
        f"below {limit:.4f}",
        "worst ratio / bound",
        "iterations",
        "theorem's T",
    )
    return finding, report.format_table(header, rows)


def check_largest_step() -> tuple[report.Finding, report.Finding]:
    """Lemma 5.3 at eta = 1 / ||b*||^2, which it allows, with infinitely many samples: both errors are 0."""
    delta0 = 0.5
    findings: dict[float, float] = {}
    for share in (0.5, 1.0):
        a_star, a = start(0, delta0)
        b_star = draw_gaussian(0, "b*", 1, D)
        problem, eta = create_population(a_star, b_star), share / float(b_star.square().sum())
        deltas = descend(problem, a, eta, 50).deltas
        bound = math.sqrt(1 - share * (1 - delta0**2))
        ratios = [after / before for before, after in itertools.pairwise(deltas)]
        findings[share] = max(ratios) / bound
    broken: Verdict = "contradicted" if findings[1.0] > 1 else "holds"
    wide = report.Finding(
        "Lemma 5.3 as stated, step size up to 1 / \\|b*\\|^2",
        f"infinitely many samples, eta = 1 / \\|b*\\|^2: ratio {findings[1.0]:.2f} times the bound",
        broken,
    )
    half = report.Finding(
        "the same with eta = 1 / (2 \\|b*\\|^2)",
        f"{findings[0.5]:.2f} times the bound",
        "holds" if findings[0.5] <= 1 else "contradicted",
    )
    return wide, half


def check_frozen(draws: int) -> tuple[report.Finding, str]:
    """Proposition 5.5: the mean over data sets of FFA-LoRA's loss, on the fitted samples and on others."""
    delta, b_norm = DELTA, 1.5
    a = torch.tensor([1.0, 0.0], dtype=torch.float64)
    a_star = torch.tensor([math.sqrt(1 - delta**2), delta], dtype=torch.float64)
    rows: list[list[object]] = []
    apart: list[float] = []
    for clients in (1, 5, 20):
        for samples in (6, 10, 50):
            X = draw_gaussian(clients, "proposition 5.5", draws, clients, samples, 2)
            G = X.mT @ X / samples
            b_star = torch.full((clients, 1), b_norm, dtype=torch.float64)
            here, fresh = torch.empty(draws).double(), torch.empty(draws).double()
            for draw in range(draws):
                problem = LinearFederation(G[draw], a_star, b_star)
                b = compute_ffa_solution(problem, a)
                here[draw] = losses(problem, a, b).mean()
                fresh[draw] = (a_star * b_norm - a * b).square().sum()
            expected = compute_ffa_loss(delta, b_norm, clients, samples)
            unseen = b_norm**2 * delta**2 * (1 + 1 / (clients * (samples - 2)))
            error, fresh_error = (float(one.std()) / math.sqrt(draws) for one in (here, fresh))
            apart.append((float(here.mean()) - expected) / error)
            rows.append(
                [
                    *(clients, samples, f"{expected:.4f}", f"{float(here.mean()):.4f} ± {error:.4f}"),
                    *(f"{apart[-1]:+.1f}", f"{(float(here.mean()) - b_norm**2 * delta**2) / error:+.1f}"),
                    *(f"{unseen:.4f}", f"{float(fresh.mean()):.4f} ± {fresh_error:.4f}"),
                ]
            )
    most = max(map(abs, apart))
    finding = report.Finding(
        "Proposition 5.5: FFA-LoRA's expected loss is (1 + c) \\|b*\\|^2 (delta^0)^2",
        f"at most {most:.1f} standard errors apart in {len(apart)} settings of N and m",
        "holds" if most < 3 else "contradicted",
    )
    header = ("N", "m", "formula", "measured", "apart (s.e.)", "from c = 0 (s.e.)", "unseen data: ours", "measured")
    return finding, report.format_table(header, rows)


def check_different_targets(seeds: Sequence[int]) -> tuple[list[report.Finding], str]:
    """Theorem A.14 with Lemma A.16, and Proposition A.17, in the population."""
    rows: list[list[object]] = []
    kept, in_time, excess, exact = [], [], [], []
    for share in (0.1, 0.25, 0.5):
        worst, slowest, beyond = 0.0, 0, 0.0
        needed = math.ceil(1 / (2 * share * (1 - DELTA**2)) * math.log(DELTA / TARGET))
        for seed in seeds:
            problem, a = create_heterogeneous(seed)
            mean_b = problem.b_NP.mean(0)
            size = float(mean_b.square().sum())
            variance = float((problem.b_NP - mean_b).square().sum(1).mean())
            path = descend(problem, a, share / size, needed)
            worst = max(worst, path.worst(1 - 2 * share * (1 - DELTA**2)))
            reached = path.reached(TARGET)
            slowest = max(slowest, needed + 1 if reached is None else reached)
            last = a
            for _ in range(needed if reached is None else reached):
                last, _ = run_rolora_round(problem, last, share / size)
            loss = float(losses(problem, last, compute_ffa_solution(problem, last)).mean())
            beyond = max(beyond, (loss - variance) / size)
            frozen_loss = float(losses(problem, a, compute_ffa_solution(problem, a)).mean())
            exact.append(abs(frozen_loss - variance - size * DELTA**2) / frozen_loss)
        kept.append(worst <= 1 + 1e-9)
        in_time.append(slowest <= needed)
        excess.append(beyond <= TARGET**2 + 1e-12)
        rows.append([share, f"{worst:.3f}", slowest, needed, f"{beyond:.1e}"])
    findings = [
        report.Finding(
            "Theorem A.14, Lemma A.16: different targets, step size up to 1 / (2 \\|mean b*\\|^2)",
            f"bound kept and {TARGET:g} reached in T iterations in {sum(map(min, kept, in_time, excess))} of "
            f"{len(kept)} settings",
            "holds" if all([*kept, *in_time, *excess]) else "contradicted",
        ),
        report.Finding(
            "Proposition A.17: FFA-LoRA's loss is gamma^2 + \\|mean b*\\|^2 (delta^0)^2",
            f"relative difference at most {max(exact):.0e}",
            "holds" if max(exact) < 1e-12 else "contradicted",
        ),
    ]
    header = (
        "eta \\|mean b*\\|^2",
        "worst ratio / bound",
        "iterations",
        "theorem's T",
        "excess loss / \\|mean b*\\|^2",
    )
    return findings, report.format_table(header, rows)


def draw_curves(seed: int, iterations: int) -> tuple[Figure, str]:
    """Loss by communication round of the three methods, on samples and in the population."""
    figure = Figure(figsize=(8, 3))
    rows: list[list[str]] = []
    same, other = create_homogeneous(seed, 100), create_heterogeneous(seed)
    cases = {"one target, m = 100": same, "different targets, population": other}
    for axes, (name, (problem, first)) in zip(figure.subplots(1, 2), cases.items(), strict=True):
        mean_b = problem.b_NP.mean(0)
        floor = float((problem.b_NP - mean_b).square().sum(1).mean()) if problem is other[0] else 0.0
        eta = 0.25 / float(mean_b.square().sum())
        steps: dict[str, Callable[[Tensor], Tensor]] = {
            "RoLoRA": lambda a, p=problem, e=eta: run_rolora_round(p, a, e)[0],
            "FFA-LoRA": lambda a: a,
        }
        curves: dict[str, list[float]] = {}
        for method, step in steps.items():
            a, values = first, list[float]()
            for _ in range(iterations // 2):  # one iteration of Algorithm 2 is two communication rounds
                values += [float(losses(problem, a, compute_ffa_solution(problem, a)).mean())] * 2
                a = step(a)
            curves[method] = values
        a, values = first, list[float]()
        for _ in range(iterations):
            a, b = run_fedit_round(problem, a, eta)
            values.append(float(losses(problem, a, b).mean()))
        curves["LoRA"] = values
        for method, values in curves.items():
            axes.semilogy(range(1, iterations + 1), [max(value - floor, 1e-16) for value in values], label=method)
            rows.append([name, method, f"{values[-1] - floor:.1e}"])
        axes.set(title=name, xlabel="communication round")
    figure.axes[0].set_ylabel("loss above the least")
    figure.axes[0].legend()
    return figure, report.format_table(("case", "method", f"loss above the least after {iterations} rounds"), rows)


def main() -> None:
    """Check everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=report.OUT)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--samples", type=int, nargs="+", default=[25, 400, 160_000])
    parser.add_argument("--draws", type=int, default=20_000, help="data sets of each row of proposition 5.5")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(args.seeds)
    lemma, lemma_table = check_contraction(seeds, args.samples)
    proposition, proposition_table = check_frozen(args.draws)
    others, others_table = check_different_targets(seeds)
    figure, ends = draw_curves(0, 200)
    report.save_figure(figure, args.out, "rolora")
    findings = [lemma, *check_largest_step(), proposition, *others]
    report.show(findings, [lemma_table, proposition_table, others_table, ends])


if __name__ == "__main__":
    main()
