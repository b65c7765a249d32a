"""``fedspan predict``, ``evaluate`` and ``export``: using what was trained."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedspan.cli.show import Json
from fedspan.errors import FedspanError

__all__ = ["evaluate", "export", "predict"]

Model = Annotated[Path, typer.Argument(metavar="RUN_OR_MODEL", help="A run folder, or a model that was exported.")]
Client = Annotated[str | None, typer.Option("--client", metavar="ID", help="Whose model, if every client has its own.")]


class Form(StrEnum):
    """In which form a model is exported."""

    adapter = "adapter"
    merged = "merged"


def predict(
    model: Model,
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT...", help="Texts to label.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="A file with one text a line; - reads standard input.")
    ] = None,
    client: Client = None,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="A tab separates the two texts of a pair, for a model of pairs.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Label texts. Prints label, probability and text, with tabs in between when not in a terminal."""
    given: list[str] = [*(texts or ()), *(_lines(file) if file is not None else ())]
    if not given:
        raise FedspanError("TEXT", None, "texts to label, or --file FILE")
    asked = [_pair(text) for text in given] if pairs else given
    from fedspan import api

    answers = api.predict(model, asked, client)
    rows = [(label, probability, text) for (label, probability), text in zip(answers, given, strict=True)]
    if as_json:
        content = [{"text": text, "label": label, "probability": probability} for label, probability, text in rows]
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
    elif sys.stdout.isatty():
        width = max(len(label) for label, _, _ in rows)
        for label, probability, text in rows:
            typer.echo(f"{label:<{width}}  {100 * probability:5.1f}%  {' '.join(text.split())}")
    else:
        for label, probability, text in rows:
            typer.echo(f"{label}\t{probability:.4f}\t{' '.join(text.split())}")


def _lines(file: Path) -> list[str]:
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FedspanError("--file", str(file), f"a readable text file in UTF-8 ({error})") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise FedspanError("--file", str(file), "a file with texts in it, one a line; this one is empty")
    return lines


def _pair(text: str) -> tuple[str, str]:
    first, tab, second = text.partition("\t")
    if not tab:
        raise FedspanError("--pairs", text, "two texts with a tab in between")
    return first, second


def evaluate(
    model: Model,
    client: Client = None,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="FILE", help="Labelled texts; left out: the run's own held-out test set."),
    ] = None,
    text: Annotated[str, typer.Option("--text", metavar="COLUMN", help="The file's column of texts.")] = "text",
    label: Annotated[str, typer.Option("--label", metavar="COLUMN", help="Its column of labels.")] = "label",
    text_pair: Annotated[
        str | None, typer.Option("--text-pair", metavar="COLUMN", help="Its column of second texts, if any.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a model as PEFT loads it: accuracy, macro-F1, loss."""
    from fedspan import api
    from fedspan.cli.text import percent

    metrics = api.evaluate(model, client, data=data, text=text, label=label, text_pair=text_pair)
    if as_json:
        typer.echo(json.dumps(metrics))
        return
    shown = {
        "accuracy": percent(metrics["accuracy"]),
        "macro-F1": percent(metrics["macro_f1"]),
        "loss": f"{metrics['loss']:.4f}",
        "examples": f"{metrics['examples']:.0f}",
    }
    for name, value in shown.items():
        typer.echo(f"{name:<9} {value:>8}")


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A new folder.")],
    form: Annotated[
        Form, typer.Option("--form", help="A PEFT adapter, or a plain Transformers model with its tokenizer.")
    ] = Form.adapter,
    client: Client = None,
    round: Annotated[
        str, typer.Option("--round", metavar="N", help="best (by validation), last, or a round that was kept.")
    ] = "best",
) -> None:
    """Copy a trained model out of a run, as a PEFT adapter or merged into its base."""
    from fedspan import api

    wanted = int(round) if round.isdecimal() else round
    path = api.export(run, out, form.value, client, wanted)  # pyright: ignore[reportArgumentType]
    typer.echo(f"wrote {path}")
