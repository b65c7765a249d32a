"""What the noise of nodes' losses costs: the round that is exported, by exact and by noisy losses.

    python benchmarks/reported_losses.py --data PATH/data --page docs/results/reported-losses.md

Every run has the config that ``fedspan init`` writes, but all its rounds. The losses of the clients' validation
examples are stored after each round, and a deployment's own functions replay from them what nodes report, which round
is selected, and where early stopping ends the run; noisy losses are drawn several times. Finished runs are not run
again; ``--no-run`` reads finished ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import torch
from defaults import SEEDS, Cell, config_of

from fedspan.clients.metric_noise import add_noise
from fedspan.config import RunConfig, load_config
from fedspan.config.node import NodeLimits
from fedspan.federation.evaluation import ClientScores, Evaluator
from fedspan.federation.progress import Progress
from fedspan.federation.trimmed_scores import compute_trimmed_means
from fedspan.runs.selection import Selection, has_stalled
from fedspan.runs.setup import Prepared, prepare
from fedspan.runs.start import run
from fedspan.tasks.bounded_losses import bound_loss, compute_guess_bound


@dataclass(frozen=True)
class Subset:
    """A subset of a data set.

    Args:
        name: Name of the set, one of ``defaults.SETS``.
        train: Number of training examples of all clients.
        classes: Number of labels.
    """

    name: str
    train: int
    classes: int

    def folder(self, seed: int, work: Path) -> Path:
        """Folder of a run; the file of the same name that ends in .jsonl has the losses of validation examples."""
        return work / str(self.train) / "all-rounds" / Cell(self.name, "IID", seed).stem


SUBSETS = (
    Subset("SST-2", 800, 2),
    Subset("SST-2", 3000, 2),
    Subset("reviews, sentiment", 1200, 2),
    Subset("Banking77, 20 classes", 800, 20),
)


@dataclass(frozen=True)
class Rule:
    """Losses that nodes report, and what counts as stalled.

    Args:
        name: Name on the page.
        is_bounded: Whether an example's loss is at most twice the cross-entropy of a guess.
        epsilon: Epsilon of an evaluation of the loss alone; None: no noise.
    """

    name: str
    is_bounded: bool
    epsilon: float | None = None


DRAWS = 20
"""Number of times that each run is replayed with noisy losses."""
EPSILON = NodeLimits().evaluation_epsilon
assert EPSILON is not None
RULES = (
    Rule("exact", is_bounded=False),
    Rule("bounded", is_bounded=True),
    Rule("noisy", is_bounded=True, epsilon=EPSILON / 2),  # the other half is the accuracy's
    Rule("a quarter of the noise", is_bounded=True, epsilon=2 * EPSILON),
)


class RecordingEvaluator(Evaluator):
    """An evaluator that appends the losses of the clients' validation examples to a file.

    Args:
        evaluator: The run's own evaluator.
        path: The file: a line of JSON for each evaluation.
    """

    def __init__(self, evaluator: Evaluator, path: Path) -> None:
        super().__init__(evaluator.federation, evaluator.batch_size)
        self.path = path

    def evaluate_clients(self, progress: Progress) -> tuple[ClientScores | None, ClientScores | None]:
        """``Evaluator.evaluate_clients``."""
        engine, examples, job = self.federation.engine, self.federation.examples, self.build_job(progress, None)
        task: Any = engine.task
        losses: dict[str, list[float]] = {}
        for id in self.ids:
            rows = self.federation.clients[id].validation
            predictions = engine.predict(job, examples, rows, self.batch_size)
            losses[id] = task.compute_example_losses(predictions, examples, rows.tolist())[0].tolist()
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"round": progress.state.round, "losses": losses}) + "\n")
        return super().evaluate_clients(progress)


def get_config(subset: Subset, seed: int, args: argparse.Namespace) -> RunConfig:
    """Return init's config of a run."""
    work = args.work / str(subset.train)
    options = argparse.Namespace(data=args.data, models=None, out=work, train=subset.train)
    return config_of(Cell(subset.name, "IID", seed), options)


