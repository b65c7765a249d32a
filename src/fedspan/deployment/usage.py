"""Servers' use of a node's data: invitations, runs, rounds, evaluations and privacy, per data set and server.

The book is one file in the node's folder, written before the use that it records. It must not get lost: a node that
forgot its privacy budget would spend it again. So a second file outside the folder, the marker, holds the digest of the
book's last version. A book that is missing, or older than its marker, is refused until a person decides.

A data set is the name in the node's file (``data_id``), not a path: another spelling, a copy or an appended row opens
no new account. Creating a node's key allows its first book, and nothing else does: a node that lost book, marker and
folder together is refused as well. ``fedspan budget --new`` starts a new book deliberately.

A key that replaces another one continues its book: the new key's marker names the old one, until the node first starts
with the new key. So the node may run with the old key while the new one is being admitted.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedspan.config.node import NodeConfig, NodeLimits, build_budget_marker
from fedspan.data.content import compute_content_digest
from fedspan.data.files import FROM_TRAINERS
from fedspan.deployment.audit import AUDIT
from fedspan.deployment.usage_markers import (
    FIRST,
    link_marker,
    read_marker,
    read_marker_text,
    require_book,
    write_marker,
)
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Count, Order
from fedspan.files import convert_disk_errors, read_bytes, write_atomic
from fedspan.training.accounting import Charge, PrivacySpend

Release = tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)], Count]


class UsagePart(BaseModel):
    """A part of a node's book."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RunUse(UsagePart):
    """What one run has used of a data set.

    Args:
        orders: Digest of its last training order and, after a space, that of the last order of a second exchange since
            then; empty: none yet.
        rounds: Rounds that were trained, and second exchanges of a round beyond its first one.
        exchanges: Orders for keys or shares of secure aggregation.
    """

    orders: str = ""
    rounds: Count = 0
    evaluations: Count = 0
    exchanges: Count = 0


class Account(UsagePart):
    """What one server has used of one data set.

    Args:
        data: Name of the data set (``data_id`` in the node's file).
        contents: Digests of the training files that the data set had, each once, the first one first.
        invitations: Digests of the invitations that were answered.
        runs: Runs that were joined, by the digest of their names.
        has_statistics: Whether statistics for a head have left this node.
        releases: Releases under differential privacy: sampling rate, noise and number of each kind.
    """

    server: str
    data: str
    contents: tuple[str, ...] = ()
    invitations: tuple[str, ...] = ()
    runs: dict[str, RunUse] = Field(default_factory=dict)
    has_statistics: bool = False
    releases: tuple[Release, ...] = ()

    @property
    def rounds(self) -> int:
        """Number of rounds of all runs."""
        return sum(use.rounds for use in self.runs.values())

    @property
    def evaluations(self) -> int:
        """Number of evaluations and exports of all runs."""
        return sum(use.evaluations for use in self.runs.values())

    def compute_epsilon(self, delta: float, charges: tuple[Charge, ...] = ()) -> float:
        """Compute the epsilon of all releases; infinite if one had no noise.

        Args:
            charges: Privacy cost that is added to theirs.

        Raises:
            FedspanError: If there are releases, and the extra ``fedspan[privacy]`` is missing.
        """
        return self._build_spend(delta).compute_worst(_remove_payers(charges))

    def add_releases(self, charges: tuple[Charge, ...], limits: NodeLimits) -> tuple[Release, ...]:
        """Return the releases with those of an order."""
        if limits.epsilon is not None and (cost := self.compute_epsilon(limits.delta, charges)) > limits.epsilon:
            raise FedspanError("limits.epsilon", limits.epsilon, f"at least {cost:.4g}, with this order")
        spend = self._build_spend(limits.delta)
        spend.charge(_remove_payers(charges))
        return tuple((rate, noise, int(count)) for rate, noise, count in spend.dump()[""])

    def _build_spend(self, delta: float) -> PrivacySpend:
        spend = PrivacySpend(delta, "rdp")
        spend.restore({"": [list(charge) for charge in self.releases]})
        return spend


def _remove_payers(charges: tuple[Charge, ...]) -> tuple[Charge, ...]:
    """Return charges as those of the node, whose only data set pays all of them."""
    return tuple(replace(charge, payer="") for charge in charges)


