"""Hyperparameter search: the plan of the trials, by grid or at random, and their ranking by validation.

Scores on a test set or on the clients' test parts are not read here: selecting settings by them would make the test
data part of the training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from fedspan.config import RunConfig, override, parse_config
from fedspan.errors import FedspanError
from fedspan.experiments.search_space import list_combinations, parse_space
from fedspan.experiments.series import (
    Step,
    compute_deviation,
    compute_mean,
    get_finite,
    require_comparable,
    set_seed,
    validate_seeds,
)
from fedspan.experiments.tables import Table, format_heading, format_mean, format_seconds
from fedspan.tasks.metrics import METRICS, compute_score

if TYPE_CHECKING:
    from fedspan.runs.report import RunReport


@dataclass(frozen=True)
class Sweep:
    """The plan of a sweep."""

    metric: str
    """The metric by which the best trial is selected."""
    seeds: tuple[int, ...]
    """Seeds of every trial."""
    values: tuple[Mapping[str, Any], ...]
    """The values of every trial, by path."""
    configs: tuple[RunConfig, ...]
    """The final config of every trial, with the rounds, seed and baselines of the original config."""
    steps: tuple[Step, ...]
    """The runs, trial by trial."""


def plan_sweep(
    values: Mapping[str, Any],
    over: Mapping[str, str | Sequence[Any]],
    trials: int | None,
    rounds: int | None,
    seeds: Sequence[int],
) -> Sweep:
    """Plan the runs of a sweep and validate every config.

    Args:
        values: Values of the config.
        over: The search space, as for ``parse_space``.
        trials: Number of combinations to draw; None for all.
        rounds: Number of rounds of a trial; None for the config's.
        seeds: Seeds of every trial.

    Raises:
        FedspanError: If the input is invalid in a way that the user can correct.
    """
    base = parse_config(values)
    seeds = validate_seeds(seeds)
    first, several = seeds[0], len(seeds) > 1
    if base.partition.validation == 0:
        expected = "a share above 0, because settings are chosen on the clients' validation parts, never on a test set"
        raise FedspanError("partition.validation", base.partition.validation, expected)
    if rounds is not None and (isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1):
        raise FedspanError("--rounds", rounds, "a whole number from 1")
    settings = list_combinations(parse_space(over), trials, base.seed)
    configs: list[RunConfig] = []
    steps: list[Step] = []
    for number, setting in enumerate(settings, 1):
        description = " ".join(f"{path}={value}" for path, value in setting.items())
        trial_config = require_comparable(base, parse_config(_set(values, setting)), "--over", description)
        changes = {"final_rounds": 0}  # the validation scores that select a trial are measured before them
        if rounds is not None and "federation.rounds" not in setting:
            changes["rounds"] = rounds
        short = trial_config.model_copy(update={"federation": trial_config.federation.model_copy(update=changes)})
        configs_by_seed = [set_seed(short, seed, first, baselines=False) for seed in seeds]
        steps += [
            Step(
                f"trial-{number:03}-seed{seed}",
                f"trial {number}{f', seed {seed}' if several else ''}: {description}",
                str(number),
                seed,
                config,
            )
            for seed, config in zip(seeds, configs_by_seed, strict=True)
        ]
        # The same partition as the trials: their validation examples must not enter the test set.
        configs.append(trial_config.model_copy(update={"partition": configs_by_seed[0].partition}))
    metric = base.evaluation.metric or base.task_definition.metric_names[0]
    return Sweep(metric, seeds, tuple(settings), tuple(configs), tuple(steps))


def _set(values: Mapping[str, Any], setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config's values with those of a trial, set by ``override`` so that paths are interpreted equally."""
    texts: list[str] = []
    for path, value in setting.items():
        try:
            text = yaml.safe_dump(value, default_flow_style=True)
        except yaml.YAMLError:  # for example a NumPy number, passed from Python
            raise FedspanError("--over", f"{path}={value!r}", "plain numbers, texts and lists") from None
        texts.append(f"{path}={text.removesuffix(chr(10)).removesuffix('...')}")
    return override(values, texts)


