"""What the defenses cost an honest federation: the same run with and without them, its rounds in turns.

    python benchmarks/defense_costs.py --page docs/results/defense-costs.md

The simulator runs ten clients with unlike data (Dirichlet 0.1) on the patients' messages, once without defenses, once
with the defaults (clipping, limited weights) and once with the validation of replies, too; a round of each after the
other. Deployments on this machine run the benchmark of benchmarks/deployment.py: with TLS, keys, signatures and the
defaults, without clipping and limits, and without TLS, keys and signatures, which can only be switched off together.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deployment import NODES, measure
from fedspan.config import parse_config
from fedspan.federation.evaluation import Evaluator
from fedspan.federation.progress import Progress
from fedspan.runs.setup import Prepared, prepare

OFF: Mapping[str, Any] = {"clip_ratio": None, "max_weight_ratio": None, "max_norm_ratio": None}
SIMULATED: Mapping[str, Mapping[str, Any]] = {
    "no defenses": {"federation": OFF},
    "the defaults": {},
    "the defaults, replies validated": {"simulation": {}},
}
DEPLOYED: Mapping[str, tuple[Mapping[str, Any], bool]] = {
    "no TLS, keys or signatures; no limits": (OFF, True),
    "TLS, keys, signatures; no limits": (OFF, False),
    "TLS, keys, signatures, and the defaults": ({}, False),
}


@dataclass
class Variant:
    """A federation in the simulator between its rounds.

    Args:
        prepared: The prepared run.
        progress: Its progress.
        seconds: Seconds of each round.
        clipped: Number of replies that were scaled down.
        lowered: Number of weights that were lowered.
    """

    prepared: Prepared
    progress: Progress
    seconds: list[float]
    clipped: int = 0
    lowered: int = 0

    def run(self) -> None:
        """Run a round."""
        began = time.perf_counter()
        result = self.prepared.federation.run_round(self.progress)
        self.seconds.append(time.perf_counter() - began)
        self.progress = result.progress
        self.clipped += len(result.clipped)
        self.lowered += len(result.lowered)

    def accuracy(self) -> float:
        """Accuracy on the test texts, in percent."""
        assert self.prepared.test is not None
        evaluator = Evaluator(self.prepared.federation, 128)
        return 100 * evaluator.evaluate_heldout(self.progress, self.prepared.test)["global"]["accuracy"]


def prepare_simulation(rounds: int, seed: int, **changes: Any) -> Variant:
    """Prepare a variant in the simulator."""
    config = parse_config(
        {
            "seed": seed,
            "threads": 1,
            "model": {
                **{"name": "builtin:all-minilm-l6-v2", "max_length": 48},
                **{"target_modules": ["query", "value"], "layers_to_transform": [5]},
            },
            "data": {"train": "builtin:patient-messages", "test_fraction": 0.2},
            "partition": {"partitioner": "dirichlet", "alpha": 0.1, "clients": 10, "validation": 0.0, "test": 0.0},
            "method": {"name": "fedit", "r": 8, "lora_alpha": 16},
            "training": {"lr": 5e-3, "batch_size": 8, "local_steps": 6},
            # a fixed stacking plan: a measured one could differ, and with it the time
            "engine": {"clients_per_pass": 10, "workers": 1},
            **changes,
            "federation": {"rounds": rounds, **changes.get("federation", {})},
        }
    )
    prepared = prepare(config)
    return Variant(prepared, prepared.federation.begin(), [])


def simulate(rounds: int, seed: int) -> list[str]:
    """Rows of the simulator: the variants take turns, and the first round of each, which fills caches, is left out."""
    variants = {name: prepare_simulation(rounds, seed, **changes) for name, changes in SIMULATED.items()}
    for number in range(rounds):
        for name in sorted(variants, reverse=number % 2 == 1):
            variants[name].run()
    baseline = next(iter(variants.values()))
    rows: list[str] = []
    for name, one in variants.items():
        ratio = statistics.median(mine / off for mine, off in zip(one.seconds[1:], baseline.seconds[1:], strict=True))
        cells = (statistics.median(one.seconds[1:]), ratio, one.accuracy(), one.clipped / rounds, one.lowered / rounds)
        rows.append("| {} | {:.2f} | {:.3f} | {:.1f} | {:.1f} | {:.1f} |".format(name, *cells))
    return rows


def deploy(rounds: int, repeats: int) -> list[str]:
    """Rows of deployments, which take turns."""
    taken: dict[str, list[float]] = {name: [] for name in DEPLOYED}
    for number in range(repeats):
        for name in sorted(DEPLOYED, reverse=number % 2 == 1):
            limits, insecure = DEPLOYED[name]
            taken[name].append(statistics.median(measure(rounds, limits, insecure=insecure)[0]))
    off = taken[next(iter(DEPLOYED))]
    ratios = {n: statistics.median(mine / b for mine, b in zip(own, off, strict=True)) for n, own in taken.items()}
    return [f"| {name} | {statistics.median(own):.3f} | {ratios[name]:.2f} |" for name, own in taken.items()]


PAGE = """# What the defenses cost an honest federation

This page reports what the defenses against hostile clients cost in time where no client is hostile.

Command: `python benchmarks/defense_costs.py --rounds {rounds} --repeats {repeats}{busy}`  
Date: {date}. Machine: {machine}, {cores} cores, torch {torch}, 1 thread a process{beside}.

[Robust aggregation](../robustness.md#what-do-the-defaults-cost) has what clipping costs in accuracy.
What the defenses achieve against an attack is in [robustness-moderate.md](robustness-moderate.md).

## In the simulator

Ten clients, Dirichlet 0.1, FedIT of rank 8 on query and value of layer 5 of all-MiniLM-L6-v2, builtin:patient-messages,
six steps of eight examples a round, {rounds} rounds. The variants take turns, round by round; the ratio is the
median over rounds, after the first, of a round's time over that of the same round without defenses. Replies are
validated between machines always, and in the simulator under `simulation`.

| variant | seconds a round | ratio | test accuracy, % | replies clipped a round | weights lowered a round |
|---|---|---|---|---|---|
{simulated}

The run is short, and learns little. Where none of its replies was clipped, equal accuracies say nothing about the cost
of clipping; [the defaults](defaults.md#what-clipping-costs) measure it.

## Between machines

{nodes} nodes, a server and `fedspan submit` on one machine, over loopback; one step of one example a client and round,
so that a round measures the cost of the way to the clients and back.
The median of {repeats} deployment{s} of each kind, with {rounds} rounds each; the kinds take turns.
Replies are validated in all of them. Signatures belong to the keys and
cannot be switched off alone.

| deployment | seconds a round | ratio |
|---|---|---|
{deployed}
"""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3, help="deployments of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--busy", action="store_true", help="write on the page that the machine had other work to do")
    parser.add_argument("--page", type=Path, help="write the page to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = PAGE.format(
        **{"rounds": args.rounds, "repeats": args.repeats, "s": "s"[: args.repeats > 1], "nodes": len(NODES)},
        **{"date": datetime.date.today(), "machine": platform.machine(), "cores": os.cpu_count()},
        torch=torch.__version__,
        busy=" --busy" if args.busy else "",
        beside=", beside other work on the machine" if args.busy else "",
        simulated="\n".join(simulate(args.rounds, args.seed)),
        deployed="\n".join(deploy(args.rounds, args.repeats)),
    )
    print(text)
    if args.page:
        args.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
