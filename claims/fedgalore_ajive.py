"""FedGaLore's Figure 5: the second moment that clients share, by averaging, by average and SVD, and by AJIVE.

``python claims/fedgalore_ajive.py`` takes some minutes. The data are
``planted_views.draw_second_moments``, AJIVE is ``fedspan.core.alignment.compute_ajive``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import report
import torch
from matplotlib.figure import Figure
from planted_views import draw_second_moments
from torch import Tensor

from fedspan.core.alignment import compute_ajive
from fedspan.experiments.intervals import Within, compare_pairs

RANK, SQUARED = 5, 15  # of G*, and of its square: 5 * 6 / 2
WIDE = 28  # of the square of a matrix of rank 5 + 2, the clients' gradient without its noise: 7 * 8 / 2
AVERAGE, ORACLE = "average", "average less its bias"
PAPER = (
    "Rethinking LoRA for Data Heterogeneous Federated Learning: Subspace and State Alignment (arXiv:2602.01746), "
    "appendix F and Figure 5"
)
READINGS = {
    "the column means lost (J_k alone, as in algorithm 5)": {"means": False},
    "no centring": {"center": False},
    f"no centring, {WIDE} directions of each view": {"center": False, "view_rank": WIDE},
    f"{2 * WIDE} directions of each view": {"view_rank": 2 * WIDE},
}


def compute_joint(
    views: Sequence[Tensor], rank: int, view_rank: int = 0, center: bool = True, means: bool = True
) -> Tensor:
    """The mean over clients of J_k, with the column means that AJIVE took off by default."""
    decomposition = compute_ajive(views, rank, view_rank or rank, center=center)
    parts = [
        decomposition.compute_joint(number) + (mean if means else 0.0)
        for number, mean in enumerate(decomposition.means)
    ]
    return torch.stack(parts).mean(0)


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
    return f"{verdict.mean:+.2f} ± {verdict.error:.2f}"


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
        falls.append(report.Finding(text, f"error {5 - perfect.mean:.2f} ± {perfect.error:.2f} %", perfect.verdict))
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
            cells = (f"{format_points(lead)}, {lead.verdict}" for lead in leads)
            compared.append([f"{format_ajive_name(*ranks)}, below {other}", *cells])
    header = [f"{k} clients" for k in clients]
    return [
        "Error, % of the norm of V*, mean over seeds:",
        report.format_table(("estimate", *header), rows),
        "How far AJIVE's error lies below, in points (negative: above), and the verdict by the same rule:",
        report.format_table(("comparison", *header), compared),
    ]


def tabulate_readings(seeds: Sequence[int], count: int, size: int, drift: float, noise: float, errors: Errors) -> str:
    """AJIVE read in other ways, in the main setting."""
    rows: list[list[object]] = []
    drawn = [draw_second_moments(size, count, drift, noise, seed, RANK) for seed in seeds]
    for name, options in READINGS.items():
        reading_errors = [compute_error(compute_joint(views, SQUARED, **options), target) for target, views in drawn]
        others = [errors[other, count] for other in (AVERAGE, format_svd_name(SQUARED))]
        leads = [compare_pairs(other, reading_errors) for other in others]
        rows.append(
            [
                name,
                f"{sum(reading_errors) / len(reading_errors):.2f}",
                *(f"{format_points(one)}, {one.verdict}" for one in leads),
            ]
        )
    return report.format_table((f"AJIVE, rank {SQUARED}", "error, %", "below average", "below average + SVD"), rows)


def tabulate_settings(seeds: Sequence[int], count: int, settings: Sequence[tuple[int, float, float]]) -> str:
    """The comparisons of joint rank 15 under other sizes, drifts and noises."""
    rows: list[list[object]] = []
    for size, drift, noise in settings:
        errors = measure_errors(seeds, [count], size, drift, noise, [EQUAL, WIDER])
        names = (AVERAGE, format_svd_name(SQUARED), format_ajive_name(*EQUAL), format_ajive_name(*WIDER))
        means = [f"{sum(errors[name, count]) / len(seeds):.2f}" for name in names]
        leads = [compute_advantage(errors, ours, worse, count) for ours in names[2:] for worse in names[:2]]
        rows.append([size, drift, noise, *means, *(f"{format_points(lead)}, {lead.verdict}" for lead in leads)])
    ours = [f"{SQUARED} of {rank} below {other}" for _, rank in (EQUAL, WIDER) for other in (AVERAGE, "SVD")]
    header = ("size", "drift", "noise", AVERAGE, "SVD", *(f"AJIVE {SQUARED} of {r}" for _, r in (EQUAL, WIDER)), *ours)
    return report.format_table(header, rows)


def describe_setting(args: argparse.Namespace, minutes: float) -> str:
    """What was run, what the paper leaves open, and why it comes out so."""
    return f"""## Setting

