"""Comparing methods: several methods and seeds on one division of the data, and one table."""

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
    """Play several methods and seeds on the same division of the data, and put them into one table.

    Every run is an ordinary one, in ``folder/<method>-seed<seed>``. One that is finished is read, one that was begun is
    gone on with: so a comparison that was stopped goes on, and one that is finished can be given more seeds or methods.

    Args:
        config: the path of a YAML file, the same as plain values, or a ``RunConfig``. Its ``method`` section may hold
            options that only some of the methods have. The baselines that it names are trained once for each seed,
            beside the first method.
        folder: for the runs, ``table.csv`` and ``table.md``; empty, not there yet, or of this comparison.
        methods: registry keys.
        seeds: of every method. ``partition.seed`` is the first of them unless the config names one.
        overrides: changes to the config, each ``section.field=value``.
        overrides_for: changes for one method, by its key, such as ``{"fedloru": ["method.tau=5"]}``.
        against: the row of the table that the others are compared with; left out: the first method.
        listener: told what happens.

    Raises:
        FedspanError: for anything that the user can put right.
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
    """Go on with a comparison under the settings that it was begun with.

    Args:
        folder: the comparison's.
        against: another reference; left out: the one that it was begun with.
        listener: told what happens.

    Raises:
        FedspanError: if no comparison was begun there, and as ``compare`` does.
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
