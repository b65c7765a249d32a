"""What every method sends, off the ledgers of real runs, against what its paper says that it sends.

``python claims/bytes.py`` takes some minutes. The formulas are the papers', written down here by themselves: nothing
that a plan counts is used. A paper counts numbers; here they are numbers of 4 bytes, of one client and one
round in which everybody participates, after the first two rounds (whose differences the methods' pages give).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
from matplotlib.figure import Figure

import fedspan
from fedspan.config import parse_config
from fedspan.methods.describe import list_methods
from fedspan.runs.folder import RunFolder
from fedspan.runs.ledger import read_totals
from fedspan.runs.setup import prepare

RANK, CLIENTS, ROUNDS, HEADS = 4, 4, 4, 2
LATER = (3, 4)  # both halves of an alternation
NAMES = {row.key: row.name for row in list_methods()}
Count = Callable[[int, int], float]
"""Numbers of a layer with so many outputs and inputs."""


def count_factors(m: int, n: int) -> float:
    """Both factors of rank r, which is what LoRA sends."""
    return RANK * (m + n)


def weight(m: int, n: int) -> float:
    """The whole layer."""
    return m * n


def count_nothing(m: int, n: int) -> float:
    """Return 0: nothing is transmitted in this direction."""
    return 0.0


@dataclass(frozen=True)
class PaperCost:
    """The costs of one method as its paper states them.

    Args:
        up: Numbers that a client sends.
        down: Numbers that a client receives.
        formula: Both in words.
        method: Options of the method beside the rank.
        reason: Reason why more or less is sent here.
    """

    up: Count
    down: Count
    formula: str
    method: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


LORA = PaperCost(count_factors, count_factors, "r (m + n) up and down")
ALL: Mapping[str, PaperCost] = {
    "fedit": LORA,
    "fedavg": PaperCost(weight, weight, "m n up and down"),
    "local-only": PaperCost(count_nothing, count_nothing, "nothing"),
    "ffa-lora": PaperCost(lambda m, n: RANK * m, lambda m, n: RANK * m, "r m up and down"),
    "rolora": PaperCost(
        lambda m, n: count_factors(m, n) / 2,
        lambda m, n: count_factors(m, n) / 2,
        "r m and r n in turn, up and down",
    ),
    "fedsa-lora": PaperCost(lambda m, n: RANK * n, lambda m, n: RANK * n, "r n up and down"),
    "fedsvd": PaperCost(lambda m, n: RANK * m, count_factors, "r m up, r (m + n) down"),
    "fedask": PaperCost(
        count_factors,
        lambda m, n: count_factors(m, n) + RANK * m,
        "r m, then r n up; r (m + n), then r m down, with sketches of r columns",
        {"oversampling": 0},
    ),
    "flora": PaperCost(
        count_factors, lambda m, n: CLIENTS * count_factors(m, n), "r (m + n) up, all clients' stack, K r (m + n), down"
    ),
    "florist": PaperCost(
        count_factors,
        lambda m, n: CLIENTS * count_factors(m, n),
        "r (m + n) up, at most all clients' stack, K r (m + n), down",
    ),
    "flexlora": LORA,
    "hetlora": PaperCost(count_factors, count_factors, "r (m + n) up and down", {"gamma": 1.0}),
    "federa": LORA,
    "fedex-lora": PaperCost(
        count_factors,
        lambda m, n: count_factors(m, n) + weight(m, n),
        "r (m + n) up, r (m + n) and a residual of m n down",
        reason="the residual has rank (K - 1) r and is transmitted as factors",
    ),
    "fr-lora": PaperCost(
        count_factors,
        count_factors,
        "r (m + n) up and down; clients compute the residual themselves",
        reason="the change of the base is sent, so that absent clients can catch up; the paper has no absent clients",
    ),
    "fedmomentum": PaperCost(
        count_factors,
        lambda m, n: count_factors(m, n) + weight(m, n),
        "r (m + n) up, r (m + n) and the change of the base (dense: m n) down",
        reason="the change of the base has rank (K - 1) r and is transmitted as factors",
    ),
    "lora-fair": LORA,
    "fedrot-lora": LORA,
    "lora-a2": PaperCost(
        lambda m, n: count_factors(m, n) / 2,
        lambda m, n: count_factors(m, n) / 2,
        "r m and r n in turn, up and down, for a budget of r slots per layer",
        reason="the indices of the selected slots are transmitted, too",
    ),
    "la-lora": LORA,
    "ravan": PaperCost(
        lambda m, n: HEADS * RANK**2, lambda m, n: HEADS * RANK**2, "h r^2 of h heads up and down", {"heads": HEADS}
    ),
    "fed-sb": PaperCost(lambda m, n: RANK**2, lambda m, n: RANK**2, "r^2 up and down"),
    "fedhm": LORA,
    "slora": PaperCost(
        count_factors, count_factors, "r (m + n) up and down, in the second stage", {"sparse_rounds": 1}
    ),
    "florg": PaperCost(lambda m, n: RANK * min(m, n), lambda m, n: RANK * min(m, n), "r min(m, n) up and down"),
    "fedloru": PaperCost(
        count_factors, count_factors, "r (m + n) up and down, in a round without accumulation", {"tau": 5}
    ),
    "mfedloru": PaperCost(count_factors, count_factors, "r (m + n) up and down, for clients of the greatest rank"),
    "pfedloru": PaperCost(count_factors, count_factors, "r (m + n) up and down: the personal factors stay"),
    "pfedlora": PaperCost(weight, weight, "m n up and down: the personal factors stay"),
    "fedgalore": PaperCost(
        lambda m, n: 2 * RANK * max(m, n),
        lambda m, n: 2 * RANK * max(m, n),
        "r max(m, n) twice, update and second moment, up and down, with seeded projectors",
        {"adaptive_refreshes": 0},
        reason="the update is sent as both factors, so that absent clients need no projectors of earlier rounds",
    ),
}


@dataclass(frozen=True)
class Sent:
    """Bytes of tensors of one client and round, from a ledger, and by the paper's formula."""

    up: float
    down: float
    paper_up: float
    paper_down: float


