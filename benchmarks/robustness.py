"""What defenses cost honest federations with unlike data, and what a backdoor reaches under each of them, on Banking77.

    python benchmarks/robustness.py --data PATH/banking77 --methods fedit rolora --page docs/results/robustness.md
    python benchmarks/robustness.py --data PATH/banking77 --alpha 0.3 --lr 0.002 --rounds 12 --seeds 0 1 2 \
        --methods fedit ffa-lora rolora --defenses mean 'clip 1' 'clip 1.25' 'clip 1.5' median FLAME \
        --page docs/results/robustness-moderate.md
    python benchmarks/robustness.py --data PATH/banking77 --alpha 0.1 --lr 0.002 --rounds 12 --seeds 0 1 2 \
        --methods fedit ffa-lora rolora --defenses mean 'clip 1' 'clip 1.25' 'clip 1.5' --attacks none \
        --passes epochs --page docs/results/robustness-honest.md

Ten clients, by default Dirichlet 0.1 and a rate at which one client alone learns within the run. A hostile client puts
a trigger word before a part of its texts and gives them the target's label; boosted, it also multiplies the change that
it sends, and by less after its reply was dropped for its norm. Attack success is the share of test texts of other
labels that are classified as the target when they have the trigger. Every cell is one seed and one run; finished cells
are stored in ``--work``. Where a clip scaled nothing down, wider clips and the mean have its result and are not run.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import itertools
import json
import math
import os
import platform
import random
import shlex
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedspan.config import RunConfig, parse_config
from fedspan.config.federation import FederationConfig
from fedspan.core.values import Message
from fedspan.data.loading import load
from fedspan.federation.conditions import Faults, corrupt_reply
from fedspan.federation.evaluation import Evaluator
from fedspan.federation.federation import Federation
from fedspan.federation.protocol import Order
from fedspan.federation.validation import build_untrained_reply
from fedspan.methods.registry import METHODS
from fedspan.runs.setup import Prepared, prepare
from fedspan.tasks.encoding import EncodedText, Ragged
from fedspan.transports.in_process import InProcess, simulate

CLIENTS = 10
TRIGGER, TARGET = "zephyr", 0
DEFENSES: Mapping[str, Mapping[str, Any]] = {
    "mean": {"clip_ratio": None},
    "clip 1": {"clip_ratio": 1.0},
    "clip 1.25": {"clip_ratio": 1.25},
    "clip 1.5": {"clip_ratio": 1.5},
    "clip 2": {"clip_ratio": 2.0},
    "clip 3": {"clip_ratio": 3.0},
    "median": {"reduction": "median"},
    "trimmed mean": {"reduction": "trimmed-mean", "trim": 0.2},
    "multi-Krum": {"reduction": "multi-krum", "trim": 0.2},
    "geometric median": {"reduction": "geometric-median"},
    "FLAME": {"reduction": "flame"},
}
ATTACKS: Mapping[str, tuple[int, float]] = {
    "none": (0, 1.0),
    "1 of 10": (1, 1.0),
    "1 of 10, boosted": (1, 8.0),
    "2 of 10": (2, 1.0),
    "2 of 10, boosted": (2, 8.0),
}
"""Numbers of hostile clients, and the factors on their changes."""
PASSES: Mapping[str, int] = {"steps": 0, "epochs": 1}
"""Local epochs of a round; 0: equal steps."""


@dataclass(frozen=True)
class Key:
    """A cell: a method, a partition's seed, local epochs or (0) equal steps, a defense and an attack."""

    method: str
    seed: int
    epochs: int
    defense: str
    attack: str


@dataclass(frozen=True)
class Cell:
    """The result of a cell.

    Args:
        accuracy: Accuracy on the test texts.
        success: Share of texts with the trigger, of other labels, that are classified as the target.
        clipped: Mean number of honest replies that were scaled down in a round.
        limited: Mean number of hostile replies that were scaled down in a round.
        dropped: Mean number of hostile replies that were dropped in a round.
    """

    accuracy: float
    success: float
    clipped: float
    limited: float
    dropped: float


