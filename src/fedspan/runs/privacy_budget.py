"""A run's privacy budget, and the key that its noise comes from."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedspan.config import RunConfig
from fedspan.core.noise import KEY_BYTES
from fedspan.errors import FedspanError
from fedspan.files import disk_errors, from_json, fsync_folder, read_bytes, to_json, write_all, write_atomic
from fedspan.training.accounting import Charge, PrivacySpend, require_opacus

__all__ = ["Book", "Budget", "has_key", "load_noise_key", "new_key", "store_noise_key"]

_KEY, _BOOK = "noise.key", "privacy.json"


def is_secret(config: RunConfig) -> bool:
    """Whether a run's noise does not follow from its seed."""
    return config.privacy is not None and config.privacy.randomness == "secret"


def new_key(config: RunConfig) -> bytes | None:
    """A key for the noise of a new run; None where it follows from the seed."""
    return secrets.token_bytes(KEY_BYTES) if is_secret(config) else None


def store_noise_key(folder: Path, key: bytes | None) -> None:
    """Write a key into a folder, for its owner alone; nothing for None.

    Raises:
        FedspanError: if the disk is full or refuses.
    """
    if key is None:
        return
    with disk_errors(folder):
        descriptor = os.open(folder / _KEY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            write_all(descriptor, key)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        fsync_folder(folder)


def has_key(folder: Path) -> bool:
    """Whether a key was written into a folder."""
    return (folder / _KEY).is_file()


def load_noise_key(folder: Path, config: RunConfig) -> bytes | None:
    """The key in a folder; None where it follows from the seed.

    Raises:
        FedspanError: if it should be there and is not, or is damaged.
    """
    if config.privacy is None or config.privacy.randomness != "secret":
        return None
    key = read_bytes(folder / _KEY)
    if len(key) != KEY_BYTES:
        raise FedspanError(str(folder / _KEY), f"{len(key)} bytes", f"the {KEY_BYTES} bytes that the run began with")
    return key


class Budget:
    """What a run has spent, and whether it may go on; of a run without privacy, nothing and yes.

    Args:
        config: the run's.
        kept: what ``dump`` gave, of a run that is resumed.

    Raises:
        FedspanError: if Opacus is not installed.
    """

    def __init__(self, config: RunConfig, kept: str = "{}") -> None:
        self._config = config.privacy
        self._spend: PrivacySpend | None = None
        if self._config is not None:
            require_opacus()
            self._spend = PrivacySpend(self._config.delta, self._config.accountant)
            self._spend.restore(json.loads(kept))

    def count(self, charges: tuple[Charge, ...]) -> None:
        """Count what a round has cost."""
        if self._spend is not None:
            self._spend.charge(charges)

    def allows(self, charges: tuple[Charge, ...]) -> bool:
        """Whether a round at such a cost can be paid for."""
        if self._spend is None or self._config is None or self._config.epsilon is None:
            return True
        return self._spend.worst(charges) <= self._config.epsilon

    def require_first(self, charges: tuple[Charge, ...]) -> None:
        """Check that there is enough for a first round.

        Raises:
            FedspanError: if not.
        """
        if not self.allows(charges) and self._spend is not None and self._config is not None:
            least = f"at least {self._spend.worst(charges):.3g}, which one round costs with this noise"
            raise FedspanError("privacy.epsilon", self._config.epsilon, least)

    @property
    def limited(self) -> bool:
        """Whether there is an end to it."""
        return self._config is not None and self._config.epsilon is not None

    def row(self) -> dict[str, Any] | None:
        """What was spent, for a line of metrics: the largest epsilon of all clients; None without privacy."""
        if self._spend is None or self._config is None:
            return None
        return {"epsilon": self._spend.worst(), "delta": self._config.delta}

    def report(self) -> dict[str, Any]:
        """What was spent, and how, for the report; empty without privacy."""
        if self._config is None:
            return {}
        names = ("mechanism", "clip", "noise", "accountant", "randomness")
        return {**(self.row() or {}), **{name: getattr(self._config, name) for name in names}}

    def dump(self) -> str:
        """As text, for a checkpoint."""
        return json.dumps({} if self._spend is None else self._spend.dump())


class Book:
    """What all runs together have spent of a data holder's privacy, on its own disk.

    Args:
        folder: the node's.
        delta: of the guarantee.
    """

    def __init__(self, folder: Path, delta: float) -> None:
        self.path, self.delta = folder / _BOOK, delta

    def pay(self, charges: tuple[Charge, ...], most: float | None) -> None:
        """Write down what an order costs, before anything is done for it.

        Args:
            charges: the order's.
            most: the epsilon that there is in all; None: no end.

        Raises:
            FedspanError: if there is not enough left, or the book can't be read or written.
        """
        if not charges:
            return
        spend = PrivacySpend(self.delta, "rdp")
        if self.path.is_file():
            try:
                spend.restore(from_json(read_bytes(self.path)))  # pyright: ignore[reportArgumentType]
            except ValueError as error:
                raise FedspanError(str(self.path), str(error), "what this node has spent so far") from error
        own = tuple(replace(one, payer="") for one in charges)
        if most is not None and (cost := spend.worst(own)) > most:
            raise FedspanError("limits.epsilon", most, f"at least {cost:.4g}, with this order")
        spend.charge(own)
        with disk_errors(self.path.parent, "free some space on the node"):
            write_atomic(self.path, to_json(spend.dump()).encode())
