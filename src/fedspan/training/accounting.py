"""Privacy cost: the epsilon for a delta of subsampled Gaussian mechanisms, computed by Opacus' accountants.

Every release is a Gaussian mechanism on a Poisson sample, described by its rate (1: every unit participates) and its
noise, the standard deviation over the L2 sensitivity. Renyi accounting (``rdp``: Mironov et al., arXiv 1908.10530) is
quick and slightly loose; ``prv`` (Gopi et al., NeurIPS 2021) is tight and takes seconds if many clients differ.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from fedspan.errors import FedspanError, build_install_command

Accounting = Literal["rdp", "prv"]

_STEP = 0.01
"""Share of a target epsilon that calibration may leave unspent."""
_ORDERS = (*(1 + tenth / 10 for tenth in range(1, 110)), *range(12, 64), 80, 96, 128, 192, 256, 384, 512, 1024)
"""Orders of Renyi divergences. Opacus' own list ends at 63, which overestimates the cost of few very noisy releases."""
_LONGEST = 800.0
"""Loose epsilon times the root of the number of releases, by which the time and memory of ``prv`` grow. Beyond it, the
loose bound will do: a server may choose a noise or steps for which ``prv`` takes minutes and gigabytes."""
_TRIES = 4
"""Calibrations by the loose bound in one by ``prv``; two usually suffice."""
_COARSE = 8
"""Calibration first tries every eighth order: a divergence takes milliseconds."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class Mechanism:
    """One kind of release."""

    rate: float
    noise: float

    @property
    def is_slow(self) -> bool:
        """Whether Opacus' series for orders between whole numbers takes seconds to converge."""
        return abs(self.rate - 0.5) < 0.02 and self.noise > 5


@dataclass(frozen=True)
class Charge:
    """Releases of one kind."""

    payer: str
    """The client whose data are released; empty: the data of the whole federation."""
    mechanism: Mechanism
    count: int


