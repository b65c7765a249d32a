"""A client's half of the rounds, where its data is: answers a server's orders.

What it keeps between rounds (memory, moments, the base that it holds) is versioned by round. An order names the round
whose reply was accepted last (``Client.held``); training goes on from that version and writes a new one, so a round
that is retried, or a reply that is lost, never advances it twice.
"""

from __future__ import annotations

import errno
import math
import os
import re
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fedspan.core.base import BaseUpdate, apply_patch
from fedspan.core.method import Memory, Method
from fedspan.core.values import Client, Job, Message, OptimizerState, Trained
from fedspan.engines import wire
from fedspan.engines.accounting import Charge
from fedspan.engines.engine import Engine
from fedspan.engines.federation import Member, kept_moments
from fedspan.engines.parcels import Answer, Order, Parcel, Part, ScoredPart, Scores
from fedspan.engines.privacy import order_charges, protected, training_noise
from fedspan.engines.secure_parcels import Phase, refused_phase
from fedspan.engines.work import Assignment
from fedspan.errors import FedspanError
from fedspan.tasks.task import Examples

if TYPE_CHECKING:
    from fedspan.engines.secure_client import SecureClient

__all__ = ["Keeper", "Kept", "Lost", "Participant", "declined", "refused", "told"]


_SERVER_S = frozenset(
    {"client memory", "export", "federation", "limits", "message", "method", "node", "reply", "run", "serial"}
    | {"training", "version"}
)
"""Sections of fields whose values the server knows already."""
_FIELD = re.compile(r"[a-z_]+(\.[a-z_]+)*")


@dataclass(frozen=True)
class Kept:
    """What a client keeps between rounds.

    Args:
        memory: the method's.
        moments: kept optimizer states by phase, with the generation that they belong to.
        base: the base update that it holds.
    """

    memory: Memory = field(default_factory=dict)
    moments: Mapping[str, tuple[OptimizerState, int]] = field(default_factory=dict)
    base: BaseUpdate = BaseUpdate()


class Lost(FedspanError):
    """What a client kept is not there any more, or damaged."""

    def __init__(self, client: str, round: int, why: str) -> None:
        super().__init__("client memory", client, f"what it kept of round {round + 1} ({why}); it is sent everything")


class Keeper(Protocol):
    """Where clients' versions are."""

    def load(self, client: str, round: int) -> Kept:
        """What a client kept after its training in a round.

        Raises:
            Lost: if that is not there, or damaged.
        """
        ...

    def store(self, client: str, round: int, kept: Kept, needed: frozenset[int]) -> None:
        """Keep a version; all others but those of the rounds that are needed may go.

        Raises:
            FedspanError: if the disk is full or refuses.
        """
        ...


