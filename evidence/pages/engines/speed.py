"""Seconds per example: fedspan's engines, a centralized loop, Flower and pfl-research, in turns."""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evidence.pages.engines.contenders import HERE, Contender, Measured, get_fedspan_variables, take_turns
from evidence.pages.engines.environment import get_peer_variables
from evidence.pages.engines.page import Limit, compute_ratios, format_equal_table, format_speed_table
from evidence.pages.engines.work import Work, write_plan

SUBJECT = "fedspan batched, bfloat16"
EQUAL = {"float32": "fedspan batched, float32", "bfloat16": SUBJECT}
PLAIN, SAME = "PEFT loop, float32", "PEFT loop, bfloat16, bucketed"
LAST = (4, 5)
ALL_LAYERS, CACHED = "fedspan batched, bfloat16, all layers", "fedspan batched, bfloat16, last 2 layers"
TARGETS = {4: {PLAIN: 4.0, SAME: 2.0, "Flower": 3.0}, 32: {PLAIN: 4.0, SAME: 1.5}}
MORE = 2.2
"""Required speedups by batch; and of the last layers with the prefix cache against all layers."""
MILLISECONDS = {4: 1.6}
"""Most milliseconds an example by batch, in bfloat16."""
NEAR = 1e-3
"""How far losses of the same training may be apart, relatively."""
RESULTS = "results.json"


class Field:
    """Makes contenders.

    Args:
        args: Arguments of the driver.
        python: Python of the peers' environment; None: there are no peers.
        folder: Folder for plans, configs and logs.
    """

    def __init__(self, args: argparse.Namespace, python: Path | None, folder: Path) -> None:
        self.args, self.python, self.folder = args, python, folder
        folder.mkdir(parents=True, exist_ok=True)

    def plan(self, work: Work, name: str) -> Path:
        """A work written down."""
        write_plan(work, self.folder / name, self.args.repetitions + 1)
        return self.folder / name

    def fedspan(self, name: str, work: Work, dtype: str, engine: Mapping[str, Any]) -> Contender:
        """fedspan with an engine."""
        path = self.folder / f"{name.replace(' ', '-')}.json"
        path.write_text(json.dumps(work.values(dtype, dict(engine))))
        command = [sys.executable, str(HERE / "fedspan_rounds.py"), str(path)]
        return Contender(name, command, get_fedspan_variables(work.threads))

    def peer(self, name: str, script: str, plan: Path, *options: str, threads: int | None = None) -> Contender:
        """A peer."""
        command = [str(self.python), str(HERE / script), str(plan), *options, "--attention", self.args.attention]
        home = self.folder / "flower-home"
        return Contender(name, command, get_peer_variables(threads or self.args.threads, home))


def work_of(args: argparse.Namespace, batch: int, layers: tuple[int, ...] | None = None) -> Work:
    """The work of a section."""
    return Work(args.data, batch, args.examples[batch], args.clients, layers, args.threads)


def compare(args: argparse.Namespace, python: Path | None, batch: int) -> tuple[list[str], list[Limit]]:
    """Everybody at one batch size; the section and its limits."""
    field = Field(args, python, args.out / f"batch-{batch}")
    work = work_of(args, batch)
    contenders = [
        field.fedspan(f"fedspan {engine}, {dtype}", work, dtype, {"name": engine})
        for engine in ("batched", "loop")
        for dtype in ("bfloat16", "float32")
    ]
    if python is not None:
        plan = field.plan(work, "plan")
        contenders += [
            field.peer(PLAIN, "peers_plain.py", plan, "--dtype", "float32"),
            field.peer(SAME, "peers_plain.py", plan, "--dtype", "bfloat16", "--order", "bucketed"),
        ]
        if batch in args.simulators:
            contenders += [
                field.peer(
                    f"Flower, float32, {actors} x {threads}",
                    "peers_flower.py",
                    plan,
                    "--actors",
                    str(actors),
                    "--threads",
                    str(threads),
                    threads=threads,
                )
                for actors, threads in dict.fromkeys(((1, args.threads), (args.threads, 1)))
            ]
            contenders.append(field.peer("pfl-research, float32", "peers_pfl.py", plan))
    results = take_turns(contenders, args.repetitions, field.folder)
    keep(results, field.folder)
    limits = [check_agreement(results, batch)]
    if (most := MILLISECONDS.get(batch)) is not None:
        taken = statistics.median(results[SUBJECT].milliseconds())
        kept = taken <= most if args.judged else None
        limits.append(Limit(f"batch {batch}: in bfloat16, ms an example", f"{taken:.2f}", f"at most {most:g}", kept))
    for name, target in TARGETS.get(batch, {}).items():
        if faster := compare_subject(results, name):
            kept = statistics.median(faster) >= target if args.judged else None
            other = name if name != "Flower" else "Flower, float32, at its best"
            quantity = f"batch {batch}: in bfloat16, times faster than {other}"
            limits.append(Limit(quantity, f"{statistics.median(faster):.2f}", f"at least {target:g}", kept))
    stacking = results[SUBJECT].ready["stacking"]
    medians = {name: round(statistics.median(result.milliseconds()), 2) for name, result in results.items()}
    lines = [
        f"## Batch {batch}",
        "",
        f"{args.clients} clients of {args.examples[batch]} examples. The batched engine chose "
        f"{stacking['clients']} clients at once and {stacking['workers']} workers. Flower's settings are actors x "
        "threads.",
        "",
        format_speed_table(results, SUBJECT) + "\n",
        "In equal number formats, as ratios of these medians:",
        "",
        format_equal_table(medians, EQUAL) + "\n",
    ]
    return lines, limits


