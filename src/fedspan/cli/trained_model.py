"""``fedspan predict`` and ``fedspan evaluate``: use of a trained model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from fedspan.cli.commands import Json, Overrides, argument, flag, option, register_command
from fedspan.cli.formatting import create_console, create_table
from fedspan.errors import FedspanError, escape_controls
from fedspan.files import neutralize_formula
from fedspan.progress.formatting import format_score

Model = Annotated[Path, argument("RUN_OR_MODEL", "Folder of a run or of an exported model.")]
ClientOption = Annotated[
    str | None, option("ID", "Client whose model is used, if every client has its own.", "--client")
]


@register_command(
    "predict",
    'fedspan predict runs/first "Can I move my appointment to Friday?"',
    "fedspan predict runs/first --file messages.csv --text message --out labels.csv",
    'fedspan predict runs/personal --client client-03 "Where do I park?"',
)
def predict(
    model: Model,
    texts: Annotated[
        list[str] | None, argument("TEXT...", "Texts or image files; for a model of pairs, two texts with a tab.")
    ] = None,
    file: Annotated[
        Path | None,
        option(
            "FILE",
            "A table in any format that init reads, or a .txt file with one text per line; - reads "
            "lines of standard input.",
        ),
    ] = None,
    text: Annotated[str | None, option("COLUMN", "The table's column. Default: as in training.")] = None,
    text_pair: Annotated[str | None, option("COLUMN", "The table's column of second texts.")] = None,
    out: Annotated[Path | None, option("FILE", "New .csv, .tsv or .jsonl file for the table with predictions.")] = None,
    client: ClientOption = None,
    as_json: Json = False,
) -> None:
    """Predict the labels or numbers of texts, or answer prompts; the output is tab-separated outside of a terminal.

    There, texts that a spreadsheet would run as formulas begin with an apostrophe. --json prints all texts unchanged.
    """
    if not texts and file is None:
        raise FedspanError("TEXT", None, "texts to label, or --file FILE")
    import fedspan
    from fedspan.serving.inputs import read_inputs, require_new_table, write_predictions

    if out is not None:
        require_new_table(out)
    inputs = read_inputs(model, client, texts or (), file, text, text_pair)
    rows = [_name_parts(answer) for answer in fedspan.predict(model, inputs.values, client)]
    cells = [[_format_cell(value) for value in row.values()] for row in rows]
    lines = [_format_input(value) for value in inputs.values]
    if out is not None:
        write_predictions(out, inputs.rows, rows, cells)
        typer.echo(f"wrote {out}")
        return
    if as_json:
        content = [{"text": text, **row} for row, text in zip(rows, lines, strict=True)]
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
        return
    if (screen := sys.stdout.isatty()) and "answer" not in rows[0]:  # labels are those of the model's folder
        cells = [[escape_controls(cell) for cell in row] for row in cells]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row, text in zip(cells, lines, strict=True):
        shown = " ".join(text.split())
        if screen and "answer" in rows[0]:
            typer.echo("\n  ".join([shown, *map(escape_controls, row[0].splitlines())]))
        elif screen:
            typer.echo("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=True)), shown]))
        else:
            typer.echo("\t".join(neutralize_formula(" ".join(cell.split())) for cell in (*row, text)))


def _name_parts(answer: object) -> dict[str, object]:
    """Convert the prediction of a classifier, a regression, a language model or an encoder to named columns."""
    if isinstance(answer, tuple):
        label, probability = cast(tuple[str, float], answer)
        return {"label": label, "probability": probability}
    if isinstance(answer, list) and answer and isinstance(answer[0], float):
        return {"vector": answer}
    return {"number" if isinstance(answer, float) else "answer": answer}


def _format_cell(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], float):
        return " ".join(f"{number:.6g}" for number in value)
    if isinstance(value, list):  # pairs of a label and its probability, or of an entity and its type
        return ", ".join(" ".join(map(_format_cell, pair)) for pair in cast("list[tuple[object, ...]]", value))
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _format_input(value: object) -> str:
    if isinstance(value, tuple | list):  # a pair of texts, or the words of a sentence
        return ("\t" if isinstance(value, tuple) else " ").join(cast("tuple[str, ...]", value))
    return str(value)


def _split_role(text: str) -> tuple[str, str]:
    role, equals, column = text.partition("=")
    if not equals or not role or not column:
        raise FedspanError("--role", text, "ROLE=COLUMN, such as tokens=words")
    return role, column


@register_command(
    "evaluate",
    "fedspan evaluate runs/first",
    "fedspan evaluate exported/ --data new.csv --text message --label intent",
    "fedspan evaluate runs/ner --data new.jsonl --role tokens=words --set data.label=ner",
    "fedspan evaluate runs/instruct --tasks mmlu,arc_easy --shots 5",
)
def evaluate(
    model: Model,
    client: ClientOption = None,
    data: Annotated[str | None, option("FILE", "Labeled examples. Default: the run's held-out test set.")] = None,
    text: Annotated[str | None, option("COLUMN", "Column of texts. Default: the run's, or text.")] = None,
    image: Annotated[str | None, option("COLUMN", "Column of images. Default: the run's, or image.")] = None,
    label: Annotated[str | None, option("COLUMN", "Column of labels or numbers. Default: the run's, or label.")] = None,
    text_pair: Annotated[str | None, option("COLUMN", "Column of second texts.")] = None,
    answer: Annotated[str | None, option("COLUMN", "Column of answers or targets. Default: answer.")] = None,
    roles: Annotated[
        list[str] | None, option("ROLE=COLUMN", "Column with a role (data.roles); may be repeated.", "--role")
    ] = None,
    overrides: Overrides = None,
    generate: Annotated[
        bool, flag("--generate/--no-generate", "Generate the answers of language models and seq2seq, and score them.")
    ] = True,
    tasks: Annotated[
        str | None, option("A,B", "Tasks of lm-evaluation-harness (mmlu, arc_easy), in place of data.")
    ] = None,
    shots: Annotated[int | None, option("N", "Few-shot examples per prompt, with --tasks.")] = None,
    limit: Annotated[int | None, option("N", "Maximum number of examples per task, with --tasks.")] = None,
    include: Annotated[Path | None, option("DIR", "Folder of custom tasks, with --tasks.", "--task-folder")] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a model as PEFT loads it, by the metrics of its task: accuracy, correlation, perplexity, exact match."""
    if tasks is not None:
        inputs = {"--data": data, "--text": text, "--image": image, "--label": label, "--text-pair": text_pair}
        inputs |= {
            "--answer": answer,
            "--role": ", ".join(roles or ()) or None,
            "--set": ", ".join(overrides or ()) or None,
        }
        for name, value in inputs.items():
            if value is not None:
                raise FedspanError(
                    name, value, problem="it cannot be combined with --tasks, which have data of their own"
                )
        _run_harness(model, client, tasks, shots, limit, include, as_json)
        return
    for name, value in {"--shots": shots, "--limit": limit, "--task-folder": include}.items():
        if value is not None:
            raise FedspanError(name, str(value), problem="it needs --tasks")
    import fedspan
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
        roles=dict(map(_split_role, roles or ())),
        overrides=overrides or (),
        generate=generate,
    )
    if as_json:
        typer.echo(json.dumps(metrics))
        return
    shown = {METRICS[name].title: format_score(name, value) for name, value in metrics.items() if name in METRICS}
    width = max(map(len, shown))
    counts = {name: f"{metrics[name]:.0f}" for name in ("examples", "skipped") if name in metrics}
    for name, value in {**shown, **counts}.items():
        typer.echo(f"{name:<{width}} {value:>8}")


def _run_harness(
    model: Path,
    client: str | None,
    tasks: str,
    shots: int | None,
    limit: int | None,
    include: Path | None,
    as_json: bool,
) -> None:
    import fedspan

    names = [part.strip() for part in tasks.split(",") if part.strip()]
    results = fedspan.harness(model, names, client, shots=shots, limit=limit, include=include)
    if as_json:
        typer.echo(json.dumps(results, indent=2))
        return
    table = create_table()
    table.add_column("task", style="cyan", no_wrap=True)
    for title in ("metric", "value", "error", "examples"):
        table.add_column(title, justify="left" if title == "metric" else "right", no_wrap=True)
    for task, metrics in results.items():
        count = "" if "examples" not in metrics else f"{metrics['examples']:.0f}"
        for name, value in metrics.items():
            if name != "examples" and "_stderr" not in name:
                error = metrics.get(name.replace(":", "_stderr:", 1) if ":" in name else f"{name}_stderr")
                table.add_row(task, name, f"{value:.4f}", "" if error is None else f"{error:.4f}", count)
    create_console().print(table)