class Participant:
    """Answers orders to a client.

    Args:
        method: the run's, as on the server.
        engine: trains.
        member: the client's examples.
        examples: what the member's indices point into.
        keeper: where it keeps what it must remember.
        batch_size: of evaluation.
        export: writes the model of a job, over a base, of a round; None: that is not for this client to do.
        secure: masks its replies where an order says so; None: the run has no secure sums.
    """

    def __init__(
        self,
        method: Method,
        engine: Engine,
        member: Member,
        examples: Examples,
        keeper: Keeper,
        batch_size: int,
        export: Callable[[Job, BaseUpdate, int], None] | None = None,
        secure: SecureClient | None = None,
    ) -> None:
        self.method, self.engine, self.member = method, engine, member
        self.examples, self.keeper, self.batch_size, self.export = examples, keeper, batch_size, export
        self.secure = secure

    def reply(self, asked: Order | Phase) -> Parcel:
        """Do whatever a server asks.

        Raises:
            FedspanError: as ``answer`` and ``SecureClient.answer``.
            ValueError: likewise.
        """
        if isinstance(asked, Order):
            return self.answer(asked).parcel()
        if self.secure is None:
            raise FedspanError("federation.secure", asked.task, "left out: the run's config has none")
        return self.secure.answer(asked).parcel()

    def answer(self, order: Order) -> Answer:
        """Do what is asked.

        Raises:
            FedspanError: if the loss stops being finite, or (``Lost``) what the client kept is not there.
            ValueError: if the order is not one to this client.
        """
        if order.to != self.member.client.id:
            raise ValueError(f"an order to {order.to!r}; this is {self.member.client.id!r}")
        if order.task == "evaluate":
            return self._evaluated(order)
        if order.task == "export":
            return self._exported(order)
        if order.client is None or order.client.id != order.to:
            raise ValueError("an order to train names another client, or none")
        return self._trained(order)

    def _kept(self, held: int | None) -> Kept:
        return Kept() if held is None else self.keeper.load(self.member.client.id, held)

    def _start(self, order: Order) -> tuple[Job, Kept]:
        """The job of an order, with the model's base as the server has it, and what was kept."""
        message = order.message
        kept = self._kept(None if order.client is None else order.client.held)
        base = apply_patch(kept.base, message.base)
        self.engine.adapted.set_base(base)
        memory = kept.memory if order.client is not None else {}
        return self.method.start(message, order.client, memory), replace(kept, base=base)

    def _trained(self, order: Order) -> Answer:
        client = order.client
        assert client is not None
        id, settings = order.to, self.engine.settings
        self._require_secure(order)
        job, kept = self._start(order)
        noise = training_noise(settings, self.method, order.message, self._known(client), kept.memory)
        memory, moments = kept.memory, dict(kept.moments)
        parts: list[Part] = []
        replies: list[Message] = []

        def assigned(job: Job) -> Assignment:
            kept_before = kept_moments(job, moments.get(job.phase), settings.keep_optimizer)
            return Assignment(id, order.round, job, self.member.train, order.lr, kept_before, noise)

        def finished(work: Assignment, trained: Trained) -> Assignment | None:
            nonlocal memory
            if settings.keep_optimizer:
                moments[work.job.phase] = (trained.optimizer_state, work.job.generation)
            result, memory = self.method.finish(work.job, trained, client, memory)
            parts.append(Part(loss=trained.metrics["loss"], examples=trained.metrics["examples"]))
            if isinstance(result, Job):
                return assigned(result)
            replies.append(result)
            return None

        work = int(self.examples.lengths[self.member.train].sum())
        self.engine.train_all(self.examples, {id: work}, lambda _: assigned(job), finished)
        (reply,) = replies
        reply = protected(settings.privacy, job.tensors, client, reply, order.round)
        if settings.privacy is not None and settings.privacy.mechanism != "central":
            parts.clear()  # a loss is of the raw data
        needed = frozenset(round for round in (client.held, order.best) if round is not None)
        self.keeper.store(id, order.round, Kept(memory, moments, kept.base), needed)
        body = self._body(order, reply, job)
        return Answer("train", order.round, order.attempt, id, tuple(parts), body=body)

    def _require_secure(self, order: Order) -> None:
        """Check, before anything is trained, that a reply goes into a secure sum if and only if the run says so.

        Raises:
            FedspanError: if not.
        """
        if order.secure is None:
            if self.secure is not None:
                raise FedspanError("federation.secure", None, "a session: in this run replies are sent under masks")
        elif self.secure is None:
            raise FedspanError("federation.secure", order.secure.session, "left out: the run's config has none")
        else:
            self.secure.require(order, order.secure)

    def _body(self, order: Order, reply: Message, job: Job) -> bytes:
        """A reply as it travels: as it is, or what it contributes to a secure sum."""
        encoded = wire.encode(reply)
        if order.secure is None:
            return encoded
        assert self.secure is not None
        assert order.client is not None
        contribution = self.method.contribute(wire.decode(encoded), order.client)
        return wire.encode(self.secure.masked(order, order.secure, contribution, job.tensors))

    def charges(self, order: Order | Phase) -> tuple[Charge, ...]:
        """What an order costs of this client's privacy."""
        if not isinstance(order, Order) or order.task != "train" or order.client is None:
            return ()
        settings, client = self.engine.settings, self._known(order.client)
        if settings.privacy is None:
            return ()
        memory = self._kept(client.held).memory
        return order_charges(settings.privacy, settings, self.method, order.message, client, memory)

    def _known(self, client: Client) -> Client:
        """A client with the number of examples that it has, whatever a server says of it: less noise would follow."""
        return replace(client, examples=len(self.member.train))

    def _exported(self, order: Order) -> Answer:
        if self.export is None:
            raise FedspanError("export", order.to, "a client that keeps its own adapter")
        job, kept = self._start(order)
        self.export(job, kept.base, order.round)
        return Answer("export", order.round, order.attempt, order.to)

    def _evaluated(self, order: Order) -> Answer:
        job, _ = self._start(order)
        scores: dict[ScoredPart, Scores] = {}
        parts: tuple[tuple[ScoredPart, np.ndarray], ...]
        parts = (("validation", self.member.validation), ("test", self.member.test))
        for name, indices in parts:
            if not len(indices):
                continue
            self.engine.ready(self.examples, indices)
            predictions = self.engine.predict(job, self.examples, indices, self.batch_size)
            measured = self.engine.task.metrics(predictions, self.examples, indices.tolist())
            scores[name] = {key: value for key, value in measured.items() if math.isfinite(value)}
            scores[name]["examples"] = float(len(indices))
        return Answer("evaluate", order.round, order.attempt, order.to, scores=scores)


def refused(order: Order, error: Exception) -> Answer:
    """The answer of a client that could not do what it was asked."""
    return Answer(order.task, order.round, order.attempt, order.to, failed=told(error), lost=isinstance(error, Lost))


def declined(asked: Order | Phase, error: Exception) -> Parcel:
    """``refused``, of whatever was asked."""
    if isinstance(asked, Order):
        return refused(asked, error).parcel()
    return refused_phase(asked, told(error)).parcel()


def told(error: Exception) -> str:
    """What a server is told of an error on a client.

    Errors may quote data and paths. Those about what the server itself sent go out whole; of the others, the field, the
    kind, or what the system calls it (no space left on device).
    """
    ours = isinstance(error, FedspanError)
    if ours and error.field.partition(".")[0] in _SERVER_S:
        return str(error)
    system = _system_s(error.__cause__ if ours else error)
    if ours and _FIELD.fullmatch(error.field):
        what = error.field
    elif system is not None:
        what = system
    else:
        what = "an error" if ours else type(error).__name__
    return f"{what}; see the client's own log"


def _system_s(error: BaseException | None) -> str | None:
    """What the operating system calls an error; None of others, those of TLS and of looking up names among them."""
    if not isinstance(error, OSError) or isinstance(error, socket.gaierror | socket.herror | ssl.SSLError):
        return None
    number = error.errno
    return os.strerror(number).lower() if number is not None and number in errno.errorcode else None
