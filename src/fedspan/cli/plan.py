"""``fedspan plan``: the cost of a run, computed before anything but a model's config is downloaded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedspan.cli.commands import Json, Overrides, command
from fedspan.errors import FedspanError

if TYPE_CHECKING:
    from rich.console import Console

    from fedspan.planning.plan import Plan

__all__ = ["plan"]

_TASK = "sequence-classification"
_BINARY = 2


@command(
    "plan",
    "fedspan plan --model FacebookAI/roberta-large --clients 50 --rank 4",
    "fedspan plan my.yaml",
    "fedspan plan my.yaml --methods all --set method.r=16",
    "fedspan plan my.yaml --examples 5000 --length 25 --device A100 --mbit 100",
)
def plan(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="A run's config; left out: all follows from the options.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="ID", help="A hub id, or a local folder.")] = None,
    methods: Annotated[
        str | None,
        typer.Option("--methods", metavar="A,B", help="Or all; left out: the config's, or all without a config."),
    ] = None,
    clients: Annotated[int | None, typer.Option("--clients", metavar="N", help="Of the federation.")] = None,
    cohort: Annotated[int | None, typer.Option("--per-round", metavar="N", help="Clients of a round.")] = None,
    rank: Annotated[int | None, typer.Option("--rank", metavar="R", help="Of all clients.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", metavar="T", help="Of the run.")] = None,
    targets: Annotated[
        str | None, typer.Option("--targets", metavar="A,B", help="Target modules; left out: PEFT's default.")
    ] = None,
    examples: Annotated[
        int | None, typer.Option("--examples", metavar="N", help="Of the training set, which steps follow from.")
    ] = None,
    labels: Annotated[int | None, typer.Option("--labels", metavar="N", help="Classes; without a config, 2.")] = None,
    length: Annotated[
        int | None,
        typer.Option("--length", metavar="N", help="Tokens of an example on average; left out: the greatest length."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="NAME", help="Time on a GPU (A100), or here, on this machine, which is timed."
        ),
    ] = None,
    utilization: Annotated[
        float | None,
        typer.Option("--utilization", metavar="U", help="Of a GPU's peak; left out: 0.35."),
    ] = None,
    mbit: Annotated[
        float | None,
        typer.Option("--mbit", metavar="N", help="Megabits a second of a client's link: time of transfers."),
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", metavar="TASK", help=f"Without a config; left out: {_TASK}.")
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Show what a run takes: trainable numbers, bytes that travel, FLOPs, time, memory of a client and of the server.

    No weights are read, and of data only a local file of the config's own, to count: a federation of a thousand
    hospitals is planned on a laptop. Bytes are those that a run's ledger will count.
    """
    if config is None and model is None:
        raise FedspanError("--model", None, "the name of a model, or a config")
    if config is not None and task is not None:
        raise FedspanError("--task", task, problem="the config already names the task. Leave the option out")
    for name, value in {"--examples": examples, "--labels": labels}.items():
        if value is not None and value < 1:
            raise FedspanError(name, value, "a whole number from 1")
    changes = {
        "model.name": model,
        "partition.clients": clients,
        "federation.clients_per_round": cohort,
        "method.r": rank,
        "federation.rounds": rounds,
        "model.target_modules": None if targets is None else [part.strip() for part in targets.split(",")],
    }
    texts = [f"{path}={json.dumps(value)}" for path, value in changes.items() if value is not None]
    from fedspan.cli.formatting import console
    from fedspan.config import read_values

    values = _bare(task or _TASK) if config is None else read_values(config)
    if config is None and labels is None and task in (None, _TASK, "image-classification"):
        labels = _BINARY
    screen = console()
    screen.quiet = as_json
    doing = "timing some steps on this machine" if device == "here" else "loading torch and Transformers"
    with screen.status(doing):
        from fedspan.methods.registry import METHODS
        from fedspan.planning.estimate import plan_methods

        wanted = "all" if methods is None and config is None else methods or _own(values)
        keys = list(METHODS) if wanted == "all" else [part.strip() for part in wanted.split(",") if part.strip()]
        found = plan_methods(
            values,
            keys,
            overrides=[*texts, *(overrides or ())],
            clients=clients,
            examples=examples,
            labels=labels,
            length=length,
            device=device,
            utilization=utilization,
            mbit=mbit,
        )
    plans = {key: each for key, each in found.items() if not isinstance(each, FedspanError)}
    if not plans:
        raise next(each for each in found.values() if isinstance(each, FedspanError))
    refused = {key: str(each) for key, each in found.items() if isinstance(each, FedspanError)}
    if as_json:
        plain = {"plans": {key: _plain(each) for key, each in plans.items()}, "refused": refused}
        typer.echo(json.dumps(plain, indent=2, ensure_ascii=False))
    else:
        _show(screen, plans, refused, length is None)


def _bare(task: str) -> dict[str, Any]:
    """Return the values of a config whose data are never read."""
    values: dict[str, Any] = {"task": task, "data": {"train": "unread.csv"}}
    if task == "causal-lm":
        values["data"]["prompt"] = "{text}"
    return values


