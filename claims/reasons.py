"""Test hypotheses about why runs at the small scale contradict a paper.

``python claims/reasons.py --data PATH --model PATH``. Finished runs of a page are copied if they are in ``--runs``.
After an interruption, the same command continues. With ``--hypotheses`` the page keeps what it says of the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import report
from hypotheses import HYPOTHESES, Hypothesis
from reproduced import build_finding, describe_machines

from fedspan.experiments.execution import reuse_finished_runs
from fedspan.experiments.run_comparison import compare
from fedspan.experiments.series import compute_deviation, compute_mean
from fedspan.experiments.tables import format_mean, format_megabytes, format_seconds
from fedspan.reproduction.cells import MODEL, list_cells
from fedspan.reproduction.presets import Claim, load_preset
from fedspan.reproduction.verdicts import CellScore, judge
from fedspan.training.prefix_rows import share_prefixes

PAGE = "reasons"
SEEDS = (0, 1, 2)
TITLE = "Examined contradictions at the small scale"
PAPER = "see the page of each statement"
OPENING = """\
Where a page contradicts its paper, the reason may be the small scale, a setting, or an error in this library. Here rows
of such pages are run again with one change. Learning rates are not searched again: each is the one that the page
selected, unless the section names another one."""


def is_model_needed(hypothesis: Hypothesis) -> bool:
    """Check whether a hypothesis needs a folder with a language model."""
    return any(MODEL in json.dumps(dict(cell.configs)) for cell in list_cells(load_preset(hypothesis.preset), "small"))


def run_rows(hypothesis: Hypothesis, args: argparse.Namespace, folder: Path) -> tuple[CellScore, ...]:
    """Run every row with all seeds; runs that are finished in ``--runs`` are copied."""
    preset = load_preset(hypothesis.preset)
    cells = {cell.name: cell for cell in list_cells(preset, "small", str(args.data), args.model and str(args.model))}
    scores: list[CellScore] = []
    for number, row in enumerate(hypothesis.rows):
        key = row.key or preset.methods[row.label].key
        config = dict(cells[hypothesis.cell].configs[row.label])
        overrides = [*row.list_changes(str(args.data)), *args.overrides]
        place = folder / f"row-{number}"
        if hypothesis.partitions:  # one comparison has one partition for all of its seeds
            parts = [compare(config, place / f"seed-{seed}", [key], [seed], overrides=overrides) for seed in args.seeds]
        else:
            parts = [compare(config, place, [key], args.seeds, overrides=overrides)]
        values = tuple(value for part in parts for value in part.rows[0].scores)
        metric = parts[0].metric
        score = CellScore(
            cell=hypothesis.cell,
            method=row.name,
            selected={},
            metric=metric,
            higher=parts[0].higher,
            scores=values,
            mean=compute_mean(values),
            deviation=compute_deviation(values),
            bytes_down=compute_mean([part.rows[0].bytes_down for part in parts]),
            bytes_up=compute_mean([part.rows[0].bytes_up for part in parts]),
            seconds=compute_mean([part.rows[0].seconds for part in parts]),
        )
        scores.append(score)
        print(f"{hypothesis.preset}, {row.name}: {format_mean(metric, score.mean, score.deviation)}", flush=True)
    return tuple(scores)


def build_findings(hypothesis: Hypothesis, scores: Sequence[CellScore]) -> list[report.Finding]:
    """Judge the first row against each of the others by the rule of the claims."""
    cells = [cell for cell in list_cells(load_preset(hypothesis.preset), "small") if cell.name == hypothesis.cell]
    first, *others = (row.name for row in hypothesis.rows)
    claim = Claim(statement=hypothesis.statement, better=first, worse=others)
    return [build_finding(judged) for judged in judge([claim], cells, scores)]


def format_verdicts(findings: Sequence[report.Finding]) -> str:
    """Return a hypothesis' verdicts as a list."""
    return "\n".join(f"- {finding.statement}: {finding.measured}: **{finding.verdict}**." for finding in findings)