def train(subset: Subset, seed: int, args: argparse.Namespace) -> None:
    """Run or continue all rounds of a run."""
    folder = subset.folder(seed, args.work)
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_suffix(".yaml")
    path.write_text(json.dumps(get_config(subset, seed, args).model_dump(mode="json")), encoding="utf-8")
    config = load_config(path, ["baselines=[]", "federation.early_stopping=null"])

    def build(*arguments: Any) -> Prepared:
        prepared = prepare(*arguments)
        recorder = RecordingEvaluator(prepared.evaluator, folder.with_suffix(".jsonl"))
        return replace(prepared, evaluator=recorder)

    run(config, folder, resume=(folder / "config.yaml").exists(), build=build)


def report(losses: Sequence[float], rule: Rule, classes: int) -> dict[str, float]:
    """Return what a node reports of the losses of its validation examples."""
    metrics = {"loss": mean(losses), "examples": float(len(losses))}
    if not rule.is_bounded:
        return metrics
    losses_B, bound = torch.tensor(losses), compute_guess_bound(classes)
    terms = losses_B, torch.ones_like(losses_B)
    task: Any = SimpleNamespace(metric="loss", loss_bound=bound, compute_example_losses=lambda *_: terms)
    bounded = bound_loss(task, metrics, losses_B, None, ())
    return bounded if rule.epsilon is None else add_noise(bounded, len(losses), len(losses), rule.epsilon, task)


