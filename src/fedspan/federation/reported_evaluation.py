"""Evaluation by the clients themselves, who report metrics of the models that they receive."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from fedspan.core.values import Job
from fedspan.federation.absences import Awaited, EvaluationAbsences
from fedspan.federation.changes import compute_capped_median
from fedspan.federation.evaluation import ClientScores, Evaluator, Metrics
from fedspan.federation.federation import Federation
from fedspan.federation.out_of_round import exchange_model
from fedspan.federation.plausibility import compute_weight_limit, drop_impossible_metrics
from fedspan.federation.progress import ClientState, Failure, Progress
from fedspan.federation.protocol import Reply, ScoredPart, Scores
from fedspan.federation.trimmed_scores import compute_trimmed_means

_REQUIRED = ("accuracy", "loss")
"""Metrics without which a client is not counted where others have them: rounds are compared by them."""


class ReportedEvaluator(Evaluator):
    """Evaluate by the clients themselves: they receive the models and reply with metrics.

    Pooled metrics are means over clients, weighted by their numbers of examples. Rounds are compared by trimmed means,
    unless this process assigned the clients' examples (a simulation) or there is one client.

    Args:
        batch_size: Batch size of the server's forward passes.
        clients: Number of clients to evaluate; None: all.
    """

    def __init__(self, federation: Federation, batch_size: int, clients: int | None = None) -> None:
        super().__init__(federation, batch_size, clients)
        self._absences = EvaluationAbsences()

    def evaluate_clients(self, progress: Progress) -> tuple[ClientScores | None, ClientScores | None]:
        """``Evaluator.evaluate_clients``; clients that do not reply are left out and recorded as events.

        Clients that the next round would not wait for are not waited for here either, if any other replied. Beside
        asynchronous rounds, clients that train are not asked, and those are not waited for that missed the last
        ``max_missed_rounds`` evaluations or let the time limit of an order pass.
        """
        federation = self.federation
        personal = federation.method.declare_claims().personal
        reported: dict[str, dict[str, Scores]] = {"validation": {}, "test": {}}
        stages, measured = federation.engine.stages, set[str]()
        training = federation.transport.list_training()
        ids = tuple(id for id in self.get_ids(progress) if id not in training)
        absent = federation.find_absent(progress, ids)
        if federation.settings.buffered is not None:
            absent = self._absences.find(ids, federation.transport.list_stalled(), federation.rules.max_missed_rounds)
        awaited = Awaited(ids, absent)

        def record_scores(id: str, reply: Reply | str) -> bool:
            stages.advance("evaluation")
            if isinstance(reply, str):
                federation.record(Failure(id, 0, f"not measured: {reply}", "evaluate"))
            else:
                measured.add(id)
                for part, scores in (reply.scores or {}).items():
                    reported[part][id] = scores
            return awaited.is_over(id, lambda: measured, 1)

        with stages.stage("evaluation", len(ids), "clients"):
            federation.transport.begin(progress)
            exchange_model(
                "evaluate",
                federation.method,
                progress.state,
                ids,
                lambda id: federation.get_client(id, progress) if personal else None,
                federation.transport,
                run=federation.run,
                seconds=federation.rules.deadline,
                on_order=federation.record,
                on_reply=record_scores,
            )
        self._absences.record(ids, measured)
        return self._pool("validation", reported["validation"]), self._pool("test", reported["test"])

    def _pool(self, part: ScoredPart, by_client: Mapping[str, Scores]) -> ClientScores | None:
        """Pool the clients' metrics.

        Impossible values do not count. A client without the loss or the accuracy, where at least half of the
        clients have it, is excluded; of the other metrics, those that at least half have are pooled over the clients
        that have them. What does not count is recorded, as one failure of its client.
        """
        reported = {id: by_client[id] for id in sorted(by_client) if by_client[id].get("examples", 0) > 0}
        rows, impossible = drop_impossible_metrics(reported)
        counts = Counter(name for row in rows.values() for name in row)
        names = [name for name, count in counts.items() if 2 * count >= len(rows)]
        metric = getattr(self.federation.engine.task, "metric", "loss")  # a task without one is compared by the loss
        required = [name for name in _REQUIRED if name in names and name in ("loss", metric)]
        for id in list(rows):
            details = "; ".join(reason for client, reason in impossible if client == id)
            if missing := [name for name in required if name not in rows[id]]:
                reason = f"not measured: no {missing[0]} of its {part} part" + (f" ({details})" if details else "")
                self.federation.record(Failure(id, 0, reason, "evaluate"))
                del rows[id]
            elif details:
                self.federation.record(Failure(id, 0, f"of its {part} part, {details}", "evaluate"))
        if not rows:
            return None
        weights = self._compute_weights(part, {id: reported[id]["examples"] for id in rows})
        pooled = {
            name: _compute_weighted_mean(rows, weights, name)
            for name in names
            if any(name in row for row in rows.values())
        }
        by_client = {id: {**row, "examples": weights[id]} for id, row in rows.items()}
        is_known = all(len(getattr(self.federation.clients[id], part)) for id in rows)
        trimmed = None if is_known or len(self.ids) == 1 else compute_trimmed_means(by_client, pooled)
        pooled["examples"] = sum(weights.values())
        return ClientScores(pooled, by_client, trimmed, noisy=not is_known)

    def _compute_weights(self, part: ScoredPart, reported: Mapping[str, float]) -> dict[str, float]:
        """Return the clients' weights: their known numbers of examples, or reported ones up to what is plausible.

        A reported number counts as 1 at least, up to the client's training examples, as far as they count, and up to
        ``max_weight_ratio`` times the median. For a client that was admitted with a number, the second limit is what
        the clients' median share of evaluated among training examples makes of its own training examples.
        """
        clients = {id: self.federation.clients[id] for id in reported}
        examples_by_client = {id: len(getattr(data, part)) for id, data in clients.items()}
        train = {id: min(data.client.examples, data.max_weight or math.inf) for id, data in clients.items()}
        counts = {id: examples_by_client[id] or max(1.0, min(reported[id], train[id])) for id in reported}
        limit = compute_weight_limit(list(counts.values()), self.federation.settings.max_weight_ratio)
        if limit is None:
            return {id: float(count) for id, count in counts.items()}
        share = compute_capped_median([counts[id] / max(1, train[id]) for id in counts])
        limits = {id: limit if clients[id].max_weight is None else share * max(1, train[id]) for id in counts}
        return {id: float(count if examples_by_client[id] else min(count, limits[id])) for id, count in counts.items()}


class RemoteEvaluator(ReportedEvaluator):
    """Evaluate on the clients' machines.

    Args:
        batch_size: Batch size of the server's forward passes.
        clients: Number of clients to evaluate; None: all.
        load_state: Returns a client's state of a round where the server can access it (a simulation); None: it cannot.
    """

    def __init__(
        self,
        federation: Federation,
        batch_size: int,
        clients: int | None = None,
        load_state: Callable[[str, int], ClientState] | None = None,
    ) -> None:
        super().__init__(federation, batch_size, clients)
        self._load_state = load_state

    def build_job(self, progress: Progress, client_id: str | None) -> Job:
        """``Evaluator.build_job``, where the server can access the client's state."""
        last_round = None if client_id is None else progress.last_rounds.get(client_id)
        if client_id is None or last_round is None:
            return super().build_job(progress, client_id)
        assert self._load_state is not None, "models() names no client otherwise"
        state = self._load_state(client_id, last_round)
        return super().build_job(replace(progress, states={client_id: state}), client_id)

    def iterate_models(
        self, progress: Progress, clients: Iterable[str] | None = None
    ) -> Iterator[tuple[tuple[str, ...], Job]]:
        """``Evaluator.iterate_models``; personal models only where the server can access the clients' states."""
        if self._load_state is None and self.federation.method.declare_claims().personal:
            return iter(())
        return super().iterate_models(progress, clients)


def _compute_weighted_mean(rows: Mapping[str, Metrics], weights: Mapping[str, float], name: str) -> float:
    ids = [id for id, row in rows.items() if name in row]
    return float(np.average([rows[id][name] for id in ids], weights=[weights[id] for id in ids]))
