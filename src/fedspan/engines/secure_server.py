"""Rounds whose replies the server never sees one by one: it is sent masked vectors, and learns their sum.

An attempt of a round is four exchanges: keys, shares, training, unmasking (``secure_session``). Whoever is gone before
the third is left out; whoever is gone after it is in the sum. With too few left the attempt ends, and the next one
begins a new session with the whole cohort: masks are used once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedspan.core.method import Method
from fedspan.core.tensors import Tensors, norm
from fedspan.core.values import Client, Reduced, ServerState
from fedspan.engines import wire
from fedspan.engines.accounting import Charge
from fedspan.engines.asking import Forgot, Transport, opened
from fedspan.engines.changes import origin_of, restored
from fedspan.engines.engine import Engine
from fedspan.engines.federation import Failure, Member, Progress, RoundResult, Transfer
from fedspan.engines.parcels import Answer, Masking
from fedspan.engines.privacy import private_mean
from fedspan.engines.remote import RemoteFederation, too_few
from fedspan.engines.screening import ReplyRules, require_asked
from fedspan.engines.secure_client import MASKED
from fedspan.engines.secure_session import SecureSession, TooFew
from fedspan.engines.secure_sums import begun_with, layout_of, parted
from fedspan.engines.settings import RoundSettings, SecureSettings
from fedspan.errors import FedspanError
from fedspan.secure.ring import Integers, Ring
from fedspan.tasks.task import Examples

__all__ = ["SecureFederation"]

_FEWEST = 3
"""Clients of a cohort: of two, each knows the other's change once it is sent the next state."""


