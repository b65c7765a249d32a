"""How the head of a classifier should train under label skew, once it starts from statistics.

    python benchmarks/head_updates.py --data PATH/data --models PATH/models --page docs/results/head-updates.md

``fedspan init`` writes the config, and each way of training the head changes it as ``WAYS`` says. All ways of a cell
(data set, Dirichlet alpha, seed) have the same examples, partition, start and batches, so differences are paired by
cell. Every run has ``ROUNDS`` rounds without early stopping, in this process and on one thread. Finished runs are not
run again, so the script can be stopped at any moment; ``--minutes`` starts no further run after that time.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from defaults import SETS, Cell, ImageSet, config_of

SEEDS = {"Banking77": (0,), "Banking77, 20 classes": (0, 1), "Fashion-MNIST": (0, 1)}
"""Seeds by data set."""
ALPHAS = (0.3, 0.1)
ROUNDS = 8
WAYS: dict[str, tuple[str, ...]] = {
    "as init writes it": (),
    "a tenth of the rate": ("model.extras_lr_scale=0.1",),
    "frozen": ("model.extras=frozen",),
    "own classes, no adjustment": ("training.head_updates=own-classes", "training.logit_adjustment=0"),
    "all rows, no adjustment": ("training.logit_adjustment=0",),
}
"""Ways of training the head, as changes of init's config; differences are to the first one."""


@dataclass(frozen=True)
class Run:
    """One run.

    Args:
        name: Name of the data set.
        alpha: Concentration of the Dirichlet partition.
        seed: Seed of subset, partition and run.
        way: How the head trains, one of ``WAYS``.
    """

    name: str
    alpha: float
    seed: int
    way: str

    def folder(self, out: Path) -> Path:
        """Folder of the run."""
        parts = (self.name, str(self.alpha), str(self.seed), self.way)
        return out / "runs" / "-".join("".join(c if c.isalnum() else "_" for c in part).lower() for part in parts)


@dataclass(frozen=True)
class Result:
    """What a run reports.

    Args:
        start: Test accuracy before the first round.
        last: Test accuracy after the last round.
        exported: Test accuracy of the round that the run exports.
        loss: Validation loss after the last round.
    """

    start: float
    last: float
    exported: float
    loss: float


