"""The batched engine: many clients in one forward and backward pass over one frozen base; a faster `loop`.

Clients are distributed among threads, each with its own model object (the weights share memory); each thread trains
several of its clients at once (``worker.py``). The grouping depends on the data alone: two runs have the same bits.

Stacking pays if a client's own batch is too small to keep the processor busy. Otherwise it costs time, because batches
of several clients are padded to the longest of them. So the number of stacked clients is measured on the run's own
first jobs, which it leaves unchanged, and stored in the user's cache folder: a rerun gives the same bits.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from fedspan.core.values import Job, Trained
from fedspan.models.adapted import AdaptedModel
from fedspan.models.stacked import Unstackable
from fedspan.tasks.task import Examples, Task
from fedspan.training.batching import evaluation_batches
from fedspan.training.client_slot import ClientSlot, select_group
from fedspan.training.jobs import Assignment, PrefixSettings, TrainingSettings
from fedspan.training.loop import LoopEngine
from fedspan.training.prefix import PrefixCaches
from fedspan.training.stages import Stages
from fedspan.training.worker import Worker

__all__ = ["DEFAULT", "BatchedEngine", "StackingPlan", "StackingRequest", "cache_file", "tune"]

_WORTH, _TOKENS = 200, 10_000  # a round below both (batches, tokens) is too small for measuring to pay
_PASSES, _SECONDS = 4, 0.3  # limits of one measurement
_GAIN = 0.97  # a larger group must take at most this share of the time
_PATIENCE = 2  # sizes in a row that may be no faster: other load can spoil a measurement
_MOST = 64  # clients in a pass


@dataclass(frozen=True)
class StackingPlan:
    """The number of clients that train at the same time.

    Args:
        at_once: Number of clients in one pass.
        workers: Number of threads, each with its own passes.
    """

    at_once: int
    workers: int


@dataclass(frozen=True)
class StackingRequest:
    """The user's settings; None: measured."""

    at_once: int | None = None
    workers: int | None = None


DEFAULT = StackingPlan(4, 2)
"""The plan where training is too short for measuring to pay; one worker if torch has one thread, or on a GPU."""


def tune(
    wish: StackingRequest,
    workers: Callable[[int], Sequence[Worker]],
    together: Callable[[Sequence[Callable[[], None]]], None],
    works: Sequence[Assignment],
    clients: int,
    examples: Examples,
) -> StackingPlan:
    """Decide how many clients train at once in a round that begins with these jobs.

    Args:
        wish: The settings that are fixed already.
        workers: Returns the requested number of workers.
        together: Runs calls in parallel, each with its share of torch's threads.
        works: The first jobs of the round; they are not changed.
        clients: Number of clients in the round.
        examples: The data set that the jobs' indices point into.
    """
    if wish.at_once is not None and wish.workers is not None:
        return StackingPlan(wish.at_once, wish.workers)
    first, works = workers(1)[0], [work for work in works if len(work.indices)]
    probe = first.seat(works[0], examples) if works else None
    threads = torch.get_num_threads() if first.adapted.device.type == "cpu" else 1
    tokens = 0 if probe is None else clients * sum(int(examples.lengths[batch].sum()) for batch in probe.batches)
    few = probe is None or (len(probe.batches) * clients < _WORTH and tokens < _TOKENS)
    if probe is None or few or first.why_not is not None:
        # Clients that train one by one can still train in parallel threads.
        return StackingPlan(wish.at_once or DEFAULT.at_once, wish.workers or min(DEFAULT.workers, threads))
    key = _key(wish, first, probe, clients, examples)
    if known := _read().get(key):
        return StackingPlan(**known)

    def seconds(stacking: StackingPlan) -> float:
        team = workers(stacking.workers)
        return _seconds_a_token(team, together, works, stacking.at_once, examples)

    found = _search(wish, clients, threads, seconds)
    _write(key, found)
    return found


