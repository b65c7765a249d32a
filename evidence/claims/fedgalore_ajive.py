"""FedGaLore's Figure 5: the second moment that clients share, by averaging, by average and SVD, and by AJIVE.

Takes some minutes. The data are ``planted_views.draw_second_moments``, AJIVE is
``fedspan.core.alignment.compute_ajive``; its result is the mean over clients of J_k, plus the column means that
centering took off, as in ``fedgalore``. The paper names one rank, the joint one. AJIVE also has to be told how much of
each view is signal: *rank 15 of 15* keeps as many directions as are joint (the default of ``fedgalore``), *15 of 28* as
many as the square of a client's gradient has (its ``view_rank``). *Average less its bias* is no method: it subtracts
the mean of what drift and noise add to every entry.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from evidence.claims import report
from evidence.claims.planted_views import draw_second_moments
from fedspan.core.alignment import compute_ajive
from fedspan.experiments.intervals import Within, compare_pairs

RANK, SQUARED = 5, 15  # of G*, and of its square: 5 * 6 / 2
WIDE = 28  # of the square of a matrix of rank 5 + 2, the clients' gradient without its noise: 7 * 8 / 2
AVERAGE, ORACLE = "average", "average less its bias"


def compute_joint(views: Sequence[Tensor], rank: int, view_rank: int) -> Tensor:
    """The mean over clients of J_k, with the column means that AJIVE took off."""
    decomposition = compute_ajive(views, rank, view_rank)
    return torch.stack([decomposition.compute_joint(k) + mean for k, mean in enumerate(decomposition.means)]).mean(0)


def cut(matrix: Tensor, rank: int) -> Tensor:
    """The nearest matrix of a rank."""
    U, S, Vt = torch.linalg.svd(matrix, full_matrices=False)
    return (U[:, :rank] * S[:rank]) @ Vt[:rank]


def format_svd_name(rank: int) -> str:
    """Of the average cut to a rank."""
    return f"average + SVD, rank {rank}"


def format_ajive_name(rank: int, view_rank: int) -> str:
    """Of AJIVE with a joint rank, from so many directions of each view."""
    return f"AJIVE, rank {rank} of {view_rank}"


LOW, EQUAL, WIDER = (RANK, RANK), (SQUARED, SQUARED), (SQUARED, WIDE)


def compute_estimates(views: Sequence[Tensor], ranks: Sequence[tuple[int, int]], bias: float) -> dict[str, Tensor]:
    """What every way of combining views makes of them; ``ranks`` are AJIVE's joint and view ranks."""
    mean = torch.stack(list(views)).mean(0)
    estimates = {AVERAGE: mean, ORACLE: mean - bias}
    for rank, view_rank in ranks:
        estimates[format_svd_name(rank)] = cut(mean, rank)
        estimates[format_ajive_name(rank, view_rank)] = compute_joint(views, rank, view_rank)
    return estimates


def compute_error(estimate: Tensor, target: Tensor) -> float:
    """The distance (Frobenius) in % of the target's norm."""
    return 100 * float((estimate - target).norm() / target.norm())


Errors = Mapping[tuple[str, int], Sequence[float]]
"""By estimate and number of clients: one error a seed."""


def measure_errors(
    seeds: Sequence[int],
    clients: Sequence[int],
    size: int,
    drift: float,
    noise: float,
    ranks: Sequence[tuple[int, int]],
) -> Errors:
    """Errors of one setting."""
    errors: dict[tuple[str, int], list[float]] = {}
    for seed in seeds:
        target, views = draw_second_moments(size, max(clients), drift, noise, seed, RANK)
        for count in clients:
            for name, estimate in compute_estimates(views[:count], ranks, drift**2 + noise**2).items():
                errors.setdefault((name, count), []).append(compute_error(estimate, target))
    return errors


def format_points(verdict: Within) -> str:
    """A difference of errors."""
    return f"{verdict.mean:+.2f} ± {verdict.half_width:.2f}"


def compute_advantage(errors: Errors, better: str, worse: str, count: int) -> Within:
    """How far the first estimate's error lies below the second's."""
    return compare_pairs(errors[worse, count], errors[better, count])


