"""Compare the methods that a user would choose between, on several data sets, each with two partitions.

    python -m evidence.pages.methods --data PATH/data --models PATH/models --out FOLDER
    python -m evidence.pages.methods --data PATH/data --models PATH/models --out FOLDER --cells intents-iid --shard 1/4
    python -m evidence.pages.methods --out FOLDER --page PAGE.md

``methods.yaml`` has the cells (data, model, partition) and the methods. In each cell, a method's learning rate is the
one of three with the best validation score on a seed of its own; while that is the lowest or the highest, another
rate is tried beyond it, up to ``MAX_RATES``. With that rate, the method runs with other seeds, each of which draws the
partition, the factors and the batches.

A run is a folder under ``FOLDER/runs``. Finished runs are not repeated and stopped ones continue, so the command can be
stopped at any moment, and several processes can share a folder, each with its own ``--shard``, the N-th of M parts. A
new method is a line in the YAML file, or in a copy of it for ``--settings``.

``--page`` writes the page and its picture from the finished runs.
"""

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import yaml
from matplotlib.figure import Figure
from scipy import stats

import fedspan
from evidence.claims.report import describe_machine, format_table, save_figure
from fedspan.runs.predictions import Items, read_items
from fedspan.tasks.metrics import METRICS
from fedspan.training.prefix_rows import share_prefixes

HERE = Path(__file__).resolve().parent
VALIDATION_SEED, SEEDS = 100, (0, 1, 2, 3, 4, 5)
STEP, MAX_RATES = 4.0, 5
RESAMPLES = 2000
DRAWS = 200_000
LEVEL = 0.95


