"""``fedspan run``: training across the clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fedspan.cli.commands import Overrides, argument, option, refuse_options, register_command
from fedspan.cli.live_run import find_unused_folder, show_run
from fedspan.errors import FedspanError


@register_command(
    "run",
    "fedspan run my.yaml --out runs/first",
    "fedspan run my.yaml --set method.name=ffa-lora --set training.lr=2e-3",
    "fedspan run --resume runs/first",
    "fedspan run --resume runs/first --set federation.rounds=40",
)
def run(
    config: Annotated[Path | None, argument("CONFIG", "The YAML file of a new run.")] = None,
    out: Annotated[Path | None, option("FOLDER", "Folder of the run. Default: runs/ and the config's name.")] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        option(
            "FOLDER",
            "Resume a run with its own config; with --set federation.rounds=N, extend it to N "
            "rounds, even a finished one.",
        ),
    ] = None,
    track: Annotated[
        str | None,
        option("A,B", "tensorboard, wandb, mlflow, trackio, or none. Default: tensorboard if it is installed."),
    ] = None,
) -> None:
    """Train across the clients, round by round, and export the best round's adapter.

    Every round is saved: after Ctrl-C or a crash, --resume continues to the same adapter, bit for bit. A finished run
    can be extended if the learning-rate schedule allows it (constant, or with cycle_rounds).
    """
    if resume is not None:
        problem = "it cannot be combined with --resume, because a resumed run keeps its own config"
        refuse_options({"CONFIG": config, "--out": out}, problem)
        show_run(resume, None, overrides or (), track)
        return
    if config is None:
        raise FedspanError(
            "CONFIG", None, "a YAML file, or --resume FOLDER (fedspan demo --show-config prints a config)"
        )
    show_run(out or find_unused_folder(Path("runs") / config.stem), config, overrides or (), track)
