"""Epsilon, against Opacus' own accountants, the exact Gaussian mechanism and the first paper's figure."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

pytest.importorskip("opacus", reason="the extra fedspan[privacy] is not installed")

from opacus.accountants import RDPAccountant

from fedspan.errors import FedspanError
from fedspan.training.accounting import Charge, Mechanism, PrivacySpend, calibrate_noise, compute_epsilon


def exact(noise: float, count: int, delta: float) -> float:
    """Of so many Gaussian mechanisms without sampling: Balle and Wang, ICML 2018, theorem 8."""
    mu = math.sqrt(count) / noise

    def excess(epsilon: float) -> float:
        gone = math.exp(epsilon + float(norm.logcdf(-mu / 2 - epsilon / mu)))
        return float(norm.cdf(mu / 2 - epsilon / mu)) - gone - delta

    return brentq(excess, 0, 200)


@pytest.mark.parametrize(("noise", "count"), [(1.0, 1), (4.0, 10), (20.0, 100), (0.8, 3)])
def test_without_sampling_prv_is_exact_and_rdp_just_above(noise: float, count: int) -> None:
    right = exact(noise, count, 1e-5)
    one = {Mechanism(1.0, noise): count}
    assert compute_epsilon(one, 1e-5, "prv") == pytest.approx(right, abs=0.02)
    assert right <= compute_epsilon(one, 1e-5, "rdp") <= 1.15 * right


def test_the_figure_of_the_first_paper() -> None:
    """Abadi et al., section 3.2: rate 0.01, noise 4, 10,000 steps, delta 1e-5: epsilon 1.26 by the moments accountant.

    The conversion of today is tighter, so it must be below, and not by much.
    """
    one = {Mechanism(0.01, 4.0): 10_000}
    tight, loose = compute_epsilon(one, 1e-5, "prv"), compute_epsilon(one, 1e-5, "rdp")
    assert 0.8 < tight < loose < 1.26


@given(st.floats(0.01, 1.0), st.floats(0.6, 8.0), st.integers(1, 500))
@settings(max_examples=2, deadline=None)
def test_rdp_is_opacus_own_or_tighter(rate: float, noise: float, count: int) -> None:
    accountant = RDPAccountant()
    accountant.history = [(noise, rate, count)]
    theirs, ours = accountant.get_epsilon(1e-5), compute_epsilon({Mechanism(rate, noise): count}, 1e-5, "rdp")
    assert ours <= theirs + 1e-9
    assert ours > 0.6 * theirs or theirs < 0.6  # their orders end at 63


@pytest.mark.parametrize("accounting", ["rdp", "prv"])
@pytest.mark.parametrize(
    ("rate", "count", "epsilon"),
    [(1.0, 10, 8.0), pytest.param(0.1, 200, 2.0, marks=pytest.mark.slow), (0.01, 1000, 0.5)],
)
def test_calibrated_noise_spends_the_target_and_no_more(
    rate: float, count: int, epsilon: float, accounting: str
) -> None:
    noise = calibrate_noise(rate, count, epsilon, 1e-5, accounting)
    spent = compute_epsilon({Mechanism(rate, noise): count}, 1e-5, accounting)
    assert 0.98 * epsilon <= spent <= epsilon


@given(st.floats(0.01, 1.0), st.integers(1, 2000), st.floats(0.2, 50.0), st.sampled_from([1e-3, 1e-5, 1e-9]))
@example(1.0, 1, 0.25, 1e-9)
@settings(max_examples=2, deadline=None)
def test_the_few_orders_that_calibration_looks_at_leave_nothing_unspent(
    rate: float, count: int, epsilon: float, delta: float
) -> None:
    noise = calibrate_noise(rate, count, epsilon, delta, "rdp")
    spent = compute_epsilon({Mechanism(rate, noise): count}, delta, "rdp")
    assert 0.985 * epsilon <= spent <= epsilon


def test_no_noise_has_no_bound_and_nothing_costs_nothing() -> None:
    assert compute_epsilon({}, 1e-5, "rdp") == 0
    assert compute_epsilon({Mechanism(1.0, 2.0): 0}, 1e-5, "rdp") == 0
    assert compute_epsilon({Mechanism(0.1, 0.0): 1}, 1e-5, "rdp") == math.inf
    with pytest.raises(FedspanError, match="with any noise"):
        calibrate_noise(1.0, 10**9, 1e-4, 1e-12, "rdp")


def test_clients_spend_each_their_own() -> None:
    spend = PrivacySpend(1e-5, "rdp")
    assert spend.compute_worst() == 0
    some, more = Mechanism(0.1, 1.0), Mechanism(0.5, 2.0)
    spend.charge((Charge("a", some, 10), Charge("b", more, 3), Charge("a", some, 5)))
    both = {payer: spend.compute_epsilon(payer) for payer in "ab"}
    assert both["a"] == compute_epsilon({some: 15}, 1e-5, "rdp")
    assert spend.compute_worst() == max(both.values())
    assert spend.compute_worst((Charge("c", Mechanism(1.0, 0.5), 1),)) > spend.compute_worst()
    assert spend.compute_epsilon("a", (Charge("a", more, 1),)) > both["a"]
    other = PrivacySpend(1e-5, "rdp")
    other.restore(spend.dump())
    assert other.dump() == spend.dump()
    assert other.compute_worst() == spend.compute_worst()
    for wrong in (3, {"a": 3}, {"a": [[1, 2]]}, {"a": [["x", 1, 2]]}):
        with pytest.raises(ValueError, match=r"."):
            other.restore(wrong)
