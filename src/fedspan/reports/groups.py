"""Groups of runs that differ only in their seed, labeled by the settings that distinguish the groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedspan.experiments.series import compute_deviation, compute_mean
from fedspan.reports.curves import compute_sent_bytes
from fedspan.reports.run_data import RunData

_SEEDS = ("seed", "baselines")


@dataclass(frozen=True)
class RunGroup:
    """Runs of one configuration that differ only in the seed."""

    label: str
    runs: tuple[RunData, ...]

    @property
    def scores(self) -> tuple[float | None, ...]:
        """Scores of the runs."""
        return tuple(run.final for run in self.runs)

    @property
    def mean(self) -> float | None:
        """Mean of the scores; None if one is missing."""
        return compute_mean(self.scores)

    @property
    def deviation(self) -> float | None:
        """Standard deviation (n - 1) of the scores; None for one run."""
        return compute_deviation(self.scores)

    @property
    def references(self) -> Mapping[str, float]:
        """Mean scores of what the results are compared with, as far as measured in all runs."""
        return self._average([run.references for run in self.runs])

    @property
    def client_means(self) -> Mapping[str, float]:
        """Mean scores on the clients' own tests, of the ``result`` and of what it is compared with."""
        tables: list[dict[str, Any]] = []
        for run in self.runs:
            parts = {name: scores.get("clients") for name, scores in {"result": run.result, **run.references}.items()}
            tables.append({name: {"clients": part} for name, part in parts.items() if part})
        return self._average(tables)

    def _average(self, tables: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, float]:
        names = dict.fromkeys(name for table in tables for name in table)
        means = {
            name: compute_mean([run.score(table.get(name, {})) for run, table in zip(self.runs, tables, strict=True)])
            for name in names
        }
        return {name: mean for name, mean in means.items() if mean is not None}


@dataclass(frozen=True)
class Curve:
    """A quantity by round, over a group's seeds.

    Args:
        bytes: Bytes of a run up to that round, mean over the runs.
        seconds: Seconds of a run up to that round, mean over the runs.
    """

    rounds: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    bytes: tuple[float, ...]
    seconds: tuple[float, ...]


def group_runs(runs: Sequence[RunData]) -> tuple[RunGroup, ...]:
    """Group the runs, in the order of their first runs."""
    by_settings: dict[str, list[RunData]] = {}
    for run in runs:
        flat = {
            path: value for path, value in _flatten(run.config.model_dump(mode="json")).items() if path not in _SEEDS
        }
        by_settings.setdefault(repr(sorted(flat.items())), []).append(run)
    sets = [sorted(group, key=lambda run: run.config.seed) for group in by_settings.values()]
    differ = list_distinguishing_settings([group[0] for group in sets])
    labels = [
        _format_label(group[0], {path: row[index] for path, row in differ.items()}) for index, group in enumerate(sets)
    ]
    if len(set(labels)) < len(labels):
        labels = [group[0].name for group in sets]
    return tuple(RunGroup(label, tuple(group)) for label, group in zip(labels, sets, strict=True))


def list_distinguishing_settings(runs: Sequence[RunData]) -> dict[str, tuple[Any, ...]]:
    """Return the fields in which configurations differ, with every run's value (None if missing), except seeds."""
    flats = [_flatten(run.config.model_dump(mode="json")) for run in runs]
    paths = dict.fromkeys(path for flat in flats for path in flat if path not in _SEEDS)
    rows = {path: tuple(flat.get(path) for flat in flats) for path in paths}
    return {path: row for path, row in rows.items() if any(value != row[0] for value in row)}


def summarize_curve(group: RunGroup, values: Mapping[str, Mapping[int, float]]) -> Curve:
    """Summarize a quantity by round over the runs of a group."""
    series = [values[run.name] for run in group.runs]
    rounds = sorted(set[int].intersection(*(set(curve) for curve in series))) if series else []
    columns = [[curve[round] for curve in series] for round in rounds]
    bytes_by_round = [compute_sent_bytes(run.totals, run.rounds) for run in group.runs]
    seconds_by_round = [{int(row["round"]): float(row.get("seconds", 0.0)) for row in run.rows} for run in group.runs]
    count = max(1, len(series))
    return Curve(
        tuple(rounds),
        tuple(sum(column) / count for column in columns),
        tuple(min(column) for column in columns),
        tuple(max(column) for column in columns),
        tuple(sum(curve[round] for curve in bytes_by_round) / count for round in rounds),
        tuple(sum(curve[round] for curve in seconds_by_round) / count for round in rounds),
    )


def _format_label(run: RunData, differing_settings: Mapping[str, Any]) -> str:
    rest = [
        f"{path.rpartition('.')[2]}={value}"
        for path, value in differing_settings.items()
        if not path.startswith("method.") or path.rpartition(".")[2] not in ("name", "wrappers")
    ]
    settings = [setting for setting in rest if not setting.endswith("=None")]
    return " ".join([run.config.method.title, *settings[:3], *(["..."] if len(settings) > 3 else [])])


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
