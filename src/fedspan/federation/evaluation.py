"""Evaluation of a federation's models, in this process or by the clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedspan.core.method import Memory
from fedspan.core.tensors import generator
from fedspan.core.values import Job
from fedspan.federation import serialization
from fedspan.federation.federation import Federation
from fedspan.federation.progress import ClientData, Failure, Progress, Transfer
from fedspan.federation.protocol import Envelope, OrderEncoder, Orders, ScoredPart, Scores, open_reply
from fedspan.tasks.metrics import METRICS, rank_of
from fedspan.tasks.task import Examples

__all__ = ["ClientScores", "Evaluator", "RemoteEvaluator", "coarsen", "summarised"]

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class ClientScores:
    """Metrics on one part (validation or test) of the clients' own examples.

    Args:
        pooled: Metrics over the examples of all clients together.
        by_client: Metrics of each client.
    """

    pooled: Metrics
    by_client: Mapping[str, Metrics]

    def summary(self, metric: str) -> dict[str, Any]:
        """Return unweighted client means of every metric, and under ``worst`` the client with the worst ``metric``."""
        return summarised(self.by_client, metric)


def summarised(by_client: Mapping[str, Metrics], metric: str) -> dict[str, Any]:
    """Return unweighted means of every metric over the clients that have a value, and the worst client by ``metric``.

    Returns:
        ``{metric: mean, ..., "worst": {"client": id, metric: value}}``; without ``worst`` if no client has a value.
    """
    names = dict.fromkeys(name for scores in by_client.values() for name in scores if name in METRICS)
    summary: dict[str, Any] = {
        name: float(np.mean([scores[name] for scores in by_client.values() if name in scores])) for name in names
    }
    measured = {id: scores for id, scores in by_client.items() if metric in scores}
    if measured:
        worst = min(measured, key=lambda id: rank_of(metric, measured[id]))
        summary["worst"] = {"client": worst, metric: measured[worst][metric]}
    return summary


def coarsen(scores: Metrics, examples: int) -> dict[str, float]:
    """Round metrics so that no group of fewer than half of ``examples`` shows in one of them.

    Args:
        scores: Metrics of one part, with their number of ``examples``.
        examples: Examples that a part needs; 1: metrics are returned as they are.

    Returns:
        The metrics; empty if the part has too few examples.
    """
    count = scores.get("examples", 0.0)
    if count < examples:
        return {}
    if examples == 1:
        return dict(scores)
    step = examples / (2 * count)
    return {name: value if name == "examples" else step * round(value / step) for name, value in scores.items()}


def _drawn(federation: Federation, count: int | None) -> tuple[str, ...]:
    ids = tuple(federation.clients)
    if count is None or count >= len(ids):
        return ids
    rng = generator(federation.settings.seed, "evaluation")
    return tuple(sorted(ids[at] for at in torch.randperm(len(ids), generator=rng)[:count].tolist()))


def _judged(member: ClientData) -> tuple[np.ndarray, np.ndarray]:
    return member.validation, member.test


class Evaluator:
    """Evaluate a progress.

    Args:
        federation: The federation to evaluate.
        batch_size: Batch size of the forward passes.
        clients: Number of clients to evaluate, drawn from the federation's seed alone, for comparable rounds; None:
            all.
    """

    def __init__(self, federation: Federation, batch_size: int, clients: int | None = None) -> None:
        self.federation = federation
        self.batch_size = batch_size
        self.ids = _drawn(federation, clients)
        """Ids of the evaluated clients, sorted."""

    def job(self, progress: Progress, client_id: str | None) -> Job:
        """Return the job with the client's own model, or (None) the global one. Sets the engine's base, too."""
        method, engine = self.federation.method, self.federation.engine
        engine.adapted.set_base(progress.state.base)
        client = None if client_id is None else self.federation.client(client_id, progress)
        memory = {} if client_id is None else progress.memories.get(client_id, {})
        return method.start(method.sync(progress.state, client), client, memory, progress.state.round)

    def models(self, progress: Progress, clients: Iterable[str] | None = None) -> Iterator[tuple[tuple[str, ...], Job]]:
        """Yield each distinct model with its clients: one for a global method, one per client for a personal method.

        Args:
            progress: The progress that holds the models.
            clients: Ids of the clients; None: all.
        """
        ids = tuple(self.federation.clients if clients is None else clients)
        if not self.federation.method.declared().personal:
            yield ids, self.job(progress, None)
            return
        for id in ids:  # lazily: a model is built only when it is requested
            yield (id,), self.job(progress, id)

    def clients(self, progress: Progress) -> tuple[ClientScores | None, ClientScores | None]:
        """Evaluate the clients' models on their own validation and test parts (None where no client has the part)."""
        members, examples = self.federation.clients, self.federation.examples
        scored: tuple[dict[str, tuple[Tensor, np.ndarray]], ...] = ({}, {})
        for ids, job in self.models(progress, self.ids):
            wanted = [(id, part, own) for id in ids for part, own in enumerate(_judged(members[id])) if len(own)]
            if not wanted:
                continue
            for _, _, own in wanted:  # the same batches, independent of the models that are evaluated
                self.federation.engine.ready(examples, own)
            indices = np.concatenate([own for _, _, own in wanted])
            predictions = self.federation.engine.predict(job, examples, indices, self.batch_size)
            at = 0
            for id, part, own in wanted:
                scored[part][id] = (predictions[at : at + len(own)], own)
                at += len(own)
        return self._scores(scored[0]), self._scores(scored[1])

    def _scores(self, scored: Mapping[str, tuple[Tensor, np.ndarray]]) -> ClientScores | None:
        if not scored:
            return None
        task, examples = self.federation.engine.task, self.federation.examples
        by_client = {
            id: {**task.metrics(predictions, examples, own.tolist()), "examples": float(len(own))}
            for id, (predictions, own) in scored.items()
        }
        predictions = torch.cat([predictions for predictions, _ in scored.values()])
        indices = np.concatenate([own for _, own in scored.values()])
        pooled = task.metrics(predictions, examples, indices.tolist())
        return ClientScores(pooled, by_client)

    def heldout(self, progress: Progress, examples: Examples, *, thorough: bool = False) -> dict[str, Metrics]:
        """Evaluate the models on a held-out set that belongs to no client; keys are client ids, or ``global``."""
        task, engine = self.federation.engine.task, self.federation.engine
        indices = np.arange(len(examples))
        scores: dict[str, Metrics] = {}
        for ids, job in self.models(progress, self.ids):
            predictions = engine.predict(job, examples, indices, self.batch_size, thorough=thorough)
            key = ids[0] if self.federation.method.declared().personal else "global"
            scores[key] = task.metrics(predictions, examples, indices.tolist())
        return scores


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
        return self._pooled("validation", found["validation"]), self._pooled("test", found["test"])

    def _pooled(self, part: ScoredPart, by_client: Mapping[str, Scores]) -> ClientScores | None:
        """Pool the metrics that most clients report; clients that lack one of them are excluded and recorded."""
        rows = {id: dict(by_client[id]) for id in sorted(by_client) if by_client[id].get("examples", 0) > 0}
        counts = Counter(name for row in rows.values() for name in row)
        names = [name for name, count in counts.items() if 2 * count > len(rows)]
        for id in list(rows):
            if missing := [name for name in names if name not in rows[id]]:
                self.federation.note(Failure(id, 0, f"not measured: no {missing[0]} of its {part} part", "evaluate"))
                del rows[id]
            else:
                rows[id]["examples"] = self._weight(id, part, rows[id]["examples"])
        if not rows:
            return None
        weights = np.array([row["examples"] for row in rows.values()])
        pooled = {name: float(np.average([row[name] for row in rows.values()], weights=weights)) for name in names}
        return ClientScores({**pooled, "examples": float(weights.sum())}, rows)

    def _weight(self, id: str, part: ScoredPart, stated: float) -> float:
        """Return a client's weight: its number of examples, or a stated one that is at most its training examples."""
        member = self.federation.clients[id]
        known = len(getattr(member, part))
        return float(known) if known else min(stated, float(max(1, member.client.examples)))
