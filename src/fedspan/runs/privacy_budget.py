"""The privacy budget of a run, and the key that its noise is derived from."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

from fedspan.config import RunConfig
from fedspan.core.noise import KEY_BYTES
from fedspan.errors import FedspanError
from fedspan.files import disk_errors, fsync_folder, read_bytes, write_all
from fedspan.training.accounting import Charge, PrivacySpend, require_opacus

__all__ = ["Budget", "has_key", "load_noise_key", "new_key", "store_noise_key"]

_KEY = "noise.key"


def is_secret(config: RunConfig) -> bool:
    """Check whether a run's noise comes from a secret key, not from its seed."""
    return config.privacy is not None and config.privacy.randomness == "secret"


def new_key(config: RunConfig) -> bytes | None:
    """Generate a key for the noise of a new run; None if the noise follows from the seed."""
    return secrets.token_bytes(KEY_BYTES) if is_secret(config) else None


def store_noise_key(folder: Path, key: bytes | None) -> None:
    """Write a key into a folder, readable by its owner only; without a key, do nothing.

    Raises:
        FedspanError: If the disk is full or cannot be written.
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
    """Check whether a folder holds a key."""
    return (folder / _KEY).is_file()


def load_noise_key(folder: Path, config: RunConfig) -> bytes | None:
    """Load the key in a folder; None if the noise follows from the seed.

    Raises:
        FedspanError: If the key is required and missing, or is damaged.
    """
    if config.privacy is None or config.privacy.randomness != "secret":
        return None
    key = read_bytes(folder / _KEY)
    if len(key) != KEY_BYTES:
        raise FedspanError(str(folder / _KEY), f"{len(key)} bytes", f"the {KEY_BYTES} bytes with which the run began")
    return key


class Budget:
    """The privacy budget of a run: what it has spent, and whether it may continue; without privacy, nothing and yes.

    Args:
        config: Config of the run.
        kept: Result of ``dump``, for a resumed run.

    Raises:
        FedspanError: If Opacus is not installed.
    """

    def __init__(self, config: RunConfig, kept: str = "{}") -> None:
        self._config = config.privacy
        self._spend: PrivacySpend | None = None
        if self._config is not None:
            require_opacus()
            self._spend = PrivacySpend(self._config.delta, self._config.accountant)
            self._spend.restore(json.loads(kept))

    def count(self, charges: tuple[Charge, ...]) -> None:
        """Charge the cost of a round."""
        if self._spend is not None:
            self._spend.charge(charges)

    def allows(self, charges: tuple[Charge, ...]) -> bool:
        """Check whether the budget covers a round with these charges."""
        if self._spend is None or self._config is None or self._config.epsilon is None:
            return True
        return self._spend.worst(charges) <= self._config.epsilon

    def require_first(self, charges: tuple[Charge, ...]) -> None:
        """Check that the budget covers the first round.

        Raises:
            FedspanError: If it does not.
        """
        if not self.allows(charges) and self._spend is not None and self._config is not None:
            least = f"at least {self._spend.worst(charges):.3g}, which one round costs with this noise"
            raise FedspanError("privacy.epsilon", self._config.epsilon, least)

    @property
    def limited(self) -> bool:
        """Whether the budget is limited."""
        return self._config is not None and self._config.epsilon is not None

    def row(self) -> dict[str, Any] | None:
        """Return the spent budget for a line of metrics: the largest epsilon of all clients; None without privacy."""
        if self._spend is None or self._config is None:
            return None
        return {"epsilon": self._spend.worst(), "delta": self._config.delta}

    def report(self) -> dict[str, Any]:
        """Return the spent budget and the privacy settings for the report; empty without privacy."""
        if self._config is None:
            return {}
        names = ("mechanism", "clip", "noise", "accountant", "randomness")
        return {**(self.row() or {}), **{name: getattr(self._config, name) for name in names}}

    def dump(self) -> str:
        """Serialize the spent budget as text, for a checkpoint."""
        return json.dumps({} if self._spend is None else self._spend.dump())
