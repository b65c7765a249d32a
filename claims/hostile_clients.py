"""What robust reductions and reply validation do against hostile clients, on Banking77.

``python claims/hostile_clients.py --data PATH/banking77``. Every cell is one federated run: a method, a kind of bad
reply, a share of clients that send it, and a defense. A finished cell is stored in ``--work`` and not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import report
import torch
from matplotlib.figure import Figure

from fedspan.config import RunConfig, parse_config
from fedspan.errors import FedspanError
from fedspan.experiments.intervals import Verdict, compare_pairs
from fedspan.federation.evaluation import Evaluator
from fedspan.federation.federation import Federation
from fedspan.runs.setup import Prepared, prepare
from fedspan.transports.in_process import simulate

PAPER = (
    "Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates (ICML 2018, "
    "arXiv:1803.01498), definitions 1 and 2; Sun et al., Can You Really Backdoor Federated Learning? "
    "(arXiv:1911.07963), section 3; reply validation is fedspan's own"
)
METHODS = {"rolora": "RoLoRA", "fedit": "FedIT", "ffa-lora": "FFA-LoRA"}
FAULTS: Mapping[str, float | None] = {"sign-flip": 3.0, "noise": 3.0, "scale": 10.0, "nan": None}
"""Kinds of bad replies and their factors."""
SHARES = (0.1, 0.3)
CLIENTS = 10


@dataclass(frozen=True)
class Defense:
    """A way to combine replies.

    Args:
        name: Its name on the page.
        federation: Fields of the config's section ``federation``.
        validation: Whether replies are validated.
    """

    name: str
    federation: Mapping[str, Any]
    validation: bool = False


DEFENSES = (
    Defense("mean", {"clip_ratio": None}),
    Defense("mean, validated", {"clip_ratio": None}, validation=True),
    Defense("mean, validated, ratio 2", {"clip_ratio": None, "max_norm_ratio": 2.0}, validation=True),
    Defense("median", {"reduction": "median"}),
    Defense("trimmed-mean", {"reduction": "trimmed-mean", "trim": 0.3}),
    Defense("clipped-mean", {"clip_ratio": 1.0}),
)
PLAIN, DEFAULT, STRICT = DEFENSES[0].name, DEFENSES[1].name, DEFENSES[2].name
ROBUST = tuple(defense.name for defense in DEFENSES[3:])


@dataclass(frozen=True)
class Key:
    """A cell of the experiment.

    Args:
        method: Registry key of the method.
        seed: Seed of the run.
        fault: Kind of bad reply; empty without hostile clients.
        share: Share of hostile clients.
        defense: Name of the defense.
    """

    method: str
    seed: int
    fault: str
    share: float
    defense: str


@dataclass(frozen=True)
class Cell:
    """The result of a cell.

    Args:
        accuracy: Test accuracy after the last round, in percent; None: the run did not reach it.
        ended: Round in which the run ended without a result, from 1; None: it ran to its end.
        why: Why it ended.
        dropped_hostile: Replies of hostile clients that validation dropped.
        dropped_honest: Replies of the other clients that validation dropped.
    """

    accuracy: float | None
    ended: int | None = None
    why: str = ""
    dropped_hostile: int = 0
    dropped_honest: int = 0

    def __str__(self) -> str:
        return f"{self.why}, round {self.ended}" if self.accuracy is None else f"{self.accuracy:.1f}"


Cells = dict[Key, Cell]


def list_cells(methods: Sequence[str], seeds: Sequence[int]) -> list[Key]:
    """Return the cells of the experiment."""
    conditions = [("", 0.0), *itertools.product(FAULTS, SHARES)]
    return [
        Key(method, seed, fault, share, defense.name)
        for seed, method, (fault, share), defense in itertools.product(seeds, methods, conditions, DEFENSES)
        # NaN replies fail whatever the limit on norms is
        if (fault, defense.name) != ("nan", STRICT)
    ]


def build_config(args: argparse.Namespace, key: Key) -> RunConfig:
    """Return the config of a cell."""
    defense = next(defense for defense in DEFENSES if defense.name == key.defense)
    simulation: dict[str, Any] = {"validation": defense.validation}
    if key.fault:
        simulation["faults"] = {"share": key.share, "kind": key.fault, "factor": FAULTS[key.fault]}
    return parse_config(
        {
            "seed": key.seed,
            "threads": 1,
            "model": {
                "name": args.model,
                "target_modules": ["query", "value"],
                "layers_to_transform": args.layers,
                "max_length": 48,
            },
            "data": {
                "dataset": "banking77",
                "train": str(args.data / "train.csv"),
                "test": str(args.data / "test.csv"),
                "first_labels": args.labels,
                "max_examples": args.examples,
            },
            "partition": {
                **{"partitioner": "dirichlet", "alpha": 0.5, "clients": CLIENTS},
                **{"validation": 0.0, "test": 0.0},
            },
            "method": {"name": key.method, "r": 8, "lora_alpha": 16},
            "federation": {"rounds": args.rounds, **defense.federation},
            "training": {"lr": args.lr, "batch_size": args.batch, "local_steps": args.steps},
            # a fixed stacking plan: a measured one could differ from run to run, and with it the rounding
            "engine": {"clients_per_pass": CLIENTS, "workers": 1},
            "simulation": simulation,
        }
    )


def federate(built: Prepared, config: RunConfig) -> Federation:
    """Return the federation of a cell, over the model and the prefix cache of another cell of the same method."""
    assert config.simulation is not None
    shared = built.federation
    return simulate(
        shared.method,
        built.engine,
        shared.clients,
        built.train,
        config.build_round_settings(),
        config.build_simulation_rules(),
        conditions=config.simulation.build_conditions(config.seed),
    )


def run_cell(built: Prepared, config: RunConfig) -> Cell:
    """Train a cell and measure it after its last round."""
    federation = federate(built, config)
    assert config.simulation is not None
    hostile = config.simulation.build_conditions(config.seed).draw_faulty(sorted(federation.clients))
    progress, dropped = federation.begin(), [0, 0]
    for number in range(1, config.federation.rounds + 1):
        try:
            result = federation.run_round(progress)
        except FedspanError as error:
            if error.field == "federation.reduction":  # clipped-mean has no norm of a change that is not finite
                return Cell(None, number, "stopped")
            if "the loss of client" not in str(error):
                raise
            return Cell(None, number, "diverged")
        progress = result.progress
        for failure in result.failures:
            dropped[failure.client not in hostile] += 1
    assert built.test is not None
    scores = Evaluator(federation, config.evaluation.batch_size).evaluate_heldout(progress, built.test)["global"]
    if not math.isfinite(scores["loss"]):
        return Cell(None, config.federation.rounds, "diverged")
    return Cell(100 * scores["accuracy"], None, "", *dropped)


def run_cells(args: argparse.Namespace, keys: Sequence[Key]) -> Cells:
    """Run the cells that the work folder does not hold yet."""
    apart = ("data", "methods", "out", "seeds", "work")  # a cell's key holds its method and seed
    settings = {name: str(value) for name, value in vars(args).items() if name not in apart}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    store = None if args.work is None else args.work / f"hostile_clients-{digest}.jsonl"
    cells: Cells = {}
    if store is not None and store.is_file():
        for line in store.read_text(encoding="utf-8").splitlines():
            saved = json.loads(line)
            cells[Key(**saved["key"])] = Cell(**saved["cell"])
    for _, group in itertools.groupby(keys, key=lambda key: (key.seed, key.method)):
        missing = [key for key in group if key not in cells]
        if not missing:
            continue
        built = prepare(build_config(args, missing[0]))
        for key in missing:
            began = time.perf_counter()
            cells[key] = run_cell(built, build_config(args, key))
            print(f"{key}: {cells[key]}, {time.perf_counter() - began:.1f} s", flush=True)
            if store is not None:
                store.parent.mkdir(parents=True, exist_ok=True)
                with store.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": asdict(key), "cell": asdict(cells[key])}) + "\n")
    return {key: cells[key] for key in keys}


def select(cells: Cells, fault: str, share: float, defense: str) -> list[Cell]:
    """Return the cells of a condition and a defense, over methods and seeds in their order."""
    return [cell for key, cell in cells.items() if (key.fault, key.share, key.defense) == (fault, share, defense)]


def get_accuracies(cells: Sequence[Cell]) -> list[float]:
    """Return accuracies for a paired comparison; a run without a result answers nothing: 0."""
    return [0.0 if cell.accuracy is None else cell.accuracy for cell in cells]


def label_fault(fault: str) -> str:
    """Return a kind of bad reply with its factor."""
    return "NaN" if fault == "nan" else f"{fault} x {FAULTS[fault]:g}"


def compare_defenses(statement: str, better: Sequence[Cell], worse: Sequence[Cell]) -> report.Finding:
    """Compare two defenses, paired by method and seed."""
    one, other = get_accuracies(better), get_accuracies(worse)
    difference = compare_pairs(one, other)
    means = f"{sum(one) / len(one):.1f} % and {sum(other) / len(other):.1f} %"
    return report.Finding(statement, f"{means}: {difference} points", difference.verdict)


def state(statement: str, measured: str, holds: bool) -> report.Finding:
    """Return a finding that no chance decides."""
    verdict: Verdict = "holds" if holds else "contradicted"
    return report.Finding(statement, measured, verdict)


def judge(cells: Cells) -> list[report.Finding]:
    """Return the findings."""
    most = max(SHARES)
    findings: list[report.Finding] = []
    for fault in [fault for fault in FAULTS if fault != "nan"]:
        plain = select(cells, fault, most, PLAIN)
        for name in (*ROBUST, STRICT):
            side = "the mean under a norm limit of 2 medians" if name == STRICT else name
            statement = f"{label_fault(fault)} by {100 * most:.0f} % of the clients: {side} ends above the plain mean"
            findings.append(compare_defenses(statement, select(cells, fault, most, name), plain))
    clean = select(cells, "", 0.0, PLAIN)
    for name in ROBUST:
        statement = f"Without hostile clients the mean ends above {name}"
        findings.append(compare_defenses(statement, clean, select(cells, "", 0.0, name)))
    poisoned = [cell for share in SHARES for cell in select(cells, "nan", share, PLAIN)]
    failed = sum(cell.accuracy is None for cell in poisoned)
    statement = "NaN replies end every run with the mean"
    findings.append(state(statement, f"{failed} of {len(poisoned)} runs", failed == len(poisoned)))
    guarded = [cell for share in SHARES for cell in select(cells, "nan", share, DEFAULT)]
    ended = sum(cell.accuracy is not None for cell in guarded)
    statement = "Reply validation drops NaN replies, and every run reaches its end"
    findings.append(state(statement, f"{ended} of {len(guarded)} runs", ended == len(guarded)))
    flipped = [cell for share in SHARES for cell in select(cells, "sign-flip", share, DEFAULT)]
    dropped = sum(cell.dropped_hostile for cell in flipped)
    statement = "Reply validation with its default limit drops no flipped reply: a change three times as long passes"
    findings.append(state(statement, f"{dropped} dropped", dropped == 0))
    return findings


def tabulate(cells: Cells, method: str, seeds: Sequence[int]) -> str:
    """Return a method's table of accuracies: conditions by defenses."""
    rows: list[tuple[str, ...]] = []
    for fault, share in [("", 0.0), *itertools.product(FAULTS, SHARES)]:
        formatted: list[str] = []
        for defense in DEFENSES:
            cells_of_row = [cells.get(Key(method, seed, fault, share, defense.name)) for seed in seeds]
            formatted.append(" / ".join(str(cell) for cell in cells_of_row if cell is not None))
        rows.append((label_fault(fault) if fault else "none", f"{100 * share:.0f} %", *formatted))
    return report.format_table(("bad replies", "of clients", *(defense.name for defense in DEFENSES)), rows)