def count_sent(key: str, folder: Path, model: str, layer: int) -> Sent:
    """Some rounds of a method on a small model with wide, tall and square layers."""
    cost = ALL[key]
    values: dict[str, Any] = {
        "model": {
            "name": model,
            "target_modules": ["query", "intermediate.dense", "output.dense"],
            "layers_to_transform": [layer],
            "max_length": 16,
            "extras": "frozen",
        },
        "data": {"train": "builtin:patient-messages", "max_examples": 120},
        "partition": {"clients": CLIENTS},
        "method": {"name": key, "r": RANK, "lora_alpha": 2 * RANK, **cost.method},
        "federation": {"rounds": ROUNDS},
        "training": {"lr": 1e-4, "local_steps": 1, "batch_size": 4},
        "evaluation": {"every": ROUNDS},
    }
    config = parse_config(values)
    fedspan.run(config, folder)
    shapes = [layer.shape for layer in prepare(config).engine.adapted.spec.layers]
    totals = read_totals(RunFolder(folder).ledger)
    rounds = [(totals.count_round("up", number), totals.count_round("down", number)) for number in LATER]
    up, down = (
        sum(round_bytes[direction].payload for round_bytes in rounds) / len(LATER) / CLIENTS for direction in (0, 1)
    )
    return Sent(up, down, *(4 * sum(count(*shape) for shape in shapes) for count in (cost.up, cost.down)))


def build_finding(key: str, sent: Sent) -> report.Finding:
    """Holds where no more is sent than the paper says; what is sent beyond it has its reason beside it."""
    parts: list[str] = []
    for direction, ours, paper_bytes in (("up", sent.up, sent.paper_up), ("down", sent.down, sent.paper_down)):
        if ours == paper_bytes:
            parts.append(f"{direction} as stated")
        else:
            parts.append(
                f"{direction} {ours / paper_bytes:.4g} times as much"
                if paper_bytes
                else f"{direction} {ours:.0f} bytes"
            )
    more = sent.up > sent.paper_up or sent.down > sent.paper_down
    reason = ALL[key].reason
    measured = ", ".join(parts) + (f": {reason}" if reason else "")
    statement = f"{NAMES[key]} sends no more than its paper says: {ALL[key].formula}"
    return report.Finding(statement, measured, "contradicted" if more else "holds")


def draw(sent_by_method: Mapping[str, Sent]) -> Figure:
    """Both directions of every method, on a logarithmic axis."""
    figure = Figure(figsize=(10, 4.5))
    axes = figure.subplots()
    for index, (name, hatch) in enumerate((("up", ""), ("down", "//"))):
        places = [position + 0.4 * index for position in range(len(sent_by_method))]
        sizes = [getattr(sent, name) / 1024 for sent in sent_by_method.values()]  # nothing has no bar on such an axis
        axes.bar(places, sizes, 0.4, label=name, hatch=hatch, edgecolor="black", linewidth=0.5)
    axes.set_yscale("log")
    axes.set_ylabel("KiB of a client and round")
    axes.set_xticks(
        [position + 0.2 for position in range(len(sent_by_method))], list(sent_by_method), rotation=60, ha="right"
    )
    axes.legend()
    return figure


def page(sent_by_method: Mapping[str, Sent], folder: Path) -> None:
    """Write it."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        (key, *(f"{number:,.0f}" for number in (sent.up, sent.paper_up, sent.down, sent.paper_down)))
        for key, sent in sent_by_method.items()
    ]
    sections = [
        f"Layers m x n (outputs x inputs) of all three kinds, square, tall and wide; rank r = {RANK}, K = {CLIENTS} "
        f"clients, {ROUNDS} rounds; the mean of rounds {LATER[0]} and {LATER[1]}. Holds: no more than the paper says. "
        "Heads are frozen, so that target layers alone are counted; headers are not (the ledger has them, too).",
        report.format_table(("method", "bytes up", "the paper's", "bytes down", "the paper's"), rows),
        report.save_figure(draw(sent_by_method), folder, "bytes", "Bytes of one client and round by method"),
    ]
    findings = [build_finding(key, sent) for key, sent in sent_by_method.items()]
    report.write(folder, "bytes", "Bytes: what every method sends", "see the page of each method", findings, sections)


def measure(methods: Sequence[str], model: str, layer: int) -> dict[str, Sent]:
    """Every method in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        return {key: count_sent(key, Path(folder) / key, model, layer) for key in methods}


def main() -> None:
    """Run, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", choices=ALL, default=list(ALL), metavar="KEY", help="left out: all")
    parser.add_argument("--model", default="builtin:all-minilm-l6-v2", help="one of BERT's family")
    parser.add_argument("--layer", type=int, default=5, help="the block whose layers are adapted, from 0")
    parser.add_argument("--out", type=Path, default=report.FOLDER)
    args = parser.parse_args()
    page(measure(args.methods, args.model, args.layer), args.out)


if __name__ == "__main__":
    main()