class PrivacySpend:
    """All releases so far, by payer."""

    def __init__(self, delta: float, accounting: Accounting) -> None:
        self.delta = delta
        self.accounting: Accounting = accounting
        self._counts: dict[str, dict[Mechanism, int]] = {}

    def charge(self, charges: tuple[Charge, ...]) -> None:
        """Count releases."""
        for release in charges:
            counts = self._counts.setdefault(release.payer, {})
            counts[release.mechanism] = counts.get(release.mechanism, 0) + release.count

    def compute_epsilon(self, payer: str, further: tuple[Charge, ...] = ()) -> float:
        """Compute the epsilon that a payer has spent, with more charges of its own on top."""
        counts = dict(self._counts.get(payer, {}))
        for release in further:
            counts[release.mechanism] = counts.get(release.mechanism, 0) + release.count
        return compute_epsilon(counts, self.delta, self.accounting)

    def compute_worst(self, further: tuple[Charge, ...] = ()) -> float:
        """Compute the largest epsilon of all payers; they do not add up, since each payer has its own data."""
        payers = {*self._counts, *(release.payer for release in further)}
        by_payer = {payer: tuple(release for release in further if release.payer == payer) for payer in payers}
        return max((self.compute_epsilon(payer, by_payer[payer]) for payer in payers), default=0.0)

    @property
    def counted_by(self) -> Accounting:
        """The accountant that counts: ``rdp`` if any payer's releases need it."""
        kinds = {choose_accountant(counts, self.delta, self.accounting) for counts in self._counts.values()}
        return "rdp" if "rdp" in kinds else self.accounting

    def dump(self) -> dict[str, list[list[float]]]:
        """Return the counts as plain values, for a checkpoint."""
        return {
            payer: [[mechanism.rate, mechanism.noise, count] for mechanism, count in sorted(counts.items())]
            for payer, counts in sorted(self._counts.items())
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Replace the counts by those that ``dump`` returned.

        Raises:
            ValueError: If the values do not come from ``dump``.
        """
        try:
            self._counts = {
                payer: {Mechanism(float(rate), float(noise)): int(count) for rate, noise, count in counts}
                for payer, counts in values.items()
            }
        except (TypeError, AttributeError) as error:
            raise ValueError("counts of releases by payer") from error


def require_opacus() -> None:
    """Raise a clear error where the extra is missing."""
    try:
        import opacus  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise FedspanError(
            "privacy",
            "on",
            problem=f"privacy needs a package that is missing ({error}). Run: {build_install_command('privacy')}",
        ) from None


def compute_epsilon(counts: Mapping[Mechanism, int], delta: float, accounting: Accounting) -> float:
    """Compute the epsilon of a composition; infinite if anything was released without noise."""
    releases = {mechanism: count for mechanism, count in counts.items() if count}
    if not releases:
        return 0.0
    if any(mechanism.noise <= 0 for mechanism in releases):
        return math.inf
    parts = tuple(sorted(releases.items()))
    loose = _compute_renyi_epsilon(parts, delta, _ORDERS)[0]
    if choose_accountant(releases, delta, accounting) == "rdp":
        return loose
    return min(loose, _compute_tight_epsilon(parts, delta))


def choose_accountant(releases: Mapping[Mechanism, int], delta: float, accounting: Accounting) -> Accounting:
    """Return the accountant that counts some releases: ``rdp`` in place of a ``prv`` that would take minutes."""
    if accounting == "rdp" or not releases or any(mechanism.noise <= 0 for mechanism in releases):
        return accounting
    loose = _compute_renyi_epsilon(tuple(sorted(releases.items())), delta, _ORDERS)[0]
    length = loose * math.sqrt(sum(releases.values()))
    if length <= _LONGEST and not any(mechanism.is_slow for mechanism in releases):
        return accounting
    _log_looser_accountant()
    return "rdp"


@lru_cache(maxsize=1)
def _log_looser_accountant() -> None:
    log.warning("privacy.accountant: prv would take minutes, so rdp computes epsilon, whose bound is looser")


@lru_cache(maxsize=4096)
def _compute_tight_epsilon(releases: tuple[tuple[Mechanism, int], ...], delta: float) -> float:
    require_opacus()
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(mechanism.noise, mechanism.rate, count) for mechanism, count in releases]
    return float(accountant.get_epsilon(delta=delta))


@lru_cache(maxsize=4096)
def _compute_renyi_epsilon(
    releases: tuple[tuple[Mechanism, int], ...], delta: float, orders: tuple[float, ...]
) -> tuple[float, float]:
    """Compute the epsilon by the best of some orders, and that order: a bound that more orders can only tighten."""
    require_opacus()
    from opacus.accountants.analysis.rdp import get_privacy_spent

    total = sum(count * _compute_renyi_divergences(mechanism, orders) for mechanism, count in releases)
    with warnings.catch_warnings():
        # The warning that the best order is the first or the last: the result is still a bound.
        warnings.simplefilter("ignore", UserWarning)
        epsilon, order = get_privacy_spent(orders=list(orders), rdp=total, delta=delta)
    return max(0.0, float(epsilon)), float(order)


@lru_cache(maxsize=4096)
def _compute_renyi_divergences(mechanism: Mechanism, orders: tuple[float, ...]) -> Any:
    """Compute the Renyi divergences of one release; those of several releases add up."""
    from opacus.accountants.analysis.rdp import compute_rdp

    used = [order for order in orders if not mechanism.is_slow or order == int(order)]
    divergences: Any = compute_rdp(q=mechanism.rate, noise_multiplier=mechanism.noise, steps=1, orders=used)
    by_order = dict[float, float](zip(used, divergences, strict=True))
    return np.array([by_order.get(order, math.inf) for order in orders])


@lru_cache(maxsize=4096)
def calibrate_noise(rate: float, count: int, epsilon: float, delta: float, accounting: Accounting) -> float:
    """Find the noise with which ``count`` releases cost at most ``epsilon``, of which at most 1 % is left unspent.

    Args:
        rate: Probability that a unit participates in one release.
        delta: Delta of the guarantee.
    """
    require_opacus()
    if accounting == "prv":
        return _calibrate_tightly(rate, count, epsilon, delta)

    def cost(noise: float, orders: tuple[float, ...]) -> float:
        return _compute_renyi_epsilon(((Mechanism(rate, noise), count),), delta, orders)[0]

    # The last orders are far apart, and a slow mechanism has whole ones alone.
    coarse = tuple(sorted({*_ORDERS[::_COARSE], *map(float, range(2, 12)), *_ORDERS[-_COARSE:]}))
    high = 1.0
    while cost(high, coarse) > epsilon:
        high *= 2
        if high > 1e6:
            raise FedspanError(
                "privacy.epsilon", epsilon, problem=f"{epsilon:g} is too small for {count} releases with any noise"
            )
    high = _bisect(high, epsilon, lambda noise: cost(noise, coarse))
    # Epsilon has one minimum over the orders: the best order of all lies near the best coarse one.
    best = _compute_renyi_epsilon(((Mechanism(rate, high), count),), delta, coarse)[1]
    index = coarse.index(best)
    first, last = coarse[max(0, index - 1)], coarse[min(index + 1, len(coarse) - 1)]
    fine = tuple(order for order in _ORDERS if first <= order <= last)
    return _bisect(high, epsilon, lambda noise: cost(noise, fine))


def _calibrate_tightly(rate: float, count: int, epsilon: float, delta: float) -> float:
    """Calibrate noise by ``prv``: by the loose bound, for an epsilon by so much larger as that bound is loose."""
    target = best = epsilon
    for _ in range(_TRIES):
        noise = calibrate_noise(rate, count, target, delta, "rdp")
        loose, tight = (compute_epsilon({Mechanism(rate, noise): count}, delta, kind) for kind in ("rdp", "prv"))
        if tight <= epsilon:
            best = target
        if epsilon * (1 - _STEP) <= tight <= epsilon:
            break
        target = epsilon * (1 - _STEP / 4) * loose / tight
    return calibrate_noise(rate, count, best, delta, "rdp")


def _bisect(high: float, epsilon: float, cost: Callable[[float], float]) -> float:
    """Find a noise that costs an epsilon or slightly less, starting from a noise that costs no more."""
    low = high
    while low > 1e-3 and cost(low) <= epsilon:
        low /= 2
    while cost(high) < epsilon * (1 - _STEP) and high - low > 1e-6 * high:
        midpoint = (low + high) / 2
        low, high = (low, midpoint) if cost(midpoint) <= epsilon else (midpoint, high)
    return high