def replay(
    losses: Sequence[Mapping[str, Sequence[float]]], rule: Rule, classes: int, config: RunConfig
) -> tuple[int, int]:
    """Select a round and stop as a deployment would.

    Args:
        losses: Losses of the validation examples by client, of the start and of each round.
        rule: The rule.
        classes: Number of labels.
        config: The run's config, with early stopping.

    Returns:
        The round that is exported (0: the start), and the round after which the run ends.
    """
    selection, number = Selection(), 0
    for number, by_client in enumerate(losses):
        rows = {id: report(own, rule, classes) for id, own in by_client.items()}
        means = compute_trimmed_means(rows, ["loss"])
        selection = selection.add("loss", number, ClientScores(means, rows, means, noisy=rule.epsilon is not None))
        if number and has_stalled(config, number, selection.improved):
            break
    assert selection.best is not None
    return selection.best.round, number


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """Read a file of a line for the start and each round; of an evaluation that was repeated, the last line."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    by_round = {line["round"]: line for line in lines}
    return [by_round[number] for number in range(len(by_round))]


Results = dict[str, list[tuple[float, int, int]]]
"""By rule: test accuracy in %, exported round and last round of each run, with noise of each draw."""


def read_results(subset: Subset, seeds: Sequence[int], args: argparse.Namespace) -> tuple[Results, int]:
    """Read the results of a subset's runs, and the smallest number of a client's validation examples."""
    results, examples = Results(), set[int]()
    for seed in seeds:
        folder = subset.folder(seed, args.work)
        tested = [100 * line["test"]["accuracy"] for line in read_rounds(folder / "metrics.jsonl")]
        losses = [line["losses"] for line in read_rounds(folder.with_suffix(".jsonl"))]
        examples |= {len(own) for own in losses[0].values()}
        config, last = get_config(subset, seed, args), len(losses) - 1
        chosen = {
            rule.name: [
                replay(losses, rule, subset.classes, config) for _ in range(1 if rule.epsilon is None else DRAWS)
            ]
            for rule in RULES
        }
        for name, replays in {**chosen, "*start*": [(0, 0)], "*all rounds*": [(last, last)]}.items():
            results.setdefault(name, []).extend((tested[rounds[0]], *rounds) for rounds in replays)
    return results, min(examples)


def format_tables(args: argparse.Namespace) -> str:
    """Format a table over all finished runs, and one for each subset."""
    together, sections = Results(), list[str]()
    for subset in SUBSETS:
        seeds = [seed for seed in args.seeds if (subset.folder(seed, args.work) / "report.json").exists()]
        if not seeds:
            continue
        results, examples = read_results(subset, seeds, args)
        deviation = math.sqrt(2) * compute_guess_bound(subset.classes) * 2 / EPSILON / examples
        sections.append(
            f"## {subset.name}, {subset.train:,} training examples\n\n{examples} validation examples of each client; "
            f"the noise of each loss has a standard deviation of {deviation:.2f}. "
            f"{'Seed' if len(seeds) == 1 else 'Seeds'} {', '.join(map(str, seeds))}.\n\n"
            "| losses | test accuracy, % | exported round | last round |\n|---|---|---|---|\n"
        )
        for name, runs in results.items():
            accuracies, *rounds = zip(*runs, strict=True)
            cells = [f"{mean(accuracies):.1f}", *(f"{mean(numbers):.0f}" for numbers in rounds)]
            sections[-1] += f"| {name} | {' | '.join(cells)} |\n"
            together.setdefault(name, []).extend(runs)
    exact = [run[0] for run in together["exact"]]
    count = f"{len(exact)} of {len(SUBSETS) * len(args.seeds)} runs, {DRAWS} draws of noise"
    table = f"| losses | test accuracy, % ({count}) | difference to exact | last round |\n|---|---|---|---|\n"
    for name, runs in together.items():
        accuracies, _, lasts = zip(*runs, strict=True)
        difference = round(mean(accuracies) - mean(exact), 1) + 0.0  # no negative zero
        table += f"| {name} | {mean(accuracies):.1f} | {difference:+.1f} | {mean(lasts):.0f} |\n"
    return "\n".join([table, *sections])


def format_page(tables: str, args: argparse.Namespace) -> str:
    """Format the page, with the command, the machine and the date."""
    config = get_config(SUBSETS[0], args.seeds[0], args)
    return (
        "# Rounds selected by noisy losses\n\n"
        "This page measures the cost of [noise in validation losses](../privacy.md#how-are-metrics-protected) on the "
        "nodes. "
        "The server selects a round and stops a run by these losses.\n\n"
        f"{config.partition.clients} clients of equal distribution train with the config of `fedspan init`, in "
        "simulation and for all its rounds. What a deployment would have exported, and where early stopping (after "
        f"{config.federation.early_stopping} rounds) would have ended it, is replayed from the losses of the clients' "
        "validation examples:\n\n"
        "- **exact**: nodes send exact losses (`limits.evaluation_epsilon: null`).\n"
        "- **bounded**: an example counts at most 2 ln C, for C classes. The mean is exact.\n"
        f"- **noisy**: the default, an epsilon of {EPSILON:g} for the loss and the accuracy together. Nodes with fewer "
        "than `limits.evaluation_examples` validation examples, as most of these, would send nothing and export the "
        "last round (*all rounds*).\n"
        "- **a quarter of the noise**: as with four times the epsilon, or of four times the examples.\n\n"
        "All numbers are means over seeds and draws; round 0 is the start, whose [head comes from "
        "statistics](../head-start.md).\n\n"
        "Command: `python benchmarks/reported_losses.py --data PATH/data`  \n"
        f"Date: {time.strftime('%Y-%m-%d')}. Machine: {platform.machine()}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}, one thread.\n\n{tables}"
    )


def main() -> None:
    """Run what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--work", type=Path, default=Path("runs/reported-losses"), help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--no-run", action="store_true", help="only the tables of what is finished")
    parser.add_argument("--page", type=Path, help="write the tables to this file")
    args = parser.parse_args()
    for seed, subset in itertools.product([] if args.no_run else args.seeds, SUBSETS):
        if not (subset.folder(seed, args.work) / "report.json").exists():
            train(subset, seed, args)
    tables = format_tables(args)
    print(tables)
    if args.page is not None:
        args.page.write_text(format_page(tables, args), encoding="utf-8")


if __name__ == "__main__":
    main()