def _search(
    wish: StackingRequest, clients: int, threads: int, seconds: Callable[[StackingPlan], float]
) -> StackingPlan:
    best = StackingPlan(wish.at_once or min(4, clients), wish.workers or 1)
    least = seconds(best)
    if wish.workers is None and threads > 1 and clients > 1:
        other = StackingPlan(best.at_once, threads)
        if (taken := seconds(other)) < _GAIN * least:
            best, least = other, taken
    if wish.at_once is not None:
        return best
    share = -(-clients // best.workers)
    more = [size for size in sorted({8, 16, 32, _MOST, share}) if best.at_once < size <= min(share, _MOST)]
    for sizes in (more, (2, 1)):
        start, failed = best, 0
        for size in sizes:
            other = StackingPlan(size, best.workers)
            if size > share or failed == _PATIENCE:
                break
            if (taken := seconds(other)) > _GAIN * least:
                failed += 1
            else:
                best, least, failed = other, taken, 0
        if best != start:
            break
    if wish.workers is None and threads > 1 and clients > 1:  # small passes do not predict how large ones share a CPU
        workers = 1 if best.workers > 1 else threads
        other = StackingPlan(min(best.at_once, -(-clients // workers)), workers)
        if seconds(other) < _GAIN * least:
            best = other
    return best


def _seconds_a_token(
    team: Sequence[Worker],
    together: Callable[[Sequence[Callable[[], None]]], None],
    works: Sequence[Assignment],
    at_once: int,
    examples: Examples,
) -> float:
    """Measure wall-clock seconds per token that is not padding; infinite if the passes do not fit into memory.

    The same passes run three times and the faster of the last two counts: libraries prepare for every new shape.
    """
    tokens = [0] * len(team)
    made: list[list[list[tuple[ClientSlot, int]]]] = [[] for _ in team]

    def first(number: int) -> None:
        worker, seats = team[number], seated[number]
        until = time.perf_counter() + _SECONDS
        while len(made[number]) < _PASSES and (not made[number] or time.perf_counter() < until):
            group = select_group(seats, at_once, not worker.loop.padding.possible)
            tokens[number] += sum(int(examples.lengths[seat.batch].sum()) for seat in group)
            made[number].append([(seat, seat.taken) for seat in group])
            worker.advance(group, examples)
            for seat in group:
                seat.taken %= len(seat.batches)

    def again(number: int) -> None:
        for passed in made[number]:
            for seat, taken in passed:
                seat.taken = taken
            team[number].advance([seat for seat, _ in passed], examples)

    seated = [_seats(worker, works, number, at_once, examples) for number, worker in enumerate(team)]
    try:
        together([lambda number=number: first(number) for number in range(len(team))])
        least = float("inf")
        for _ in range(2):
            start = time.perf_counter()
            together([lambda number=number: again(number) for number in range(len(team))])
            least = min(least, time.perf_counter() - start)
        return least / sum(tokens)
    except (Unstackable, torch.cuda.OutOfMemoryError):
        return float("inf")


def _seats(
    worker: Worker, works: Sequence[Assignment], number: int, at_once: int, examples: Examples
) -> list[ClientSlot]:
    """Open more jobs than fit into a pass, as in training; jobs are repeated if there are too few."""
    repeated = [works[(number + at) % len(works)] for at in range(2 * at_once)]
    seats = [worker.seat(work, examples) for work in repeated]
    return [seat for seat in seats if seat is not None]


def _key(wish: StackingRequest, worker: Worker, seat: ClientSlot, clients: int, examples: Examples) -> str:
    """Compute the cache key from everything that the plan depends on: machine, model, jobs."""
    model = worker.adapted.model
    parts = {
        "machine": [platform.node(), platform.machine(), os.cpu_count(), torch.get_num_threads(), torch.__version__],
        "device": str(worker.adapted.device),
        "model": [type(model).__name__, sum(value.numel() for value in model.parameters())],
        "dtype": sorted({str(value.dtype) for value in model.parameters()}),
        "layout": [seat.layout.names, [list(shape) for shape in seat.layout.shapes]],
        "padded": not worker.loop.padding.possible,
        "compiled": worker.compiled is not None,
        "batch": [worker.settings.batch_size, round(float(examples.lengths.mean()), 1), worker.settings.accumulate],
        "clients": clients,
        "wish": asdict(wish),
    }
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def cache_file() -> Path:
    """Return the file of cached plans: under FEDSPAN_CACHE, XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("FEDSPAN_CACHE")
    base = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedspan"
    return base / "stacking.json"


def _read() -> dict[str, dict[str, int]]:
    """Read the cached plans; empty if the file is missing or invalid."""
    try:
        found = json.loads(cache_file().read_text(encoding="utf-8"))
        return {key: {name: int(one[name]) for name in ("at_once", "workers")} for key, one in found.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _write(key: str, found: StackingPlan) -> None:
    place = cache_file()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        part = place.with_name(f"{place.name}.{os.getpid()}")
        part.write_text(json.dumps({**_read(), key: asdict(found)}), encoding="utf-8")
        part.replace(place)
    except OSError:  # the home folder is not writable: measure again next time
        return


_TRIED = 16  # clients whose jobs are measured


class BatchedEngine:
    """Trains and evaluates jobs on one model, many clients at once.

    Args:
        adapted: The model.
        task: The learning problem.
        settings: Settings of local training.
        seed: Seed of every random draw (batches, dropout).
        wish: The stacking request: the number of clients at once, as far as it is not to be measured.
        prefix: Storage of the hidden states that leave the model's frozen prefix, or the caches of another engine on
            this model and task; None: they are computed every time.
        padding_free: Train without padding where the model can.
        compiled: Compile the model's blocks for passes that clients share; batches are padded then.
        stages: Reports the progress of long work; None: nobody is told.
    """

    def __init__(
        self,
        adapted: AdaptedModel,
        task: Task,
        settings: TrainingSettings,
        seed: int,
        wish: StackingRequest | None = None,
        prefix: PrefixSettings | PrefixCaches | None = None,
        padding_free: bool = True,
        compiled: bool = False,
        stages: Stages | None = None,
    ) -> None:
        self.stages = stages or Stages()
        self.adapted, self.task, self.settings, self.seed = adapted, task, settings, seed
        self.wish = wish or StackingRequest()
        self.stacking: StackingPlan | None = None
        """The stacking plan; known from the first round on, or set beforehand."""
        self.compiled = compiled
        loop = LoopEngine(adapted, task, settings, seed, prefix, padding_free and not compiled, self.stages)
        self._workers = [Worker(loop, compiled)]

    def train_all(
        self,
        examples: Examples,
        sizes: Mapping[str, int],
        opened: Callable[[str], Assignment],
        finished: Callable[[Assignment, Trained], Assignment | None],
    ) -> None:
        """Train several clients at once (``Engine.train_all``)."""
        lock = Lock()
        early: dict[str, Assignment] = {}

        def opening(client: str) -> Assignment:
            with lock:
                return early.pop(client) if client in early else opened(client)

        def finishing(work: Assignment, trained: Trained) -> Assignment | None:
            with lock:
                return finished(work, trained)

        if self.stacking is None:
            early = {client: opened(client) for client in list(sizes)[:_TRIED]}
        stacking = self.settle(list(early.values()), len(sizes), examples)
        shares = balance(sizes, min(stacking.workers, len(sizes)))
        workers = self._ready(len(shares))
        calls = [
            lambda worker=worker, share=share: worker.run(
                examples, share, min(stacking.at_once, len(share)), opening, finishing
            )
            for worker, share in zip(workers, shares, strict=True)
        ]
        run_parallel(calls)

    def settle(self, works: Sequence[Assignment], clients: int, examples: Examples) -> StackingPlan:
        """Choose the stacking plan by the first jobs of a round of ``clients`` clients, if it is not known yet."""
        if self.stacking is None:
            with self.stages.stage("stacking"):
                self.stacking = tune(self.wish, self._ready, run_parallel, works, clients, examples)
        return self.stacking

    @property
    def prefixes(self) -> PrefixCaches:
        """``Engine.prefixes``."""
        return self._workers[0].loop.prefixes

    def ready(self, examples: Examples, parts: Sequence[np.ndarray]) -> None:
        """``Engine.ready``."""
        self._workers[0].loop.ready(examples, parts)

    def predict(
        self, job: Job, examples: Examples, indices: np.ndarray, batch_size: int, *, generate: bool = False
    ) -> Tensor:
        """``Engine.predict``."""
        batches = evaluation_batches(indices, examples.lengths, batch_size)
        workers = self._ready(min(1 if self.stacking is None else self.stacking.workers, len(batches)))
        rows: dict[int, Tensor] = {}

        def predicted(number: int) -> None:
            own = batches[number :: len(workers)]
            rows.update(workers[number].loop.rows(job, examples, own, generate=generate))

        run_parallel([lambda number=number: predicted(number) for number in range(len(workers))])
        return torch.stack([rows[index] for index in indices.tolist()])

    def features(self, job: Job | None, examples: Examples, indices: np.ndarray, batch_size: int) -> Tensor:
        """``Engine.features``."""
        return self._workers[0].loop.features(job, examples, indices, batch_size)

    @property
    def why_not(self) -> str | None:
        """The reason why clients, or some of their jobs, train one by one although stacking was requested."""
        reasons = [worker.why_not or worker.why_alone for worker in self._workers]
        return next((reason for reason in reasons if reason is not None), None)

    def _ready(self, count: int) -> Sequence[Worker]:
        """Return ``count`` workers, all with the current base."""
        while len(self._workers) < max(1, count):
            loop = LoopEngine(self.adapted.replica(), self.task, self.settings, self.seed, stages=self.stages)
            loop.prefixes = self._workers[0].loop.prefixes.replica(loop.adapted)
            loop.padding = self._workers[0].loop.padding.replica(loop.adapted)
            self._workers.append(Worker(loop, self.compiled))
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
    with _threads(max(1, torch.get_num_threads() // len(calls))), ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result()


@contextmanager
def _threads(count: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)  # the initial value in the pool's threads
    try:
        yield
    finally:
        torch.set_num_threads(before)
