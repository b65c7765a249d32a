"""How high a barrier between models is."""

from __future__ import annotations

import pytest

from fedspan.diagnostics.round_diagnosis import Barrier


def test_how_high_a_barrier_is() -> None:
    assert Barrier(("a", "b"), (1.0, 1.5, 2.5, 2.0, 3.0)).height == pytest.approx(0.5)
    assert Barrier(("a", "b"), (1.0, 1.1, 1.2, 1.3, 3.0)).height == 0
