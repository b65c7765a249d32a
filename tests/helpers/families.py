"""Methods as parameters of tests: one of each family in ``make test``, every other one in a step of .ci/run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from fedspan.methods.registry import METHODS

FAMILIES = ("fedit", "rolora", "flora", "flexlora", "fedsa-lora", "fedgalore", "fedloru", "pfedlora")
"""Averaged, alternating, stacked, decomposed and personal factors, projected gradients, accumulated updates, two
phases."""


def methods_by_family(keys: Iterable[str] = METHODS) -> list[Any]:
    """Return the keys of all or some methods, as parameters of a test; those outside ``FAMILIES`` are marked slow."""
    return [pytest.param(key, marks=() if key in FAMILIES else pytest.mark.slow) for key in sorted(keys)]
