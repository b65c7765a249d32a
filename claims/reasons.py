"""Why the small scale contradicts a paper: its rows played again under what might be the reason.

``python claims/reasons.py --data PATH --model PATH``. Runs that a page made are copied, if they are in ``--runs``.
Stopped, the same command goes on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import report
from reproduced import finding

from fedspan.api.comparing import compare
from fedspan.engines.prefix_rows import shared_prefixes
from fedspan.runs.cells import MODEL, cells_of
from fedspan.runs.judging import CellScore, judge
from fedspan.runs.presets import preset_of
from fedspan.runs.reusing import finished_runs
from fedspan.runs.statements import Claim
from fedspan.runs.tables import megabytes, plus_minus, seconds

PAGE = "reasons"
TITLE = "Looked into: why the small scale contradicts"
PAPER = "of each page its own"
OPENING = """Where a page contradicts its paper, the reason may be the small scale, a setting or an error of ours. Here
rows of such pages are played again with something changed. No learning rate is searched anew: each is the one that the
page chose, unless it is said here that it is another."""


@dataclass(frozen=True)
class Row:
    """What is played.

    Args:
        name: on the page.
        label: of the preset's row.
        changes: to that row's config, each ``section.field=value``.
    """

    name: str
    label: str
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Look:
    """One possible reason.

    Args:
        preset: whose statement is contradicted.
        cell: of its small scale.
        asked: what might be the reason; in markdown.
        says: what is judged; the first row is said to be better than each of the others.
        rows: these.
        found: what came of it, in words; the numbers are the table's.
    """

    preset: str
    cell: str
    asked: str
    says: str
    rows: tuple[Row, ...]
    found: str


def _rate(lr: float, *changes: str) -> tuple[str, ...]:
    """A row's learning rate, and what else is changed."""
    return (f"training.lr={lr}", *changes)


MORE = "federation.rounds={}".format
GRADIENT = "method.adaptive_refreshes=1000"
AT_ONCE = "training.cycle_rounds=null"
EACH_ROUND = ("method.adaptive_in=round", "method.steps=12", "method.period=6")

