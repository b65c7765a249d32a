"""What the settings of rounds compute from their fields."""

from __future__ import annotations

from typing import Any

import pytest

from fedspan.federation.settings import BufferedSettings, RoundSettings
from fedspan.training.jobs import Privacy


@pytest.mark.parametrize(
    ("exponent", "staleness", "factor"), [(0.5, 0, 1.0), (0.5, 3, 0.5), (1.0, 3, 0.25), (0.0, 7, 1.0)]
)
def test_the_change_of_an_old_order_is_scaled_down(exponent: float, staleness: int, factor: float) -> None:
    assert BufferedSettings(concurrency=4, staleness_exponent=exponent).compute_factor(staleness) == factor


CENTRAL = Privacy("central", clip=1.0, noise=0.5)
LOCAL = Privacy("local", clip=1.0, noise=0.5)


@pytest.mark.parametrize(("privacy", "central"), [(CENTRAL, CENTRAL), (LOCAL, None), (None, None)])
def test_only_central_privacy_is_central(privacy: Privacy | None, central: Privacy | None) -> None:
    assert RoundSettings(3, privacy=privacy).central is central


@pytest.mark.parametrize(
    ("changes", "clips"),
    [
        ({}, False),
        ({"clip_ratio": 2.0}, True),
        ({"max_norm": 1.0}, True),
        ({"max_norm": 1.0, "reduction": "median"}, False),
        ({"max_norm": 1.0, "privacy": LOCAL}, True),
        ({"clip_ratio": 2.0, "max_norm": 1.0, "privacy": CENTRAL}, False),
    ],
)
def test_changes_are_scaled_down_under_the_mean_without_central_privacy(changes: dict[str, Any], clips: bool) -> None:
    assert RoundSettings(3, **changes).clips == clips
