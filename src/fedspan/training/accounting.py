"""What privacy costs: epsilon for a delta, by Opacus' accountants, of subsampled Gaussian mechanisms.

Every release is a Gaussian mechanism on a Poisson sample: its rate (1: everybody takes part) and its noise, the
standard deviation over the L2 sensitivity. Renyi accounting (``rdp``: Mironov et al., arXiv 1908.10530) is quick and
slightly loose; ``prv`` (Gopi et al., NeurIPS 2021) is tight and takes seconds where many clients differ.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from fedspan.errors import FedspanError

__all__ = ["Accounting", "Charge", "Mechanism", "PrivacySpend", "calibrate_noise", "epsilon_of", "require_opacus"]

Accounting = Literal["rdp", "prv"]

_STEP = 0.01
"""Of a target epsilon, how much calibration may leave unspent."""
_ORDERS = (*(1 + tenth / 10 for tenth in range(1, 110)), *range(12, 64), 80, 96, 128, 192, 256, 384, 512, 1024)
"""Of Renyi divergences. Opacus' own end at 63, where much noise and few releases look more expensive than they are."""
_COARSE = 8
"""Calibration looks at every so many of them first: a divergence takes milliseconds."""


@dataclass(frozen=True, order=True)
class Mechanism:
    """One kind of release.

    Args:
        rate: probability with which a protected unit takes part.
        noise: standard deviation over sensitivity.
    """

    rate: float
    noise: float


@dataclass(frozen=True)
class Charge:
    """Releases of one kind.

    Args:
        payer: the client whose data they are about; empty: the whole federation's.
        mechanism: their kind.
        count: how many.
    """

    payer: str
    mechanism: Mechanism
    count: int


class PrivacySpend:
    """All releases so far, by payer.

    Args:
        delta: of the guarantee.
        accounting: the accountant.
    """

    def __init__(self, delta: float, accounting: Accounting) -> None:
        self.delta = delta
        self.accounting: Accounting = accounting
        self._counts: dict[str, dict[Mechanism, int]] = {}

    def charge(self, charges: tuple[Charge, ...]) -> None:
        """Count releases."""
        for one in charges:
            own = self._counts.setdefault(one.payer, {})
            own[one.mechanism] = own.get(one.mechanism, 0) + one.count

    def epsilon(self, payer: str, more: tuple[Charge, ...] = ()) -> float:
        """What a payer has spent, with more charges of its own on top."""
        counts = dict(self._counts.get(payer, {}))
        for one in more:
            counts[one.mechanism] = counts.get(one.mechanism, 0) + one.count
        return epsilon_of(counts, self.delta, self.accounting)

    def worst(self, more: tuple[Charge, ...] = ()) -> float:
        """The largest epsilon of all payers: each has data of its own, so that they don't add up."""
        payers = {*self._counts, *(one.payer for one in more)}
        own = {payer: tuple(one for one in more if one.payer == payer) for payer in payers}
        return max((self.epsilon(payer, own[payer]) for payer in payers), default=0.0)

    def dump(self) -> dict[str, list[list[float]]]:
        """As plain values, for a checkpoint."""
        return {
            payer: [[one.rate, one.noise, count] for one, count in sorted(counts.items())]
            for payer, counts in sorted(self._counts.items())
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """What ``dump`` gave, in place of what there is.

        Raises:
            ValueError: if it is something else.
        """
        try:
            self._counts = {
                payer: {Mechanism(float(rate), float(noise)): int(count) for rate, noise, count in counts}
                for payer, counts in values.items()
            }
        except (TypeError, AttributeError) as error:
            raise ValueError("counts of releases by payer") from error


def require_opacus() -> None:
    """Raise a clear error where the extra is missing.

    Raises:
        FedspanError: if Opacus can't be imported.
    """
    try:
        import opacus  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise FedspanError("privacy", "on", f"pip install 'fedspan[privacy]' first ({error})") from None


def epsilon_of(counts: Mapping[Mechanism, int], delta: float, accounting: Accounting) -> float:
    """The epsilon of a composition; infinite where anything was released without noise.

    Args:
        counts: releases by kind.
        delta: of the guarantee.
        accounting: the accountant.
    """
    spent = {one: count for one, count in counts.items() if count}
    if not spent:
        return 0.0
    if any(one.noise <= 0 for one in spent):
        return math.inf
    parts = tuple(sorted(spent.items()))
    return _tight(parts, delta) if accounting == "prv" else _renyi_bound(parts, delta, _ORDERS)[0]


@lru_cache(maxsize=4096)
def _tight(spent: tuple[tuple[Mechanism, int], ...], delta: float) -> float:
    require_opacus()
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(one.noise, one.rate, count) for one, count in spent]
    return float(accountant.get_epsilon(delta=delta))


