"""The data of a run, read from its folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fedspan.config import RunConfig
from fedspan.errors import FedspanError
from fedspan.logs import read_lines
from fedspan.reports.curves import get_score
from fedspan.run_folder import RunFolder, describe_missing_run
from fedspan.runs.integrity import read_resolved_config, require_intact
from fedspan.runs.ledger import Totals, read_totals
from fedspan.runs.predictions import Items, read_items
from fedspan.runs.report import RunReport, read_report
from fedspan.tasks.metrics import METRICS

Row = Mapping[str, Any]
BASELINES = ("local-only", "centralized")


@dataclass(frozen=True)
class RunData:
    """The content of a run's folder.

    Args:
        name: The shortest name of the folder that is unique among the runs on the page.
        report: Summary of the run; None while it is in progress, or if it was stopped.
        rows: Lines of metrics.jsonl, by round; that of a measured start has round 0.
    """

    name: str
    folder: Path
    config: RunConfig
    report: RunReport | None
    rows: tuple[Row, ...]
    totals: Totals

    @property
    def rounds(self) -> int:
        """Number of finished rounds."""
        return int(self.rows[-1]["round"]) if self.rows else 0

    @property
    def metric(self) -> str:
        """Metric by which the rounds are compared."""
        return self.config.evaluation.metric or self.config.task_definition.metric_names[0]

    @property
    def higher(self) -> bool:
        """Whether higher values of the metric are better."""
        return METRICS[self.metric].greater_is_better

    def score(self, row: Row) -> float | None:
        """Return a round's score on held-out examples; without them, the mean over the clients' own test parts."""
        return get_score(row, self.metric)

    @property
    def result(self) -> Row:
        """Scores of the run's resulting models (those of the best round); for a run in progress, the last scores."""
        if self.report is not None:
            return self.report.scores
        return next((row for row in reversed(self.rows) if self.score(row) is not None), {})

    @property
    def final(self) -> float | None:
        """Score of the run's result."""
        return self.score(self.result)

    @property
    def references(self) -> Mapping[str, Mapping[str, Any]]:
        """Scores of what the result is compared with, as far as measured: ``start`` and the baselines."""
        baselines = {} if self.report is None else self.report.baselines
        scores: dict[str, Row] = {name: baseline["scores"] for name, baseline in baselines.items()}
        start = {} if self.report is None else self.report.start
        if self.rows and self.rows[0]["round"] == 0:
            start = self.rows[0]
        return {"start": start, **scores} if start else scores

    def read_items(self, name: str = "result") -> Items | None:
        """Read the predictions of the result, or of one of ``references``, on the held-out examples, if recorded."""
        return read_items(self.folder / "baselines" / name) if name in BASELINES else read_items(self.folder, name)

    @property
    def bytes(self) -> int:
        """Bytes of the training messages, in both directions."""
        return self.totals.run("down").bytes + self.totals.run("up").bytes

    @property
    def seconds(self) -> float:
        """Wall-clock time of the rounds."""
        return float(self.rows[-1].get("seconds", math.nan)) if self.rows else math.nan


def read_runs(folders: Sequence[str | Path]) -> tuple[RunData, ...]:
    """Read the runs in some folders; a folder of a series (compare, sweep, reproduce) stands for all runs below it."""
    resolved: dict[Path, None] = {}
    for folder in folders:
        path = Path(folder)
        inside = (
            [path]
            if _is_run(path)
            else sorted(entry.parent for entry in path.glob("**/config.yaml") if _is_run(entry.parent))
        )
        if not inside:
            expected = "the folder of a run, or a folder with runs in it"
            raise FedspanError("run folder", str(folder), expected, problem=describe_missing_run(folder))
        resolved |= dict.fromkeys(entry.resolve() for entry in inside)
    paths = list(resolved)
    names = _build_names(paths)
    return tuple(_read_run(name, run_path) for name, run_path in zip(names, paths, strict=True))


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() and (path / "environment.json").is_file()


def _build_names(paths: Sequence[Path]) -> list[str]:
    """Return as many last parts of each path as make the names unique."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _read_run(name: str, folder: Path) -> RunData:
    run_folder = RunFolder(folder)
    require_intact(run_folder)
    config = read_resolved_config(folder)
    report = read_report(folder) if run_folder.report.is_file() else None
    rows = tuple(cast("Sequence[Row]", list(read_lines(run_folder.metrics))))
    return RunData(name, folder, config, report, rows, read_totals(run_folder.ledger))