def build_findings(errors: Errors, clients: Sequence[int]) -> list[report.Finding]:
    """The paper's statements, at the largest number of clients."""
    most, least = max(clients), min(clients)
    compared = {
        f"Joint rank {RANK}: AJIVE below average + SVD of that rank": (format_ajive_name(*LOW), format_svd_name(RANK)),
        "Averaging keeps a bias: above what it is without the bias": (ORACLE, AVERAGE),
    }
    falls: list[report.Finding] = []
    for joint_rank, view_rank in (EQUAL, WIDER):
        ours = format_ajive_name(joint_rank, view_rank)
        description = f"Joint rank {joint_rank}, {view_rank} directions of each view: AJIVE"
        compared |= {
            f"{description} below averaging": (ours, AVERAGE),
            f"{description} below average + SVD of rank {joint_rank}": (ours, format_svd_name(joint_rank)),
            f"{description} below AJIVE of joint rank {RANK}, which underfits": (ours, format_ajive_name(*LOW)),
        }
        fall = compare_pairs(errors[ours, least], errors[ours, most])
        text = f"{description} recovers better as clients grow, {least} to {most}"
        falls.append(report.Finding(text, f"error falls by {format_points(fall)} points", fall.verdict))
        perfect = compare_pairs([5.0] * len(errors[ours, most]), errors[ours, most])
        text = f"{description} recovers V* nearly perfectly (read as: error below 5 %), {most} clients"
        falls.append(
            report.Finding(text, f"error {5 - perfect.mean:.2f} ± {perfect.half_width:.2f} %", perfect.verdict)
        )
    leads = {statement: compute_advantage(errors, *pair, most) for statement, pair in compared.items()}
    findings = [
        report.Finding(f"{key}, {most} clients", f"by {format_points(one)} points", one.verdict)
        for key, one in leads.items()
    ]
    return findings + falls


def draw(errors: Errors, clients: Sequence[int]) -> Figure:
    """The paper's figure: mean error by number of clients."""
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    for name in dict.fromkeys(name for name, _ in errors):
        low = name in (format_ajive_name(*LOW), format_svd_name(RANK))
        color = "tab:red" if name in (AVERAGE, ORACLE) else "tab:blue" if low else "tab:green"
        marker = "^" if name == format_ajive_name(*WIDER) else "o"
        style = {AVERAGE: "--", ORACLE: ":"}.get(name, marker if name.startswith("AJIVE") else "-")
        values = [sum(errors[name, count]) / len(errors[name, count]) for count in clients]
        axes.plot(clients, values, style, color=color, label=name)
    axes.set(xlabel="clients", ylabel="error, % of the norm of V*", ylim=(0, None))
    axes.legend(fontsize="small")
    return figure


def tabulate_clients(errors: Errors, clients: Sequence[int]) -> list[str]:
    """Errors, and the comparisons at every number of clients."""
    rows: list[list[object]] = []
    for name in dict.fromkeys(name for name, _ in errors):
        rows.append([name, *(f"{sum(errors[name, k]) / len(errors[name, k]):.2f}" for k in clients)])
    compared: list[list[object]] = []
    for ranks in (LOW, EQUAL, WIDER):
        for other in (AVERAGE, format_svd_name(ranks[0])):
            leads = [compute_advantage(errors, format_ajive_name(*ranks), other, k) for k in clients]
            cells = (f"{format_points(lead)}, {report.WORDS[lead.verdict]}" for lead in leads)
            compared.append([f"{format_ajive_name(*ranks)}, below {other}", *cells])
    header = [f"{k} clients" for k in clients]
    return [
        "Error, % of the norm of V*, mean over seeds:",
        report.format_table(("estimate", *header), rows),
        "How far AJIVE's error lies below, in points (negative: above), and the verdict by the same rule:",
        report.format_table(("comparison", *header), compared),
    ]


def main() -> None:
    """Figure and findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=report.OUT)
    parser.add_argument("--size", type=int, default=100)
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 5, 10, 20, 50, 100])
    parser.add_argument("--drift", type=float, default=0.5)
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    args = parser.parse_args()
    torch.set_num_threads(1)
    errors = measure_errors(args.seeds, args.clients, args.size, args.drift, args.noise, [LOW, EQUAL, WIDER])
    report.save_figure(draw(errors, args.clients), args.out, "fedgalore")
    report.show(build_findings(errors, args.clients), tabulate_clients(errors, args.clients))


if __name__ == "__main__":
    main()
