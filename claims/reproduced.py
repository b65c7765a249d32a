"""A paper's table or figure at the small scale, run by ``fedspan reproduce``, as a page with its verdicts.

``python claims/reproduced.py rolora-table1 --data PATH`` (a folder with the data sets). Stopped, the same command goes
on: the runs are in ``--runs``, where tables share them; after a change of the code, begin with an empty folder.
``--protocol matched`` gives all rows the one learning rate that the preset names, and has a page of its own, which the
preset's page cites (``pages.py``).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pages
import report
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fedspan.experiments.tables import format_markdown
from fedspan.reproduction.presets import Preset, load_preset
from fedspan.reproduction.reproduce import Reproduction, reproduce
from fedspan.reproduction.verdicts import CellScore, Judged, format_difference
from fedspan.tasks.metrics import METRICS, Metric


def build_finding(judged: Judged) -> report.Finding:
    """A verdict as a row."""
    statement = f"{judged.statement}: {judged.better} against {judged.worse}"
    if judged.overall is None:
        return report.Finding(statement, judged.reason or "", judged.verdict)
    known = METRICS.get(judged.metric)
    unit = "" if known is None else f" {'points of ' if known.is_percentage else ''}{known.title}"
    return report.Finding(statement, f"by {format_difference(judged.metric, judged.overall)}{unit}", judged.verdict)


def tabulate_cells(verdicts: Sequence[Judged]) -> str:
    """The same, cell by cell, where there are several."""
    rows = [
        [judged.statement, judged.better, judged.worse, cell.cell, format_difference(judged.metric, cell), cell.verdict]
        for judged in verdicts
        if len(judged.cells) > 1 and not judged.metric.startswith("bytes")
        for cell in judged.cells
    ]
    if not rows:
        return ""
    return "Cell by cell:\n\n" + report.format_table(("statement", "better", "worse", "cell", "by", "verdict"), rows)


def tabulate_measures(scores: Sequence[CellScore]) -> str:
    """What was measured beside scores, bytes and time, mean and deviation over the seeds; empty if nothing was."""
    rows: list[tuple[str, str, str, str]] = []
    for score in scores:
        for name, values in score.measured.items():
            known = [value for value in values if value is not None]
            spread = f" ± {stdev(known):.2g}" if len(known) > 1 else ""
            rows.append((score.cell, score.method, name, f"{fmean(known):.3g}{spread}" if known else "-"))
    if not rows:
        return ""
    return "Measured on the finished runs:\n\n" + report.format_table(("cell", "method", "measure", "value"), rows)


def describe_ends(reproduction: Reproduction, preset: Preset) -> str:
    """Which rows' settings were chosen at an end of their grid; empty if none were."""
    rows: list[str] = []
    for path, grid in preset.get_sweep(reproduction.scale).items():
        numbers = [value for value in grid if isinstance(value, int | float)]
        if len(numbers) < 2:
            continue
        ends = {min(numbers): "smallest", max(numbers): "largest"}
        for end, name in ends.items():
            cells: dict[str, list[str]] = {}
            for score in reproduction.scores:
                if score.selected.get(path) == end:
                    cells.setdefault(score.method, []).append(score.cell)
            rows += [
                f"- {path} {end:g}, the {name}: {method} in {', '.join(methods)}" for method, methods in cells.items()
            ]
    if not rows:
        return ""
    return "Chosen at an end of the grid, beyond which more might be found:\n\n" + "\n".join(rows)


