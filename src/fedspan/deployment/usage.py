"""What servers have used of a node's data: rounds, evaluations, runs and privacy, per data set and server.

The book is one file in the node's folder, written before the use that it records. It must not get lost: a node that
forgot its privacy budget would spend it again. So a second file outside the folder, the marker, holds the digest of the
book's last version. A book that is missing, or older than its marker, is refused until a person decides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedspan.config.node import NodeConfig, NodeLimits
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Count, Order
from fedspan.files import convert_disk_errors, read_bytes, write_atomic
from fedspan.training.accounting import Charge, PrivacySpend

__all__ = ["Account", "UsageBook"]

_BOOK = "budget.json"
_CURE = "free some space on the node"
_Release = tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)], Count]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Account(_Part):
    """What one server has used of one data set.

    Args:
        server: Host of the server.
        data: The training data, as in the node's file.
        rounds: Rounds that were trained.
        evaluations: Evaluations, exports and head statistics.
        runs: Runs that were joined, by the digest of their names, each with the digest of its last training order.
        releases: Releases under differential privacy: sampling rate, noise and number of each kind.
    """

    server: str
    data: str
    rounds: Count = 0
    evaluations: Count = 0
    runs: dict[str, str] = Field(default_factory=dict)
    releases: tuple[_Release, ...] = ()


class _Book(_Part):
    """The content of the file.

    Args:
        previous: Digest of the version before this one.
        accounts: Accounts by data set and server.
    """

    format: Literal[1] = 1
    previous: str
    accounts: dict[str, Account]


class UsageBook:
    """The book of a node.

    Args:
        node: The node's config.
    """

    def __init__(self, node: NodeConfig) -> None:
        self.path, self.marker, self.limits = Path(node.folder) / _BOOK, node.budget_marker, node.limits
        server, data = node.server.rpartition(":")[0].lower() or node.server, json.dumps(node.data, sort_keys=True)
        self._key = hashlib.sha256(json.dumps([server, data]).encode()).hexdigest()[:32]
        self._new = Account(server=server, data=str(node.data.get("train") or node.data.get("dataset") or ""))

    def get_account(self) -> Account:
        """Return what the node's server has used of the node's data.

        Raises:
            FedspanError: If the book is missing, damaged or not the newest version.
        """
        return self._load()[0].get(self._key, self._new)

    def require_run(self, run: str, rounds: int) -> None:
        """Check that another run fits into what is left; nothing is recorded.

        Args:
            run: Name of the run.
            rounds: Number of its rounds.

        Raises:
            FedspanError: If it does not fit.
        """
        account = self.get_account()
        if _compute_digest(run) in account.runs:
            return
        _require_left("runs", len(account.runs), 1, self.limits.runs)
        _require_left("rounds", account.rounds, rounds, self.limits.rounds)

    def record_run(self, run: str) -> None:
        """Record that the node joins a run.

        Raises:
            FedspanError: If it may join no more, or the disk cannot be written.
        """
        accounts, digest = self._load()
        account = accounts.get(self._key, self._new)
        if _compute_digest(run) not in account.runs:
            _require_left("runs", len(account.runs), 1, self.limits.runs)
            runs = {**account.runs, _compute_digest(run): ""}
            self._store({**accounts, self._key: account.model_copy(update={"runs": runs})}, digest)

    def record_order(self, order: Order, charges: tuple[Charge, ...]) -> None:
        """Record an order before it is carried out.

        Args:
            order: The order.
            charges: Its privacy cost.

        Raises:
            FedspanError: If too little is left of a limit, or the disk cannot be written.
        """
        accounts, digest = self._load()
        account = accounts.get(self._key, self._new)
        update: dict[str, Any] = {}
        if order.task == "train":
            content = f"{order.round} {order.lr!r} {hashlib.sha256(order.body).hexdigest()}"
            if account.runs.get(_compute_digest(order.run)) != _compute_digest(content):
                _require_left("rounds", account.rounds, 1, self.limits.rounds)
                update["rounds"] = account.rounds + 1
                update["runs"] = {**account.runs, _compute_digest(order.run): _compute_digest(content)}
        else:
            _require_left("evaluations", account.evaluations, 1, self.limits.evaluations)
            update["evaluations"] = account.evaluations + 1
        if charges:
            update["releases"] = _add_releases(account, charges, self.limits)
        if update:
            self._store({**accounts, self._key: account.model_copy(update=update)}, digest)

    def _load(self) -> tuple[dict[str, Account], str]:
        """Return the accounts and the digest of the book; both empty before the first use."""
        marked = read_bytes(self.marker).decode(errors="replace").strip() if self.marker.is_file() else None
        if not self.path.is_file():
            if marked is None:
                return {}, ""
            problem = (
                f"the record of what servers have used of this node's data is missing. Restore it from a backup; only "
                f"removing {str(self.marker)!r} as well begins with a full budget"
            )
            raise FedspanError(str(self.path), None, problem=problem)
        content = read_bytes(self.path)
        try:
            book = _Book.model_validate_json(content)
        except (ValidationError, ValueError, RecursionError) as error:
            problem = "the record of what servers have used of this node's data is damaged. Restore it from a backup"
            raise FedspanError(str(self.path), None, problem=problem) from error
        digest = hashlib.sha256(content).hexdigest()
        if marked not in (digest, book.previous):  # the marker is written last, so it may be one version behind
            problem = (
                f"by {str(self.marker)!r}, this record of what servers have used of this node's data is not the newest "
                "one. Restore the newest one from a backup"
            )
            raise FedspanError(str(self.path), None, problem=problem)
        return book.accounts, digest

    def _store(self, accounts: Mapping[str, Account], previous: str) -> None:
        content = _Book(previous=previous, accounts=dict(accounts)).model_dump_json(indent=1).encode()
        with convert_disk_errors(self.path.parent, _CURE):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not previous:  # from now on, a missing book is one that got lost
                write_atomic(self.marker, hashlib.sha256(content).hexdigest().encode(), 0o600)
            write_atomic(self.path, content, 0o600)
            write_atomic(self.marker, hashlib.sha256(content).hexdigest().encode(), 0o600)


def _compute_digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


def _require_left(limit: str, used: int, added: int, maximum: int | None) -> None:
    """Check that a count stays within its limit.

    Raises:
        FedspanError: If it does not.
    """
    if maximum is not None and used + added > maximum:
        problem = (
            f"this server has used {used} {limit} of this node's data, and {added} more exceed the limit of {maximum}"
        )
        raise FedspanError(f"limits.{limit}", maximum, problem=problem)


def _add_releases(account: Account, charges: tuple[Charge, ...], limits: NodeLimits) -> tuple[_Release, ...]:
    """Return an account's releases with those of an order.

    Raises:
        FedspanError: If they exceed the limit on epsilon.
    """
    spend = PrivacySpend(limits.delta, "rdp")
    spend.restore({"": [list(charge) for charge in account.releases]})
    unattributed = tuple(replace(charge, payer="") for charge in charges)
    if limits.epsilon is not None and (cost := spend.compute_worst(unattributed)) > limits.epsilon:
        raise FedspanError("limits.epsilon", limits.epsilon, f"at least {cost:.4g}, with this order")
    spend.charge(unattributed)
    return tuple((rate, noise, int(count)) for rate, noise, count in spend.dump()[""])
