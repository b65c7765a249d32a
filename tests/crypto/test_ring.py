"""Fixed-point encoding in a ring: the error bound of a sum, and rings without room."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspan.crypto.masks import Ring


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([32, 64]),
    st.floats(1e-3, 1e6),
    st.integers(2, 300),
    st.integers(0, 2**32),
    st.sampled_from(["any", "greatest", "least"]),
)
def test_a_sum_of_encodings_is_off_by_no_more_than_the_bound(
    bits: int, clip: float, addends: int, seed: int, which: str
) -> None:
    """Also where all addends are as large as they may be: the sum is never taken for its negative."""
    ring, rng = Ring(bits, clip, addends), np.random.default_rng(seed)
    values = {
        "any": rng.uniform(-clip, clip, (addends, 7)),
        "greatest": np.full((addends, 7), clip),
        "least": np.full((addends, 7), -clip),
    }[which]
    total = np.zeros(7, ring.dtype)
    for value in values:
        total += ring.encode(value)
    exact = np.array([float(sum(map(np.longdouble, column))) for column in values.T])
    assert np.abs(ring.decode(total) - exact).max() <= ring.bound_error(addends)


def test_the_bound_is_no_larger_than_it_must_be() -> None:
    ring, rng = Ring(32, 100.0, 20), np.random.default_rng(0)
    values = rng.uniform(-100, 100, (20, 20000))
    off = np.abs(
        ring.decode(sum((ring.encode(value) for value in values), np.zeros(20000, ring.dtype))) - values.sum(0)
    )
    assert ring.bound_error(20) / 6 < off.max() <= ring.bound_error(20)
    assert ring.bound_error(1) == pytest.approx(100 * 20 / 2**32, rel=1e-4)


def test_a_ring_without_room_is_refused() -> None:
    for bits, addends in ((32, 2**31), (32, 1), (16, 4)):
        with pytest.raises(ValueError, match="no ring"):
            _ = Ring(bits, 1.0, addends).levels
