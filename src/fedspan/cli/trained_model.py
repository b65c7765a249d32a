"""``fedspan predict`` and ``fedspan evaluate``: use of a trained model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from fedspan.cli.commands import Json, command
from fedspan.errors import FedspanError

__all__ = ["Client", "evaluate", "predict"]

Model = Annotated[Path, typer.Argument(metavar="RUN_OR_MODEL", help="A run folder, or a model that was exported.")]
Client = Annotated[str | None, typer.Option("--client", metavar="ID", help="Whose model, if every client has its own.")]


@command(
    "predict",
    'fedspan predict runs/first "Can I move my appointment to Friday?"',
    "fedspan predict runs/first --file messages.txt > labels.tsv",
    'fedspan predict runs/personal --client client-03 "Where do I park?"',
)
def predict(
    model: Model,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT...", help="Texts to label, or files of images.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="A file with one text a line; - reads standard input.")
    ] = None,
    client: Client = None,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="A tab separates the two texts of a pair, for a model of pairs.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Label texts (or give numbers to them, or answer prompts), with tabs in between when not in a terminal."""
    given: list[str] = [*(texts or ()), *(_lines(file) if file is not None else ())]
    if not given:
        raise FedspanError("TEXT", None, "texts to label, or --file FILE")
    asked = [_pair(text) for text in given] if pairs else given
    import fedspan

    rows = [_answer(answer) for answer in fedspan.predict(model, asked, client)]
    if as_json:
        content = [{"text": text, **row} for row, text in zip(rows, given, strict=True)]
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
        return
    screen = sys.stdout.isatty()
    cells = [[_cell(value) for value in row.values()] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row, text in zip(cells, given, strict=True):
        shown = " ".join(text.split())
        if screen and "answer" in rows[0]:
            typer.echo(f"{shown}\n  {row[0]}")
        elif screen:
            typer.echo("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=True)), shown]))
        else:
            typer.echo("\t".join([*(" ".join(cell.split()) for cell in row), shown]))


def _answer(answer: object) -> dict[str, object]:
    """Name the parts of a prediction: of a classifier, a regression or a language model."""
    if isinstance(answer, tuple):
        label, probability = cast(tuple[str, float], answer)
        return {"label": label, "probability": probability}
    return {"number" if isinstance(answer, float) else "answer": answer}


def _cell(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _lines(file: Path) -> list[str]:
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FedspanError("--file", str(file), f"a readable text file in UTF-8 ({error})") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise FedspanError("--file", str(file), problem="the file is empty", expected="a file with one text a line")
    return lines


def _pair(text: str) -> tuple[str, str]:
    first, tab, second = text.partition("\t")
    if not tab:
        raise FedspanError("--pairs", text, "two texts separated by a tab")
    return first, second


@command(
    "evaluate",
    "fedspan evaluate runs/first",
    "fedspan evaluate exported/ --data new.csv --text message --label intent",
    "fedspan evaluate runs/instruct --tasks mmlu,arc_easy --shots 5",
)
def evaluate(
    model: Model,
    client: Client = None,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="FILE", help="Labelled texts; left out: the run's own held-out test set."),
    ] = None,
    text: Annotated[
        str | None, typer.Option("--text", metavar="COLUMN", help="The file's column of texts; left out: text.")
    ] = None,
    image: Annotated[
        str | None, typer.Option("--image", metavar="COLUMN", help="Its column of images; left out: image.")
    ] = None,
    label: Annotated[
        str | None, typer.Option("--label", metavar="COLUMN", help="Its column of labels or numbers; left out: label.")
    ] = None,
    text_pair: Annotated[
        str | None, typer.Option("--text-pair", metavar="COLUMN", help="Its column of second texts, if any.")
    ] = None,
    answer: Annotated[
        str | None, typer.Option("--answer", metavar="COLUMN", help="Its column of answers, for a language model.")
    ] = None,
    generate: Annotated[
        bool, typer.Option("--generate/--no-generate", help="Let a language model answer, and count exact matches.")
    ] = True,
    tasks: Annotated[
        str | None,
        typer.Option("--tasks", metavar="A,B", help="Of lm-evaluation-harness (mmlu, arc_easy), in place of data."),
    ] = None,
    shots: Annotated[
        int | None, typer.Option("--shots", metavar="N", help="With --tasks: examples in prompts.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", help="With --tasks: examples of each.")] = None,
    include: Annotated[
        Path | None, typer.Option("--task-folder", metavar="DIR", help="With --tasks: a folder with one's own.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a model as PEFT loads it: accuracy, correlations, perplexity, exact match; whatever its task has."""
    if tasks is not None:
        given = {"--data": data, "--text": text, "--image": image, "--label": label, "--answer": answer}
        for name, value in given.items():
            if value is not None:
                raise FedspanError(
                    name, value, problem="it cannot be combined with --tasks, which have data of their own"
                )
        _harness(model, client, tasks, shots, limit, include, as_json)
        return
    for name, value in {"--shots": shots, "--limit": limit, "--task-folder": include}.items():
        if value is not None:
            raise FedspanError(name, str(value), problem="it needs --tasks")
    import fedspan
    from fedspan.cli.formatting import score
    from fedspan.tasks.metrics import METRICS

    metrics = fedspan.evaluate(
        model,
        client,
        data=data,
        text=text,
        image=image,
        label=label,
        text_pair=text_pair,
        answer=answer,
        generate=generate,
    )
    if as_json:
        typer.echo(json.dumps(metrics))
        return
    shown = {METRICS[name].title: score(name, value) for name, value in metrics.items() if name in METRICS}
    width = max(map(len, shown))
    for name, value in {**shown, "examples": f"{metrics['examples']:.0f}"}.items():
        typer.echo(f"{name:<{width}} {value:>8}")


def _harness(
    model: Path,
    client: str | None,
    tasks: str,
    shots: int | None,
    limit: int | None,
    include: Path | None,
    as_json: bool,
) -> None:
    """Run tasks of lm-evaluation-harness, and print a table or JSON."""
    import fedspan
    from fedspan.cli.formatting import console, plain_table

    names = [part.strip() for part in tasks.split(",") if part.strip()]
    found = fedspan.harness(model, names, client, shots=shots, limit=limit, include=include)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    table = plain_table()
    table.add_column("task", style="cyan", no_wrap=True)
    for title in ("metric", "value", "error", "examples"):
        table.add_column(title, justify="left" if title == "metric" else "right", no_wrap=True)
    for task, metrics in found.items():
        count = "" if "examples" not in metrics else f"{metrics['examples']:.0f}"
        for name, value in metrics.items():
            if name != "examples" and "_stderr" not in name:
                error = metrics.get(name.replace(":", "_stderr:", 1) if ":" in name else f"{name}_stderr")
                table.add_row(task, name, f"{value:.4f}", "" if error is None else f"{error:.4f}", count)
    console().print(table)