def build_command(name: str, seeds: Sequence[int] = SEEDS) -> str:
    """Return the command that runs a hypothesis."""
    model = " --model FOLDER" if is_model_needed(HYPOTHESES[name]) else ""
    chosen = "" if tuple(seeds) == SEEDS else f" --seeds {' '.join(map(str, seeds))}"
    return f"python claims/reasons.py --hypotheses {name} --data FOLDER{model}{chosen}"


def write_section(
    name: str,
    hypothesis: Hypothesis,
    scores: Sequence[CellScore],
    findings: Sequence[report.Finding],
    seeds: Sequence[int],
    folder: Path,
) -> str:
    """Write the section of a hypothesis, whose runs are in a folder, in Markdown."""
    preset = load_preset(hypothesis.preset)
    rows = [
        (
            row.name,
            ", ".join(row.changes).replace("|", r"\|"),
            format_mean(score.metric, score.mean, score.deviation),
            format_megabytes(score.bytes_up),
            format_seconds(score.seconds),
        )
        for row, score in zip(hypothesis.rows, scores, strict=True)
    ]
    head = ("row", "config", f"held-out {scores[0].metric}", "MB up", "seconds")
    link = f"[{report.build_title(preset)}]({hypothesis.preset}.md)"
    parts = (
        f"## {hypothesis.statement}",
        f"Command: `{build_command(name, seeds)}`  \nDate: {time.strftime('%Y-%m-%d')}. "
        f"Machine: {describe_machines(folder)}.",
        f"{link}, {hypothesis.cell}. {hypothesis.reason}",
        report.format_table(head, rows),
        format_verdicts(findings),
    )
    return "\n\n".join(parts)


def read_sections(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the text and the findings of every hypothesis that the page in the folder has; empty without a page."""
    path = folder / f"{PAGE}.json"
    return json.loads(path.read_text(encoding="utf-8"))["sections"] if path.is_file() else {}


def write_page(folder: Path, sections: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the page and its JSON file, with the sections in the order of the hypotheses."""
    ordered = {name: sections[name] for name in HYPOTHESES if name in sections}
    findings = [report.Finding(**finding) for section in ordered.values() for finding in section["findings"]]
    names = ", ".join(map(str, SEEDS))
    closing = (
        f"Rows: mean ± standard deviation over the seeds {names}, or those that a section's command names; MB and "
        "seconds are those of one run. Verdicts: difference ± half its 95 % interval, paired by seed."
    )
    texts = [OPENING, *(section["text"] for section in ordered.values()), closing]
    command, machine = "python claims/reasons.py --data FOLDER --model FOLDER", "each section names its own"
    stated = "statement under the change"
    report.write(folder, PAGE, TITLE, PAPER, findings, texts, stated, machine=machine, command=command)
    path = folder / f"{PAGE}.json"
    saved = {**json.loads(path.read_text(encoding="utf-8")), "sections": ordered}
    path.write_text(json.dumps(saved, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Run the hypotheses, or continue them, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with data sets")
    parser.add_argument(
        "--model", type=Path, help="folder with a language model; without it, hypotheses that need one are skipped"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/claims"))
    parser.add_argument("--hypotheses", nargs="+", choices=tuple(HYPOTHESES), default=tuple(HYPOTHESES))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--set", dest="overrides", nargs="*", default=[], help="section.field=value")
    parser.add_argument("--out", type=Path, default=report.FOLDER)
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    hypotheses = {name: hypothesis for name, hypothesis in HYPOTHESES.items() if name in args.hypotheses}
    for name in [name for name, hypothesis in hypotheses.items() if args.model is None and is_model_needed(hypothesis)]:
        print(f"{name}: skipped, because no --model is given", flush=True)
        del hypotheses[name]
    sections = read_sections(args.out)
    with share_prefixes(), reuse_finished_runs([args.runs]):
        for name, hypothesis in hypotheses.items():
            folder = args.runs / PAGE / name
            scores = run_rows(hypothesis, args, folder)
            judged = build_findings(hypothesis, scores)
            text = write_section(name, hypothesis, scores, judged, args.seeds, folder)
            sections[name] = {"text": text, "findings": [dataclasses.asdict(finding) for finding in judged]}
    args.out.mkdir(parents=True, exist_ok=True)
    write_page(args.out, sections)


if __name__ == "__main__":
    main()