def run(one: Run, args: argparse.Namespace) -> None:
    """Run or continue a run."""
    import fedspan
    from fedspan.config import load_config

    init = config_of(Cell(one.name, "Dirichlet 0.3", one.seed), args)
    path = one.folder(args.out).with_suffix(".yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(init.model_dump(mode="json")), encoding="utf-8")
    changes = ["baselines=[]", f"federation.rounds={ROUNDS}", "federation.early_stopping=null"]
    config = load_config(path, [*changes, f"partition.alpha={one.alpha}", *WAYS[one.way]])
    fedspan.run(config, one.folder(args.out), resume=True)


def result_of(one: Run, args: argparse.Namespace) -> Result | None:
    """Read a run; None if it is not finished."""
    folder = one.folder(args.out)
    if not (folder / "report.json").is_file():
        return None
    report = json.loads((folder / "report.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Result(
        start=report["start"]["test"]["accuracy"],
        last=rows[-1]["test"]["accuracy"],
        exported=report["scores"]["test"]["accuracy"],
        loss=rows[-1]["validation"]["loss"],
    )


def difference(way: str, cells: Sequence[dict[str, Result]], value: Callable[[Result], float], digits: int) -> str:
    """The mean of a paired difference to the first way, with its standard error over cells."""
    differences = [value(by_way[way]) - value(by_way[next(iter(WAYS))]) for by_way in cells]
    error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
    return f"{mean(differences):+.{digits}f} ± {error:.{digits}f}"


def tables(args: argparse.Namespace) -> str:
    """Accuracies by set and alpha, and paired differences over all finished cells."""
    rows = ["| data | alpha | start | " + " | ".join(WAYS) + " |", "|---" * (len(WAYS) + 3) + "|"]
    cells: list[dict[str, Result]] = []
    for name, seeds in SEEDS.items():
        for alpha in ALPHAS:
            cells_of_table: list[dict[str, Result]] = []
            for seed in seeds:
                results = {way: result_of(Run(name, alpha, seed, way), args) for way in WAYS}
                by_way = {way: result for way, result in results.items() if result is not None}
                if len(by_way) == len(WAYS):
                    cells_of_table.append(by_way)
            cells += cells_of_table
            if cells_of_table:
                start = f"{100 * mean(by_way[next(iter(WAYS))].start for by_way in cells_of_table):.1f}"
                values = [
                    f"{100 * mean(by_way[way].exported for by_way in cells_of_table):.1f} / "
                    f"{100 * mean(by_way[way].last for by_way in cells_of_table):.1f}"
                    for way in WAYS
                ]
                rows.append("| " + " | ".join([name, str(alpha), start, *values]) + " |")
    if not cells:
        return "No cell is finished.\n"
    compared = [
        "| head | validation loss, last round | test accuracy, exported round | test accuracy, last round |",
        "|---|---|---|---|",
    ]
    for way in list(WAYS)[1:]:
        values = [
            difference(way, cells, lambda result: result.loss, 3),
            difference(way, cells, lambda result: 100 * result.exported, 2),
            difference(way, cells, lambda result: 100 * result.last, 2),
        ]
        compared.append("| " + " | ".join([way, *values]) + " |")
    return (
        f"{len(cells)} of {len(ALPHAS) * sum(map(len, SEEDS.values()))} cells are finished.\n\n"
        "## Differences to init's config\n\n"
        + "\n".join(compared)
        + "\n\n## Accuracies\n\nTest accuracy in per cent, mean over seeds: exported round / last round.\n\n"
        + "\n".join(rows)
        + "\n"
    )


def page(text: str, args: argparse.Namespace) -> str:
    """The tables with the command, the machine and the date."""
    import torch

    size = next(kind.size for kind in SETS.values() if isinstance(kind, ImageSet))
    seeds = [f"{name}: {', '.join(map(str, numbers))}" for name, numbers in SEEDS.items()]
    settings = "\n".join(f"- **{way}**: {', '.join(f'`{change}`' for change in WAYS[way])}" for way in list(WAYS)[1:])
    return (
        "# Training of a warm head under label skew\n\n"
        "This page compares ways to train a classifier's head that [starts from statistics](../head-start.md), where "
        "clients have different classes.\n\n"
        f"Ten clients by a Dirichlet distribution, {ROUNDS} rounds without early stopping, and otherwise the config of "
        "`fedspan init`: the head trains with the adapters' rate, and `training.logit_adjustment: 1` leaves classes "
        "that a client lacks out of its softmax, so their rows have no gradient. The other ways change it:\n\n"
        f"{settings}\n\n"
        "All ways of a cell (data, alpha, seed) have the same examples, partition, start and batches. ± is the "
        "standard error of the paired difference over cells. Subsets are those of [the defaults](defaults.md#data); "
        f"images are resized to {size} x {size} pixels.\n\n"
        "Command: `python benchmarks/head_updates.py --data PATH/data --models PATH/models`  \n"
        f"Date: {time.strftime('%Y-%m-%d')}. Machine: {platform.machine()}, {multiprocessing.cpu_count()} cores, torch "
        f"{torch.__version__}, one thread. Seeds: {'; '.join(seeds)}.\n\n{text}"
    )


def seed_of(cell: tuple[str, float, int]) -> int:
    """The seed of a cell; an unfinished table then covers all sets."""
    return cell[2]


def main() -> None:
    """Run what is missing, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--models", type=Path, required=True, help="folder with mobilenet_v2")
    parser.add_argument("--out", type=Path, default=Path("runs/head-updates"))
    parser.add_argument("--only", nargs="+", choices=list(SEEDS), default=list(SEEDS), metavar="SET", help="runs these")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no further run after that time")
    parser.add_argument("--page", type=Path, help="write the tables to this file")
    parser.set_defaults(train=None)  # subsets as small as those of the defaults
    args = parser.parse_args()
    began = time.monotonic()
    cells = sorted(((name, alpha, seed) for name in args.only for alpha in ALPHAS for seed in SEEDS[name]), key=seed_of)
    for name, alpha, seed in cells:
        for way in WAYS:
            one = Run(name, alpha, seed, way)
            if result_of(one, args) is None and time.monotonic() - began < 60 * args.minutes:
                before = time.monotonic()
                run(one, args)
                print(f"{one} {time.monotonic() - before:.0f} s", flush=True)
    text = tables(args)
    print(text)
    if args.page:
        args.page.write_text(page(text, args), encoding="utf-8")


if __name__ == "__main__":
    main()