BOOK = "budget.json"

_HISTORY = (AUDIT, "jobs", "*/invitation.json")
"""What shows in a node's folder that it has answered a server before."""
_CURE = "free some space on the node"
_RENEW = "Restore it from a backup; `fedspan budget NODE --new` starts a new budget deliberately"
_ROUND_EXCHANGES = 14
"""Keys and shares orders for each of ``run_rounds``: two for each of three attempts at two exchanges, and 2."""


class _Book(UsagePart):
    """The content of the file.

    Args:
        previous: Digest of the version before this one.
    """

    format: Literal[3] = 3
    previous: str
    accounts: dict[str, Account]


class DataUse(NamedTuple):
    """What is new about a server's use of a node's training data.

    Args:
        content: Digest of the training data; None: a trainer's own.
        is_changed: Whether the server has used the data set only with other content before.
        other_servers: Servers that have used the same content; empty if this server has used it before.
    """

    content: str | None
    is_changed: bool = False
    other_servers: tuple[str, ...] = ()


class UsageBook:
    """The book of a node."""

    def __init__(self, node: NodeConfig) -> None:
        self.path, self.marker, self.limits = Path(node.folder) / BOOK, node.budget_marker, node.limits
        server = (node.server.rpartition(":")[0] or node.server).lower().rstrip(".")
        self._key = hashlib.sha256(json.dumps([server, node.data_id]).encode()).hexdigest()[:32]
        self._new = Account(server=server, data=node.data_id)
        self._source = node.data.get("train") or node.data.get("dataset")
        self._has_key = node.key is not None

    def begin(self) -> None:
        """Create the book of a new node; the book of any other node is left as it is, even if it is missing.

        The marker of a key that replaces another one becomes independent of that one.

        A node is new if nothing in its folder shows that it has answered a server, and its key was just created, or it
        has none (``--insecure``).
        """
        marked = read_marker(self.marker)
        if marked not in (None, FIRST, read_marker_text(self.marker)):  # from here on, the replaced key may be deleted
            write_marker(self.marker, marked)
        is_first = marked == FIRST or (marked is None and not self._has_key)
        history = (next(self.path.parent.glob(pattern), None) for pattern in _HISTORY)
        if is_first and not self.path.exists() and not any(history):
            self._store({}, FIRST)

    def restart(self) -> None:
        """Replace the book by an empty one, with which every server has its full budget again."""
        self._store({}, FIRST)

    def replace_key(self, old: Path) -> None:
        """Continue the book of another key, if this node's key has no book yet.

        Args:
            old: File of the key that this node used before; its folder if it had no key.

        Raises:
            FedspanError: If this node's key has a book, that in the node's folder is not the other key's newest one, or
                the disk cannot be written.
        """
        if read_marker(self.marker) not in (None, FIRST):
            raise FedspanError("--replaces", str(old), problem="the node's key has a record of its own already")
        require_book(old)
        self._load(build_budget_marker(old))
        link_marker(self.marker, old)

    def list_accounts(self) -> list[Account]:
        """Return what each server has used of each data set, sorted by both names.

        Raises:
            FedspanError: If the book is missing, damaged or not the newest version.
        """
        return sorted(self._load()[0].values(), key=lambda account: (account.server, account.data))

    def get_account(self) -> Account:
        """Return what the node's server has used of the node's data.

        Raises:
            FedspanError: If the book is missing, damaged or not the newest version.
        """
        return self._load()[0].get(self._key, self._new)

    def require_run(self, run: str, rounds: int) -> None:
        """Check that another run fits into what is left; nothing is recorded."""
        account = self.get_account()
        if _compute_digest(run) in account.runs:
            return
        _require_left("runs", len(account.runs), 1, self.limits.runs)
        _require_left("rounds", account.rounds, rounds, self.limits.rounds)

    def require_privacy(self, run: str, plan: Callable[[], tuple[Charge, ...]]) -> None:
        """Check that the planned privacy cost of another run fits into what is left; nothing is recorded.

        Args:
            run: Name of the run; one that was joined before is charged by its orders alone.
            plan: Computes the cost of all of its rounds; called if there is a limit.
        """
        account, epsilon = self.get_account(), self.limits.epsilon
        if epsilon is None or _compute_digest(run) in account.runs or not (charges := plan()):
            return
        cost = account.compute_epsilon(self.limits.delta, charges)
        if cost > epsilon:
            spent = account.compute_epsilon(self.limits.delta)
            problem = (
                f"all rounds of the run would cost an epsilon of {cost:.4g} (delta {self.limits.delta:g})"
                f"{f', with the {spent:.4g} that this server has spent' if spent else ''}, above this node's limit of "
                f"{epsilon:g}. Fewer rounds or more noise cost less"
            )
            raise FedspanError("limits.epsilon", epsilon, problem=problem)

    def record_invitation(self, job: str) -> None:
        """Record an invitation before it is answered; a repeated one counts once.

        Raises:
            FedspanError: If the server may send no other one, or the disk cannot be written.
        """
        accounts, digest = self._load()
        account = accounts.get(self._key, self._new)
        if job not in account.invitations:
            _require_left("invitations", len(account.invitations), 1, self.limits.invitations)
            update = {"invitations": (*account.invitations, job)}
            self._store({**accounts, self._key: account.model_copy(update=update)}, digest)

    def record_run(self, run: str) -> DataUse:
        """Record that the node joins a run, with the content of its data.

        Returns:
            What is new about the use of the training data.

        Raises:
            FedspanError: If it may join no more, the data belong to another data set's account, or the disk cannot be
                written.
        """
        accounts, digest = self._load()
        account, content = accounts.get(self._key, self._new), self.compute_content()
        for other in accounts.values():
            if other.server == account.server and other.data != account.data and content in other.contents:
                problem = f"these training data have a budget already, as data set {other.data!r}"
                raise FedspanError("data_id", account.data, repr(other.data), problem=problem)
        update: dict[str, Any] = {}
        if _compute_digest(run) not in account.runs:
            _require_left("runs", len(account.runs), 1, self.limits.runs)
            update["runs"] = {**account.runs, _compute_digest(run): RunUse()}
        if content is not None and content not in account.contents:
            update["contents"] = (*account.contents, content)
        if update:
            self._store({**accounts, self._key: account.model_copy(update=update)}, digest)
        if content is None or "contents" not in update:
            return DataUse(content)
        others = {other.server for other in accounts.values() if content in other.contents}
        return DataUse(content, bool(account.contents), tuple(sorted(others - {account.server})))

    def record_order(self, order: Order, charges: tuple[Charge, ...], context: str) -> None:
        """Record an order before it is carried out.

        Args:
            context: Digest of what the reply depends on besides the order: the config and base model, this node's file
                and data. The difference of two replies to one order, before and after an example was added, tells it.

        Raises:
            FedspanError: If too little is left of a limit, or the disk cannot be written.
        """
        accounts, digest = self._load()
        account = accounts.get(self._key, self._new)
        update: dict[str, Any] = {}
        run = _compute_digest(order.run)
        use = account.runs.get(run, RunUse())
        if order.task == "statistics":
            if account.has_statistics:
                problem = "statistics of this data set have left this node for this server, which happens once"
                raise FedspanError("limits.head_statistics", "exact", problem=problem)
            update["has_statistics"] = True
        elif order.task in ("train", "second"):
            session = None if order.secure is None else order.secure.session
            content = _compute_digest(f"{context} {order.key} {session}")
            trained, _, second = use.orders.partition(" ")
            if content != (trained if order.task == "train" else second):
                # The first order of a second exchange is part of the round that was trained. Any other one tells
                # something new of the same training: differences of two sums tell what a single client sent.
                is_new = order.task == "train" or not trained or bool(second)
                if is_new:
                    _require_left("run_rounds", use.rounds, 1, self.limits.run_rounds)
                    _require_left("rounds", account.rounds, 1, self.limits.rounds)
                digests = content if order.task == "train" else f"{trained} {content}"
                update["runs"] = {
                    **account.runs,
                    run: use.model_copy(update={"orders": digests, "rounds": use.rounds + is_new}),
                }
        else:
            _require_left("run_evaluations", use.evaluations, 1, self.limits.run_evaluations)
            _require_left("evaluations", account.evaluations, 1, self.limits.evaluations)
            update["runs"] = {**account.runs, run: use.model_copy(update={"evaluations": use.evaluations + 1})}
        if charges:
            update["releases"] = account.add_releases(charges, self.limits)
        if update:
            self._store({**accounts, self._key: account.model_copy(update=update)}, digest)

    def record_exchange(self, run: str) -> None:
        """Record an order for keys or shares of secure aggregation before it is carried out.

        Each costs the node computation and disk space without a round that would be counted.

        Raises:
            FedspanError: If the run has had too many, or the disk cannot be written.
        """
        accounts, digest = self._load()
        account, run = accounts.get(self._key, self._new), _compute_digest(run)
        use = account.runs.get(run, RunUse())
        maximum = _ROUND_EXCHANGES * self.limits.run_rounds
        if use.exchanges >= maximum:
            problem = (
                f"this run has sent {maximum} orders for keys and shares of secure aggregation, the maximum for this "
                "number of rounds"
            )
            raise FedspanError("limits.run_rounds", self.limits.run_rounds, problem=problem)
        runs = {**account.runs, run: use.model_copy(update={"exchanges": use.exchanges + 1})}
        self._store({**accounts, self._key: account.model_copy(update={"runs": runs})}, digest)

    def compute_content(self) -> str | None:
        """Return the digest of the training data; None: a trainer's own."""
        if not isinstance(self._source, str) or self._source == FROM_TRAINERS:
            return None
        return compute_content_digest(self._source, "data.train")

    def _load(self, marker: Path | None = None) -> tuple[dict[str, Account], str]:
        """Return the accounts and the digest of the book, checked against a marker; None: the node's own."""
        marker = marker or self.marker
        marked = read_marker(marker)
        if not self.path.is_file():
            problem = f"the record of what servers have used of this node's data is missing. {_RENEW}"
            raise FedspanError(str(self.path), None, problem=problem)
        content = read_bytes(self.path)
        try:
            book = _Book.model_validate_json(content)
        except (ValidationError, ValueError, RecursionError) as error:
            problem = (
                "the record of what servers have used of this node's data is damaged, or of another version of "
                f"fedspan. {_RENEW}"
            )
            raise FedspanError(str(self.path), None, problem=problem) from error
        digest = hashlib.sha256(content).hexdigest()
        if marked not in (digest, book.previous):  # the marker is written last, so it may be one version behind
            problem = (
                f"by {str(marker)!r}, this record of what servers have used of this node's data is not the newest "
                f"one. {self._describe_other_key((digest, book.previous)) if marked in (None, FIRST) else ''}{_RENEW}"
            )
            raise FedspanError(str(self.path), None, problem=problem)
        return book.accounts, digest

    def _describe_other_key(self, digests: Collection[str]) -> str:
        """Return what to do if the record belongs to another key, which is searched beside this key and the folder."""
        places = (self.path.parent.parent, self.marker.parent)
        markers = sorted({path for place in places for path in place.glob("*.budget")} - {self.marker})
        replaced = [path.with_suffix("") for path in markers if read_marker(path) in digests]
        old = shlex.quote(str(replaced[0])) if replaced else "OLD"
        where = "" if replaced else ", where OLD is the old key (the node's folder, if it had none)"
        return f"If the node's key was replaced, run `fedspan budget NODE --replaces {old}`{where}. "

    def _store(self, accounts: Mapping[str, Account], previous: str) -> None:
        content = _Book(previous=previous, accounts=dict(accounts)).model_dump_json(indent=1).encode()
        with convert_disk_errors(self.path.parent, _CURE):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if previous == FIRST:  # a crash after the book was written leaves a marker that is one version behind
                write_atomic(self.marker, FIRST.encode(), 0o600)
            write_atomic(self.path, content, 0o600)
            write_atomic(self.marker, hashlib.sha256(content).hexdigest().encode(), 0o600)


def _compute_digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


def _require_left(limit: str, used: int, added: int, maximum: int) -> None:
    if used + added > maximum:
        subject, unit = ("this run", limit[4:]) if limit.startswith("run_") else ("this server", limit)
        problem = (
            f"{subject} has used {used} {unit} of this node's data, and {added} more exceed the limit of {maximum}"
        )
        raise FedspanError(f"limits.{limit}", maximum, problem=problem)