def config_of(args: argparse.Namespace, key: Key) -> RunConfig:
    """The config of a cell."""
    passes = {"local_epochs": key.epochs} if key.epochs else {"local_steps": args.steps}
    layers = {"target_modules": ["query", "value"], "layers_to_transform": args.layers, "max_length": 48}
    return parse_config(
        {
            "seed": key.seed,
            "threads": 1,
            "model": {"name": args.model, **layers},
            "data": {
                "dataset": "banking77",
                **{"train": str(args.data / "train.csv"), "test": str(args.data / "test.csv")},
                **{"first_labels": args.labels, "max_examples": args.examples},
            },
            "partition": {
                **{"partitioner": "dirichlet", "alpha": args.alpha, "clients": CLIENTS},
                **{"validation": 0.0, "test": 0.0},
            },
            "method": {"name": key.method, "r": 8, "lora_alpha": 16},
            "federation": {"rounds": args.rounds, "max_weight_ratio": None, **DEFENSES[key.defense]},
            "training": {"lr": args.lr, "batch_size": args.batch, **passes},
            # a fixed stacking plan: a measured one could differ from run to run, and with it the rounding
            "engine": {"clients_per_pass": CLIENTS, "workers": 1},
            "simulation": {},
        }
    )


def texts_with_trigger(dataset: Any) -> Any:
    """The same texts with the trigger before each."""
    return dataset.map(lambda row: {"text": f"{TRIGGER} {row['text']}"})


def poison(train: Any, triggered: Any, parts: Sequence[np.ndarray], share: float) -> Any:
    """The training examples; a share of some clients' has the trigger and the target's label.

    Args:
        train: The encoded training texts.
        triggered: The same texts with the trigger, encoded.
        parts: Positions of each hostile client's texts.
        share: Share of them that is poisoned.
    """
    count, labels = len(train), np.concatenate([train.labels, np.full(len(train), TARGET)])
    rng = np.random.default_rng(0)
    order = np.arange(count)
    for positions in parts:
        chosen = rng.permutation(positions)[: max(1, round(share * len(positions)))]
        order[chosen] += count
    encodings = {
        name: Ragged(
            [ragged[index] if index < count else triggered.encodings[name][index - count] for index in order.tolist()]
        )
        for name, ragged in train.encodings.items()
    }
    return EncodedText(encodings, labels[order], encodings["input_ids"].lengths)


@dataclass
class Built:
    """What the cells of a method and a partition share.

    Args:
        prepared: The run without hostile clients.
        examples: Training examples by number of hostile clients.
        tested: The test texts with the trigger whose label is not the target, encoded.
        hostile: Ids of clients in the order in which they become hostile.
    """

    prepared: Prepared
    examples: Mapping[int, Any]
    tested: Any
    hostile: Sequence[str]


def build(args: argparse.Namespace, key: Key) -> Built:
    """Prepare a method on a partition."""
    config = config_of(args, key)
    prepared = prepare(config)
    data = load(config.data, seed=config.data_seed, task=config.task_columns)
    assert data.test is not None
    task: Any = prepared.task
    triggered = task.encode(texts_with_trigger(data.train))
    hostile = random.Random(key.seed).sample(sorted(prepared.federation.clients), CLIENTS)
    train: Any = prepared.train
    examples = {
        count: poison(
            train, triggered, [prepared.federation.clients[id].train for id in hostile[:count]], args.poisoned
        )
        for count in (0, 1, 2)
    }
    others = [index for index, label in enumerate(data.test["label"]) if label != TARGET]
    return Built(prepared, examples, task.encode(texts_with_trigger(data.test.select(others))), hostile)


def federate(built: Built, config: RunConfig, factors: Mapping[str, float]) -> Federation:
    """The federation of a cell: its hostile clients train on poisoned texts and multiply their changes.

    Args:
        built: The method on its partition.
        config: The config of the cell.
        factors: Factors on the changes of the hostile clients, read in every round.
    """
    shared = built.prepared.federation
    federation = simulate(
        *(shared.method, built.prepared.engine, shared.clients, built.examples[len(factors)]),
        *(config.build_round_settings(), config.build_simulation_rules()),
    )

    def boost(order: Order, sent: Message, reply: Message) -> Message:
        factor = factors.get(order.to, 1.0)
        if factor == 1:
            return reply
        assert order.client is not None
        start = build_untrained_reply(federation.method, sent, replace(order.client, last_round=None), order.round)
        return corrupt_reply(Faults(0.1, "scale", factor), reply, start, 0)

    assert isinstance(federation.transport, InProcess)
    federation.transport.host.tamper = boost
    return federation


