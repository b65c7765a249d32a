"""``fedspan init``: a starter config for the user's own data."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from fedspan.cli.commands import argument, flag, option, register_command
from fedspan.cli.formatting import create_console
from fedspan.errors import FedspanError


@register_command(
    "init",
    "fedspan init messages.csv --test held-out.csv",
    "fedspan init notes.parquet --text note --label diagnosis --by hospital --out hospitals.yaml",
    "fedspan init export.xlsx --set data.sheet=Answers",
    "fedspan init dialogues.jsonl --task causal-lm --model Qwen/Qwen2.5-0.5B",
)
def init(
    data: Annotated[
        str, argument("DATA", "A file, a folder or archive of images or texts by class, or a hub data set.")
    ],
    out: Annotated[Path, option("FILE", "File of the config.")] = Path("fedspan.yaml"),
    test: Annotated[str | None, option("FILE", "Test set. Default: a fifth of DATA.")] = None,
    task: Annotated[str | None, option("TASK", "Learning task. Default: inferred.")] = None,
    text: Annotated[str | None, option("COLUMN", "Column of texts, prompts or images.")] = None,
    label: Annotated[str | None, option("COLUMN", "Column of labels or numbers.")] = None,
    answer: Annotated[str | None, option("COLUMN", "Column of answers to prompts.")] = None,
    by: Annotated[str | None, option("COLUMN", "Column that assigns each row to a client.")] = None,
    clients: Annotated[int | None, option("N", "Number of clients of a random partition. Default: at most 10.")] = None,
    model: Annotated[str | None, option("ID", "Base model. Default: a small one.")] = None,
    method: Annotated[str, option("KEY", "Method; fedspan methods lists them.")] = "fedit",
    force: Annotated[bool, flag("--force", "Replace an existing file.")] = False,
    overrides: Annotated[
        list[str] | None, option("data.FIELD=VALUE", "Set an option of data, such as data.delimiter=^.", "--set")
    ] = None,
) -> None:
    """Infer a commented config from the beginning of your own data, and describe the data."""
    screen = create_console()
    options = _parse_options(overrides or ())
    with screen.status("inspecting the data"):
        from fedspan.config.starter import write_starter_config

        starter = write_starter_config(
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
            options=options,
        )
    for line in starter.findings:
        screen.print(line)
    path = shlex.quote(str(starter.path))
    screen.print(f"wrote {starter.path}. Next:\n  fedspan plan {path}\n  fedspan run {path} --out runs/first")


def _parse_options(overrides: Sequence[str]) -> dict[str, Any]:
    from fedspan.config.reading import override

    for text in overrides:
        if not text.startswith("data."):
            problem = f"init sets only options of data, not {text!r}; set other sections in the config's file"
            raise FedspanError("--set", text, "data.FIELD=VALUE", problem=problem)
    return override({"data": {}}, overrides)["data"]
