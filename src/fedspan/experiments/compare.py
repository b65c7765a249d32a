"""Comparison of methods: several methods and seeds on one partition, summarized in one table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedspan.experiments.comparison import CompareReport, compared, heldout_score, plan_comparison
from fedspan.experiments.execution import ConfigLike, begin, command_line, plain_values, read_settings, run_step
from fedspan.experiments.series import Watcher
from fedspan.experiments.tables import write_tables
from fedspan.training.prefix_rows import shared_prefixes

__all__ = ["COMPARE", "compare", "resume_compare"]

COMPARE = "compare.yaml"
_SETTINGS = {
    "command": list,
    "methods": list,
    "seeds": list,
    "against": (str, type(None)),
    "for": dict,
    "config": dict,
}


def compare(
    config: ConfigLike,
    folder: str | Path,
    methods: Sequence[str],
    seeds: Sequence[int] = (0, 1, 2),
    *,
    overrides: Sequence[str] = (),
    overrides_for: Mapping[str, Sequence[str]] | None = None,
    against: str | None = None,
    listener: Watcher | None = None,
) -> CompareReport:
    """Run several methods and seeds on the same partition and summarize them in one table.

    Every run is an ordinary run in ``folder/<method>-seed<seed>``. A finished run is read and an unfinished run is
    resumed. A stopped comparison therefore continues, and a finished one can be extended by more seeds or methods.

    Args:
        config: The path of a YAML file, its content as plain values, or a ``RunConfig``. The ``method`` section may
            hold options that only some of the methods have. The config's baselines are trained once for each seed,
            in the runs of the first method.
        folder: Folder of the runs, ``table.csv`` and ``table.md``; empty, not yet existing, or of this comparison.
        methods: Registry keys of the methods.
        seeds: Seeds of every method. ``partition.seed`` is the first of them unless the config sets it.
        overrides: Changes to the config, each ``section.field=value``.
        overrides_for: Changes for one method, by its key, such as ``{"fedloru": ["method.tau=5"]}``.
        against: The reference row of the table; by default the first method.
        listener: The listener that is notified of every event.

    Raises:
        FedspanError: If the input is invalid in a way that the user can correct.
    """
    settings = {
        "command": command_line(sys.argv),
        "methods": list(methods),
        "seeds": list(seeds),
        "against": against,
        "for": {key: list(texts) for key, texts in (overrides_for or {}).items()},
        "config": plain_values(config, overrides),
    }
    return _play(settings, Path(folder), listener or Watcher())


def resume_compare(folder: str | Path, *, against: str | None = None, listener: Watcher | None = None) -> CompareReport:
    """Resume a comparison with its original settings.

    Args:
        folder: Folder of the comparison.
        against: Another reference row; by default the original one.
        listener: The listener that is notified of every event.

    Raises:
        FedspanError: If the folder holds no comparison, and as ``compare`` does.
    """
    settings = read_settings(Path(folder), COMPARE, _SETTINGS)
    return _play({**settings, "against": against or settings["against"]}, Path(folder), listener or Watcher())


def _play(settings: Mapping[str, Any], folder: Path, watcher: Watcher) -> CompareReport:
    plan = plan_comparison(
        settings["config"], settings["methods"], settings["seeds"], settings["for"], settings["against"]
    )
    begin(folder, COMPARE, settings, plan.steps)
    watcher.series_started(plan.steps)
    with shared_prefixes():
        reports = {step.name: run_step(step, folder, watcher, heldout_score) for step in plan.steps}
    report = compared(plan, reports, str(folder))
    title = f"Comparison of {', '.join(plan.methods)}"
    names = [step.name for step in plan.steps]
    write_tables(folder, title, report.table(), report.plain(), settings["command"], names, report.by_seed())
    return report
