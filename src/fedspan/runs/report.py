"""The report of a finished run, and its partition and clients, read from its folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fedspan.data.partition import Partition
from fedspan.errors import FedspanError, suggest_nearest
from fedspan.files import read_bytes
from fedspan.run_folder import RECORDS, RunFolder, describe_missing_run

STATISTICS_NOTE = "A deployment starts without statistics, unless its config asks for them and its nodes allow them."
"""What a user of a simulation has to know of a head that starts from statistics."""
SELECTION_NOTE = "The validation score selected the best round, so it is too good on average (chance, nodes' noise)."
"""What a user has to know of the validation score of a selected round."""


@dataclass(frozen=True)
class RunReport:
    """The summary of a finished run; ``report.json`` holds the same, and what ``run_folder.Records`` describes.

    Args:
        method: Registry key of the method, with those of its wrappers: ``fedit+fedprox``.
        task: Kind of problem.
        metric: The metric that rounds were compared by.
        rounds: Number of rounds that were run.
        best_round: The round with the best validation score (the last one if none was selected); 0: the start.
        scores: Scores of the exported models: ``test`` (held-out set; mean over clients for personal methods),
            ``clients`` (own test parts: mean, worst); and ``validation``, which selected the best round, and so is too
            good on average.
        by_client: Metrics of the exported models on each client's own test part.
        bytes: Serialized bytes of the training, ``down`` and ``up``.
        seconds: Wall-clock time of the rounds.
        baselines: Scores of local-only and centralized training, if requested.
        adapters: Folders of the exported adapters, relative to the run folder, by client id, or under ``global``.
        examples: Predictions on a few held-out texts.
        privacy: The spent privacy budget (``epsilon``, ``delta``) and the settings; empty without ``privacy`` in the
            config.
        other_bytes: Bytes sent for ``statistics``, and, if clients are remote, for ``evaluate`` and ``export``;
            ``down`` and ``up``.
        failures: Failures by client: ``count``, how often its reply did not count, or it was not evaluated or did not
            export, and the ``round`` and ``reason`` of the last failure.
        learning_rate: Result of the range test: the chosen ``lr``, the loss at the ``start``, and the ``losses`` of the
            candidates, each with its ``lr``; empty unless ``training.lr`` is ``auto``.
        warnings: Sentences about a result that should not be used as it is: training diverged, or made the model worse.
        start: Scores before the first round, if they were measured: ``validation``, ``clients`` and ``test`` as in a
            line of metrics. A head from statistics adds its kind (``head_init``) and whether the clients were
            ``simulated``; one that is random because too few clients sent statistics, ``head_init`` and the ``reason``.
        by_value: Metrics of the exported models, and the number of ``examples``, on the held-out examples of each value
            of ``evaluation.by`` (mean over clients for personal methods); empty without it.
        selected: Whether validation scores selected ``best_round``. They do not without validation parts, or where too
            few nodes report them (``docs/robustness.md``).
        final_rounds: Number of rounds after the best one that trained on all examples, those of the validation parts
            included; the exported models are those after them.

    Examples:
        >>> report = fedspan.run("config.yaml", "runs/first")
        >>> report.best_round, report.scores["test"]["accuracy"], report.bytes["up"]
    """

    method: str
    task: str
    metric: str
    rounds: int
    best_round: int
    scores: Mapping[str, Any]
    by_client: Mapping[str, Mapping[str, float]]
    bytes: Mapping[str, int]
    seconds: float
    baselines: Mapping[str, Any] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    examples: tuple[Mapping[str, str], ...] = ()
    privacy: Mapping[str, Any] = field(default_factory=dict)
    other_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    failures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    learning_rate: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    start: Mapping[str, Any] = field(default_factory=dict)
    by_value: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    selected: bool = True
    final_rounds: int = 0


def format_final_rounds(count: int) -> str:
    """Format a number of final rounds as ``2 final rounds on all examples, validation included``."""
    return f"{count} final {'round' if count == 1 else 'rounds'} on all examples, validation included"


def is_run(folder: str | Path) -> bool:
    """Check whether a folder holds a run (an exported model has a config.json, but no config.yaml)."""
    return os.path.isfile(RunFolder(folder).config)  # Path's own raises for a name that is too long for the disk


def read_report(folder: str | Path) -> RunReport:
    """Read the report of a finished run.

    Returns:
        The report that ``run`` returned.

    Examples:
        >>> fedspan.read_report("runs/first").scores["test"]

    Raises:
        FedspanError: If there is no run in the folder, it is not finished, or report.json was changed.
    """
    run_folder = RunFolder(folder)
    if not is_run(folder):
        raise FedspanError("run folder", str(folder), problem=describe_missing_run(folder))
    if not run_folder.report.is_file():
        raise FedspanError(
            "run folder", str(folder), problem=f"this run is not finished. Continue it with --resume {folder}"
        )
    content = run_folder.read_sealed(run_folder.report)
    values = {name: value for name, value in content.items() if name not in RECORDS}
    names = {part.name for part in fields(RunReport)}
    if set(values) != names:
        raise FedspanError(str(run_folder.report), sorted(values), f"a report with {', '.join(sorted(names))}")
    examples, warnings = values.pop("examples"), values.pop("warnings")
    return RunReport(examples=tuple(examples), warnings=tuple(warnings), **values)


def read_partition(folder: str | Path) -> Partition:
    """Read the partition of a run: the examples of each client."""
    run_folder = RunFolder(folder)
    return Partition.from_json(read_bytes(run_folder.partition).decode(errors="replace"), str(run_folder.partition))


def require_client(folder: str | Path, client: str) -> None:
    """Check that a run has a client."""
    ids = [part.id for part in read_partition(folder).clients]
    if client not in ids:
        raise FedspanError(
            "client", client, problem=f"{folder} has no client {client!r}. {suggest_nearest(client, ids)}"
        )
