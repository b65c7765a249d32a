"""``fedspan plan``: the cost of a run, computed from the config and the model's architecture."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedspan.cli.commands import Json, Overrides, argument, option, register_command
from fedspan.cli.formatting import create_console, create_table, format_flop_count, format_span
from fedspan.errors import FedspanError
from fedspan.progress.formatting import format_size

if TYPE_CHECKING:
    from fedspan.planning.plan import Plan

_TASK = "sequence-classification"
_BINARY = 2


@register_command(
    "plan",
    "fedspan plan --model FacebookAI/roberta-large --clients 50 --rank 4",
    "fedspan plan my.yaml",
    "fedspan plan my.yaml --methods all --set method.r=16",
    "fedspan plan my.yaml --examples 5000 --length 25 --device A100 --mbit 100",
)
def plan(
    config: Annotated[Path | None, argument("[CONFIG]", "Config of the run. Default: options only.")] = None,
    model: Annotated[str | None, option("ID", "Hub id or local folder of the model.")] = None,
    methods: Annotated[
        str | None, option("A,B", "Methods, or all. Default: the config's method; all without a config.")
    ] = None,
    clients: Annotated[int | None, option("N", "Number of clients.")] = None,
    cohort: Annotated[int | None, option("N", "Number of clients per round.", "--per-round")] = None,
    rank: Annotated[int | None, option("R", "Rank of all clients' adapters.")] = None,
    rounds: Annotated[int | None, option("T", "Number of rounds.")] = None,
    targets: Annotated[str | None, option("A,B", "Target modules. Default: PEFT's.")] = None,
    examples: Annotated[
        int | None, option("N", "Size of the training set, which determines the number of steps.")
    ] = None,
    labels: Annotated[int | None, option("N", "Number of classes. Default: 2 without a config.")] = None,
    length: Annotated[int | None, option("N", "Mean number of tokens per text. Default: model.max_length.")] = None,
    device: Annotated[
        str | None, option("NAME", "Estimate the time on a GPU (A100), or measure it on this machine (here).")
    ] = None,
    utilization: Annotated[float | None, option("U", "Share of a GPU's peak FLOPs. Default: 0.35.")] = None,
    mbit: Annotated[float | None, option("N", "Bandwidth of a client's link in Mbit/s, for transfer times.")] = None,
    task: Annotated[str | None, option("TASK", f"Task without a config. Default: {_TASK}.")] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Estimate the cost of a run: trainable parameters, traffic, FLOPs, time, and memory of a client and the server.

    No weights are loaded, and only a local data file of the config is read, to count its examples: a laptop can plan a
    federation of a thousand hospitals. The bytes equal those in a run's ledger.
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
    from fedspan.config import override, read_values

    values = _make_config_values(task or _TASK) if config is None else read_values(config)
    values = override(values, [*texts, *(overrides or ())])
    if config is not None and methods is None:  # so that the error names the field of the file, and not --methods
        from fedspan.methods.registry import get_method_class

        get_method_class(_get_method_name(values))
    if config is None and labels is None:
        from fedspan.tasks.registry import get_task

        labels = _BINARY if get_task(task or _TASK, "--task").has_labels else None
    screen = create_console()
    screen.quiet = as_json
    activity = "timing some steps on this machine" if device == "here" else "loading torch and Transformers"
    with screen.status(activity):
        from fedspan.experiments.comparison import plan_comparison
        from fedspan.methods.registry import METHODS

        requested = "all" if methods is None and config is None else methods or _get_method_name(values)
        keys = list(METHODS) if requested == "all" else [part.strip() for part in requested.split(",") if part.strip()]
        # before Transformers is imported, so that a mistake is reported at once
        steps = plan_comparison(values, keys, [0], {}, None).steps
        from fedspan.planning.estimate import plan_configs

        results = plan_configs(
            {step.group: step.config for step in steps},
            clients=clients,
            examples=examples,
            labels=labels,
            length=length,
            device=device,
            utilization=utilization,
            mbit=mbit,
        )
    plans = {key: result for key, result in results.items() if not isinstance(result, FedspanError)}
    if not plans:
        raise next(result for result in results.values() if isinstance(result, FedspanError))
    refused = {key: str(result) for key, result in results.items() if isinstance(result, FedspanError)}
    if as_json:
        plain = {"plans": {key: _to_dict(plan) for key, plan in plans.items()}, "refused": refused}
        typer.echo(json.dumps(plain, indent=2, ensure_ascii=False))
    else:
        _show(screen, plans, refused, length is None)


def _make_config_values(task: str) -> dict[str, Any]:
    """Return the values of a config whose data are never read."""
    values: dict[str, Any] = {"task": task, "data": {"train": "unread.csv"}}
    from fedspan.tasks.registry import get_task

    if get_task(task, "--task").is_generative:
        values["data"]["prompt"] = "{text}"
    return values


def _get_method_name(values: Mapping[str, Any]) -> str:
    """Return the method's name in a config, whose section also holds the wrappers."""
    section = values.get("method")
    return str(section.get("name", "fedit")) if isinstance(section, Mapping) else "fedit"


