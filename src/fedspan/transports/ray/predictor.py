"""Predictions of an evaluation, by the workers of a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from fedspan.core.values import Job
from fedspan.errors import FedspanError
from fedspan.tasks.task import Examples
from fedspan.training.batched import BatchedEngine
from fedspan.training.batching import ModelInputs, split_evaluation_batches, split_job_windows, split_windows
from fedspan.training.engine import Engine
from fedspan.transports.ray.team import Piece, Team, WorkerHandle

_PIECES = 4
"""Pieces of each worker, so that a fast worker can take work from a slow one."""


class ClusterPredictor:
    """Predicts on the workers, in the batches of the driver's engine: results do not depend on their number."""

    def __init__(self, team: Team, engine: Engine, train: Examples) -> None:
        self.team, self.engine = team, engine
        self._train = train
        self._stored: tuple[Examples, Any] | None = None
        self._parts: Sequence[np.ndarray] = ()

    def prepare(self, examples: Examples, parts: Sequence[np.ndarray]) -> None:
        """``Predictor.prepare``, by the workers, of each part that the next model's examples belong to."""
        self._parts = parts

    def predict(
        self, job: Job, examples: Examples, indices: np.ndarray, batch_size: int, *, generate: bool = False
    ) -> Tensor:
        """``Predictor.predict``."""
        return self._predict_batches([job], examples, indices, batch_size, generate=generate)[0]

    def predict_each(self, models: Iterable[ModelInputs], examples: Examples, batch_size: int) -> Iterator[Tensor]:
        """``Predictor.predict_each``: the models that could share a pass on the driver are predicted by one worker."""
        plan = self.engine.stacking if isinstance(self.engine, BatchedEngine) else None
        threads = 1 if plan is None else plan.workers
        parts = list[Sequence[np.ndarray]]()  # of each model that was requested

        def request() -> Iterator[ModelInputs]:
            for model in models:
                parts.append(self._take_parts())
                yield model

        windows = split_windows(request(), threads * batch_size)
        while group := list(islice(windows, len(self.team.handles) * _PIECES)):
            count = sum(map(len, group))
            taken, parts[:count] = parts[:count], []
            if count == 1:
                ((job, indices),) = group[0]
                self._parts = taken[0]
                yield self.predict(job, examples, indices, batch_size)
                continue
            pieces = [([job for job, _ in window], [indices for _, indices in window]) for window in group]
            for predictions in self._share(
                pieces, examples, [part for of_model in taken for part in of_model], batch_size
            ):
                yield from predictions

    def predict_shared_examples(
        self, jobs: Iterable[Job], examples: Examples, indices: np.ndarray, batch_size: int
    ) -> Iterator[Tensor]:
        """``Predictor.predict_shared_examples``: a worker predicts whole batches, with models that may share passes."""
        models = 1
        if isinstance(self.engine, BatchedEngine):
            plan = self.engine.get_prediction_plan()
            models = plan.workers * plan.clients_per_pass
        for window in split_job_windows(jobs, models):
            yield from self._predict_batches(window, examples, indices, batch_size)

    def _predict_batches(
        self,
        jobs: Sequence[Job],
        examples: Examples,
        indices: np.ndarray,
        batch_size: int,
        *,
        generate: bool = False,
    ) -> list[Tensor]:
        """Predict the same examples with each of some models, in shares of whole batches."""
        batches = split_evaluation_batches(indices, examples.lengths, batch_size)
        count = max(1, -(-len(batches) // (_PIECES * len(self.team.handles))))
        shares = [np.concatenate(batches[start : start + count]) for start in range(0, len(batches), count)]
        # What the workers share does not depend on their number; generated answers use no cache.
        parts = self._take_parts() or (() if generate or not batches else [np.concatenate(batches)])
        models = ray.put(list(jobs))
        pieces = [(models, [share] * len(jobs)) for share in shares]
        predicted = self._share(pieces, examples, parts, batch_size, generate=generate, shared=True)
        by_model: list[dict[int, Tensor]] = [{} for _ in jobs]
        for share, outputs in zip(shares, predicted, strict=True):
            for rows, predictions in zip(by_model, outputs, strict=True):
                rows.update(zip(share.tolist(), predictions, strict=True))
        return [torch.stack([rows[index] for index in indices.tolist()]) for rows in by_model]

    def _take_parts(self) -> Sequence[np.ndarray]:
        parts, self._parts = self._parts, ()
        return parts

    def _share(
        self,
        pieces: Sequence[tuple[Any, Sequence[np.ndarray]]],
        examples: Examples,
        parts: Sequence[np.ndarray],
        batch_size: int,
        *,
        generate: bool = False,
        shared: bool = False,
    ) -> list[list[Tensor]]:
        """Predict pieces, each of some models with the indices of their examples; ``shared``: the same of all."""
        self.team.set_base(self.engine.adapted.base)
        data, plan = self._store(examples), self.engine.stacking if isinstance(self.engine, BatchedEngine) else None
        predicted: dict[int, list[Tensor]] = {}

        def send(handle: WorkerHandle, number: int) -> Any:
            jobs, indices = pieces[number]
            rows = np.concatenate(indices)
            prepared = [part for part in parts if np.isin(part, rows).any()]
            return handle.actor.predict.remote(
                *self.team.get_base(handle), plan, data, prepared, jobs, indices, batch_size, generate, shared
            )

        def on_result(number: int, predictions: list[Tensor]) -> None:
            predicted[number] = predictions
            self.engine.stages.advance("evaluation", sum(map(len, predictions)))

        def on_failure(number: int, reason: str) -> None:
            raise FedspanError("cluster.workers", len(self.team.handles), problem=f"an evaluation failed: {reason}")

        workers = len(self.team.handles)
        queues = [
            [Piece(number, sum(map(len, pieces[number][1]))) for number in range(worker, len(pieces), workers)]
            for worker in range(workers)
        ]
        self.team.share(queues, send, on_result, on_failure)
        self.team.release_memory()
        return [predicted[number] for number in range(len(pieces))]

    def _store(self, examples: Examples) -> list[Any]:
        """Return the reference of a data set in the object store, in a list; an empty one for the hosts' own."""
        if examples is self._train:
            return []
        if self._stored is None or self._stored[0] is not examples:
            self._stored = examples, ray.put(examples)
        return [self._stored[1]]
