"""The last screen of a run: what it reached beside its baselines, what it cost, and how to use the adapter."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedspan.cli.text import duration, one_line, percent, plain_table, size, titles
from fedspan.models.loading import resolve
from fedspan.runs.session import RunReport

__all__ = ["peft_snippet", "show_report"]


def show_report(out: Console, report: RunReport, folder: Path) -> None:
    """Print the report of the run in ``folder``."""
    out.print(_scores(report))
    if said := _gain(report):
        out.print(Text(said))
        out.print()
    id, where = next(iter(report.adapters.items()))
    adapter, own = folder / where, id != "global"
    chosen = "the best by validation" if "validation" in report.scores else "the last one"
    whose = f" --client {shlex.quote(id)}" if own else ""
    facts = {
        "traffic": f"{size(report.bytes['down'])} down, {size(report.bytes['up'])} up",
        "time": f"{duration(report.seconds)} for {report.rounds} rounds",
        "round": f"{report.best_round}, {chosen}",
        "adapters" if own else "adapter": f"{adapter.parent} (one for each client)" if own else str(adapter),
        "report": str(folder / "report.json"),
        "try": f'fedspan predict {shlex.quote(str(folder))} "your text"{whose}',
    }
    for name, fact in facts.items():
        out.print(Text.assemble((f"{name:<10}", "dim"), fact), soft_wrap=True)
    out.print()
    for line in peft_snippet(adapter):
        out.print(Text(f"  {line}", "cyan"), soft_wrap=True)
    if report.examples:
        out.print(_examples(report, out.width))


def _scores(report: RunReport) -> Table:
    heldout, own = "test" in report.scores, "clients" in report.scores
    table = plain_table()
    table.add_column("", no_wrap=True)
    if heldout:
        table.add_column("held-out\naccuracy", justify="right")
        table.add_column("held-out\nmacro-F1", justify="right")
        table.add_column("held-out\nworst client", justify="right", no_wrap=True)
    if own:
        table.add_column("own tests\nmean", justify="right")
        table.add_column("own tests\nworst client", justify="right", no_wrap=True)
    rows = {report.method: report.scores, **{name: made["scores"] for name, made in report.baselines.items()}}
    for name, scores in rows.items():
        cells: list[str] = []
        if heldout:
            test = scores.get("test") or {}
            cells += [percent(test.get("accuracy")), percent(test.get("macro_f1")), _worst(test)]
        if own:
            clients = scores.get("clients") or {}
            cells += [percent(clients.get("accuracy")), _worst(clients)]
        table.add_row(titles(name), *cells, style="bold" if name == report.method else "")
    return table


def _worst(scores: Mapping[str, Any]) -> str:
    worst = scores.get("worst")
    return "" if worst is None else f"{one_line(worst['client'], 12)} {percent(worst['accuracy'])}"


def _gain(report: RunReport) -> str:
    """One sentence on what the federation was good for."""
    reached = (report.scores.get("test") or {}).get("accuracy")
    others = {name: (made["scores"].get("test") or {}).get("accuracy") for name, made in report.baselines.items()}
    if reached is None:
        return ""
    parts = [
        f"{_apart(reached - score)} {against}"
        for name, against in (("local", "the mean client alone"), ("centralised", "all examples in one place"))
        if (score := others.get(name)) is not None
    ]
    return f"Held-out accuracy is {' and '.join(parts)}." if parts else ""


def _apart(difference: float) -> str:
    points = f"{abs(100 * difference):.1f}"
    return "equal to" if points == "0.0" else f"{points} points {'above' if difference > 0 else 'below'}"


def peft_snippet(adapter: Path) -> list[str]:
    """Three lines of Python that load an adapter without fedspan."""
    notes = json.loads((adapter / "fedspan.json").read_text(encoding="utf-8"))
    revision = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8")).get("revision")
    more = f"num_labels={len(notes['labels'])}" + (f", revision={revision!r}" if revision else "")
    base = resolve(notes["base_model"])
    return [
        "import peft, transformers",
        f'base = transformers.AutoModelForSequenceClassification.from_pretrained("{base}", {more})',
        f'model = peft.PeftModel.from_pretrained(base, "{adapter}")',
    ]


def _examples(report: RunReport, width: int) -> Table:
    table = plain_table()
    labels = max(len("prediction"), *(len(row[key]) for row in report.examples for key in ("label", "prediction")))
    labels = min(labels, (width - 30) // 2)
    table.add_column("a held-out text", width=min(90, width - 2 * labels - 6))
    table.add_column("label", no_wrap=True, max_width=labels)
    table.add_column("prediction", no_wrap=True, max_width=labels)
    for row in report.examples:
        right = row["label"] == row["prediction"]
        table.add_row(
            Text(" ".join(row["text"].split())),
            Text(row["label"]),
            Text(row["prediction"], "green" if right else "red"),
        )
    return table
