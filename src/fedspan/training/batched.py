"""The batched engine: many clients in one forward and backward pass over one frozen base; a faster `loop`.

Clients are distributed among threads, each with its own model object (the weights share memory); each thread trains
several of its clients at once (``worker.py``). The grouping depends on the data alone: two runs have the same bits.
How many clients share a pass is measured (``stacking.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from fedspan.core.values import Job, Trained
from fedspan.models.stacked import Unstackable
from fedspan.tasks.losses import bound_loss
from fedspan.tasks.task import Examples
from fedspan.training.batching import (
    ModelInputs,
    split_evaluation_batches,
    split_into_passes,
    split_job_windows,
    split_windows,
    stack_models,
    stack_on_shared_examples,
)
from fedspan.training.engine import FinishJob, OpenJob
from fedspan.training.jobs import Assignment, convert_out_of_memory
from fedspan.training.loop import LoopEngine
from fedspan.training.prefix import PrefixCaches
from fedspan.training.services import join_features
from fedspan.training.stacking import DEFAULT, PROBE_CLIENTS, MeasuringTime, StackingPlan, tune
from fedspan.training.worker import Worker


class BatchedEngine:
    """Trains and evaluates jobs on one model, many clients at once.

    Args:
        loop: The loop engine with the model and its settings, which trains clients that cannot share a pass.
        rounds: Planned number of rounds, which bounds what is spent on measuring; None: it is unknown.
    """

    def __init__(self, loop: LoopEngine, rounds: int | None = None) -> None:
        self.on_plan: Callable[[StackingPlan], None] | None = None
        """Receives the stacking plan before the first training that uses it; None: there is no receiver."""
        self.adapted, self.task, self.settings, self.seed = loop.adapted, loop.task, loop.settings, loop.seed
        self.stages, self.privacy, self.options, self.rounds = loop.stages, loop.privacy, loop.options, rounds
        self.stacking: StackingPlan | None = None
        """The stacking plan; known from the first round on, or set beforehand."""
        self.measuring = MeasuringTime()
        """The time that is left for measuring stacking plans, which the engines of a run share."""
        self.refusal_elsewhere: str | None = None
        """``refusal`` of an engine in another process that trains this one's clients; None: there is none."""
        self._workers = [Worker(loop)]
        self._predicts_alone = False  # models could not share a pass

    def train_all(self, examples: Examples, sizes: Mapping[str, int], open_job: OpenJob, finish_job: FinishJob) -> None:
        """Train several clients at once (``Engine.train_all``)."""
        lock = Lock()
        open_jobs: dict[str, Assignment] = {}

        def open_locked(client: str) -> Assignment:
            with lock:
                return open_jobs.pop(client) if client in open_jobs else open_job(client)

        def finish_locked(assignment: Assignment, trained: Trained) -> Assignment | None:
            with lock:
                return finish_job(assignment, trained)

        if self.stacking is None:
            open_jobs = {client: open_job(client) for client in list(sizes)[:PROBE_CLIENTS]}
        stacking = self.choose_plan(list(open_jobs.values()), len(sizes), examples)
        shares = balance(sizes, min(stacking.workers, len(sizes)))
        workers = self._get_workers(len(shares))
        calls = [
            lambda worker=worker, share=share: worker.run(
                examples, share, min(stacking.clients_per_pass, len(share)), open_locked, finish_locked
            )
            for worker, share in zip(workers, shares, strict=True)
        ]
        remedy = ", a smaller training.batch_size, or model.gradient_checkpointing"
        size = stacking.clients_per_pass
        with convert_out_of_memory(self.adapted.device, "engine.clients_per_pass", size, "clients in a pass", remedy):
            run_parallel(calls)

    def choose_plan(
        self, assignments: Sequence[Assignment], clients: int, examples: Examples, rounds: float | None = None
    ) -> StackingPlan:
        """Choose the stacking plan, if it is not known yet.

        Args:
            rounds: Number of such rounds that are planned; None: those of the engine.
        """
        if self.stacking is None:
            with self.stages.stage("stacking"):
                planned = self.rounds if rounds is None else rounds
                plan = tune(
                    self.options,
                    self._get_workers,
                    run_parallel,
                    assignments,
                    clients,
                    examples,
                    planned,
                    self.measuring,
                )
            self.adopt_plan(plan)
        assert self.stacking is not None
        return self.stacking

    def adopt_plan(self, plan: StackingPlan) -> None:
        """Train by a plan that was measured elsewhere."""
        self.stacking = plan
        if self.on_plan is not None:
            self.on_plan(plan)

    @property
    def prefixes(self) -> PrefixCaches:
        """``Engine.prefixes``."""
        return self._workers[0].loop.prefixes

    def prepare(self, examples: Examples, parts: Sequence[np.ndarray]) -> None:
        """``Engine.prepare``."""
        self._workers[0].loop.prepare(examples, parts, self._run_caches)

    def _run_caches(self, compute: Callable[[PrefixCaches], None]) -> None:
        """Compute hidden states in several threads."""
        run_parallel([partial(compute, worker.loop.prefixes) for worker in self._get_workers(self._count_threads())])

    def predict(
        self,
        job: Job,
        examples: Examples,
        indices: np.ndarray,
        batch_size: int,
        *,
        generate: bool = False,
        parts: Sequence[np.ndarray] | None = None,
    ) -> Tensor:
        """``TrainingServices.predict``."""
        parts = [indices] if parts is None else parts
        self._workers[0].loop.references.ensure(examples, parts)  # before threads share the weights
        if not generate:  # generated answers have other lengths
            self.prefixes.ensure(examples, parts, self._run_caches)
        count = 1 if self.stacking is None else self.stacking.workers
        batches = [batch for part in parts for batch in split_evaluation_batches(part, examples.lengths, batch_size)]
        rows = self._compute_rows(job, examples, batches, count, generate=generate)
        return torch.stack([rows[index] for index in indices.tolist()])

    def _compute_rows(
        self, job: Job | None, examples: Examples, batches: Sequence[np.ndarray], count: int, **options: bool
    ) -> dict[int, Tensor]:
        """Call ``TrainingServices.compute_rows`` in up to ``count`` threads."""
        workers = self._get_workers(min(count, len(batches)))
        remaining = reversed(batches)  # which threads share, the longest texts first
        rows: dict[int, Tensor] = {}

        def compute_share(worker: Worker) -> None:
            rows.update(worker.loop.compute_rows(job, examples, remaining, **options))

        run_parallel([partial(compute_share, worker) for worker in workers])
        return rows

    def _count_threads(self) -> int:
        """Return the number of threads of passes that no plan is for: a resumed run knows it before the first round."""
        threads = torch.get_num_threads() if self.adapted.device.type == "cpu" else 1
        return self.options.workers or min(DEFAULT.workers, threads)

    def evaluate(
        self, client: str, job: Job, examples: Examples, indices: np.ndarray, batch_size: int, *, bounded: bool = False
    ) -> dict[str, float]:
        """``Engine.evaluate``."""
        parts = self._workers[0].loop.alike.split(examples, indices) if bounded else [indices]
        self.prepare(examples, parts)
        predictions = self.predict(job, examples, indices, batch_size, parts=parts)
        metrics = self.task.compute_metrics(predictions, examples, indices.tolist())
        return bound_loss(self.task, metrics, predictions, examples, indices.tolist()) if bounded else metrics

    def predict_each(self, models: Iterable[ModelInputs], examples: Examples, batch_size: int) -> Iterator[Tensor]:
        """Predict with several models at once (``Engine.predict_each``), if their examples fit into one batch.

        A model whose examples fill more than half a batch predicts alone. Which models share a pass depends on the
        numbers of examples and on the stacking plan alone.
        """
        plan = self.get_prediction_plan()
        for window in split_windows(models, plan.workers * batch_size):
            models_per_pass = self._count_models_per_pass(plan)
            stacks = [stack for stack in stack_models(window, models_per_pass, batch_size) if len(stack) > 1]
            predictions = self._predict_stacks(window, stacks, plan.workers, examples)
            for index, (job, indices) in enumerate(window):
                yield predictions[index] if index in predictions else self.predict(job, examples, indices, batch_size)

    def predict_shared_examples(
        self, jobs: Iterable[Job], examples: Examples, indices: np.ndarray, batch_size: int
    ) -> Iterator[Tensor]:
        """Predict with several models at once, in passes over a part of the examples each.

        Which models and examples share a pass depends on their numbers, on the examples' lengths and on the stacking
        plan alone (``Engine.predict_shared_examples``).
        """
        plan = self.get_prediction_plan()
        for window in split_job_windows(jobs, plan.workers * plan.clients_per_pass):
            models_per_pass = self._count_models_per_pass(plan)
            stacks = stack_on_shared_examples(window, models_per_pass, batch_size)
            stacks = [stack for stack in stacks if len(stack) > 1]
            predictions = self._predict_stacks_on(window, stacks, plan.workers, examples, indices, batch_size)
            for index, job in enumerate(window):
                yield predictions[index] if index in predictions else self.predict(job, examples, indices, batch_size)

    def get_prediction_plan(self) -> StackingPlan:
        """Return the plan by which models share passes: the stacking plan, or, while it is unknown, the options."""
        return self.stacking or StackingPlan(
            self.options.clients_per_pass or DEFAULT.clients_per_pass, self.options.workers or 1
        )

    def _count_models_per_pass(self, plan: StackingPlan) -> int:
        return 1 if self._predicts_alone or self._workers[0].refusal is not None else plan.clients_per_pass

    def _predict_stacks(
        self, window: Sequence[ModelInputs], stacks: Sequence[Sequence[int]], count: int, examples: Examples
    ) -> dict[int, Tensor]:
        """Predict with the stacks of a window in up to ``count`` threads; a stack that cannot share a pass is missing.

        Returns:
            Predictions by position in the window.
        """
        if not stacks:
            return {}
        outputs = self._predict_passes([[window[index] for index in stack] for stack in stacks], count, examples)
        return {
            index: rows
            for number, passed in outputs.items()
            for index, rows in zip(stacks[number], passed, strict=True)
        }

    def _predict_stacks_on(
        self,
        window: Sequence[Job],
        stacks: Sequence[Sequence[int]],
        count: int,
        examples: Examples,
        indices: np.ndarray,
        batch_size: int,
    ) -> dict[int, Tensor]:
        """Predict the same examples with the stacks of a window (``_predict_stacks``)."""
        if not stacks or not len(indices):
            return {}
        self.prepare(examples, [indices])  # all at once, as for a model that predicts alone
        batches = split_evaluation_batches(indices, examples.lengths, batch_size)
        passes = [(stack, rows) for stack in stacks for rows in split_into_passes(batches, len(stack), batch_size)]
        models = [[(window[index], rows) for index in stack] for stack, rows in passes]
        outputs = self._predict_passes(models, count, examples)
        if len(outputs) < len(passes):
            return {}
        by_model: dict[int, dict[int, Tensor]] = {index: {} for stack in stacks for index in stack}
        for number, (stack, rows) in enumerate(passes):
            for index, predictions in zip(stack, outputs[number], strict=True):
                by_model[index].update(zip(rows.tolist(), predictions, strict=True))
        return {
            index: torch.stack([by_example[example] for example in indices.tolist()])
            for index, by_example in by_model.items()
        }

    def _predict_passes(
        self, passes: Sequence[Sequence[ModelInputs]], count: int, examples: Examples
    ) -> dict[int, list[Tensor]]:
        """Run passes of several models each in up to ``count`` threads; a refused one ends the passes of its thread."""
        workers = self._get_workers(min(count, len(passes)))
        outputs: dict[int, list[Tensor]] = {}

        def predict_share(number: int) -> None:
            for position in range(number, len(passes), len(workers)):
                try:
                    outputs[position] = workers[number].predict(passes[position], examples)
                except Unstackable:
                    self._predicts_alone = True
                    return

        run_parallel([lambda number=number: predict_share(number) for number in range(len(workers))])
        return outputs

    def compute_features(self, job: Job | None, examples: Examples, indices: np.ndarray, batch_size: int) -> Tensor:
        """``Engine.compute_features``."""
        self.prefixes.ensure(examples, [indices], self._run_caches)
        batches = split_evaluation_batches(indices, examples.lengths, batch_size)
        rows = self._compute_rows(job, examples, batches, self._count_threads(), features=True)
        return join_features(rows, indices)

    @property
    def refusal(self) -> str | None:
        """The reason why clients, or some of their jobs, train one by one although stacking was requested."""
        reasons = [worker.refusal or worker.job_refusal for worker in self._workers] + [self.refusal_elsewhere]
        return next((reason for reason in reasons if reason is not None), None)

    def _get_workers(self, count: int) -> Sequence[Worker]:
        """Return ``count`` workers, all with the current base."""
        while len(self._workers) < max(1, count):
            model, privacy = self.adapted.create_replica(), self.privacy
            loop = LoopEngine(model, self.task, self.settings, self.seed, stages=self.stages, privacy=privacy)
            loop.padding = self._workers[0].loop.padding.create_replica(loop.adapted)
            loop.prefixes = self._workers[0].loop.prefixes.create_replica(loop.adapted, loop.padding)
            loop.features = self._workers[0].loop.features
            self._workers.append(Worker(loop))
        workers = self._workers[: max(1, count)]
        for worker in workers[1:]:
            worker.adapted.share_base(self.adapted)
        return workers


def balance(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Distribute clients into parts of about equal work: the largest first, each to the part with the least work."""
    shares: list[list[str]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for client in sorted(sizes, key=lambda id: (-sizes[id], id)):
        part = loads.index(min(loads))
        shares[part].append(client)
        loads[part] += sizes[client]
    return shares


def run_parallel(calls: Sequence[Callable[[], None]]) -> None:
    """Run calls in parallel, sharing torch's threads; the first error is raised after all calls have ended."""
    if len(calls) == 1:
        calls[0]()
        return
    with _limit_threads(max(1, torch.get_num_threads() // len(calls))), ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result()


@contextmanager
def _limit_threads(count: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)  # the initial value in the pool's threads
    try:
        yield
    finally:
        torch.set_num_threads(before)