def _format_count(number: int) -> str:
    """Format 33 554 432 as 33.6 M."""
    if number < 10_000:
        return str(number)
    return f"{number / 1e6:.3g} M" if number < 999.5e6 else f"{number / 1e9:.3g} G"


def _to_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain JSON values, with the memory's totals."""
    plain = dataclasses.asdict(plan)
    plain["client"]["total"], plain["server"]["total"] = plan.client.total, plan.server.total
    return plain


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _show(out: Console, plans: Mapping[str, Plan], refused: Mapping[str, str], is_max_length: bool) -> None:
    from fedspan.federation.plausibility import describe_few_nodes

    first = next(iter(plans.values()))
    cohort = "all" if first.cohort == first.clients else str(first.cohort)
    steps = "" if first.steps is None else f", {_count(first.steps, 'step')} of a client in a round"
    out.print(
        f"{first.model}: {first.parameters:,} parameters, {_count(first.layers, 'target layer')}; "
        f"{_count(first.clients, 'client')}, {cohort} a round, {_count(first.rounds, 'round')}{steps}",
        style="bold",
    )
    table = create_table()
    table.add_column("method", style="cyan", no_wrap=True)
    for title in ("train-\nable", "first\ndown", "first\nup", "later\ndown", "later\nup", "total", "client", "server"):
        table.add_column(title, justify="right", no_wrap=True)
    for key, plan in plans.items():
        table.add_row(
            key,
            _format_count(plan.trainable),
            *map(format_size, (plan.first_down, plan.first_up, plan.later_down, plan.later_up)),
            ("" if plan.exact else "~") + format_size(plan.bytes_down + plan.bytes_up),
            *map(format_size, (plan.client.total, plan.server.total)),
        )
    out.print(table)
    _show_compute(out, plans, is_max_length)
    for key, reason in refused.items():
        out.print(f"{key}: {reason}", style="yellow")
    base, activations = format_size(first.client.base), format_size(first.client.activations)
    out.print(
        "trainable: parameters per client (M: millions). first, later: bytes of tensor data to and from a client "
        "in the first round and, on average, in a later one. total: both directions, all rounds (~: returning clients "
        f"may receive more). client, server: peak memory, including {base} for the model and {activations} for a "
        "client's activations.",
        style="dim",
    )
    if (note := describe_few_nodes(first.clients)) is not None:
        out.print(f"In a deployment: {note}.", style="dim")
    if first.head_up:
        out.print(
            f"Before the first round every client sends {format_size(first.head_up)} of statistics, which initialize "
            "the head (model.head_init).",
            style="dim",
        )


def _show_compute(out: Console, plans: Mapping[str, Plan], is_max_length: bool) -> None:
    """Print FLOPs, and the requested times of training and transfers."""

    def format_flops(count: int | None) -> str:
        return "-" if count is None else format_flop_count(count)

    def format_time(seconds: float | None) -> str:
        return "-" if seconds is None else format_span(seconds)

    first = next(iter(plans.values()))
    time, run = first.time, first.compute.run is not None
    workers = "one device" if time is None or time.workers == 1 else f"{time.workers} workers"
    titles = ["FLOPs\n/ step", *(["FLOPs\n/ round", "FLOPs\ntotal"] if run else [])]
    if time is not None:
        titles += ["time\n/ step", *(["time\n/ round", f"time, on\n{workers}", "time, on\none each"] if run else [])]
    if first.transfer is not None:
        titles.append("transfer\n/ round")
    table = create_table()
    table.add_column("method", style="cyan", no_wrap=True)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for key, plan in plans.items():
        compute, estimate = plan.compute, plan.time
        cells = [format_flop_count(compute.step), *(map(format_flops, (compute.client, compute.run)) if run else ())]
        if estimate is not None:
            cells.append(format_span(estimate.step))
            cells += map(format_time, (estimate.client, estimate.simulated, estimate.deployed)) if run else ()
        if plan.transfer is not None:
            cells.append(format_span(plan.transfer))
        table.add_row(key, *cells)
    out.print(table)
    tokens, notes = first.compute.length, []
    if tokens is not None:
        maximum = " (the maximum; set the mean with --length)" if is_max_length else ""
        notes.append(
            f"FLOPs: for training on examples of {tokens:,} tokens{maximum}. Steps and rounds are one client's."
        )
    else:
        notes.append("FLOPs: for training. Steps and rounds are one client's.")
    if first.compute.once:
        notes.append(
            f"In addition {format_flop_count(first.compute.once)} once per example, for the layers below the first "
            "trainable one."
        )
    if time is not None:
        transfers = "" if first.transfer is None else ", including transfers"
        speed = "this machine, as measured" if time.device == "here" else f"{time.device}, at the assumed utilization"
        notes.append(
            f"Time: for training on {speed}; on {workers}, all clients; on one each, the "
            f"clients of a round in parallel{transfers}. Evaluation and the server's own work are not included."
        )
    out.print(" ".join(notes), style="dim")
    for key, plan in plans.items():
        if plan.time is not None and plan.time.memory is not None and plan.client.total > plan.time.memory:
            available, required = format_size(plan.time.memory), format_size(plan.client.total)
            out.print(f"{key}: a client needs {required}, and {plan.time.device} has {available}", style="yellow")