G* of rank {RANK}, L_k of rank 2 (products of Gaussian factors), Gaussian noise; V* = (G*)^2, V_k = (G* + L_k + noise)^2
by entries, equal weights. N = M = {args.size}; entries have variance 1 in G*, {args.drift}^2 in L_k and
{args.noise}^2 in the noise; {len(args.seeds)} seeds draw all of them. {minutes:.1f} minutes of one core in all. The
paper gives the two ranks; sizes, drift, noise and the numbers of clients are open. So are:

- **What AJIVE returns**: the mean over clients of J_k, plus the column means that centring took off, as in the
  library's `fedgalore`. No identifiability check.
- **Directions of each view**: the paper names one rank, the joint one. AJIVE also has to be told how much of each view
  is signal. *Rank {SQUARED} of {SQUARED}* keeps as many directions as are joint (the default of `fedgalore`),
  *{SQUARED} of {WIDE}* as many as the square of G* + L_k has (`view_rank` of `fedgalore`).
- **Error**: relative to the norm of V*; the paper's is not. Within a seed that changes no order.

*Average less its bias* is no method: L_k and the noise are independent of G* and have mean 0, so
`E V_k = V* + drift^2 + noise^2` in every entry, and this subtracts that number.

## Why

Up to the column means, J_k = U U^T V_k, so the mean of the J_k is U U^T times the average: AJIVE chooses a left space,
and within it what comes out *is* the average. The bias is the same number in all entries of all clients, so consensus
cannot tell it from V*: it comes back with the column means. V* has rank at most r (r + 1) / 2 = {SQUARED}, as the
paper says; with smaller ranks the cut dominates.

What consensus can do is choose among the clients' directions. With as many directions of each view as are joint, each
client has dropped its weaker ones before anything was compared or averaged, while average + SVD averages first. With
more of them AJIVE does choose better, most with few clients; the lead shrinks as the average itself gets better."""


def main() -> None:
    """Figure, other readings, other settings, page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=report.FOLDER)
    parser.add_argument("--size", type=int, default=100)
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 5, 10, 20, 50, 100])
    parser.add_argument("--drift", type=float, default=0.5)
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--drifts", type=float, nargs="+", default=[0.1, 0.25, 1.0], help="of the other settings")
    parser.add_argument("--noises", type=float, nargs="+", default=[0.1, 0.5], help="of the other settings")
    parser.add_argument("--sizes", type=int, nargs="+", default=[40, 200], help="of the other settings")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.process_time()
    most = max(args.clients)
    errors = measure_errors(args.seeds, args.clients, args.size, args.drift, args.noise, [LOW, EQUAL, WIDER])
    other_readings = tabulate_readings(args.seeds, most, args.size, args.drift, args.noise, errors)
    settings = [(size, args.drift, args.noise) for size in args.sizes]
    settings += [(args.size, drift, noise) for drift in args.drifts for noise in args.noises]
    other_settings = tabulate_settings(args.seeds, most, settings)
    figure = report.save_figure(draw(errors, args.clients), args.out, "fedgalore_ajive", "error by number of clients")
    minutes = (time.process_time() - start) / 60
    sections = [
        *tabulate_clients(errors, args.clients),
        figure,
        describe_setting(args, minutes),
        f"## Other readings of AJIVE\n\n{most} clients, points of error as above:",
        other_readings,
        f"## Other sizes, drifts and noises\n\n{most} clients, joint rank {SQUARED}, error in % and points:",
        other_settings,
    ]
    title = "FedGaLore: AJIVE of second moments under drift"
    report.write(args.out, "fedgalore_ajive", title, PAPER, build_findings(errors, args.clients), sections)


if __name__ == "__main__":
    main()