LOOKS: dict[str, Look] = {
    "rolora-budgets": Look(
        "rolora-figure4",
        "sst-2-p3",
        "With enough parameters FFA-LoRA is to be level with RoLoRA, and stays below it after 20 rounds. Three times "
        "as many:",
        "With enough parameters RoLoRA is still above FFA-LoRA after 60 rounds",
        (
            Row("RoLoRA, 60 rounds", "RoLoRA", _rate(0.004, MORE(60))),
            Row("FFA-LoRA, 60 rounds", "FFA-LoRA", _rate(0.016, MORE(60))),
        ),
        "Both gain as much: too few rounds are not the reason. What is was not found.",
    ),
    "rolora-77-classes": Look(
        "rolora-figure6",
        "banking77-p3",
        "RoLoRA is far below FFA-LoRA on 77 classes with the largest budget. Three times as many rounds, at the page's "
        "rate and at a quarter of it:",
        "After 60 rounds RoLoRA at a quarter of its rate is above FFA-LoRA, and above itself at the page's rate",
        (
            Row("RoLoRA at a quarter of the rate", "RoLoRA", _rate(0.004, MORE(60))),
            Row("FFA-LoRA", "FFA-LoRA", _rate(0.016, MORE(60))),
            Row("RoLoRA at the page's rate", "RoLoRA", _rate(0.016, MORE(60))),
        ),
        "The rate that 20 rounds choose is too high for RoLoRA to go on with, and 20 rounds are few for 77 classes "
        "under a head that stays as it was drawn.",
    ),
    "rolora-instructions": Look(
        "rolora-table12",
        "alpaca",
        "RoLoRA's loss is above LoRA's after 20 rounds, in which each of its factors trains in ten. Twice as many, "
        "which send what LoRA sends in 20:",
        "RoLoRA's loss after 40 rounds is below LoRA's",
        (
            Row("RoLoRA, 40 rounds", "RoLoRA", _rate(0.016, MORE(40))),
            Row("LoRA, 20 rounds", "LoRA", _rate(0.016)),
            Row("LoRA, 40 rounds", "LoRA", _rate(0.016, MORE(40))),
        ),
        "Each factor trains in half of the rounds: with as many bytes RoLoRA is ahead, with as many rounds LoRA is.",
    ),
    "rolora-questions": Look(
        "rolora-table10",
        "boolq",
        "So is RoLoRA's loss at rank 2 after ten rounds, five for each factor. Twice as many:",
        "At rank 2 RoLoRA's loss after 20 rounds is below LoRA's",
        (
            Row("RoLoRA, 20 rounds", "RoLoRA", _rate(0.016, MORE(20))),
            Row("LoRA, 10 rounds", "LoRA", _rate(0.016)),
            Row("LoRA, 20 rounds", "LoRA", _rate(0.016, MORE(20))),
        ),
        "The two are level with as many bytes; with as many rounds LoRA's lead is within two standard errors.",
    ),
    "florg-rounds": Look(
        "florg-table2",
        "sst-2-r-8",
        "FLoRG is below FedIT after ten rounds. Three times as many:",
        "FLoRG is above FedIT after 30 rounds",
        (
            Row("FLoRG, 30 rounds", "FLoRG", _rate(0.016, MORE(30))),
            Row("FedIT, 30 rounds", "FedIT", _rate(0.004, MORE(30))),
        ),
        "Ten rounds were too few: after 30 the two are level.",
    ),
    "fedgalore-projectors": Look(
        "fedgalore-table3",
        "non-iid-sst",
        "FedGaLore is below FedIT without IID. After its first refreshes, projectors are random. From the gradient in "
        "all rounds, and from the gradient anew at the start of every round, FedGaLore at four times the page's rate:",
        "With projectors from the gradient in all rounds FedGaLore is above the others",
        (
            Row("FedGaLore, gradient in all rounds", "FedGaLore", _rate(0.016, GRADIENT)),
            Row("FedGaLore", "FedGaLore", _rate(0.016)),
            Row("FedGaLore, gradient first in every round", "FedGaLore", _rate(0.016, *EACH_ROUND)),
            Row("FedIT", "FedIT", _rate(0.004)),
        ),
        "What the gradient's projectors gain is within the seeds' spread, and FedIT stays ahead: random projectors are "
        "not the reason, or not all of it.",
    ),
    "fedgalore-domains": Look(
        "fedgalore-table11",
        "non-iid-reviews",
        "The same with a domain of reviews for each client:",
        "With projectors from the gradient in all rounds FedGaLore is above the others, by domain",
        (
            Row("FedGaLore, gradient in all rounds", "FedGaLore", _rate(0.004, GRADIENT)),
            Row("FedGaLore", "FedGaLore", _rate(0.004)),
            Row("FedIT", "FedIT", _rate(0.016)),
        ),
        "By domain they bring it level with FedIT.",
    ),
    "pfedloru-rate": Look(
        "fedloru-table4",
        "psi-0.5",
        "One seed's validation chose a rate for pFedLoRU under which the others are unstable. At a third of it:",
        "At a lower rate pFedLoRU is above both variants of pFedLoRA",
        (
            Row("pFedLoRU at a third of the rate", "pFedLoRU", _rate(0.1)),
            Row("pFedLoRA(1)", "pFedLoRA(1)", _rate(0.1)),
            Row("pFedLoRA(2)", "pFedLoRA(2)", _rate(0.3)),
        ),
        "",
    ),
    "fedloru-rounds": Look(
        "fedloru-table1",
        "fashion-mnist-iid-20-clients-rank-128",
        "FedLoRU is below FedLoRA after 20 rounds. Four times as many under one cosine, with cycles of ten and of "
        "twenty rounds:",
        "FedLoRU with cycles of 20 rounds is above FedLoRA after 80, and above itself with cycles of ten",
        (
            Row("FedLoRU, cycles of 20", "FedLoRU", _rate(0.3, MORE(80), AT_ONCE, "method.tau=20")),
            Row("FedLoRA", "FedLoRA", _rate(0.3, MORE(80), AT_ONCE)),
            Row("FedLoRU, cycles of 10", "FedLoRU", _rate(0.3, MORE(80), AT_ONCE, "method.tau=10")),
        ),
        "",
    ),
}


