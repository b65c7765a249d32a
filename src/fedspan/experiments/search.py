"""Hyperparameter search: the plan of the trials, by grid or at random, and their ranking by validation.

Scores on a test set or on the clients' test parts are not read here: selecting settings by them would make the test
data part of the training.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from fedspan.config import RunConfig, load_yaml, override, parse_config
from fedspan.data.keyed import make_generator
from fedspan.errors import FedspanError
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


_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER})\.\.({_NUMBER})\s*")
_ATTEMPTS = 200  # attempts to draw a new combination, for each trial


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included: integers uniform, others log-uniform."""

    low: float
    """Lower end, above 0 unless it is an integer."""
    high: float
    """Upper end, above ``low``."""

    @property
    def whole(self) -> bool:
        """Whether integers are drawn."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def draw(self, seed: int, attempt: int, path: str) -> float:
        """Draw the number of one attempt, with four significant digits so that it can be read and typed."""
        rng = make_generator(seed, "sweep", attempt, path)
        if self.whole:
            return int(rng.integers(int(self.low), int(self.high), endpoint=True))
        number = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        return min(max(float(f"{number:.4g}"), self.low), self.high)


Space = Mapping[str, Range | tuple[Any, ...]]
"""Values to try, by path in the config."""


def parse_space(over: Mapping[str, str | Sequence[Any]]) -> dict[str, Range | tuple[Any, ...]]:
    """Parse the values to try for each field.

    Args:
        over: Values by path in the config, or a string such as ``4,8`` or ``1e-4..1e-1``.
    """
    if not over:
        raise FedspanError("--over", None, "at least one field with values to try, such as training.lr=1e-4,1e-3")
    return {path: _parse_values(path, candidates) for path, candidates in over.items()}


def _parse_values(path: str, candidates: str | Sequence[Any]) -> Range | tuple[Any, ...]:
    argument = f"{path}={candidates}"
    if not path or not all(path.split(".")):
        raise FedspanError("--over", argument, "section.field=value,value,...")
    values: Any = candidates
    if isinstance(candidates, str):
        if match := _RANGE.fullmatch(candidates):
            return _parse_range(argument, match[1], match[2])
        try:
            values = load_yaml(f"[{candidates}]")
        except ValueError:
            values = None
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise FedspanError("--over", argument, "values separated by commas, or a range such as 1e-4..1e-1")
    for position, value in enumerate(values):
        if value in values[:position]:
            raise FedspanError("--over", argument, problem=f"{argument!r} has the value {value} twice")
    return tuple(values)


def _parse_range(argument: str, low: str, high: str) -> Range:
    is_integer = all(re.fullmatch(r"[+-]?\d+", end) for end in (low, high))
    parsed = Range(int(low), int(high)) if is_integer else Range(float(low), float(high))
    if not -(2**62) < parsed.low < parsed.high < 2**62:
        raise FedspanError("--over", argument, "a range from the smaller to the larger number")
    if not is_integer and parsed.low <= 0:
        raise FedspanError("--over", argument, "a range above 0, because values are drawn on a logarithmic scale")
    return parsed


def list_combinations(space: Space, trials: int | None, seed: int) -> list[dict[str, Any]]:
    """Return the values of every trial: all combinations, or a number of distinct random ones.

    Args:
        seed: Seed of the draws. The number of trials does not change the first draws.

    Raises:
        FedspanError: If a range has no number of trials, or there are more trials than combinations.
    """
    if trials is None:
        for path, values in space.items():
            if isinstance(values, Range):
                argument = f"{path}={values.low}..{values.high}"
                raise FedspanError(
                    "--over",
                    argument,
                    "a list of values, or --trials N with the number of values to draw from the range",
                )
        lists = [values for values in space.values() if not isinstance(values, Range)]
        return [dict(zip(space, combination, strict=True)) for combination in itertools.product(*lists)]
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < 1:
        raise FedspanError("--trials", trials, "a whole number from 1")
    count = math.prod(_count_values(candidates) for candidates in space.values())
    if trials > count:
        raise FedspanError(
            "--trials", trials, f"at most {count}, the number of combinations, or no --trials, to try all"
        )
    distinct: list[dict[str, Any]] = []
    for attempt in range(_ATTEMPTS * trials):
        values = {path: _draw(candidates, seed, attempt, path) for path, candidates in space.items()}
        if values not in distinct:
            distinct.append(values)
        if len(distinct) == trials:
            return distinct
    raise FedspanError(
        "--trials", trials, f"at most {len(distinct)}, or wider ranges, which give more different values"
    )


def _count_values(candidates: Range | tuple[Any, ...]) -> float:
    """Return the number of distinct values; infinite for a continuous range."""
    if not isinstance(candidates, Range):
        return len(candidates)
    return int(candidates.high) - int(candidates.low) + 1 if candidates.whole else math.inf


def _draw(candidates: Range | tuple[Any, ...], seed: int, attempt: int, path: str) -> Any:
    if isinstance(candidates, Range):
        return candidates.draw(seed, attempt, path)
    return candidates[int(make_generator(seed, "sweep", attempt, path).integers(len(candidates)))]


@dataclass(frozen=True)
class Sweep:
    """The plan of a sweep."""

    metric: str
    """The metric by which the best trial is selected."""
    seeds: tuple[int, ...]
    values: tuple[Mapping[str, Any], ...]
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
    """Plan the runs of a sweep and validate every config."""
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

    Examples:
        >>> report = fedspan.sweep("config.yaml", "runs/sweep", {"training.lr": "1e-4..1e-1"}, trials=8)
        >>> [(trial.values, trial.mean) for trial in report.trials]
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
    """Rank all trials: best first (ties by the smaller validation loss), failed ones last."""
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