def _own(values: Mapping[str, Any]) -> str:
    """Return the method's name in a config, whose section also holds the wrappers."""
    section = values.get("method")
    return str(section.get("name", "fedit")) if isinstance(section, Mapping) else "fedit"


def _count(number: int) -> str:
    """Format 33 554 432 as 33.6 M."""
    if number < 10_000:
        return str(number)
    return f"{number / 1e6:.3g} M" if number < 999.5e6 else f"{number / 1e9:.3g} G"


def _plain(found: Plan) -> dict[str, Any]:
    """Return a plan as plain JSON values, with the memory's totals."""
    plain = dataclasses.asdict(found)
    plain["client"]["total"], plain["server"]["total"] = found.client.total, found.server.total
    return plain


def _show(out: Console, plans: Mapping[str, Plan], refused: Mapping[str, str], longest: bool) -> None:
    from fedspan.cli.formatting import plain_table
    from fedspan.experiments.tables import size

    first = next(iter(plans.values()))
    cohort = "all" if first.cohort == first.clients else str(first.cohort)
    steps = "" if first.steps is None else f", {first.steps:,} steps of a client in a round"
    out.print(
        f"{first.model}: {first.parameters:,} parameters, {first.layers} target layers; {first.clients} clients, "
        f"{cohort} a round, {first.rounds} rounds{steps}",
        style="bold",
    )
    table = plain_table()
    table.add_column("method", style="cyan", no_wrap=True)
    for title in ("train-\nable", "first\ndown", "first\nup", "later\ndown", "later\nup", "in all", "client", "server"):
        table.add_column(title, justify="right", no_wrap=True)
    for key, each in plans.items():
        table.add_row(
            key,
            _count(each.trainable),
            *map(size, (each.first_down, each.first_up, each.later_down, each.later_up)),
            ("" if each.exact else "~") + size(each.bytes_down + each.bytes_up),
            *map(size, (each.client.total, each.server.total)),
        )
    out.print(table)
    _show_compute(out, plans, longest)
    for key, why in refused.items():
        out.print(f"{key}: {why}", style="yellow")
    base, kept = size(first.client.base), size(first.client.activations)
    out.print(
        "trainable: numbers that a client moves (M: millions). first, later: bytes of tensor data to and from a client "
        "in the first round and in the mean of the later ones. in all: both ways, all rounds (~: clients that come "
        f"back may be sent more). client, server: memory at the most, the model's {base} and a client's activations "
        f"({kept}) among it.",
        style="dim",
    )
    if first.head_up:
        out.print(
            f"Before the first round every client sends {size(first.head_up)} of statistics, from which the head "
            "starts (model.head_init).",
            style="dim",
        )


def _show_compute(out: Console, plans: Mapping[str, Plan], longest: bool) -> None:
    """Print FLOPs, and the requested times of training and transfers; ``longest``: no length was given."""
    from fedspan.cli.formatting import flops, plain_table, span
    from fedspan.experiments.tables import size

    def counted(count: int | None) -> str:
        return "-" if count is None else flops(count)

    def spent_in(seconds: float | None) -> str:
        return "-" if seconds is None else span(seconds)

    first = next(iter(plans.values()))
    time, run = first.time, first.compute.run is not None
    here = "one device" if time is None or time.workers == 1 else f"{time.workers} workers"
    titles = ["FLOPs\na step", *(["FLOPs\na round", "FLOPs\nin all"] if run else [])]
    if time is not None:
        titles += ["time\na step", *(["time\na round", f"time, on\n{here}", "time, on\none each"] if run else [])]
    if first.transfer is not None:
        titles.append("transfer\na round")
    table = plain_table()
    table.add_column("method", style="cyan", no_wrap=True)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for key, each in plans.items():
        compute, spent = each.compute, each.time
        cells = [flops(compute.step), *(map(counted, (compute.client, compute.run)) if run else ())]
        if spent is not None:
            cells.append(span(spent.step))
            cells += map(spent_in, (spent.client, spent.simulated, spent.deployed)) if run else ()
        if each.transfer is not None:
            cells.append(span(each.transfer))
        table.add_row(key, *cells)
    out.print(table)
    tokens, said = first.compute.length, []
    if tokens is not None:
        most = ", the most (--length: their mean)" if longest else ""
        said.append(f"FLOPs: of training, on examples of {tokens:,} tokens{most}. A step, a round: of a client.")
    else:
        said.append("FLOPs: of training. A step, a round: of a client.")
    if first.compute.once:
        said.append(f"Beside that {flops(first.compute.once)} once for an example, below the first layer that trains.")
    if time is not None:
        moved = "" if first.transfer is None else ", with transfers"
        said.append(
            f"Time: of training {_where(time.device)}; on {here} all clients, on one each those of a round at the "
            f"same time{moved}. Evaluations and the server's part come on top."
        )
    out.print(" ".join(said), style="dim")
    for key, each in plans.items():
        if each.time is not None and each.time.memory is not None and each.client.total > each.time.memory:
            have, needs = size(each.time.memory), size(each.client.total)
            out.print(f"{key}: a client takes {needs}, and {each.time.device} has {have}", style="yellow")


def _where(device: str) -> str:
    return "on this machine, as some steps took" if device == "here" else f"on {device}, at a share of its peak"