def needs_model(look: Look) -> bool:
    """Whether a folder with a language model has to be given."""
    return any(MODEL in json.dumps(dict(cell.configs)) for cell in cells_of(preset_of(look.preset), "small"))


def play(look: Look, args: argparse.Namespace, folder: Path) -> tuple[CellScore, ...]:
    """Every row under all seeds; a run that is finished in ``--runs`` is copied."""
    preset = preset_of(look.preset)
    cells = {cell.name: cell for cell in cells_of(preset, "small", str(args.data), args.model and str(args.model))}
    scores: list[CellScore] = []
    for number, row in enumerate(look.rows):
        key = preset.methods[row.label].key
        config = dict(cells[look.cell].configs[row.label])
        overrides = [*row.changes, *args.overrides]
        found = compare(config, folder / f"row-{number}", [key], args.seeds, overrides=overrides)
        one = found.rows[0]
        scores.append(
            CellScore(
                cell=look.cell,
                method=row.name,
                chosen={},
                metric=found.metric,
                higher=found.higher,
                scores=one.scores,
                mean=one.mean,
                deviation=one.deviation,
                bytes_down=one.bytes_down,
                bytes_up=one.bytes_up,
                seconds=one.seconds,
            )
        )
        print(f"{look.preset}, {row.name}: {plus_minus(found.metric, one.mean, one.deviation)}", flush=True)
    return tuple(scores)


def findings(look: Look, scores: Sequence[CellScore]) -> list[report.Finding]:
    """The first row against each of the others, by the claims' own rule."""
    cells = [cell for cell in cells_of(preset_of(look.preset), "small") if cell.name == look.cell]
    first, *others = (row.name for row in look.rows)
    return [finding(judged) for judged in judge([Claim(says=look.says, better=first, worse=others)], cells, scores)]


def section(look: Look, scores: Sequence[CellScore]) -> str:
    """Of the page."""
    preset = preset_of(look.preset)
    rows = [
        (
            row.name,
            ", ".join(row.changes),
            plus_minus(score.metric, score.mean, score.deviation),
            megabytes(score.bytes_up),
            seconds(score.seconds),
        )
        for row, score in zip(look.rows, scores, strict=True)
    ]
    head = ("row", "config", f"held-out {scores[0].metric}", "MB up", "seconds")
    link = f"[{report.title_of(preset)}]({look.preset}.md)"
    parts = (
        f"## {report.title_of(preset)}",
        f"{link}, {look.cell}. {look.asked}",
        report.table(head, rows),
        look.found,
    )
    return "\n\n".join(part for part in parts if part)


def main() -> None:
    """Play, or go on; page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with data sets")
    parser.add_argument("--model", type=Path, help="folder with a language model; without, what needs one is left out")
    parser.add_argument("--runs", type=Path, default=Path("runs/claims"))
    parser.add_argument("--looks", nargs="+", choices=tuple(LOOKS), default=tuple(LOOKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", dest="overrides", nargs="*", default=[], help="section.field=value")
    parser.add_argument("--out", type=Path, default=report.FOLDER)
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    looks = {name: look for name, look in LOOKS.items() if name in args.looks}
    for name in [name for name, look in looks.items() if args.model is None and needs_model(look)]:
        print(f"{name}: left out, no --model", flush=True)
        del looks[name]
    found: list[report.Finding] = []
    sections = [OPENING]
    with shared_prefixes(), finished_runs([args.runs]):
        for name, look in looks.items():
            scores = play(look, args, args.runs / PAGE / name)
            found += findings(look, scores)
            sections.append(section(look, scores))
    args.out.mkdir(parents=True, exist_ok=True)
    seeds = ", ".join(map(str, args.seeds))
    closing = f"Mean ± standard deviation over the seeds {seeds}; MB and seconds are those of one run."
    report.write(args.out, PAGE, TITLE, PAPER, found, [*sections, closing], stated="under what is changed")


if __name__ == "__main__":
    main()