def tabulate_dropped(cells: Cells, rounds: int) -> str:
    """Return the table of replies that validation dropped, over all methods and seeds."""
    rows: list[tuple[str, ...]] = []
    for fault, share in [("", 0.0), *itertools.product(FAULTS, SHARES)]:
        formatted: list[str] = []
        for name in (DEFAULT, STRICT):
            selected = select(cells, fault, share, name)
            hostile = round(share * CLIENTS) * rounds * len(selected)
            honest = CLIENTS * rounds * len(selected) - hostile
            bad, good = sum(cell.dropped_hostile for cell in selected), sum(cell.dropped_honest for cell in selected)
            formatted += [f"{bad} of {hostile}", f"{good} of {honest}"] if selected else ["", ""]
        rows.append((label_fault(fault) if fault else "none", f"{100 * share:.0f} %", *formatted))
    limits = [f"limit {limit}: {side}" for limit in (10, 2) for side in ("hostile", "honest")]
    return report.format_table(("bad replies", "of clients", *limits), rows)


def draw(cells: Cells) -> Figure:
    """Draw the accuracy of every defense under the largest share of hostile clients, a panel for each kind."""
    figure = Figure(figsize=(8, 5.5))
    panels = figure.subplots(2, 2, sharex=True, sharey=True, gridspec_kw={"wspace": 0.08, "hspace": 0.22}).flat
    most = max(SHARES)
    clean = get_accuracies(select(cells, "", 0.0, PLAIN))
    for axes, fault in zip(panels, FAULTS, strict=True):
        axes.axhline(sum(clean) / len(clean), color="0.6", linestyle=":", label="mean, no hostile clients")
        for (method, name), mark in zip(METHODS.items(), "os^", strict=True):
            points = [
                (index, cell)
                for index, defense in enumerate(DEFENSES)
                for key, cell in cells.items()
                if (key.method, key.fault, key.share, key.defense) == (method, fault, most, defense.name)
            ]
            reached = [(index, cell.accuracy) for index, cell in points if cell.accuracy is not None]
            axes.plot([index for index, _ in reached], [value for _, value in reached], mark, label=name)
            failed = [index for index, cell in points if cell.accuracy is None]
            axes.plot(failed, [0.0] * len(failed), "x", color="tab:red", clip_on=False)
        axes.set_title(f"{label_fault(fault)}, {100 * most:.0f} % of the clients", fontsize=9)
        axes.set_xticks(range(len(DEFENSES)), [defense.name for defense in DEFENSES], rotation=30, ha="right")
        axes.set_ylim(0, 100)
        axes.tick_params(labelsize=8)
    for axes in figure.axes[::2]:
        axes.set_ylabel("test accuracy, %", fontsize=8)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=4, frameon=False, fontsize=8)
    return figure


