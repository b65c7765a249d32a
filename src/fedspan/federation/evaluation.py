"""Evaluation of a federation's models in this process or by the clients, and the scores of an evaluation."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from fedspan.core.tensors import create_generator
from fedspan.core.values import Job, ServerState
from fedspan.federation.absences import Awaited, EvaluationAbsences
from fedspan.federation.changes import compute_capped_median
from fedspan.federation.federation import Federation
from fedspan.federation.plausibility import compute_trimmed_means, compute_weight_limit, drop_impossible_metrics
from fedspan.federation.progress import ClientData, ClientState, Failure, Progress
from fedspan.federation.protocol import Reply, ScoredPart, Scores
from fedspan.federation.round import exchange_model
from fedspan.tasks.metrics import METRICS, compute_score
from fedspan.tasks.task import Examples
from fedspan.training.batching import ModelInputs
from fedspan.training.engine import Predictor

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class ClientScores:
    """Metrics on one part (validation or test) of the clients' own examples."""

    pooled: Metrics
    """Metrics over the examples of all clients together."""
    by_client: Mapping[str, Metrics]
    trimmed: Metrics | None = None
    """Metrics without the clients at both ends, where the clients report their own; None: these scores were measured on
    examples that this process assigned, or by the only client."""
    noisy: bool = False
    """Whether the metrics may have noise, as those of data owners' nodes do (``clients.metric_noise``)."""

    def summarize(self, metric: str) -> dict[str, Any]:
        """Return unweighted client means of every metric, and under ``worst`` the client with the worst ``metric``."""
        return summarize(self.by_client, metric)


PartScores = tuple[ClientScores | None, ClientScores | None]
"""Scores on the clients' validation and test parts; None where no client has the part."""


def summarize(by_client: Mapping[str, Metrics], metric: str) -> dict[str, Any]:
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
        worst = min(measured, key=lambda id: compute_score(metric, measured[id]))
        summary["worst"] = {"client": worst, metric: measured[worst][metric]}
    return summary


def _draw_clients(federation: Federation, ids: Sequence[str], count: int | None) -> tuple[str, ...]:
    ids = tuple(ids)
    if count is None or count >= len(ids):
        return ids
    rng = create_generator(federation.settings.seed, "evaluation")
    return tuple(sorted(ids[index] for index in torch.randperm(len(ids), generator=rng)[:count].tolist()))


def _get_evaluated_parts(data: ClientData) -> tuple[np.ndarray, np.ndarray]:
    return data.validation, data.test


class Evaluator:
    """Evaluate a progress.

    Args:
        clients: Number of clients to evaluate, drawn from the federation's seed alone, for comparable rounds; None:
            all.
        predictor: Predicts with the models; None: the federation's engine.
    """

    def __init__(
        self, federation: Federation, batch_size: int, clients: int | None = None, predictor: Predictor | None = None
    ) -> None:
        self.federation = federation
        self.predictor = federation.engine if predictor is None else predictor
        self.batch_size = batch_size
        self._count = clients
        self.ids = _draw_clients(federation, tuple(federation.clients), clients)
        """Ids of the evaluated clients, sorted; clients that are not present in a round are not evaluated after it."""

    def get_ids(self, progress: Progress) -> tuple[str, ...]:
        """Return the clients that are evaluated with a progress, drawn from those of its last round, sorted."""
        if not self.federation.presence.spans:
            return self.ids
        return _draw_clients(self.federation, self.federation.list_last_present(progress), self._count)

    def build_job(self, progress: Progress, client_id: str | None) -> Job:
        """Return the job with the client's own model, or (None) the global one. Sets the engine's base, too."""
        method, engine = self.federation.method, self.federation.engine
        engine.adapted.set_base(progress.state.base)
        client = None if client_id is None else self.federation.get_client(client_id, progress)
        memory = {} if client_id is None else progress.load_memory(client_id)
        return method.start(method.sync(progress.state, client), client, memory, progress.state.round)

    def iterate_models(
        self, progress: Progress, clients: Iterable[str] | None = None
    ) -> Iterator[tuple[tuple[str, ...], Job]]:
        """Yield each distinct model with its clients: one for a global method, one per client for a personal method."""
        ids = tuple(self.federation.clients if clients is None else clients)
        if not self.federation.method.declare_claims().personal:
            yield ids, self.build_job(progress, None)
            return
        for id in ids:  # lazily: a model is built only when it is requested
            yield (id,), self.build_job(progress, id)

    def evaluate_once(self, progress: Progress) -> PartScores:
        """``evaluate_clients``, but clients that reported metrics of this model last are not asked for them again."""
        return self.evaluate_clients(progress)

    def evaluate_clients(self, progress: Progress) -> PartScores:
        """Evaluate the clients' models on their own validation and test parts."""
        clients, examples, engine = self.federation.clients, self.federation.examples, self.federation.engine
        scored: tuple[dict[str, tuple[Tensor, np.ndarray]], ...] = ({}, {})
        evaluated = self.get_ids(progress)
        total = sum(len(rows) for id in evaluated for rows in _get_evaluated_parts(clients[id]))
        with engine.stages.stage("evaluation", total):
            requested: deque[list[tuple[str, int, np.ndarray]]] = deque()

            def requests() -> Iterator[ModelInputs]:
                for ids, job in self.iterate_models(progress, evaluated):
                    parts = [
                        (id, part, rows)
                        for id in ids
                        for part, rows in enumerate(_get_evaluated_parts(clients[id]))
                        if len(rows)
                    ]
                    if not parts:
                        continue
                    # The same batches, independent of the models that are evaluated.
                    self.predictor.prepare(examples, [rows for _, _, rows in parts])
                    requested.append(parts)
                    yield job, np.concatenate([rows for _, _, rows in parts])

            for predictions in self.predictor.predict_each(requests(), examples, self.batch_size):
                start = 0
                for id, part, rows in requested.popleft():
                    scored[part][id] = (predictions[start : start + len(rows)], rows)
                    start += len(rows)
        return self._compute_scores(scored[0]), self._compute_scores(scored[1])

    def _compute_scores(self, scored: Mapping[str, tuple[Tensor, np.ndarray]]) -> ClientScores | None:
        if not scored:
            return None
        task, examples = self.federation.engine.task, self.federation.examples
        by_client = {
            id: {
                **task.compute_metrics(predictions, examples, rows.tolist()),
                "examples": float(len(rows)),
            }
            for id, (predictions, rows) in scored.items()
        }
        predictions = torch.cat([predictions for predictions, _ in scored.values()])
        indices = np.concatenate([rows for _, rows in scored.values()])
        pooled = task.compute_metrics(predictions, examples, indices.tolist())
        return ClientScores(pooled, by_client)

    def evaluate_heldout(
        self,
        progress: Progress,
        examples: Examples,
        *,
        generate: bool = False,
        on_predictions: Callable[[Tensor], None] | None = None,
    ) -> dict[str, Metrics]:
        """Evaluate the models on a held-out set that belongs to no client; keys are client ids, or ``global``."""
        parts = [np.arange(len(examples))]
        return self.evaluate_parts(progress, examples, parts, generate=generate, on_predictions=on_predictions)[0]

    def evaluate_parts(
        self,
        progress: Progress,
        examples: Examples,
        parts: Sequence[np.ndarray],
        *,
        generate: bool = False,
        on_predictions: Callable[[Tensor], None] | None = None,
    ) -> list[dict[str, Metrics]]:
        """Evaluate the models on parts of a held-out set, which may overlap; each example is predicted once.

        Args:
            parts: Indices of each part's examples, int64.

        Returns:
            For each part what ``evaluate_heldout`` returns.
        """
        task, engine = self.federation.engine.task, self.federation.engine
        indices = np.arange(len(examples))
        scores: list[dict[str, Metrics]] = [{} for _ in parts]
        personal = self.federation.method.declare_claims().personal
        evaluated = self.get_ids(progress)
        with engine.stages.stage("evaluation", len(examples) * (len(evaluated) if personal else 1)):
            keys: list[str] = []

            def request() -> Iterator[Job]:
                for ids, job in self.iterate_models(progress, evaluated):
                    keys.append(ids[0] if personal else "global")
                    yield job

            if generate:  # one model after another: generated texts end at different lengths
                predicted = (
                    self.predictor.predict(job, examples, indices, self.batch_size, generate=True) for job in request()
                )
            else:
                predicted = self.predictor.predict_shared_examples(request(), examples, indices, self.batch_size)
            for number, predictions in enumerate(predicted):
                if on_predictions is not None:
                    on_predictions(predictions)
                for part, rows in enumerate(parts):
                    scores[part][keys[number]] = task.compute_metrics(predictions[rows], examples, rows.tolist())
        return scores


