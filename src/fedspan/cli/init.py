"""``fedspan init``: a first config for the user's own data."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedspan.cli.commands import command

__all__ = ["init"]


@command(
    "init",
    "fedspan init messages.csv --test held-out.csv",
    "fedspan init notes.parquet --text note --label diagnosis --by hospital --out hospitals.yaml",
    "fedspan init dialogues.jsonl --task causal-lm --model Qwen/Qwen2.5-0.5B",
)
def init(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA", help="A file, a folder or archive of images or texts by class, or a hub data set."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The config.")] = Path("fedspan.yaml"),
    test: Annotated[
        str | None, typer.Option("--test", metavar="FILE", help="To test on. Left out: a fifth of DATA.")
    ] = None,
    task: Annotated[str | None, typer.Option("--task", metavar="TASK", help="Left out: guessed.")] = None,
    text: Annotated[str | None, typer.Option("--text", metavar="COLUMN", help="Of texts, prompts or images.")] = None,
    label: Annotated[str | None, typer.Option("--label", metavar="COLUMN", help="Of labels or numbers.")] = None,
    answer: Annotated[str | None, typer.Option("--answer", metavar="COLUMN", help="Of answers to prompts.")] = None,
    by: Annotated[str | None, typer.Option("--by", metavar="COLUMN", help="Says whose each row is.")] = None,
    clients: Annotated[int, typer.Option("--clients", metavar="N", help="Where rows are divided at random.")] = 10,
    model: Annotated[str | None, typer.Option("--model", metavar="ID", help="Left out: a small one.")] = None,
    method: Annotated[str, typer.Option("--method", metavar="KEY", help="fedspan methods lists them.")] = "fedit",
    force: Annotated[bool, typer.Option("--force", help="Replace a file of that name.")] = False,
) -> None:
    """Write a commented config for your own data, from the beginning of the file, and describe what it holds."""
    from fedspan.cli.formatting import console

    screen = console()
    with screen.status("inspecting the data"):
        from fedspan.config.init import start

        made = start(
            data,
            out,
            test=test,
            task=task,
            text=text,
            label=label,
            answer=answer,
            by=by,
            clients=clients,
            model=model,
            method=method,
            force=force,
        )
    for line in made.found:
        screen.print(line)
    path = shlex.quote(str(made.path))
    screen.print(f"wrote {made.path}. Next:\n  fedspan plan {path}\n  fedspan run {path} --out runs/first")
