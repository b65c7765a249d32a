"""Evaluation of a federation's models in this process, and the scores of an evaluation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedspan.core.tensors import create_generator
from fedspan.core.values import Job
from fedspan.federation.federation import Federation
from fedspan.federation.progress import ClientData, Progress
from fedspan.tasks.metrics import METRICS, compute_score
from fedspan.tasks.task import Examples
from fedspan.training.batching import ModelInputs
from fedspan.training.engine import Predictor

Metrics = Mapping[str, float]
"""Metrics by name."""


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
        """Yield each distinct model with its clients: one for a global method, one per client for a personal method.

        Args:
            progress: The progress that holds the models.
            clients: Ids of the clients; None: all.
        """
        ids = tuple(self.federation.clients if clients is None else clients)
        if not self.federation.method.declare_claims().personal:
            yield ids, self.build_job(progress, None)
            return
        for id in ids:  # lazily: a model is built only when it is requested
            yield (id,), self.build_job(progress, id)

    def evaluate_clients(self, progress: Progress) -> tuple[ClientScores | None, ClientScores | None]:
        """Evaluate the clients' models on their own validation and test parts (None where no client has the part)."""
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
            progress: The progress that holds the models.
            examples: The held-out set.
            parts: Indices of each part's examples, int64.
            generate: Whether answers are generated.

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
