"""Comparison of methods: the plan of several methods and seeds on one partition, and their table.

A plan needs no Transformers, so a command refuses a wrong config before it loads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedspan.config import RunConfig, override, parse_config
from fedspan.config.method import validate_method_options
from fedspan.errors import FedspanError, suggest_nearest
from fedspan.experiments.intervals import Difference, estimate_difference
from fedspan.experiments.series import (
    Step,
    compute_deviation,
    compute_mean,
    get_finite,
    require_comparable,
    set_seed,
    validate_seeds,
)
from fedspan.experiments.tables import Table, format_heading, format_mean, format_megabytes, format_seconds
from fedspan.methods.registry import get_method_class
from fedspan.runs.predictions import Items, read_items
from fedspan.tasks.metrics import METRICS, compute_score
from fedspan.wrappers.registry import WRAPPERS

if TYPE_CHECKING:
    from fedspan.runs.report import RunReport

_OWN = {"test": "held-out", "clients": "own tests"}


@dataclass(frozen=True)
class Comparison:
    """The plan of a comparison."""

    methods: tuple[str, ...]
    """Registry keys, some with wrappers: ``fedit+fedprox``."""
    seeds: tuple[int, ...]
    against: str
    """The reference row, with which all others are compared."""
    steps: tuple[Step, ...]
    """The runs in their order of execution."""


@dataclass(frozen=True)
class CompareRow:
    """The results of one method or baseline over the seeds."""

    name: str
    """Key of a method, ``start`` (of the first method's runs), or ``local-only`` or ``centralized``."""
    scores: tuple[float | None, ...]
    """One score for each seed."""
    mean: float | None
    """Mean of the scores; None if one is missing."""
    deviation: float | None
    """Standard deviation (n - 1) of the scores; None for one seed."""
    difference: Difference | None
    """Mean over the seeds of the score minus the reference's score for the same seed, with its interval; None for the
    reference."""
    worst: float | None
    """The worst client's metric on its own test part, mean over the seeds."""
    bytes_down: float | None
    """Serialized bytes that one run downloads, mean over the seeds; None for a baseline."""
    bytes_up: float | None
    """Serialized bytes that one run uploads, mean over the seeds; None for a baseline."""
    seconds: float | None
    """Wall-clock time of the rounds of one run, mean over the seeds; None for a baseline."""


@dataclass(frozen=True)
class CompareReport:
    """The table of a comparison; ``table.csv`` and ``table.md`` in its folder hold the same.

    Args:
        metric: The compared metric.
        measured: ``test``: on the held-out set; ``clients``: mean over the clients' own test parts, if there is no
            held-out set.
        higher: Whether higher values of the metric are better.
        against: The reference row.
        seeds: The seeds in the order of the scores.
        rows: The methods, then the start and the baselines.
        folder: Folder of the runs and the tables.
        best: Name of the best row, if it is measurably better than every other one.

    Examples:
        >>> report = fedspan.compare("config.yaml", "runs/two", ["fedit", "rolora"])
        >>> {row.name: row.mean for row in report.rows}
    """

    metric: str
    measured: str
    higher: bool
    against: str
    seeds: tuple[int, ...]
    rows: tuple[CompareRow, ...]
    folder: str
    best: str | None = None

    def build_table(self) -> Table:
        """Return the table in its readable form."""
        metric, several = self.metric, len(self.seeds) > 1
        rows = tuple(
            (
                row.name,
                format_mean(metric, row.mean, row.deviation),
                "" if row.difference is None else row.difference.format(metric),
                format_mean(metric, row.worst, None),
                format_megabytes(row.bytes_down),
                format_megabytes(row.bytes_up),
                format_seconds(row.seconds),
            )
            for row in self.rows
        )
        best = next((index for index, row in enumerate(self.rows) if row.name == self.best), None)
        better = "higher is better" if self.higher else "lower is better"
        numbers = ", ".join(map(str, self.seeds))
        subject = f"Mean ± standard deviation over the seeds {numbers}" if several else f"One seed ({numbers})"
        intervals = "Differences are taken seed by seed, with 95 % intervals"
        limits = dict.fromkeys(row.difference.note for row in self.rows if row.difference and row.difference.note)
        intervals += f" ({'; '.join(limits)})" if limits else " of seeds and test items"
        return Table(
            head=(
                "method",
                format_heading(_OWN[self.measured], metric),
                f"minus {self.against}",
                "worst client" + (", %" if METRICS[metric].is_percentage else ""),
                "MB down",
                "MB up",
                "seconds",
            ),
            rows=rows,
            best=best,
            notes=(
                f"{subject}; {better}. {intervals}.",
                "An interval that includes 0 is no measurable difference. The best row is bold if it differs from all.",
                "Worst client: on its own test part. Bytes and seconds are those of one run.",
            ),
        )

    def tabulate_seeds(self) -> Table:
        """Return every score, so that the table can be reproduced."""
        rows = tuple((row.name, *(format_mean(self.metric, score, None) for score in row.scores)) for row in self.rows)
        head = (format_heading(_OWN[self.measured], self.metric), *(f"seed {seed}" for seed in self.seeds))
        return Table(head=head, rows=rows, best=None, notes=())

    def to_rows(self) -> list[dict[str, object]]:
        """Return machine-readable rows."""
        return [
            {
                "method": row.name,
                "metric": self.metric,
                "measured": self.measured,
                "seeds": " ".join(map(str, self.seeds)),
                "scores": " ".join("" if score is None else repr(score) for score in row.scores),
                "mean": row.mean,
                "deviation": row.deviation,
                "against": self.against,
                "difference": None if row.difference is None else row.difference.mean,
                "low": None if row.difference is None else row.difference.low,
                "high": None if row.difference is None else row.difference.high,
                "worst_client": row.worst,
                "bytes_down": row.bytes_down,
                "bytes_up": row.bytes_up,
                "seconds": row.seconds,
            }
            for row in self.rows
        ]


def plan_comparison(
    values: Mapping[str, Any],
    methods: Sequence[str],
    seeds: Sequence[int],
    overrides_for: Mapping[str, Sequence[str]],
    against: str | None,
) -> Comparison:
    """Plan the runs of a comparison and validate every config.

    Args:
        values: Values of the config; the ``method`` section may hold options that only some of the methods have.
        methods: Registry keys; ``fedit+fedprox`` adds a wrapper around those of the config.
        overrides_for: ``section.field=value`` for one method, by its key.
        against: The reference row; None: the first method.
    """
    if not methods:
        raise FedspanError(
            "--methods",
            [],
            "keys of methods, such as fedit,rolora (fedspan methods lists them)",
            problem="no method is given",
        )
    for position, key in enumerate(methods):
        _require_method(key)
        if key in methods[:position]:
            raise FedspanError("--methods", key, problem=f"{key!r} is given twice")
    for key, texts in overrides_for.items():
        if key not in methods:
            raise FedspanError(
                "--set-for", f"{key}:{next(iter(texts), '')}", f"one of {', '.join(methods)} before the colon"
            )
    seeds = validate_seeds(seeds)
    configs = {key: _build_config(values, key, methods, overrides_for.get(key, ())) for key in methods}
    baselines = configs[methods[0]].baselines
    if repeated := sorted({*methods} & {*baselines}):
        problem = f"the config trains {repeated[0]} as a baseline, too; a table has one row of each name"
        raise FedspanError("--methods", repeated[0], "methods other than the config's baselines", problem=problem)
    rows = (*methods, *baselines)
    if against is not None and against not in rows:
        raise FedspanError("--against", against, f"a row of the table: {', '.join(rows)}")
    steps = [
        Step(f"{key}-seed{seed}", f"{key}, seed {seed}", key, seed, set_seed(config, seed, seeds[0], index == 0))
        for index, (key, config) in enumerate(configs.items())
        for seed in seeds
    ]
    return Comparison(tuple(methods), seeds, against or methods[0], tuple(steps))


def _require_method(key: str) -> None:
    name, *wrappers = key.split("+")
    if name in WRAPPERS:
        raise FedspanError("--methods", key, problem=f"{name} is a wrapper. Put it around a method: fedit+{name}")
    get_method_class(name, "--methods")
    for wrapper in wrappers:
        if wrapper not in WRAPPERS:
            raise FedspanError(
                "--methods", key, problem=f"no wrapper is named {wrapper!r}. {suggest_nearest(wrapper, WRAPPERS)}"
            )


def _build_config(
    values: Mapping[str, Any], key: str, methods: Sequence[str], own_overrides: Sequence[str]
) -> RunConfig:
    """Return the config of one method: the shared options that it has, and its own overrides."""
    section = values.get("method", {})
    if not isinstance(section, Mapping):
        return parse_config(values)  # raises the error for this section
    names = {row: row.split("+")[0] for row in methods}
    options_by_row = {row: set(validate_method_options(name, {})) for row, name in names.items()}
    all_options = set[str]().union(*options_by_row.values())
    for option, value in section.items():
        if option not in ("name", "wrappers") and option not in all_options:
            problem = f"none of {', '.join(methods)} has this option. {suggest_nearest(str(option), all_options)}"
            raise FedspanError(f"method.{option}", value, problem=problem)
    options = {option: value for option, value in section.items() if option in options_by_row[key]}
    wrappers = section.get("wrappers", [])
    if isinstance(wrappers, list):
        # Mappings, so that --set-for can address their fields.
        wrappers = [
            {"name": wrapper} if isinstance(wrapper, str) else wrapper for wrapper in (*wrappers, *key.split("+")[1:])
        ]
    changed = {**values, "method": {"name": names[key], **options, "wrappers": wrappers}}
    config = parse_config(override(changed, own_overrides))
    argument = f"{key}:{' '.join(own_overrides)}"
    if config.method.name != names[key]:
        raise FedspanError("--set-for", argument, problem=f"{argument!r} changes the method. Name methods in --methods")
    return require_comparable(parse_config({**values, "method": {}}), config, "--set-for", argument)


def select_compared_scores(report: RunReport) -> str:
    """Return which scores of a report are compared: ``test`` (held-out set), or ``clients`` if there is no such set."""
    return "test" if "test" in report.scores else "clients"


def get_heldout_score(report: RunReport) -> float | None:
    """Return the score of a run that a comparison uses."""
    return get_finite(report.scores.get(select_compared_scores(report)), report.metric)


def build_report(comparison: Comparison, reports: Mapping[str, RunReport], folder: str) -> CompareReport:
    """Build the table of a comparison."""
    runs = {key: [reports[step.name] for step in comparison.steps if step.group == key] for key in comparison.methods}
    first = runs[comparison.methods[0]]
    metric, measured = first[0].metric, select_compared_scores(first[0])
    scores: dict[str, list[Mapping[str, Any]]] = {
        key: [report.scores for report in row_reports] for key, row_reports in runs.items()
    }
    if all(measured in report.start for report in first):
        scores["start"] = [report.start for report in first]
    for name in first[0].baselines:
        scores[name] = [run.baselines[name]["scores"] for run in first]
    items = {name: _read_items(comparison, name, folder) for name in scores}
    values = {
        name: [get_finite(own_scores.get(measured), metric) for own_scores in row_scores]
        for name, row_scores in scores.items()
    }

    def compare(name: str, other: str) -> Difference | None:
        present = [(a, b) for a, b in zip(values[name], values[other], strict=True) if a is not None and b is not None]
        if name == other or len(present) < len(values[name]):
            return None
        pairs = [None if a is None or b is None else (a, b) for a, b in zip(items[name], items[other], strict=True)]
        pairs = pairs if measured == "test" else []
        return estimate_difference(metric, [a for a, _ in present], [b for _, b in present], pairs)

    rows: list[CompareRow] = []
    for name, row_scores in scores.items():
        row_values = values[name]
        row_reports = runs.get(name, [])
        rows.append(
            CompareRow(
                name=name,
                scores=tuple(row_values),
                mean=compute_mean(row_values),
                deviation=compute_deviation(row_values),
                difference=compare(name, comparison.against),
                worst=compute_mean(
                    [get_finite((own_scores.get("clients") or {}).get("worst"), metric) for own_scores in row_scores]
                ),
                bytes_down=compute_mean([run.bytes["down"] for run in row_reports]),
                bytes_up=compute_mean([run.bytes["up"] for run in row_reports]),
                seconds=compute_mean([run.seconds for run in row_reports]),
            )
        )
    higher = METRICS[metric].greater_is_better
    means = {row.name: compute_score(metric, {metric: row.mean}) for row in rows if row.mean is not None}
    best = max(means, key=lambda name: means[name], default=None)
    differences = [compare(best, name) for name in scores if name != best] if best is not None else []
    is_best = all(difference is not None and difference.is_measurable for difference in differences)
    return CompareReport(
        metric, measured, higher, comparison.against, comparison.seeds, tuple(rows), folder, best if is_best else None
    )


def _read_items(comparison: Comparison, name: str, folder: str) -> list[Items | None]:
    group = name if name in comparison.methods else comparison.methods[0]
    folders = [Path(folder) / step.name for step in comparison.steps if step.group == group]
    if name == "start":
        return [read_items(path, "start") for path in folders]
    return [read_items(path if name in comparison.methods else path / "baselines" / name) for path in folders]