def describe_machines(folder: Path) -> str:
    """What the runs in a folder ran on, the most frequent first, with numbers of runs where there are several."""
    machines: Counter[str] = Counter()
    for path in folder.rglob("environment.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        device = found["accelerator"] or "CPU"
        machines[f"{found['machine']}, {device}, torch {found['torch']}, {found['threads']} thread(s)"] += 1
    if len(machines) < 2:
        return "".join(machines)
    return "; ".join(f"{count} runs on {machine}" for machine, count in machines.most_common())


def draw(scores: Sequence[CellScore]) -> Figure:
    """Every cell's scores, a group of bars each; those of another metric on axes of their own."""
    metrics = list(dict.fromkeys(score.metric for score in scores if score.metric))
    parts = [[score for score in scores if score.metric == metric] for metric in metrics]
    bars = [1.2 * len({score.cell for score in part}) * len({score.method for score in part}) / 2 for part in parts]
    figure = Figure(figsize=(max(6.0, sum(bars)) + 1.5, 4), layout="constrained")
    axes = figure.subplots(1, len(parts), squeeze=False, width_ratios=bars)[0]
    labels = list(dict.fromkeys(score.method for score in scores))
    for one, metric, part in zip(axes, metrics, parts, strict=True):
        _draw_bars(one, METRICS[metric], part, labels)
    patches = [Patch(label=label, **_get_style(index)) for index, label in enumerate(labels)]
    figure.legend(handles=patches, loc="outside right upper", fontsize="small")
    return figure


def _get_style(index: int) -> dict[str, Any]:
    """Of a row's bars, on all axes; without color, too."""
    hatch = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")[index % 8]
    return {"facecolor": f"C{index}", "hatch": hatch, "edgecolor": "black", "linewidth": 0.5}


def _draw_bars(axes: Axes, metric: Metric, scores: Sequence[CellScore], labels: Sequence[str]) -> None:
    cells = list(dict.fromkeys(score.cell for score in scores))
    factor = 100.0 if metric.is_percentage else 1.0
    width = 0.8 / len(labels)
    for index, label in enumerate(labels):
        drawn = [
            (cells.index(score.cell), score) for score in scores if score.method == label and score.mean is not None
        ]
        axes.bar(
            [position + (index - (len(labels) - 1) / 2) * width for position, _ in drawn],
            [factor * (score.mean or 0.0) for _, score in drawn],
            width,
            yerr=[factor * (score.deviation or 0.0) for _, score in drawn],
            **_get_style(index),
        )
    axes.set_xticks(range(len(cells)), [cell.replace(" / ", "\n") for cell in cells], fontsize="small")
    axes.set_ylabel(f"{metric.title}{', %' if metric.is_percentage else ''} (mean ± deviation over seeds)")


def page(reproduction: Reproduction, preset: Preset, folder: Path) -> None:
    """Write it."""
    drawn = any(score.metric for score in reproduction.scores)
    is_best = reproduction.protocol == "best"
    name = pages.name_page(reproduction.id, reproduction.protocol)
    findings = [build_finding(judged) for judged in reproduction.verdicts]
    figure = report.save_figure(draw(reproduction.scores), folder, name, f"{preset.item}, small scale") if drawn else ""
    by_value = reproduction.build_value_table()
    notes = "\n".join(f"- {' '.join(note.split())}" for note in preset.notes)
    seeds = f"seeds {', '.join(map(str, reproduction.seeds))}"
    if len(reproduction.seeds) == 1:
        seeds = f"seed {reproduction.seeds[0]} (one seed gives no interval)"
    sections = [
        f"At the small scale, {seeds}; at the paper's: "
        f"`fedspan reproduce {reproduction.id} --scale full --out FOLDER`.",
        "\n".join(format_markdown(reproduction.build_table())),
        "" if by_value is None else "\n".join(format_markdown(by_value)),
        figure,
        tabulate_measures(reproduction.scores),
        describe_ends(reproduction, preset) if is_best else "",
        tabulate_cells(reproduction.verdicts),
        "## Setting\n\n" + "\n".join(format_markdown(reproduction.settings)) + f"\n\n{notes}",
    ]
    title = report.build_title(preset) + ("" if is_best else ", all rows at one learning rate")
    machine = describe_machines(Path(reproduction.folder))
    report.write(folder, name, title, preset.paper, findings, [part for part in sections if part], machine=machine)
    pages.complete(folder, preset)


def main() -> None:
    """Run, or continue; page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("id", help="a preset of fedspan reproduce")
    parser.add_argument("--data", type=Path, help="folder with data sets")
    parser.add_argument("--model", type=Path, help="folder with a model, where the preset asks for one")
    parser.add_argument("--runs", type=Path, default=Path("runs/claims"))
    parser.add_argument("--protocol", choices=("best", "matched"), default="best", help="rates of the rows")
    parser.add_argument("--seeds", type=int, nargs="+", help="replace the preset's; one gives no verdict")
    parser.add_argument("--set", dest="overrides", nargs="*", default=[], help="section.field=value")
    parser.add_argument("--out", type=Path, default=report.FOLDER)
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    reproduction = reproduce(
        args.id,
        args.runs / pages.name_page(args.id, args.protocol),
        data=args.data,
        model=args.model,
        overrides=args.overrides,
        reuse=[args.runs],  # tables share cells
        seeds=args.seeds,
        protocol=args.protocol,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    page(reproduction, load_preset(args.id), args.out)


if __name__ == "__main__":
    main()
