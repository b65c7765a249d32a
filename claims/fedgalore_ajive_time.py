"""FedGaLore's Table 7: how long AJIVE takes on a server, from dense views as in the paper and from their factors.

``python claims/fedgalore_ajive_time.py`` takes some minutes. ``benchmarks/ajive.py`` compares results with mvlearn's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import report
import torch
from matplotlib.figure import Figure
from planted_views import draw_views, time_shortest
from torch import Tensor

from fedspan.core.alignment import Ajive, compute_ajive
from fedspan.experiments.intervals import compare_pairs, compare_to, estimate_standard_error

PAPER = (
    "Rethinking LoRA for Data Heterogeneous Federated Learning: Subspace and State Alignment (arXiv:2602.01746), "
    "appendix E and Table 7"
)
# The table's CPU rows in milliseconds, by views and n.
PRINTED = {
    **{(1, 512): 6.554, (1, 768): 9.816, (1, 1024): 18.628},
    **{(2, 512): 12.233, (2, 768): 25.425, (2, 1024): 40.607},
    **{(5, 512): 31.390, (5, 768): 45.956, (5, 1024): 92.544},
    **{(10, 512): 60.522, (10, 768): 98.389, (10, 1024): 184.439},
}
NAMED = (5, 1024)  # in the paper's text
FLOPS = 1.714e7  # the table's estimate for one view of n = 1024


@dataclass(frozen=True)
class Times:
    """Milliseconds, one a seed, and the largest relative difference (Frobenius) of a joint matrix."""

    dense: tuple[float, ...]
    factored: tuple[float, ...]
    apart: float


def compute_joints(decomposition: Ajive) -> list[Tensor]:
    """J_i as the views' coordinates have it."""
    return [decomposition.compute_joint(number) for number in range(len(decomposition.views))]


def measure(size: int, views: int, rank: int, seeds: Sequence[int]) -> Times:
    """AJIVE of views under one projector: of the matrices, and of their factors."""
    dense, factored, apart = list[float](), list[float](), 0.0
    for seed in seeds:
        pairs = draw_views(size, rank, views, shared=True, seed=seed)
        matrices, small = [pair.to_dense() for pair in pairs], [pair.B for pair in pairs]
        slow, dense_decomposition = time_shortest(
            lambda given=matrices: compute_ajive(given, rank // 2, rank), 2, time.process_time
        )
        quick, decomposition = time_shortest(
            lambda given=small: compute_ajive(given, rank // 2, rank), 5, time.process_time
        )
        dense.append(1e3 * slow)
        factored.append(1e3 * quick)
        for left, right, pair in (
            zip(compute_joints(decomposition), compute_joints(dense_decomposition), pairs, strict=True)
            if views > 1
            else ()
        ):
            apart = max(apart, float((left @ pair.A - right).norm() / right.norm()))
    return Times(tuple(dense), tuple(factored), apart)


def compute_spread(values: Sequence[float]) -> str:
    """Mean and standard error."""
    return f"{sum(values) / len(values):.2f} ± {estimate_standard_error(values):.2f}"


def build_findings(times: Mapping[tuple[int, int], Times]) -> list[report.Finding]:
    """The table's statements, on this machine, for both kinds of views."""
    findings: list[report.Finding] = []
    for kind in ("dense", "factored"):
        if NAMED in times:
            values, printed = getattr(times[NAMED], kind), PRINTED[NAMED]
            lead = compare_pairs([printed] * len(values), values)
            text = f"5 views with n = 1024 take {printed:.0f} ms on a CPU (read as: at most that), {kind} views"
            findings.append(report.Finding(text, f"{compute_spread(values)} ms", lead.verdict))
        size = max(size for _, size in times)
        few, many = sorted({views for views, _ in times})[-2:]
        pairs = zip(getattr(times[many, size], kind), getattr(times[few, size], kind), strict=True)
        ratios = [one / other for one, other in pairs]
        growth = compare_to(ratios, many / few, 0.2 * many / few)
        text = (
            f"Time grows in proportion to the views (read as: within 20 %), {few} to {many}, n = {size}, {kind} views"
        )
        findings.append(report.Finding(text, f"{compute_spread(ratios)} times", growth.verdict))
    return findings


def draw(times: Mapping[tuple[int, int], Times]) -> Figure:
    """Time by number of views, at the largest n."""
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    size = max(size for _, size in times)
    views = sorted(count for count, n in times if n == size)
    for kind in ("dense", "factored"):
        values = [getattr(times[count, size], kind) for count in views]
        axes.loglog(views, [sum(one) / len(one) for one in values], "o-", label=f"{kind}, this machine")
    printed = [count for count in views if (count, size) in PRINTED]
    axes.loglog(printed, [PRINTED[count, size] for count in printed], "o:", color="gray", label="the paper, CPU")
    axes.set(xlabel="views", ylabel="ms", title=f"n = {size}")
    axes.set_xticks(views, map(str, views))
    axes.legend()
    return figure


def main() -> None:
    """The table, the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=report.FOLDER)
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 768, 1024])
    parser.add_argument("--views", type=int, nargs="+", default=[1, 2, 5, 10])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    times: dict[tuple[int, int], Times] = {}
    rows: list[list[object]] = []
    for size in args.sizes:
        for views in args.views:
            one = times[views, size] = measure(size, views, args.rank, args.seeds)
            ratio = sum(one.dense) / sum(one.factored)
            printed = f"{PRINTED[views, size]:.1f}" if (views, size) in PRINTED else "-"
            cells = (
                printed,
                compute_spread(one.dense),
                compute_spread(one.factored),
                f"{ratio:.0f}",
                f"{one.apart:.0e}" if views > 1 else "-",
            )
            rows.append([views, size, *cells])
            print(*rows[-1], flush=True)
    header = ("views", "n", "the paper's CPU, ms", "dense, ms", "factored, ms", "dense / factored", "J_i apart")
    figure = report.save_figure(draw(times), args.out, "fedgalore_ajive_time", "time of AJIVE by number of views")
    text = f"""## Setting

Views v_i P of n x n and rank {args.rank} under one projector P, as after a seeded one, with a planted joint component
of rank {args.rank // 2}, which is also the joint rank asked for. *Dense* hands AJIVE the matrices, as in the paper;
*factored* hands it the v_i (n x {args.rank}), which is what clients send and what the server of `fedgalore` does. Both
give the same joint matrices: *J_i apart* is the largest relative difference (with one view nothing is joint, and any
directions of it serve). float64, {len(args.seeds)} seeds (the views), one thread. A time is processor time, so that
other work on the machine counts little: the shortest of 2 dense runs, of 5 factored ones.

The paper names neither its CPU, its threads, the rank nor the precision, so its milliseconds and ours compare only
roughly. Its estimate of operations, {FLOPS / 1024**2:.1f} n^2 for a view, is that of one product with 8 columns, so it
does not count a full SVD of the view; ours takes one. What carries over to other machines is the ratio of *dense* to
*factored*. With factors, K views cost K thin SVDs and one SVD of n x K {args.rank}, which grows like K^2."""
    title = "FedGaLore: the time of AJIVE"
    sections = ["Mean and standard error over seeds:", report.format_table(header, rows), figure, text]
    report.write(args.out, "fedgalore_ajive_time", title, PAPER, build_findings(times), sections)


if __name__ == "__main__":
    main()