@lru_cache(maxsize=4096)
def _renyi_bound(
    spent: tuple[tuple[Mechanism, int], ...], delta: float, orders: tuple[float, ...]
) -> tuple[float, float]:
    """The epsilon by the best of some orders, and that order: a bound, and no looser with more of them."""
    require_opacus()
    from opacus.accountants.analysis.rdp import get_privacy_spent

    total = sum(count * _renyi(one, orders) for one, count in spent)
    with warnings.catch_warnings():
        # that the best order is the first or the last: a bound all the same
        warnings.simplefilter("ignore", UserWarning)
        epsilon, order = get_privacy_spent(orders=list(orders), rdp=total, delta=delta)
    return max(0.0, float(epsilon)), float(order)


@lru_cache(maxsize=4096)
def _renyi(mechanism: Mechanism, orders: tuple[float, ...]) -> Any:
    """The Renyi divergences of one release; those of several add up."""
    from opacus.accountants.analysis.rdp import compute_rdp

    return compute_rdp(q=mechanism.rate, noise_multiplier=mechanism.noise, steps=1, orders=list(orders))


@lru_cache(maxsize=4096)
def calibrate_noise(rate: float, count: int, epsilon: float, delta: float, accounting: Accounting) -> float:
    """The noise with which so many releases cost at most an epsilon; no more than a hundredth of it is left over.

    Args:
        rate: probability with which a unit takes part in one of them.
        count: releases.
        epsilon: the target.
        delta: of the guarantee.
        accounting: the accountant.

    Raises:
        FedspanError: if no noise is enough.
    """
    require_opacus()

    def cost(noise: float, orders: tuple[float, ...]) -> float:
        release = Mechanism(rate, noise)
        if accounting == "prv":
            return epsilon_of({release: count}, delta, accounting)
        return _renyi_bound(((release, count),), delta, orders)[0]

    few = tuple(sorted({*_ORDERS[::_COARSE], *_ORDERS[-_COARSE:]}))  # the last ones are far apart
    high = 1.0
    while cost(high, few) > epsilon:
        high *= 2
        if high > 1e6:
            raise FedspanError("privacy.epsilon", epsilon, f"one that {count} releases can keep to with any noise")
    high = _calibrated(high, epsilon, lambda noise: cost(noise, few))
    if accounting == "prv":
        return high
    # Epsilon has one minimum over the orders: the best of all is among the best one's neighbours.
    best = _renyi_bound(((Mechanism(rate, high), count),), delta, few)[1]
    at = few.index(best)
    first, last = few[max(0, at - 1)], few[min(at + 1, len(few) - 1)]
    near = tuple(order for order in _ORDERS if first <= order <= last)
    return _calibrated(high, epsilon, lambda noise: cost(noise, near))


def _calibrated(high: float, epsilon: float, cost: Callable[[float], float]) -> float:
    """A noise that costs an epsilon or nearly so, from one that costs no more."""
    low = high
    while low > 1e-3 and cost(low) <= epsilon:
        low /= 2
    while cost(high) < epsilon * (1 - _STEP) and high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if cost(middle) <= epsilon else (middle, high)
    return high
