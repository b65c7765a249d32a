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
    assert ring.bound_error(1) == pytest.approx(100 * 20 / 2**31, rel=1e-4)


def test_rounding_is_unbiased_and_depends_on_the_values_alone() -> None:
    ring, rng = Ring(32, 100.0, 20), np.random.default_rng(0)
    values = rng.normal(size=100_000) * 0.1 * ring.clip / ring.levels  # a tenth of a step
    encoded = ring.encode(values)
    assert np.array_equal(encoded, ring.encode(values.copy()))
    assert not np.array_equal(encoded[1:], ring.encode(values[1:]))
    positive = values > 0
    for part in (positive, ~positive):
        assert ring.decode(encoded[part]).mean() == pytest.approx(values[part].mean(), rel=0.1)
    assert not ring.encode(np.zeros(9)).any()


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("step", [0.5, 1.5, 2.0, 3.0])
def test_coarse_steps_leave_the_heaviest_addend_hidden(bits: int, step: float) -> None:
    """A server that makes the steps as coarse as one client's changes, of ten of which it weighs four times as much as
    each of the others, learns no more about it than from the exact sum. Rounded to the nearest step, the others would
    be zero."""
    rng, addends = np.random.default_rng(1), 10
    ring = Ring(bits, step * (2 ** (bits - 1) // addends - 1), addends)
    victim, others = rng.normal(size=30_000), rng.normal(size=(9, 30_000)) / 4
    total = ring.encode(victim)
    for other in others:
        total += ring.encode(other)
    exact, decoded = victim + others.sum(0), ring.decode(total)
    assert _cosine(decoded, victim) <= _cosine(exact, victim)
    assert _cosine(decoded - ring.decode(ring.encode(victim)), others.sum(0)) > 0.2


def _cosine(left: np.ndarray, right: np.ndarray) -> float:
    return float(left @ right / np.linalg.norm(left) / np.linalg.norm(right))


def test_a_ring_without_room_is_refused() -> None:
    for bits, addends in ((32, 2**31), (32, 1), (16, 4)):
        with pytest.raises(ValueError, match="no ring"):
            _ = Ring(bits, 1.0, addends).levels