class SecureFederation(RemoteFederation):
    """A federation of which the server sees sums only.

    Args:
        method: the method, with its wrappers; its replies sum.
        engine: as in ``RemoteFederation``, like all that is not said here.
        members: the clients.
        examples: of the server.
        settings: of the rounds; replies are reduced by their mean.
        transport: to the clients.
        rules: when a round stands; nobody's norm is known, so none is compared with the others'.
        run: its name.
        exporting: whether clients export their own models.
        secure: how sums are secured.
    """

    def __init__(
        self,
        method: Method,
        engine: Engine,
        members: Sequence[Member] | Mapping[str, Member],
        examples: Examples,
        settings: RoundSettings,
        transport: Transport,
        rules: ReplyRules,
        run: str = "",
        exporting: bool = True,
        *,
        secure: SecureSettings,
    ) -> None:
        super().__init__(method, engine, members, examples, settings, transport, rules, run, exporting)
        self.secure = secure
        self._note: str | None = None

    def remark(self) -> str | None:
        """``Federation.remark``: what masking costs."""
        return self._note

    def play(self, progress: Progress, on_client: Callable[[str, float], None] | None = None) -> RoundResult:
        """``RemoteFederation.play``.

        Raises:
            FedspanError: if too few clients are left in the end, or what they would send has no sum; the progress is
                what it was.
        """
        state, ids, held = progress.state, self.cohort(progress.state.round), dict(progress.held)
        if len(ids) < _FEWEST:
            raise FedspanError("federation.secure", len(ids), f"at least {_FEWEST} clients in a round, to hide among")
        origin = self._origin(state, ids)
        transfers: list[Transfer] = []
        failures: list[Failure] = []
        charges: list[Charge] = []
        last: list[Failure] = []
        quorum = max(2, self.rules.quorum(len(ids)))
        for number in range(self.rules.retries + 1):
            clients = {id: self.client(id, replace(progress, held=held)) for id in ids}
            session = SecureSession(
                self.transport, self.rules.deadline, self.secure, self.run, state.round, number, quorum
            )
            answers: dict[str, Answer] = {}
            try:
                reduced = self._mean(state, clients, origin, session, answers, charges, on_client)
            except TooFew:
                reduced = None
            transfers += session.transfers
            last = session.failures
            failures += last
            for id in session.lost:
                held.pop(id, None)
            if reduced is not None:
                return self._concluded(state, held, reduced, answers, transfers, failures, charges)
        named = {failure.client for failure in last}
        raise too_few([id for id in ids if id not in named], last, quorum, state.round, ids)

    def _origin(self, state: ServerState, ids: Sequence[str]) -> Tensors:
        """What all clients of a round begin with, of what they contribute.

        Raises:
            FedspanError: if not all of that sums.
        """
        fresh = replace(self.members[ids[0]].client, held=None)
        sent = self.method.sync(state, fresh)
        try:
            contributed = origin_of(self.method, sent, fresh)
        except ValueError as error:
            expected = f"replies that sum whole; {error} (counts of norms are such: model.extras local or frozen)"
            raise FedspanError("federation.secure", "tensors that do not sum", expected) from error
        return begun_with(contributed, self.method.start(sent, fresh, {}).tensors)

    def _mean(
        self,
        state: ServerState,
        clients: Mapping[str, Client],
        origin: Tensors,
        session: SecureSession,
        answers: dict[str, Answer],
        charges: list[Charge],
        on_client: Callable[[str, float], None] | None,
    ) -> Reduced:
        """Play the four exchanges of an attempt.

        Args:
            state: before the round.
            clients: of the cohort, by id.
            origin: what they begin with.
            session: a new one.
            answers: those whose replies are in the mean are put in here.
            charges: what the orders cost of privacy is put in here.
            on_client: as in ``play``.

        Raises:
            TooFew: if too few clients are left; why is noted in the session.
        """
        session.begin(list(clients))
        there = {id: clients[id] for id in session.present}
        top = max(client.weight for client in there.values())
        if not top > 0:
            raise FedspanError("federation.secure", top, "clients with examples")
        ring = Ring(self.secure.bits, self._clip, len(there))
        total: Integers = np.zeros(sum(value.numel() for value in origin.values()), ring.dtype)
        masking = Masking(
            session=session.number,
            peers=(),
            clients=len(there),
            clip=self._clip,
            bits=self.secure.bits,
            top=top,
            layout=layout_of(origin),
        )
        self._train(state, there, masking, session, total, answers, charges, on_client)
        session.require(answers)
        session.end(total, answers.keys())
        share = sum(there[id].weight / top for id in answers)
        if not share > 0:
            raise FedspanError("federation.secure", share, "replies of positive weight")
        mean, error = ring.decode(total) / share, ring.error(len(answers)) / share
        self._note = (
            f"secure aggregation: every client sends {len(total)} masked integers of {ring.bits} bits a round, and an "
            f"entry of their mean is off by at most {error:.2g}"
        )
        change = parted(mean, origin)
        if norm(change) > self._clip * (1 + 1e-9) + error * len(mean) ** 0.5:
            why = f"the sum has a mean with a norm of {norm(change):.3g}, above federation.secure.clip"
            for id in sorted(answers):  # one of them, and nobody can say which
                session.fail(id, why)
            raise TooFew
        return Reduced(mean=self._restored(change, origin, share, state.round), count=len(answers))

    @property
    def _clip(self) -> float:
        """The norm to which clients scale larger changes down."""
        privacy = self.settings.privacy
        return privacy.clip if privacy is not None and privacy.mechanism == "central" else self.secure.clip

    def _restored(self, change: Mapping[str, Tensor], origin: Tensors, share: float, round: int) -> dict[str, Tensor]:
        """The mean of which something is the change; with central privacy, of the sum with noise on it."""
        privacy, clients = self.settings.privacy, len(self.members)
        if privacy is None or privacy.mechanism != "central":
            return restored(change, origin)
        total = {name: value * share for name, value in change.items()}
        return private_mean(total, origin, privacy, 1.0, clients, round)

    def _train(
        self,
        state: ServerState,
        clients: Mapping[str, Client],
        masking: Masking,
        session: SecureSession,
        total: Integers,
        answers: dict[str, Answer],
        charges: list[Charge],
        on_client: Callable[[str, float], None] | None,
    ) -> None:
        """Have clients train, and add the vectors that come up; answers are kept without their bodies."""
        lr = self.engine.settings.lr(state.round, self.settings.rounds)
        parcels = {
            id: replace(order, secure=masking.model_copy(update={"peers": session.present[id]})).parcel()
            for id, order in self._orders(state, clients, lr, session.attempt, session.transfers, charges)
        }
        for id, back in self.transport.exchange(parcels, self.rules.deadline):
            try:
                answer = opened(back)
                require_asked(answer, id, state.round, session.attempt)
                vector = _vector(answer, total)
            except ValueError as error:
                session.fail(id, str(error))
                if isinstance(error, Forgot):
                    session.lost.add(id)
                continue
            total += vector
            session.transfers.append(Transfer(id, "up", len(answer.body), vector.nbytes))
            answers[id] = replace(answer, body=b"")
            if on_client is not None:
                on_client(id, answer.parts[-1].loss if answer.parts else float("nan"))


def _vector(answer: Answer, total: Integers) -> Integers:
    """The masked vector in an answer.

    Raises:
        ValueError: if there is none, or it does not fit the sum.
    """
    message = wire.decode(answer.body)
    wanted = torch.int32 if total.itemsize == 4 else torch.int64
    value = message.tensors.get(MASKED)
    if message.base is not None or message.scalars or len(message.tensors) != 1 or value is None:
        raise ValueError(f"a reply of {sorted(message.tensors)[:3]}, not of one masked vector")
    if value.dtype != wanted or value.shape != (len(total),):
        raise ValueError(f"a masked vector {list(value.shape)} of {value.dtype}, not [{len(total)}] of {wanted}")
    return value.numpy().view(total.dtype)
