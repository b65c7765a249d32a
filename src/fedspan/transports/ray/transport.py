"""The transport of a cluster: orders are sent to the workers in stacks of clients that share their passes."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from fedspan.clients.host import Host
from fedspan.clients.second_exchange import TRAINED
from fedspan.clients.state_files import STATE
from fedspan.core.values import Job
from fedspan.errors import FedspanError
from fedspan.federation.conditions import Conditions
from fedspan.federation.progress import Progress
from fedspan.federation.protocol import Envelope, decode_order
from fedspan.federation.transport import OnTrained, Orders
from fedspan.tasks.task import Examples
from fedspan.training.batched import BatchedEngine, balance
from fedspan.training.batching import ModelInputs, split_evaluation_batches, split_job_windows, split_windows
from fedspan.training.engine import Engine
from fedspan.training.stacking import PROBE_CLIENTS, StackingPlan
from fedspan.transports.in_process import InProcess
from fedspan.transports.ray.team import Piece, Team, WorkerHandle
from fedspan.transports.ray.worker import Outcome, StackedOrder

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


_RETAINED = 8
"""Number of messages that stay in the object store for the next clients, such as one for each rank."""


def cut_stacks(work: Mapping[str, int], stack_size: int, workers: int) -> list[list[str]]:
    """Cut a cohort into stacks of about equal work, the clients with the most work first.

    The clients of a stack have about equal work, so that their training ends together.

    Args:
        stack_size: Maximum number of clients in a stack.
        workers: Number of workers. If all clients have equal work, the number of stacks is a multiple of it, unless
            every stack has one client.
    """
    if not work:
        return []
    stack_size = min(stack_size, math.ceil(len(work) / workers))
    count = min(len(work), workers * math.ceil(len(work) / (stack_size * workers)))
    share = max(1, sum(work.values())) / count
    stacks: list[list[str]] = []
    done, last = 0.0, -1
    for id in sorted(work, key=lambda id: (-work[id], id)):
        stack_number = int((done + work[id] / 2) / share)
        if stack_number != last or len(stacks[-1]) == stack_size:
            stacks.append([])
        stacks[-1].append(id)
        done, last = done + work[id], stack_number
    return stacks


class ClusterTransport(InProcess):
    """Passes orders to workers; all else of a round is in this process: client stores, conditions, key exchanges.

    Args:
        host: The host of all clients, which answers every order that is not training or statistics.
        conditions: Simulated conditions, which also apply to the workers' hosts; None: none.
    """

    def __init__(self, host: Host, team: Team, conditions: Conditions | None = None) -> None:
        super().__init__(host, conditions)
        self.team = team
        self._last: tuple[bytes, Any] | None = None
        self._references: OrderedDict[bytes, Any] = OrderedDict()
        self._has_cache: bool | None = None
        """Whether the workers cache hidden states; None: it is not known."""

    def begin(self, progress: Progress, on_trained: OnTrained | None = None) -> None:
        """``Transport.begin``.

        Raises:
            ValueError: If jobs are to be observed, because they are trained in other processes.
        """
        if on_trained is not None:
            raise ValueError("clients in other processes cannot be watched")
        super().begin(progress)
        self._last = None
        self._references.clear()  # messages of earlier rounds leave the object store
        self.team.set_base(progress.state.base)

    def carry_out(self, orders: Orders, ids: Sequence[str], on_reply: Callable[[str, Envelope | str], object]) -> None:
        """``InProcess.carry_out``, by the workers."""
        if not ids:  # a Poisson sample may be empty
            return
        if orders.task == "second":  # from the clients' states, which are in this process
            super().carry_out(orders, ids, on_reply)
            return
        tokens = {id: self.host.count_tokens(id) for id in ids}
        workers, stack_size, plan, engine = len(self.team.handles), 1, None, self.host.engine
        # Statistics are computed client by client, and their orders hold no jobs to measure.
        if orders.task == "train" and isinstance(engine, BatchedEngine):
            if engine.stacking is None:
                with engine.stages.stage("stacking"):
                    engine.adopt_plan(self._measure(orders, ids))
            plan = engine.stacking
            assert plan is not None
            stack_size = plan.clients_per_pass * plan.workers
        pieces = {
            stack[0]: Piece(stack, sum(map(tokens.__getitem__, stack)))
            for stack in cut_stacks(tokens, stack_size, workers)
        }
        names = balance({name: piece.load for name, piece in pieces.items()}, workers)
        queues = [[pieces[name] for name in queue] for queue in names]
        self._fill_caches(queues)

        def send(handle: WorkerHandle, stack: list[str]) -> Any:
            bodies, stacked = self._pack(orders, stack)
            return handle.actor.carry_out.remote(*self.team.get_base(handle), bodies, stacked, plan)

        def on_result(stack: list[str], outcomes: Sequence[Outcome]) -> None:
            for outcome in outcomes:
                if outcome.refusal is not None and isinstance(engine, BatchedEngine):
                    engine.refusal_elsewhere = outcome.refusal
                if outcome.state is not None:
                    state = STATE.decode(outcome.state, outcome.id, self._state.round)
                    self.host.store.store(outcome.id, self._state.round, state, frozenset())
                if outcome.trained is not None:
                    first = TRAINED.decode(outcome.trained, outcome.id, self._state.round)
                    self.host.store.store_trained(outcome.id, self._state.round, first)
                if outcome.session is not None and self.host.secure is not None:
                    self.host.secure[outcome.id].sessions.store(outcome.id, outcome.session)
                on_reply(outcome.id, outcome.envelope)

        def on_failure(stack: list[str], reason: str) -> None:
            for id in stack:
                on_reply(id, reason)

        self.team.share(queues, send, on_result, on_failure)
        self.team.release_memory()  # the activations' memory, while this process reduces and evaluates

    def _fill_caches(self, queues: Sequence[Sequence[Piece[list[str]]]]) -> None:
        """Have each worker cache the hidden states of clients that are new to it, as a step with its own progress.

        A worker that takes a stack from another one computes what it lacks while it trains.
        """
        if self._has_cache is None:
            answers = list[bool]()
            self.team.share(
                [[Piece(None, 1)], *([] for _ in queues[1:])],
                lambda handle, _: handle.actor.has_cache.remote(),
                lambda _, cached: answers.append(cached),
                lambda _, reason: None,
            )
            self._has_cache = answers != [False]
        if not self._has_cache:
            return
        new = [
            [Piece([id for id in stack.content if id not in handle.prepared], stack.load) for stack in queue]
            for handle, queue in zip(self.team.handles, queues, strict=True)
        ]
        stages, clients = self.host.engine.stages, self.host.clients

        def count(stack: Sequence[str]) -> int:
            return sum(len(clients[id].train) for id in stack)

        def send(handle: WorkerHandle, stack: list[str]) -> Any:
            handle.prepared.update(stack)
            return handle.actor.prepare.remote(stack)

        total = sum(count(stack.content) for queue in new for stack in queue)
        if not total:
            return
        with stages.stage("hidden states", total):
            self.team.share(
                [[stack for stack in queue if stack.content] for queue in new],
                send,
                lambda stack, _: stages.advance("hidden states", count(stack)),
                lambda stack, reason: None,  # training reports a worker that dies of a client's examples
                movable=False,
            )

    def _measure(self, orders: Orders, ids: Sequence[str]) -> StackingPlan:
        """Have one worker measure how many clients to train at once; the measurement changes no client's state."""
        share, plans = math.ceil(len(ids) / len(self.team.handles)), list[StackingPlan]()

        def send(handle: WorkerHandle, stack: Sequence[str]) -> Any:
            bodies, stacked = self._pack(orders, stack)
            return handle.actor.choose_plan.remote(*self.team.get_base(handle), bodies, stacked, share)

        def on_result(stack: Sequence[str], plan: StackingPlan) -> None:
            plans.append(plan)

        def on_failure(stack: Sequence[str], reason: str) -> None:
            raise FedspanError("engine.clients_per_pass", None, "a number", problem=f"it cannot be measured: {reason}")

        queues = [[Piece(list(ids[:PROBE_CLIENTS]), 1)], *([] for _ in self.team.handles[1:])]
        self._fill_caches(queues)
        self.team.share(queues, send, on_result, on_failure)
        return plans[0]

    def _pack(self, orders: Orders, ids: Sequence[str]) -> tuple[list[Any], list[StackedOrder]]:
        """Return references of the orders' messages, each once, and what else belongs to the orders."""
        positions: dict[Any, int] = {}
        stacked: list[StackedOrder] = []
        for id in ids:
            envelope = orders[id]
            position = positions.setdefault(self._put(envelope.body), len(positions))
            session = None if self.host.secure is None else self.host.secure[id].sessions.load(id)
            stacked.append(StackedOrder(envelope.header, position, self._encode_state(id, envelope), session))
        return list(positions), stacked

    def _put(self, body: bytes) -> Any:
        """Return the reference of a message in the object store; equal messages of a few kinds are stored once."""
        if self._last is not None and self._last[0] is body:  # most clients have one message
            return self._last[1]
        digest = hashlib.sha256(body).digest()
        if digest not in self._references:
            self._references[digest] = ray.put(body)
        self._references.move_to_end(digest)
        while len(self._references) > _RETAINED:
            self._references.popitem(last=False)
        self._last = body, self._references[digest]
        return self._last[1]

    def _encode_state(self, id: str, envelope: Envelope) -> bytes | None:
        client = decode_order(envelope).client
        if client is None or client.last_round is None:
            return None
        state = self.host.store.load(id, client.last_round)
        return None if state.is_empty else STATE.encode(id, client.last_round, state)
