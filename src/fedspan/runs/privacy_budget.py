"""The privacy budget of a run, and the key that its noise is derived from."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from fedspan.config import RunConfig
from fedspan.core.noise import KEY_BYTES
from fedspan.errors import FedspanError
from fedspan.files import convert_disk_errors, from_json, read_bytes, to_json, write_atomic
from fedspan.training.accounting import Charge, Mechanism, PrivacySpend, require_opacus

_KEY = "noise.key"


def is_secret(config: RunConfig) -> bool:
    """Check whether a run's noise comes from a secret key, not from its seed."""
    return config.privacy is not None and config.privacy.randomness == "secret"


def generate_key(config: RunConfig) -> bytes | None:
    """Generate a key for the noise of a new run; None if the noise follows from the seed."""
    return secrets.token_bytes(KEY_BYTES) if is_secret(config) else None


def store_noise_key(folder: Path, key: bytes | None) -> None:
    """Write a key into a folder, readable by its owner only; without a key, do nothing."""
    if key is not None:
        with convert_disk_errors(folder):
            write_atomic(folder / _KEY, key, 0o600)


def has_key(folder: Path) -> bool:
    """Check whether a folder holds a key."""
    return (folder / _KEY).is_file()


def load_noise_key(folder: Path, config: RunConfig) -> bytes | None:
    """Load the key in a folder; None if the noise follows from the seed."""
    if config.privacy is None or config.privacy.randomness != "secret":
        return None
    key = read_bytes(folder / _KEY)
    if len(key) != KEY_BYTES:
        raise FedspanError(str(folder / _KEY), f"{len(key)} bytes", f"the {KEY_BYTES} bytes with which the run began")
    return key


_Totals = dict[tuple[str, Mechanism], int]
"""Releases by payer and kind."""


class Budget:
    """The privacy budget of a run: what it has spent, and whether it may continue; without privacy, nothing and yes.

    The cost of an attempt of a round is on the disk before its orders are sent, so a round that fails, or in which the
    process is killed, has paid. When such a round is run again, its orders are the same, and clients repeat their
    replies to the bit: the larger of both costs counts. Under central privacy with a secret key other replies may come,
    and other noise; then both count.

    Args:
        kept: Result of ``dump``, for a resumed run.
        path: File of what unfinished rounds have cost; None: nothing is stored.
    """

    def __init__(self, config: RunConfig, stored: str = "{}", path: Path | None = None, finished: int = 0) -> None:
        self._config, self._path = config.privacy, path
        self._spend: PrivacySpend | None = None
        self._earlier: _Totals = {}
        """What earlier attempts to run the current round have cost, in other processes."""
        self._now: _Totals = {}
        """What this process has announced for the current round."""
        if self._config is not None:
            require_opacus()
            self._spend = PrivacySpend(self._config.delta, self._config.accountant)
            self._spend.restore(json.loads(stored))
            self._earlier = {} if path is None else _read_unfinished(path, finished)

    def announce(self, round: int, charges: tuple[Charge, ...]) -> None:
        """Record the cost of an attempt before its orders are sent."""
        if self._spend is None or self._config is None:
            return
        announced = _add(self._now, _count_charges(charges))
        total = self._add_earlier(announced)
        if (
            self._config.epsilon is not None
            and (cost := self._spend.compute_worst(_list_charges(total))) > self._config.epsilon
        ):
            problem = f"asking again in round {round + 1} would cost {cost:.4g}. The state before the round is stored"
            raise FedspanError("privacy.epsilon", self._config.epsilon, problem=problem)
        self._now = announced
        if self._path is not None:
            rows = [[payer, kind.rate, kind.noise, count] for (payer, kind), count in sorted(total.items())]
            with convert_disk_errors(self._path.parent):
                write_atomic(self._path, to_json({"round": round, "releases": rows}).encode())

    def count(self, charges: tuple[Charge, ...]) -> None:
        """Charge the cost of a finished round."""
        if self._spend is not None:
            self._spend.charge(_list_charges(self._add_earlier(_count_charges(charges))))
            self._earlier, self._now = {}, {}

    def can_spend(self, charges: tuple[Charge, ...]) -> bool:
        """Check whether the budget covers a round with these charges."""
        if self._spend is None or self._config is None or self._config.epsilon is None:
            return True
        return (
            self._spend.compute_worst(_list_charges(self._add_earlier(_count_charges(charges)))) <= self._config.epsilon
        )

    def _add_earlier(self, totals: _Totals) -> _Totals:
        assert self._config is not None
        if self._config.mechanism == "central" and self._config.randomness == "secret":
            return _add(self._earlier, totals)
        return {key: max(self._earlier.get(key, 0), totals.get(key, 0)) for key in {**self._earlier, **totals}}

    def require_first(self, charges: tuple[Charge, ...]) -> None:
        """Check that the budget covers the first round."""
        if not self.can_spend(charges) and self._spend is not None and self._config is not None:
            least = f"at least {self._spend.compute_worst(charges):.3g}, which one round costs with this noise"
            raise FedspanError("privacy.epsilon", self._config.epsilon, least)

    @property
    def limited(self) -> bool:
        """Whether the budget is limited."""
        return self._config is not None and self._config.epsilon is not None

    def to_row(self) -> dict[str, Any] | None:
        """Return the spent budget for a line of metrics: the largest epsilon of all clients; None without privacy."""
        if self._spend is None or self._config is None:
            return None
        return {"epsilon": self._spend.compute_worst(), "delta": self._config.delta}

    def build_report(self) -> dict[str, Any]:
        """Return the spent budget, the accountant that counted it, and the settings for the report; empty without."""
        if self._config is None:
            return {}
        settings = {name: getattr(self._config, name) for name in ("mechanism", "clip", "noise", "randomness")}
        counted_by = self._config.accountant if self._spend is None else self._spend.counted_by
        return {**(self.to_row() or {}), **settings, "accountant": counted_by}

    def dump(self) -> str:
        """Serialize the spent budget as text, for a checkpoint."""
        return json.dumps({} if self._spend is None else self._spend.dump())


def _count_charges(charges: tuple[Charge, ...]) -> _Totals:
    totals: _Totals = {}
    for charge in charges:
        totals[charge.payer, charge.mechanism] = totals.get((charge.payer, charge.mechanism), 0) + charge.count
    return totals


def _add(totals: _Totals, other: _Totals) -> _Totals:
    return {key: totals.get(key, 0) + other.get(key, 0) for key in {**totals, **other}}


def _list_charges(totals: _Totals) -> tuple[Charge, ...]:
    return tuple(Charge(payer, kind, count) for (payer, kind), count in totals.items())


def _read_unfinished(path: Path, finished: int) -> _Totals:
    """Read the cost of a round that was started but not finished; empty if the last one was finished."""
    if not path.is_file():
        return {}
    try:
        values: Any = from_json(read_bytes(path))
        if values["round"] < finished:
            return {}
        return {
            (str(payer), Mechanism(float(rate), float(noise))): int(count)
            for payer, rate, noise, count in values["releases"]
        }
    except (ValueError, TypeError, KeyError) as error:
        problem = f"the record of what an unfinished round has cost is damaged ({type(error).__name__})"
        raise FedspanError(str(path), None, problem=problem) from error