def compare_subject(results: Mapping[str, Measured], name: str) -> list[float]:
    """How many times faster the subject is, by repetition; than Flower: than the faster of its settings."""
    if name == "Flower":
        settings = [compute_ratios(result, results[SUBJECT]) for one, result in results.items() if one.startswith(name)]
        return [min(ratios) for ratios in zip(*settings, strict=True)]
    return compute_ratios(results[name], results[SUBJECT]) if name in results else []


def check_agreement(results: Mapping[str, Measured], batch: int) -> Limit:
    """Whether all that trains in float32 trains the same: first client's loss, then the mean of the first rounds."""
    reference = results["fedspan loop, float32"].ready
    apart = 0.0
    for name, result in results.items():
        if "bfloat16" in name:
            continue
        pairs = [(result.ready["first"], reference["first"])] if "first" in result.ready else []
        if not name.startswith("PEFT"):
            pairs += zip(result.ready["losses"], reference["losses"], strict=True)
        apart = max([apart, *(abs(one - other) / other for one, other in pairs)])
    quantity = f"batch {batch}: largest difference of float32 losses on the same batches"
    return Limit(quantity, f"{apart:.0e}", f"at most {NEAR:g}", apart <= NEAR)


def keep(results: Mapping[str, Measured], folder: Path) -> None:
    """Every number, beside the logs."""
    content = {name: {"ready": result.ready, "rounds": result.rounds} for name, result in results.items()}
    (folder / RESULTS).write_text(json.dumps(content, indent=1))


def measure_last_layers(args: argparse.Namespace, python: Path | None, batch: int) -> tuple[list[str], list[Limit]]:
    """Adapters on the last two layers only, the hidden states before them computed once."""
    field = Field(args, python, args.out / f"last-layers-{batch}")
    everywhere, last = work_of(args, batch), work_of(args, batch, LAST)
    contenders = [
        field.fedspan(CACHED, last, "bfloat16", {"name": "batched"}),
        field.fedspan(ALL_LAYERS, everywhere, "bfloat16", {"name": "batched"}),
    ]
    plain = f"{PLAIN}, all layers"
    if python is not None:
        contenders += [
            field.peer(plain, "peers_plain.py", field.plan(everywhere, "plan")),
            field.peer(f"{PLAIN}, last 2 layers", "peers_plain.py", field.plan(last, "plan-last")),
        ]
    results = take_turns(contenders, args.repetitions, field.folder)
    keep(results, field.folder)
    faster = statistics.median(compute_ratios(results[ALL_LAYERS], results[CACHED]))
    kept = faster >= MORE if args.judged else None
    quantity = f"batch {batch}, adapters on the last 2 of 6 layers: times faster than on all"
    limits = [Limit(quantity, f"{faster:.2f}", f"at least {MORE:g}", kept)]
    lines = [
        f"## Adapters on the last 2 of 6 layers, batch {batch}",
        "",
        "The frozen prefix's hidden states are computed once and cached.",
        f"The first {len(results[CACHED].ready['losses'])} rounds, which fill the cache, took "
        f"{results[CACHED].ready['warm_up']:.1f} s, those of all layers {results[ALL_LAYERS].ready['warm_up']:.1f} s.",
        "",
        format_speed_table(results, CACHED) + "\n",
    ]
    return lines, limits