_REQUIRED = ("accuracy", "loss")
"""Metrics without which a client is not counted where others have them: rounds are compared by them."""


class ReportedEvaluator(Evaluator):
    """Evaluate by the clients themselves: they receive the models and reply with metrics.

    Pooled metrics are means over clients, weighted by their numbers of examples. Rounds are compared by trimmed means,
    unless this process assigned the clients' examples (a simulation) or there is one client.
    """

    def __init__(self, federation: Federation, batch_size: int, clients: int | None = None) -> None:
        super().__init__(federation, batch_size, clients)
        self._absences, self._unscored = EvaluationAbsences(), set[str]()
        self._complete: tuple[Callable[[], ServerState | None], PartScores] = (lambda: None), (None, None)

    def evaluate_once(self, progress: Progress) -> PartScores:
        state, scores = self._complete
        return scores if state() is progress.state else self.evaluate_clients(progress)

    def evaluate_clients(self, progress: Progress) -> PartScores:
        """``Evaluator.evaluate_clients``; clients that do not reply are left out and recorded as events.

        A client that replied without scores has too few examples for them, in every round, and is not asked again.
        Clients that the next round would not wait for are not waited for here either, if any other replied. Beside
        asynchronous rounds, clients that train are not asked, and those are not waited for that missed the last
        ``max_missed_rounds`` evaluations or let the time limit of an order pass.
        """
        federation = self.federation
        personal = federation.method.declare_claims().personal
        reported: dict[str, dict[str, Scores]] = {"validation": {}, "test": {}}
        stages, measured = federation.engine.stages, set[str]()
        training = federation.transport.list_training()
        ids = tuple(id for id in self.get_ids(progress) if id not in training and id not in self._unscored)
        absent = federation.find_absent(progress, ids)
        if federation.settings.buffered is not None:
            absent = self._absences.find(
                ids, federation.transport.list_stalled(), federation.settings.max_missed_rounds
            )
        awaited = Awaited(ids, absent)

        def record_scores(id: str, reply: Reply | str) -> bool:
            stages.advance("evaluation")
            if isinstance(reply, str):
                federation.record(Failure(id, 0, f"not measured: {reply}", "evaluate"))
            else:
                measured.add(id)
                if not reply.scores:
                    self._unscored.add(id)
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
                seconds=federation.settings.deadline,
                on_order=federation.record,
                on_reply=record_scores,
            )
        self._absences.record(ids, measured)
        scores = self._pool("validation", reported["validation"]), self._pool("test", reported["test"])
        if measured | self._unscored >= set(self.get_ids(progress)):
            self._complete = ref(progress.state), scores
        return scores

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
