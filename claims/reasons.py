"""Why the small scale contradicts a paper: its rows rerun under what might be the reason.

``python claims/reasons.py --data PATH --model PATH``. Runs that a page made are copied, if they are in ``--runs``.
Stopped, the same command goes on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import report
from looks import LOOKS, Look
from reproduced import build_finding, tabulate_measures

from fedspan.experiments.comparison import compare
from fedspan.experiments.execution import reuse_finished_runs
from fedspan.experiments.tables import format_mean, format_megabytes, format_seconds
from fedspan.reproduction.cells import MODEL, list_cells
from fedspan.reproduction.measurement import MEASURED, measure
from fedspan.reproduction.presets import Claim, load_preset
from fedspan.reproduction.verdicts import CellScore, judge
from fedspan.training.prefix_rows import share_prefixes

PAGE = "reasons"
TITLE = "Looked into: why the small scale contradicts"
PAPER = "of each page its own"
OPENING = """Where a page contradicts its paper, the reason may be the small scale, a setting or an error of ours. Here
rows of such pages are played again with something changed. No learning rate is searched anew: each is the one that the
page chose, unless it is said here that it is another."""


def is_model_needed(look: Look) -> bool:
    """Whether a folder with a language model has to be given."""
    return any(MODEL in json.dumps(dict(cell.configs)) for cell in list_cells(load_preset(look.preset), "small"))


def run_rows(look: Look, args: argparse.Namespace, folder: Path) -> tuple[CellScore, ...]:
    """Every row under all seeds; a run that is finished in ``--runs`` is copied."""
    preset = load_preset(look.preset)
    cells = {cell.name: cell for cell in list_cells(preset, "small", str(args.data), args.model and str(args.model))}
    scores: list[CellScore] = []
    for number, row in enumerate(look.rows):
        key = preset.methods[row.label].key
        config = dict(cells[look.cell].configs[row.label])
        overrides = [*row.changes, *args.overrides]
        found = compare(config, folder / f"row-{number}", [key], args.seeds, overrides=overrides)
        one = found.rows[0]
        places = [folder / f"row-{number}" / f"{key}-seed{seed}" for seed in args.seeds]
        seen = [measure(place, [look.measure]) for place in places] if look.measure in MEASURED else []
        scores.append(
            CellScore(
                cell=look.cell,
                method=row.name,
                selected={},
                metric=found.metric,
                higher=found.higher,
                scores=one.scores,
                mean=one.mean,
                deviation=one.deviation,
                bytes_down=one.bytes_down,
                bytes_up=one.bytes_up,
                seconds=one.seconds,
                measured={look.measure: tuple(each[look.measure] for each in seen)} if seen else {},
            )
        )
        print(f"{look.preset}, {row.name}: {format_mean(found.metric, one.mean, one.deviation)}", flush=True)
    return tuple(scores)


def build_findings(look: Look, scores: Sequence[CellScore]) -> list[report.Finding]:
    """The first row against each of the others, by the claims' own rule."""
    cells = [cell for cell in list_cells(load_preset(look.preset), "small") if cell.name == look.cell]
    first, *others = (row.name for row in look.rows)
    claim = Claim(statement=look.statement, better=first, worse=others, measure=look.measure)
    return [build_finding(judged) for judged in judge([claim], cells, scores)]


def write_section(look: Look, scores: Sequence[CellScore]) -> str:
    """Of the page."""
    preset = load_preset(look.preset)
    rows = [
        (
            row.name,
            ", ".join(row.changes),
            format_mean(score.metric, score.mean, score.deviation),
            format_megabytes(score.bytes_up),
            format_seconds(score.seconds),
        )
        for row, score in zip(look.rows, scores, strict=True)
    ]
    head = ("row", "config", f"held-out {scores[0].metric}", "MB up", "seconds")
    link = f"[{report.build_title(preset)}]({look.preset}.md)"
    parts = (
        f"## {report.build_title(preset)}",
        f"{link}, {look.cell}. {look.asked}",
        report.format_table(head, rows),
        tabulate_measures(scores),
        look.found,
    )
    return "\n\n".join(part for part in parts if part)


def main() -> None:
    """Run, or go on; page."""
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
    for name in [name for name, look in looks.items() if args.model is None and is_model_needed(look)]:
        print(f"{name}: left out, no --model", flush=True)
        del looks[name]
    found: list[report.Finding] = []
    sections = [OPENING]
    with share_prefixes(), reuse_finished_runs([args.runs]):
        for name, look in looks.items():
            scores = run_rows(look, args, args.runs / PAGE / name)
            found += build_findings(look, scores)
            sections.append(write_section(look, scores))
    args.out.mkdir(parents=True, exist_ok=True)
    seeds = ", ".join(map(str, args.seeds))
    closing = f"Mean ± standard deviation over the seeds {seeds}; MB and seconds are those of one run."
    report.write(args.out, PAGE, TITLE, PAPER, found, [*sections, closing], stated="under what is changed")


if __name__ == "__main__":
    main()