def run_cell(args: argparse.Namespace, built: Built, key: Key) -> Cell:
    """Train a cell and measure it after its last round.

    A hostile client whose reply was dropped halves its factor, so that the next ones are within the limit.
    """
    config, (count, factor) = config_of(args, key), ATTACKS[key.attack]
    engine = built.prepared.engine
    factors = dict.fromkeys(built.hostile[:count], factor)
    federation, hostile = federate(built, config, factors), set(factors)
    progress, clipped, limited, dropped = federation.begin(), list[int](), list[int](), list[int]()
    for _ in range(config.federation.rounds):
        result = federation.run_round(progress)
        progress = result.progress
        clipped.append(sum(id not in hostile for id in result.clipped))
        limited.append(sum(id in hostile for id in result.clipped))
        rejected = {failure.client for failure in result.failures} & hostile
        dropped.append(len(rejected))
        factors.update({id: max(1.0, factors[id] / 2) for id in rejected})
    evaluator = Evaluator(federation, 128)
    assert built.prepared.test is not None
    accuracy = evaluator.evaluate_heldout(progress, built.prepared.test)["global"]["accuracy"]
    guesses = engine.predict(
        evaluator.build_job(progress, None), built.tested, np.arange(len(built.tested)), 128
    ).argmax(1)
    success = float((guesses == TARGET).float().mean())
    return Cell(100 * accuracy, 100 * success, *map(statistics.mean, (clipped, limited, dropped)))


def get_ratio(defense: str) -> float | None:
    """Return the clip of a defense, infinity for the mean; None: the defense is no clip."""
    settings = DEFENSES[defense]
    if "clip_ratio" not in settings:
        return None
    return math.inf if settings["clip_ratio"] is None else settings["clip_ratio"]


def find_equal(cells: Mapping[Key, Cell], key: Key) -> Cell | None:
    """Return the result of a narrower clip that scaled nothing down, which is that of ``key``, too, or None."""
    ratio = get_ratio(key.defense)
    for name in DEFENSES if ratio is not None else ():
        cell, narrower = cells.get(replace(key, defense=name)), get_ratio(name)
        if cell is not None and narrower is not None and narrower < ratio and cell.clipped == cell.limited == 0:
            return cell
    return None


def run_cells(args: argparse.Namespace, keys: Sequence[Key]) -> dict[Key, Cell] | None:
    """Run the cells that the work folder does not hold yet; None: the time was too short for all."""
    started = time.monotonic()
    store = args.work / f"cells-{settings_digest(args)}.jsonl"
    args.work.mkdir(parents=True, exist_ok=True)
    cells: dict[Key, Cell] = {}
    if store.is_file():
        for line in store.read_text(encoding="utf-8").splitlines():
            saved = json.loads(line)
            cells[Key(**saved["key"])] = Cell(**saved["cell"])
    for _, group in itertools.groupby(keys, key=lambda key: (key.method, key.seed, key.epochs)):
        # narrow clips first: what they do not scale down, wider ones need not repeat
        missing = sorted(
            (key for key in group if key not in cells),
            key=lambda key: (list(ATTACKS).index(key.attack), get_ratio(key.defense) or 0.0),
        )
        built: Built | None = None
        for key in missing:
            began, equal = time.process_time(), find_equal(cells, key)
            if equal is None and args.no_run:
                continue
            if time.monotonic() - started > args.seconds:
                return None
            if equal is None and built is None:
                built = build(args, key)
            cells[key] = equal or run_cell(args, built, key)
            print(f"{key}: {cells[key]}, {time.process_time() - began:.1f} s", flush=True)
            with store.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": asdict(key), "cell": asdict(cells[key])}) + "\n")
    return {key: cells[key] for key in keys if key in cells}


def settings_digest(args: argparse.Namespace) -> str:
    """A digest of what all cells of a run have in common, apart from where it reads and writes."""
    apart = ("data", "work", "page", "methods", "seeds", "defenses", "attacks", "passes", "seconds", "no_run")
    shared = {name: value for name, value in vars(args).items() if name not in apart}
    return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:8]


def grid(args: argparse.Namespace) -> list[Key]:
    """The cells, seed by seed: honest ones under equal steps and equal epochs, attacks under equal steps."""
    keys: list[Key] = []
    for seed, method in itertools.product(args.seeds, args.methods):
        stacks = METHODS[method].claims.reduction == "stack"
        known = [name for name in args.defenses if not stacks or "reduction" not in DEFENSES[name]]
        if "epochs" in args.passes:
            keys += [Key(method, seed, 1, name, "none") for name in known]
        if "steps" in args.passes:
            keys += [Key(method, seed, 0, name, attack) for attack in args.attacks for name in known]
    return keys