@dataclass(frozen=True)
class Trial:
    """One setting and its result."""

    number: int
    """Number of the trial from 1, in the order of the search."""
    values: Mapping[str, Any]
    """The values, by path in the config."""
    scores: tuple[float | None, ...]
    """The validation metric, one value for each seed that was run."""
    mean: float | None
    """Mean of the scores; None for a failed trial."""
    deviation: float | None
    """Standard deviation (n - 1); None for one seed."""
    seconds: float | None
    """Wall-clock time of the rounds of all seeds; None for a failed trial."""
    failed: str | None
    """Reason of the failure, such as divergence; None for a trial that succeeded."""


@dataclass(frozen=True)
class SweepReport:
    """The table of a sweep; ``table.csv`` and ``table.md`` in its folder hold the same.

    Args:
        metric: The metric of the selection, on the clients' validation parts.
        higher: Whether higher values of the metric are better.
        seeds: Seeds of every trial.
        trials: The trials, best first, failed ones last.
        folder: Folder of the runs and the tables.
        best: Path of the config with the best values, ready to run; None if every trial failed.
    """

    metric: str
    higher: bool
    seeds: tuple[int, ...]
    trials: tuple[Trial, ...]
    folder: str
    best: str | None

    def build_table(self) -> Table:
        """Return the table in its readable form."""
        paths = list(self.trials[0].values)
        several = len(self.seeds) > 1
        rows = tuple(
            (
                str(trial.number),
                *(str(trial.values[path]) for path in paths),
                "failed" if trial.failed else format_mean(self.metric, trial.mean, trial.deviation),
                format_seconds(trial.seconds),
            )
            for trial in self.trials
        )
        better = "higher is better" if self.higher else "lower is better"
        numbers = ", ".join(map(str, self.seeds))
        subject = f"mean ± standard deviation over the seeds {numbers}" if several else f"one seed ({numbers})"
        return Table(
            head=("trial", *paths, format_heading("validation", self.metric), "seconds"),
            rows=rows,
            best=None if self.best is None else 0,
            notes=(
                f"On the clients' validation parts together, {subject}; {better}. Nothing here was measured on a test.",
            ),
        )

    def to_rows(self) -> list[dict[str, object]]:
        """Return machine-readable rows."""
        return [
            {
                "trial": trial.number,
                **trial.values,
                "metric": self.metric,
                "seeds": " ".join(map(str, self.seeds)),
                "validation_scores": " ".join("" if score is None else repr(score) for score in trial.scores),
                "validation_mean": trial.mean,
                "validation_deviation": trial.deviation,
                "seconds": trial.seconds,
                "failed": trial.failed,
            }
            for trial in self.trials
        ]


def get_validation_score(report: RunReport) -> float | None:
    """Return the score of a run that a sweep uses."""
    return get_finite(report.scores.get("validation"), report.metric)


def rank_trials(sweep: Sweep, reports: Mapping[str, RunReport], failures: Mapping[str, str]) -> tuple[Trial, ...]:
    """Rank all trials: best first (ties by the smaller validation loss), failed ones last.

    Args:
        sweep: The plan.
        reports: Reports of the completed runs, by name.
        failures: Reasons of the failed runs, by name.
    """
    metric, trials, losses = sweep.metric, list[Trial](), dict[int, float]()
    for number, values in enumerate(sweep.values, 1):
        names = [step.name for step in sweep.steps if step.group == str(number)]
        finished = [reports[name] for name in names if name in reports]
        scores = [get_validation_score(report) for report in finished]
        failed = next((failures[name] for name in names if name in failures), None)
        score, loss = None, compute_mean([get_finite(report.scores.get("validation"), "loss") for report in finished])
        losses[number] = math.inf if loss is None else loss
        if failed is None:
            score = compute_mean(scores)
            if score is None:
                failed = f"{METRICS[metric].title} has no value on the validation parts"
        trials.append(
            Trial(
                number=number,
                values=values,
                scores=tuple(scores),
                mean=score,
                deviation=None if failed else compute_deviation(scores),
                seconds=None if failed else sum(report.seconds for report in finished),
                failed=failed,
            )
        )
    ranks = {
        trial.number: compute_score(metric, {} if trial.mean is None else {metric: trial.mean}) for trial in trials
    }
    # On few examples, several trials often have the same accuracy.
    return tuple(sorted(trials, key=lambda trial: (-ranks[trial.number], losses[trial.number])))
