"""Parameters of tests, such as methods: one of each family in ``make test``, every other one in a step of .ci/run."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from fedspan.methods.registry import METHODS

FAMILIES = ("fedit", "rolora", "flora", "flexlora", "fedsa-lora", "fedgalore", "fedloru", "pfedlora")
"""Averaged, alternating, stacked, decomposed and personal factors, projected gradients, accumulated updates, two
phases."""
UNLIKE = ("flora", "fedgalore", "fedsa-lora")
"""The methods that differ most: a base that moves, projectors with moments, factors that stay on the client.

For tests that run whole federations of each method."""


def methods_by_family(keys: Iterable[str] = METHODS, quick: Collection[str] = FAMILIES) -> list[Any]:
    """Return the keys of all or some methods, as parameters of a test; those not in ``quick`` are marked slow."""
    return others_slow(sorted(keys), quick)


def others_slow(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return values as parameters of a test; those not in ``quick`` are marked slow."""
    return [pytest.param(value, marks=() if value in quick else pytest.mark.slow) for value in values]