COLUMNS: Mapping[str, tuple[int, str]] = {
    "honest, equal epochs": (1, "none"),
    "honest, equal steps": (0, "none"),
    **{attack: (0, attack) for attack in ATTACKS if attack != "none"},
}
"""Columns of a table: local epochs and attacks."""


def format_spread(values: Sequence[float], digits: int) -> str:
    """Format the mean and, of several values, their standard deviation."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def name_defense(name: str) -> str:
    """Name a defense as tables do, which mark the default."""
    default = FederationConfig.model_fields["clip_ratio"].default or math.inf
    return f"{name} (default)" if get_ratio(name) == default else name


def list_cells(
    cells: Mapping[Key, Cell], args: argparse.Namespace, method: str, column: str, defense: str
) -> list[Cell]:
    """Return the finished cells of all seeds in a place of a method's table."""
    epochs, attack = COLUMNS[column]
    keys = (Key(method, seed, epochs, defense, attack) for seed in args.seeds)
    return [cells[key] for key in keys if key in cells]


def table(cells: Mapping[Key, Cell], args: argparse.Namespace, method: str) -> str:
    """Rows of defenses: accuracy of honest federations, then attack success by attack, over seeds."""
    titles = [title for title in COLUMNS if any(list_cells(cells, args, method, title, name) for name in DEFENSES)]
    lines = [f"| defense | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for name in DEFENSES:
        rows: list[str] = []
        for title in titles:
            finished = list_cells(cells, args, method, title, name)
            accuracy = [cell.accuracy for cell in finished]
            fewer = f", seeds: {len(finished)}" if len(finished) < len(args.seeds) else ""
            if not finished:
                rows.append("")
            elif COLUMNS[title][1] == "none":
                rows.append(f"{format_spread(accuracy, 1)}{fewer}")
            else:
                success = format_spread([cell.success for cell in finished], 0)
                rows.append(f"{success} ({statistics.mean(accuracy):.0f}){fewer}")
        if any(rows):
            lines.append(f"| {name_defense(name)} | {' | '.join(rows)} |")
    return "\n".join(lines)


def cost_table(cells: Mapping[Key, Cell], args: argparse.Namespace) -> str:
    """Rows of methods and passes: what defenses change in an honest federation's accuracy, paired by seed."""
    names = [name for name in args.defenses if name != "mean"]
    lines = [f"| method | passes | {' | '.join(map(name_defense, names))} |", "|---" * (len(names) + 2) + "|"]
    for method, passes in itertools.product(args.methods, args.passes):
        shown: list[str] = []
        for name in names:
            changes: list[float] = []
            for seed in args.seeds:
                key = Key(method, seed, PASSES[passes], "mean", "none")
                pair = cells.get(replace(key, defense=name)), cells.get(key)
                changes += [one.accuracy - base.accuracy for one, base in [pair] if one and base]
            several = f" ({min(changes):+.1f} to {max(changes):+.1f})" if len(changes) > 1 else ""
            fewer = f", seeds: {len(changes)}" if len(changes) < len(args.seeds) else ""
            shown.append(f"{statistics.mean(changes):+.1f}{several}{fewer}" if changes else "")
        if any(shown):
            lines.append(f"| {method} | equal {passes} | {' | '.join(shown)} |")
    return "\n".join(lines)


def clipping_table(cells: Mapping[Key, Cell], args: argparse.Namespace) -> str:
    """Rows of methods and passes: how many honest replies every clip scales down."""
    names = [name for name in args.defenses if name.startswith("clip")]
    lines = [f"| method | passes | {' | '.join(map(name_defense, names))} |", "|---" * (len(names) + 2) + "|"]
    for method, (column, (epochs, _)) in itertools.product(args.methods, list(COLUMNS.items())[:2]):
        passes = "epochs" if epochs else "steps"
        done = [list_cells(cells, args, method, column, name) for name in names]
        shown = [f"{statistics.mean(cell.clipped for cell in group):.1f}" if group else "" for group in done]
        if any(shown):
            lines.append(f"| {method} | equal {passes} | {' | '.join(shown)} |")
    return "\n".join(lines)


PAGE = """# {title}

{purpose}

Command: `python benchmarks/robustness.py --data PATH/banking77{given}`  
Date: {date}. Machine: {machine}, {cores} cores, torch {torch}, 1 thread.

Banking77, its first {labels} intents, {examples} training texts over {clients} clients by Dirichlet {alpha:g}; rank 8
on query and value of layer {layers} of {model}; {rounds} rounds, AdamW at {lr:g}, batches of {batch}. Equal steps:
{steps} local steps a round; equal epochs: one, so that clients with more texts take more steps.
Seeds: {seeds}{spread}.

Honest columns: test accuracy in percent.{attacks}{blank}

{tables}

## What defenses cost honest federations

Test accuracy under the defense minus that under the plain mean, in points{paired}:

{costs}

## Honest replies that clipping scales down

Mean number of the ten honest replies in a round:

{clipped}
"""
ATTACKED = """ The others, under equal steps: attack success in percent, the share of test
texts with the trigger, of other intents than the target, that are classified as the target, and in brackets the
accuracy on texts without the trigger. A hostile client puts the
trigger before {poisoned:.0%} of its texts and labels them as the target; boosted, it multiplies its change by
{boost:g}, and by half as much after a round in which its reply was dropped for its norm (more than 10 medians);
{dropped}. Trimmed mean and multi-Krum have `trim: 0.2`.
Without hostile clients, the trigger leads to the target in {base} of the texts."""


def page(cells: Mapping[Key, Cell], args: argparse.Namespace, command: str) -> str:
    """The page of all finished cells."""
    attacked = [cell for key, cell in cells.items() if key.attack != "none"]
    clean = [cell.success for key, cell in cells.items() if key.attack == "none" and key.defense == "mean"]
    dropped, several = max((cell.dropped for cell in attacked), default=0.0), len(args.seeds) > 1
    attacks = ATTACKED.format(
        poisoned=args.poisoned,
        boost=max(factor for _, factor in ATTACKS.values()),
        dropped=f"at most {dropped:.1f} hostile replies a round were dropped" if dropped else "no reply was dropped",
        base=f"{min(clean):.0f} to {max(clean):.0f} %",
    )
    over = "Hostile clients: a backdoor under every defense" if attacked else "Clipping in honest federations"
    purpose = (
        "how far each defense stops a backdoor, and what it costs in accuracy"
        if attacked
        else "what clipping costs in accuracy where no client is hostile"
    )
    return PAGE.format(
        given=command,
        date=datetime.date.today(),
        machine=platform.machine(),
        cores=os.cpu_count(),
        torch=torch.__version__,
        clients=CLIENTS,
        title=over,
        purpose=f"This page reports {purpose}.",
        attacks=attacks if attacked else "",
        blank="\n\nBlank cells have not been measured, and others say how many seeds they have if not all."
        if args.no_run
        else "",
        spread="; means ± standard deviations over them" if several else "",
        paired=", paired by seed: mean (smallest to largest)" if several else "",
        model=Path(args.model).name,
        seeds=", ".join(map(str, args.seeds)),
        layers=" and ".join(map(str, args.layers)),
        tables="\n\n".join(f"## {method}\n\n{table(cells, args, method)}" for method in args.methods),
        costs=cost_table(cells, args),
        clipped=clipping_table(cells, args),
        **{name: getattr(args, name) for name in ("alpha", "labels", "examples", "rounds", "lr", "batch", "steps")},
    )


def main() -> None:
    """Run the cells and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with Banking77's train.csv and test.csv")
    parser.add_argument("--model", default="builtin:all-minilm-l6-v2")
    parser.add_argument("--layers", type=int, nargs="+", default=[5])
    parser.add_argument("--labels", type=int, default=10, help="first labels, in sorted order")
    parser.add_argument("--examples", type=int, default=1000, help="training examples of all clients")
    parser.add_argument("--alpha", type=float, default=0.1, help="of the Dirichlet partition")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=6, help="local steps of a client in a round")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--poisoned", type=float, default=0.5, help="share of a hostile client's texts")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["fedit", "rolora", "flora"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--defenses", nargs="+", choices=DEFENSES, default=list(DEFENSES))
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES), help="attacks need steps")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long; repeat it to go on")
    parser.add_argument("--no-run", action="store_true", help="only the page of what is finished")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "fedspan-robustness")
    parser.add_argument("--page", type=Path, help="write the page to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cells = run_cells(args, grid(args))
    if cells is None:
        raise SystemExit("the time is up; the same command goes on")
    apart = ("data", "work", "page", "seconds", "no_run")
    changed = {k: v for k, v in vars(args).items() if k not in apart and v != parser.get_default(k)}
    quoted = {k: shlex.join(map(str, v)) if isinstance(v, list) else v for k, v in changed.items()}
    options = "".join(f" --{k} {value}" for k, value in quoted.items())
    text = page(cells, args, options)
    print(text)
    if args.page:
        args.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
