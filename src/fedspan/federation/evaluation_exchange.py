"""Federated evaluation: clients receive the models and reply with metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from fedspan.core.method import Memory
from fedspan.core.values import Job
from fedspan.federation import serialization
from fedspan.federation.evaluation import ClientScores, Evaluator
from fedspan.federation.federation import Federation
from fedspan.federation.orders import OrderEncoder, Orders, open_reply
from fedspan.federation.outcomes import Failure, Transfer
from fedspan.federation.progress import Progress
from fedspan.federation.protocol import Envelope, Scores

__all__ = ["RemoteEvaluator"]


class RemoteEvaluator(Evaluator):
    """Evaluate on the clients' machines: clients receive the models and reply with metrics.

    Pooled metrics are means over clients, weighted by their numbers of examples.

    Args:
        federation: The federation to evaluate.
        batch_size: Batch size of the server's forward passes.
        clients: Number of clients to evaluate; None: all.
        memories: Returns a client's memory of a round where the server can access it (a simulation); None: it cannot.
    """

    def __init__(
        self,
        federation: Federation,
        batch_size: int,
        clients: int | None = None,
        memories: Callable[[str, int], Memory] | None = None,
    ) -> None:
        super().__init__(federation, batch_size, clients)
        self._memories = memories

    def job(self, progress: Progress, client_id: str | None) -> Job:
        """``Evaluator.job``, where the server can access the client's memory."""
        held = None if client_id is None else progress.held.get(client_id)
        if client_id is None or held is None:
            return super().job(progress, client_id)
        assert self._memories is not None, "models() names no client otherwise"
        memory = self._memories(client_id, held)
        return super().job(replace(progress, memories={client_id: memory}), client_id)

    def models(self, progress: Progress, clients: Iterable[str] | None = None) -> Iterator[tuple[tuple[str, ...], Job]]:
        """``Evaluator.models``; personal models only where the server can access the clients' memories."""
        if self._memories is None and self.federation.method.declared().personal:
            return iter(())
        return super().models(progress, clients)

    def clients(self, progress: Progress) -> tuple[ClientScores | None, ClientScores | None]:
        """``Evaluator.clients``; clients that do not reply are excluded and recorded (``Federation.beside``)."""
        federation = self.federation
        method, state, asking = federation.method, progress.state, OrderEncoder(federation.run)
        personal = method.declared().personal
        found: dict[str, dict[str, Scores]] = {"validation": {}, "test": {}}

        def order(id: str) -> Envelope:
            client = federation.client(id, progress) if personal else None
            message = method.sync(state, client)
            made = asking.order("evaluate", state.round, id, client, message)
            federation.note(Transfer(id, "down", len(made.body), serialization.payload_size(message), "evaluate"))
            return made.envelope()

        def replied(id: str, back: Envelope | str) -> bool:
            try:
                answer = open_reply(back)
                if (answer.task, answer.id, answer.round) != ("evaluate", id, state.round):
                    raise ValueError(f"an answer of {answer.id!r} ({answer.task}) to round {answer.round + 1}")
            except ValueError as error:
                federation.note(Failure(id, 0, f"not measured: {error}", "evaluate"))
                return False
            for part, scores in (answer.scores or {}).items():
                found[part][id] = scores
            return False

        assert federation.transport is not None, "clients in this process are evaluated here"
        federation.transport.exchange(Orders("evaluate", self.ids, order), replied, federation.rules.deadline)
        return _pooled(found["validation"]), _pooled(found["test"])


def _pooled(by_client: Mapping[str, Scores]) -> ClientScores | None:
    rows = {id: dict(by_client[id]) for id in sorted(by_client) if by_client[id].get("examples", 0) > 0}
    if not rows:
        return None
    names = [name for name in next(iter(rows.values())) if all(name in row for row in rows.values())]
    weights = np.array([row["examples"] for row in rows.values()])
    pooled = {name: float(np.average([row[name] for row in rows.values()], weights=weights)) for name in names}
    return ClientScores({**pooled, "examples": float(weights.sum())}, rows)