def main() -> None:
    """Run the cells and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with Banking77's train.csv and test.csv")
    parser.add_argument("--model", default="builtin:all-minilm-l6-v2")
    parser.add_argument("--layers", type=int, nargs="+", default=[5])
    parser.add_argument("--labels", type=int, default=10, help="first labels, in sorted order")
    parser.add_argument("--examples", type=int, default=1000, help="training examples of all clients")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5, help="local steps of a client in a round")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--work", type=Path, help="folder for finished cells; left out: not stored")
    parser.add_argument("--out", type=Path, default=report.FOLDER)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keys = list_cells(args.methods, args.seeds)
    cells = run_cells(args, keys)
    args.out.mkdir(parents=True, exist_ok=True)
    setting = (
        f"Banking77, its first {args.labels} intents, {args.examples} training texts over {CLIENTS} clients by "
        f"Dirichlet 0.5; rank 8 on query and value of layer {' and '.join(map(str, args.layers))} of "
        f"{Path(args.model).name}; {args.rounds} rounds of {args.steps} local steps, AdamW at {args.lr:g}, batches of "
        f"{args.batch}. Seeds: {', '.join(map(str, args.seeds))}; a cell is one run for each seed. 10 % of the clients "
        "are one client, 30 % are three, the same ones in every cell of a seed; they send bad replies in every round."
    )
    columns = (
        "Reply validation checks form and finite numbers, and drops a change whose norm is more than "
        "`federation.max_norm_ratio` (10 by default) times the cohort's median; *ratio 2* is a lower limit. The "
        "reductions run without validation; trimmed-mean drops 30 % at each end, clipped-mean clips to the median "
        "norm. *diverged*: a loss was not finite. *stopped*: clipped-mean refused a change that is not finite; since "
        "commit b91bca9 such a reply fails its own client and the round continues. "
        "Blank: not run, as NaN replies fail under any limit. Red crosses in the figure are runs without a result. "
        "Comparisons are paired by method and seed; a run without a result counts as 0 % there."
    )
    if len(args.seeds) == 1:
        columns += (
            " With one seed a standard error is of the differences between the methods alone: data, partition and the "
            "choice of the hostile clients are drawn once, so small differences may be chance."
        )
    figure = report.save_figure(draw(cells), args.out, "hostile_clients", "Test accuracy by defense and bad replies")
    tables = [f"## {METHODS[method]}\n\n{tabulate(cells, method, args.seeds)}" for method in args.methods]
    sections = [
        setting,
        columns,
        figure,
        "Test accuracy after the last round, in percent:",
        *tables,
        "## Dropped replies\n\nReplies that validation dropped, over all methods, rounds and seeds:",
        tabulate_dropped(cells, args.rounds),
        "How to simulate such clients: [simulation](../simulation.md).",
    ]
    title = "Hostile clients: robust reductions and reply validation"
    if len(args.seeds) == 1:
        title += ", one seed"
    report.write(args.out, "hostile_clients", title, PAPER, judge(cells), sections, "statement")


if __name__ == "__main__":
    main()
