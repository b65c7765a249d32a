"""Search space of a sweep: lists of values and ranges, with all combinations or a random sample of them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedspan.config import load_yaml
from fedspan.data.keyed import make_generator
from fedspan.errors import FedspanError

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

    Raises:
        FedspanError: If there is nothing to try, or a string is neither a list of values nor a valid range.
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
        trials: Number of trials; None for all combinations.
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