def merge(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested mappings; later ones win."""
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(key), dict)
            merged[key] = merge(merged[key], value) if both else deepcopy(value)
    return merged


@dataclass(frozen=True)
class Pair:
    """A method in a cell.

    Args:
        cell: Name of the cell.
        method: Name of the method, or of a bound.
        config: Config of its runs, without rate and seed.
        rate: Middle of the learning rates.
        folder: Folder of its runs.
    """

    cell: str
    method: str
    config: Mapping[str, Any]
    rate: float
    folder: Path

    def run(self, rate: float, seed: int) -> fedspan.RunReport:
        """Run with a rate and a seed, or read the finished run."""
        folder = self.get_folder(rate, seed)
        if (folder / "report.json").is_file():
            return fedspan.read_report(folder)
        began = time.monotonic()
        config = merge(self.config, {"seed": seed, "training": {"lr": rate}})
        report = fedspan.run(config, folder, resume=True, progress=False)
        print(f"{self.cell}, {self.method}, rate {rate:g}, seed {seed}: {time.monotonic() - began:.0f} s", flush=True)
        return report

    def get_folder(self, rate: float, seed: int) -> Path:
        return self.folder / f"rate-{rate:g}-seed-{seed}"

    def select_rate(self) -> float:
        """Select the rate by validation, and try others while the best is at an end."""
        rates, scores = [self.rate / STEP, self.rate, self.rate * STEP], dict[float, float]()
        while True:
            for rate in rates:
                if rate not in scores:
                    scores[rate] = self._validate(rate)
            best = max(rates, key=lambda rate: scores[rate])
            if len(rates) == MAX_RATES or best not in (rates[0], rates[-1]):
                return best
            rates = [best / STEP, *rates] if best == rates[0] else [*rates, best * STEP]

    def _validate(self, rate: float) -> float:
        """Return the validation score of a rate, the higher the better; minus infinity if its loss is not finite."""
        try:
            report = self.run(rate, VALIDATION_SEED)
        except fedspan.FedspanError as error:
            if error.field != "training.lr":
                raise
            return -math.inf
        score = report.scores["validation"].get(report.metric, math.nan)
        return -math.inf if math.isnan(score) else score * (1 if METRICS[report.metric].greater_is_better else -1)


def read_pairs(settings: Mapping[str, Any], out: Path, data: Path, models: Path) -> list[Pair]:
    """Return a pair for each cell and method of the settings, cell by cell."""
    pairs: list[Pair] = []
    for cell, value in settings["cells"].items():
        for method, own in (settings["methods"] | settings["bounds"]).items():
            changes = {key: part for key, part in own.items() if key != "rate"}
            shared = merge(settings["common"], value["config"], value.get("set", {}))
            config = merge(shared, {"method": {"name": method}}, changes)
            if config["partition"]["clients"] == 1:
                config["training"]["local_steps"] *= shared["partition"]["clients"]
            text = json.dumps(config).replace("{data}", str(data)).replace("{models}", str(models))
            rate = value["rate"] * own.get("rate", 1.0)
            pairs.append(Pair(cell, method, json.loads(text), rate, out / "runs" / cell / method))
    return pairs


def run_cell(pairs: Sequence[Pair]) -> None:
    """Run the methods of a cell, and record their rates; what fedspan refuses is recorded with the reason.

    Seed by seed: a run reuses the outputs of the frozen layers of the one before, if both have the same examples.
    """
    left, rates = list(pairs), dict[str, float]()
    with share_prefixes():
        for seed, pair in ((seed, pair) for seed in (VALIDATION_SEED, *SEEDS) for pair in pairs):
            path = pair.folder / "rate.json"
            if pair not in left or (path.is_file() and "refused" in json.loads(path.read_text())):
                continue
            try:
                if seed == VALIDATION_SEED:
                    rates[pair.method] = pair.select_rate()
                else:
                    pair.run(rates[pair.method], seed)
                outcome: dict[str, Any] = {"rate": rates[pair.method]}
            except fedspan.FedspanError as error:
                print(f"{pair.cell}, {pair.method}: {error}", flush=True)
                left.remove(pair)
                if error.field == "run folder":  # another process works on it, or the disk is full: for a later call
                    continue
                outcome = {"refused": str(error)}
            if seed == SEEDS[-1] or "refused" in outcome:
                pair.folder.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(outcome) + "\n")


@dataclass(frozen=True)
class Result:
    """The finished runs of a pair.

    Args:
        rate: The selected learning rate.
        metric: The metric of the scores.
        scores: Held-out score of each seed; a loss has the opposite sign.
        items: Predictions of each seed; empty for a task without classes.
        megabytes: Bytes of both directions of a run, in MB, mean over the seeds.
        seconds: Seconds of the rounds of a run, mean over the seeds.
    """

    rate: float
    metric: str
    scores: tuple[float, ...]
    megabytes: float
    seconds: float
    items: tuple[Items, ...] = field(default=(), repr=False)


def read_result(pair: Pair) -> Result | None:
    """Read a pair's runs; None if they are not all finished."""
    path = pair.folder / "rate.json"
    facts = json.loads(path.read_text()) if path.is_file() else {}
    if "rate" not in facts:
        return None
    folders = [pair.get_folder(facts["rate"], seed) for seed in SEEDS]
    reports = [fedspan.read_report(folder) for folder in folders]
    metric = reports[0].metric
    sign = 1 if METRICS[metric].greater_is_better else -1
    items = [read_items(folder) for folder in folders]
    return Result(
        rate=facts["rate"],
        metric=metric,
        scores=tuple(sign * report.scores["test"][metric] for report in reports),
        megabytes=mean(sum(report.bytes.values()) for report in reports) / 1e6,
        seconds=mean(report.seconds for report in reports),
        items=tuple(one for one in items if one is not None) if None not in items else (),
    )


def bootstrap_difference(metric: str, first: Result, second: Result) -> tuple[float, float]:
    """Estimate the 95 % interval of a difference of two methods in a cell, from resampled seeds and test items.

    Items that all seeds share are drawn once in a resample, others for each seed.
    """
    rng, seeds = np.random.default_rng(0), len(first.scores)
    differences = np.subtract(first.scores, second.scores)
    pairs = list(zip(first.items, second.items, strict=False))
    if metric == "accuracy" and pairs:  # by seed and item: the difference of two means over the models
        by_item = [np.mean(a.predicted == a.targets, 0) - np.mean(b.predicted == b.targets, 0) for a, b in pairs]
        shared = all(np.array_equal(a.targets, pairs[0][0].targets) for a, _ in pairs)
    means: list[float] = []
    for _ in range(RESAMPLES):
        drawn = rng.integers(seeds, size=seeds)
        if metric != "accuracy" or not pairs:
            means.append(float(differences[drawn].mean()))
            continue
        rows = rng.integers(len(by_item[0]), size=len(by_item[0]))
        total = 0.0
        for seed in drawn:
            own = rows if shared else rng.integers(len(by_item[seed]), size=len(by_item[seed]))
            total += float(by_item[seed][own].mean())
        means.append(total / seeds)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def compare_jointly(means: np.ndarray) -> tuple[np.ndarray, float]:
    """Compare the rows of (methods, cells) with the first one, cells as replicates.

    Scores are a method's effect, a cell's random effect and a random interaction of both. With every method in every
    cell, the fit of this mixed model is that of a two-way table, whose residuals estimate the interaction.

    Returns:
        The mean differences, and half the width of their simultaneous 95 % intervals by Dunnett's correction.
    """
    methods, cells = means.shape
    residuals = means - means.mean(0) - means.mean(1, keepdims=True) + means.mean()
    freedom = (methods - 1) * (cells - 1)
    error = math.sqrt(float((residuals**2).sum()) / freedom * 2 / cells)
    rng = np.random.default_rng(0)  # all differences share the reference, so they correlate by a half
    normal = rng.standard_normal((DRAWS, methods))
    chi = np.sqrt(rng.chisquare(freedom, DRAWS) / freedom)
    largest = np.abs((normal[:, 1:] - normal[:, :1]) / math.sqrt(2)).max(1) / chi
    return means.mean(1)[1:] - means.mean(1)[0], float(np.quantile(largest, LEVEL)) * error


Results = dict[str, dict[str, Result]]


def read_results(pairs: Sequence[Pair]) -> Results:
    """Read the finished pairs by cell and method."""
    results: Results = {}
    for pair in pairs:
        if (result := read_result(pair)) is not None:
            results.setdefault(pair.cell, {})[pair.method] = result
    return results


def build_page(results: Results, methods: Sequence[str], figure: Path | None) -> str:
    """Build the sections of the page: the joint comparison, and a table for each cell."""
    reference = methods[0]
    cells = {name: cell for name, cell in results.items() if reference in cell}
    complete = [name for name in methods if cells and all(name in cell for cell in cells.values())]
    parts: list[str] = []
    if len(cells) > 1 and len(complete) > 1:
        means = np.array([[100 * mean(cell[name].scores) for cell in cells.values()] for name in complete])
        differences, half = compare_jointly(means)
        ranks = stats.rankdata(-means, axis=0).mean(1)
        rows = [[complete[0], "", f"{ranks[0]:.1f}"]]
        for name, difference, rank in zip(complete[1:], differences, ranks[1:], strict=True):
            interval = f"{difference:+.1f} ({difference - half:+.1f} to {difference + half:+.1f})"
            rows.append([name, interval, f"{rank:.1f}"])
        text = f"Mean over {len(cells)} cells. Intervals are simultaneous (Dunnett, 95 %), with cells as replicates."
        parts += ["## All cells", text, format_table(("method", f"minus {reference}", "average rank"), rows)]
        if figure is not None:
            draw_pareto(cells, complete, figure)
            parts.append(f"![Score against bytes and seconds]({figure.name})")
    for name, cell in cells.items():
        rows = []
        for method, result in cell.items():
            interval = ""
            if method != reference:
                low, high = bootstrap_difference(result.metric, result, cell[reference])
                difference = mean(result.scores) - mean(cell[reference].scores)
                interval = f"{100 * difference:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
            spread = f"{100 * mean(result.scores):.1f} ± {100 * float(np.std(result.scores, ddof=1)):.1f}"
            costs = (f"{result.megabytes:.1f}", f"{result.seconds:.0f}")
            rows.append([method, f"{result.rate:g}", spread, interval, *costs])
        head = ("method", "rate", f"{result.metric}, %", f"minus {reference}", "MB", "seconds")
        parts += [f"## {name}", format_table(head, rows)]
    return "\n\n".join(parts) + "\n"


def draw_pareto(cells: Results, methods: Sequence[str], path: Path) -> None:
    """Draw each method's mean score against its bytes and its seconds, both relative to the reference's."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, cost in zip(figure.subplots(1, 2, sharey=True), ("megabytes", "seconds"), strict=True):
        points: list[tuple[float, float, str]] = []
        for name in methods:
            ratios = [getattr(cell[name], cost) / getattr(cell[methods[0]], cost) for cell in cells.values()]
            score = 100 * mean(mean(cell[name].scores) for cell in cells.values())
            points.append((stats.gmean(ratios), score, name))
        front: list[tuple[float, float]] = []
        for x, y, name in sorted(points, key=lambda point: (point[0], -point[1])):
            axes.plot(x, y, "o", color="C0")
            axes.annotate(name, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8)
            if not front or y > front[-1][1]:
                front.append((x, y))
        axes.plot(*zip(*front, strict=True), color="C1", zorder=0, drawstyle="steps-post")
        axes.set(xscale="log", xlabel=f"{cost}, times {methods[0]}'s")
    figure.axes[0].set_ylabel("mean score, %")
    save_figure(figure, path.parent, path.stem)


def describe_origin() -> str:
    """Describe the command, the commit, the day and the machine."""
    words = [f"PATH/{Path(word).name}" if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return f"Command: `python -m evidence.pages.methods {shlex.join(words)}`  \n{describe_machine()} One thread a run."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--models", type=Path, default=Path("models"), help="folder with mobilenet_v2")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--settings", type=Path, default=HERE / "methods.yaml")
    parser.add_argument("--cells", nargs="+", metavar="CELL", help="left out: all")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="left out: all, and the bounds")
    parser.add_argument("--shard", default="1/1", metavar="N/M", help="the N-th of M parts")
    parser.add_argument("--page", type=Path, help="write the page of the finished runs, and run nothing")
    args = parser.parse_args()
    settings = yaml.safe_load(args.settings.read_text(encoding="utf-8"))
    pairs = [
        pair
        for pair in read_pairs(settings, args.out, args.data or Path("data"), args.models)
        if pair.cell in (args.cells or settings["cells"]) and (args.methods is None or pair.method in args.methods)
    ]
    if args.page is not None:
        sections = build_page(read_results(pairs), list(settings["methods"]), args.page.with_suffix(".svg"))
        args.page.write_text(f"# Methods compared\n\n{describe_origin()}\n\n{sections}", encoding="utf-8")
        return
    if args.data is None and any("{data}" in json.dumps(settings["cells"][pair.cell]) for pair in pairs):
        parser.error("--data: the folder of the data sets")
    number, count = map(int, args.shard.split("/"))
    mine = pairs[number - 1 :: count]
    for cell in dict.fromkeys(pair.cell for pair in mine):
        run_cell([pair for pair in mine if pair.cell == cell])


if __name__ == "__main__":
    main()
