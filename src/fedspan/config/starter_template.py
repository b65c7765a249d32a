"""The text of a starter config: YAML with a comment for every choice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fedspan.config.column_inference import InferredData
from fedspan.config.rates import FAST, get_training_defaults
from fedspan.errors import FedspanError
from fedspan.models.targets import suggest_targets
from fedspan.tasks.registry import get_task

_TARGETS_BY_MODEL_TYPE: Mapping[str, str] = {"mobilenet_v2": r"'.*(expand_1x1|reduce_1x1|conv_1x1)\.convolution'"}
"""Target modules by ``model_type``, for architectures for which PEFT has no default."""
_FAST: Mapping[str, tuple[str, ...]] = {
    "builtin:all-minilm-l6-v2": ("[query, value]", "[4, 5]"),
    _TARGETS_BY_MODEL_TYPE["mobilenet_v2"]: (
        r"'.*layer\.1[3-5]\.(expand|reduce)_1x1\.convolution|.*\.conv_1x1\.convolution'",
    ),
}
"""Target modules of ``--fast`` and the layers that have them, by model or by the targets of all layers."""
_MARKER_OUTPUTS = 7919
"""Number of outputs by which a model's head is recognized: a prime that no layer has as its size."""


def get_default_model(task: str) -> tuple[str, str]:
    """Return the name and the target layers (YAML) of the model that is suggested for a task."""
    suggested = get_task(task).default_model
    if suggested is None:
        raise FedspanError("--model", None, "the name of a model", problem=f"{task} has no default model")
    return suggested


def suggest_target_modules(task: str, model: str | None) -> str | None:
    """Suggest the target layers of a model, as YAML.

    Args:
        model: Hub id or folder of the model; None: the task's default model.

    Returns:
        The names of the layers, or None if PEFT has a default or the model can't be read.
    """
    default = get_task(task).default_model
    if model is None or (default is not None and model == default[0]):
        return get_default_model(task)[1]
    if (targets := _TARGETS_BY_MODEL_TYPE.get(_read_model_type(model))) is not None:
        return targets
    from fedspan.models.empty import load_empty

    try:
        labels = [str(number) for number in range(_MARKER_OUTPUTS)]
        names = suggest_targets(load_empty(model, get_task(task).head, labels), _MARKER_OUTPUTS)
    except FedspanError:  # plan and run report it; they may have network access
        return None
    return None if names is None else _format_scalar(names)


def render_config(
    inferred: InferredData,
    section: Mapping[str, Any],
    clients: int,
    model: str,
    targets: str | None,
    method: str,
    shares: tuple[float, float],
    has_test: bool,
    fast: bool = False,
) -> str:
    """Render the text of a starter config.

    Args:
        clients: Number of clients, if no column assigns the rows to clients.
        targets: Target layers as YAML; None: PEFT's default.
        shares: Shares of each client's examples for validation and for its own test.
        has_test: Whether a common test set measures the model after the final rounds.
        fast: Whether only the last layers get adapters.

    Raises:
        FedspanError: If the last layers of the model are not known.
    """
    defaults, factor, layers = get_training_defaults(inferred.task, method), 1.0, ()
    known = _FAST.get(model) or _FAST.get(targets or "")
    if fast and known is None:
        problem = f"the last layers of {model} are not known. Set model.layers_to_transform in the config"
        raise FedspanError("--fast", model, problem=problem)
    if known is not None and (fast or targets == known[0]):  # a task may suggest the fast ones itself
        factor = FAST if known[1:] and targets != known[0] else 1.0
        targets, *layers = known
    data = yaml.safe_dump(dict(section), sort_keys=False, allow_unicode=True).rstrip().replace("\n", "\n  ")
    partitioner = f"partitioner: iid # or dirichlet with alpha: 0.5, for heterogeneous clients\n  clients: {clients}"
    if inferred.by is not None:
        partitioner = (
            f"partitioner: natural # one client per value of a column\n  column: {_format_scalar(inferred.by)}"
        )
    lines = (
        "# Written by fedspan init; every field is explained in docs/config.md. Next:",
        "#   fedspan partition FILE      show each client's data",
        "#   fedspan plan FILE           estimate memory, traffic and time",
        "#   fedspan run FILE --out runs/first",
        f"task: {inferred.task}",
        "seed: 0",
        "",
        "model:",
        f"  name: {_format_scalar(model)} # a hub id or a folder",
        *((f"  target_modules: {targets} # layers that get adapters",) if targets else ()),
        *(f"  layers_to_transform: {numbers} # the last two of six, for speed" for numbers in layers),
        "",
        "data:",
        f"  {data}",
        "",
        "partition:",
        f"  {partitioner}",
        f"  validation: {shares[0]:g} # share of each client's examples; selects the best round",
        f"  test: {shares[1]:g} # share of each client's examples for its own score"
        + ("" if shares[1] else "; 0: all are tested on the common test set"),
        "",
        f"method: # fedspan methods lists them\n  name: {_format_scalar(method)}",
        "  r: 8",
        "  lora_alpha: 16",
        "",
        "federation:",
        f"  rounds: {defaults.rounds} # more later: fedspan run --resume RUN --set federation.rounds=20",
        *(
            (f"  final_rounds: {defaults.final_rounds} # after the best one, on all examples, validation included",)
            if has_test
            else ()
        ),
        "",
        "training:",
        f"  lr: {defaults.lr * factor:.1e}" + ("" if factor > 1 else " # or auto: a range test before the first round"),
        f"  batch_size: {defaults.batch_size}",
        f"  local_epochs: {defaults.local_epochs}",
        *(
            (f"  logit_adjustment: {defaults.logit_adjustment:g} # for clients with different label distributions",)
            if defaults.logit_adjustment
            else ()
        ),
    )
    return "\n".join(lines) + "\n"


def _read_model_type(model: str) -> str:
    """Return the ``model_type`` in the config.json of a model's folder; empty if there is none, or for a hub id."""
    try:
        content = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(content.get("model_type", "")) if isinstance(content, dict) else ""


def _format_scalar(value: str | list[str]) -> str:
    return yaml.safe_dump(value, default_flow_style=True, allow_unicode=True).removesuffix("\n...\n").strip()
