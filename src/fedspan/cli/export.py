"""``fedspan export``: export of a run's trained model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedspan.cli.commands import argument, option, register_command
from fedspan.cli.trained_model import ClientOption


class FormOption(StrEnum):
    """The form of an exported model."""

    adapter = "adapter"
    merged = "merged"


@register_command(
    "export",
    "fedspan export runs/first --out adapter",
    "fedspan export runs/first --out model --form merged",
    "fedspan export runs/personal --out theirs --client client-03",
)
def export(
    run: Annotated[Path, argument("RUN", "The run folder.")],
    out: Annotated[Path, option("DIR", "Folder of the export; it must not exist.")],
    form: Annotated[
        FormOption, typer.Option(help="PEFT adapter, or merged Transformers model with its tokenizer.")
    ] = FormOption.adapter,
    client: ClientOption = None,
    round: Annotated[
        str, option("N", "best (by validation), last, or the number of a round with a checkpoint.")
    ] = "best",
    rank: Annotated[int | None, option("R", "Truncate the adapter to this rank (best approximation).")] = None,
) -> None:
    """Export a run's trained model, as a PEFT adapter or merged into its base."""
    import fedspan

    selected = int(round) if round.isdecimal() else round
    path = fedspan.export(run, out, form.value, client, selected, rank)  # pyright: ignore[reportArgumentType]
    if rank is not None:
        errors = fedspan.read_notes(path)["relative_error"]
        width = max(map(len, errors))
        typer.echo(f"{'layer':<{width}}  relative error")
        for layer, error in errors.items():
            typer.echo(f"{layer:<{width}}  {100 * error:12.4f} %")
    typer.echo(f"wrote {path}")
