"""Stacking plans of the batched engine: how many clients share a pass, measured within a budget and cached by shape.

Stacking pays if a client's own batch is too small to keep the processor busy. Otherwise it costs time, because batches
of several clients are padded to the longest of them. So the number of stacked clients is measured on the run's own
first jobs, which it leaves unchanged, and stored in the user's cache folder: a rerun gives the same bits. Measuring
takes a small share of the run's planned work at most, and a few seconds: a short run trains with the default. What it
may take is part of the cache's key, so that what other runs measured does not change a rerun's plan. Plans that were
cut short, by too little memory or because a run's other engines had used the time, are not stored.

A pass cannot be stopped, and how long the first one takes is unknown. So measuring takes at most its allowance (5 % of
the planned time, and 10 s for all engines of a run) and the first passes of one trial. These are not repeated if they
take longer than 2 s, or if there is no time left for it, and no further trial starts once the time is over.
Measuring begins only if three passes of each of the first plans hold at most 5 % of the run's tokens, so that a slow
pass is a small part of a run that is slow itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from fedspan.models.stacked import Unstackable
from fedspan.tasks.task import Examples
from fedspan.training.batching import draw_job_batches
from fedspan.training.client_slot import ClientSlot, place_rows, select_group
from fedspan.training.config import EngineConfig
from fedspan.training.jobs import Assignment
from fedspan.training.worker import Worker

_SHARE, _LIMIT = 0.05, 10.0  # measuring takes at most this share of a run's tokens, and so many seconds
_PASSES, _SECONDS = 4, 0.3  # limits of one measurement
_REPEATS, _LONG = 3, 2.0  # runs of each measured pass; one if it takes longer than this
_GAIN = 0.97  # a larger group must take at most this share of the time
_PATIENCE = 2  # sizes in a row that may be no faster: other load can spoil a measurement
_MAX_CLIENTS = 64  # clients in a pass
PROBE_CLIENTS = 16
"""Number of clients on whose first jobs a plan is measured."""
_SIZES = 6  # from 4 to the power of this many passes of a client on, a budget excludes no plan


@dataclass(frozen=True)
class StackingPlan:
    """The number of clients that train at the same time."""

    clients_per_pass: int
    workers: int
    """Number of threads, each with its own passes."""


DEFAULT = StackingPlan(4, 2)
"""The plan where training is too short for measuring to pay; one worker if torch has one thread, or on a GPU."""


class MeasuringTime:
    """The time that all engines of a run together may still spend on measuring; in seconds."""

    def __init__(self) -> None:
        self.left = _LIMIT

    @property
    def is_whole(self) -> bool:
        """Whether nothing is spent yet."""
        return self.left == _LIMIT

    @contextmanager
    def spend(self) -> Generator[None]:
        """Count the time of this context as spent."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.left -= time.perf_counter() - start


class MeasurementBudget:
    """What is left for measuring.

    Args:
        tokens: Number of tokens that measured passes may hold; they may also take no longer than so many tokens at the
            pace of the best plan.
        pass_tokens: Mean number of tokens that a client adds to a pass.
    """

    def __init__(self, tokens: float, pass_tokens: float, seconds: float = _LIMIT) -> None:
        self.tokens, self._client = tokens, max(1.0, pass_tokens)
        self._total, self._seconds, self._start = tokens, seconds, time.perf_counter()
        self.exhausted = False
        """Whether a measurement was left out."""
        self.seconds_left = seconds
        """Time that the measurement whose passes were taken last may use."""

    def take_passes(self, plan: StackingPlan, seconds_a_token: float = 0.0) -> int:
        """Take the tokens of a measurement, and return its number of passes in each worker; 0: it costs too much.

        Args:
            seconds_a_token: The pace of the best plan so far; 0: unknown.
        """
        tokens = self._pass_tokens(plan)
        spent = time.perf_counter() - self._start
        seconds_left = min(self._seconds, self._total * seconds_a_token if seconds_a_token else math.inf) - spent
        count = min(
            _PASSES, self.tokens / tokens, seconds_left / (tokens * seconds_a_token) if seconds_a_token else _PASSES
        )
        if count < 1 or seconds_left <= 0:
            self.exhausted = True
            return 0
        self.seconds_left = seconds_left
        self.tokens -= int(count) * tokens
        return int(count)

    @property
    def size(self) -> int:
        """The budget's order of magnitude, from 0: runs of one size may share a plan."""
        return int(min(_SIZES, math.log(max(1.0, self.tokens / self._client), 4)))

    def can_afford(self, plans: Sequence[StackingPlan]) -> bool:
        """Check whether one pass of each plan can be measured."""
        return sum(map(self._pass_tokens, plans)) <= self.tokens

    def _pass_tokens(self, plan: StackingPlan) -> float:
        return _REPEATS * plan.clients_per_pass * plan.workers * self._client


def tune(
    options: EngineConfig,
    workers: Callable[[int], Sequence[Worker]],
    run_parallel: Callable[[Sequence[Callable[[], None]]], None],
    assignments: Sequence[Assignment],
    clients: int,
    examples: Examples,
    rounds: float | None = None,
    limit: MeasuringTime | None = None,
) -> StackingPlan:
    """Decide how many clients train at once in rounds like the one that begins with these jobs.

    Args:
        run_parallel: Runs calls in parallel, each with its share of torch's threads.
        rounds: Planned number of rounds; measuring takes at most 5 % of their tokens and time. None: unlimited.
        limit: The time that is left, from which this measurement is taken; None: one of its own.
    """
    if options.clients_per_pass is not None and options.workers is not None:
        return StackingPlan(options.clients_per_pass, options.workers)
    first, assignments = workers(1)[0], [assignment for assignment in assignments if len(assignment.indices)]
    probe = first.open_slot(assignments[0], examples) if assignments else None
    threads = torch.get_num_threads() if first.adapted.device.type == "cpu" else 1
    # Clients that train one by one can still train in parallel threads.
    default = StackingPlan(
        options.clients_per_pass or DEFAULT.clients_per_pass, options.workers or min(DEFAULT.workers, threads)
    )
    if probe is None or first.refusal is not None:
        return default
    per_client = float(np.mean([_count_tokens(first, assignment, examples) for assignment in assignments]))
    planned = math.inf if rounds is None else _SHARE * rounds * clients * per_client
    limit, pass_tokens = limit or MeasuringTime(), _count_tokens(first, assignments[0], examples) / len(probe.batches)
    budget = MeasurementBudget(planned, pass_tokens, limit.left)
    if not budget.can_afford(_list_first_plans(options, clients, threads)):
        return default
    key = _build_key(options, first, probe, clients, examples, budget)
    if (cached := read_plans().get(key)) is not None:
        return cached

    paces, is_whole = list[float](), limit.is_whole

    def seconds(stacking: StackingPlan, passes: int) -> float:
        team = workers(stacking.workers)
        pace = _measure_token_seconds(
            *(team, run_parallel, assignments, stacking.clients_per_pass, examples, passes, budget.seconds_left)
        )
        paces.append(pace)
        return pace

    try:
        with limit.spend():
            plan = search(options, clients, threads, seconds, budget)
    except Unstackable:
        return default  # training finds the reason again, and reports it
    if paces and all(map(math.isinf, paces)):  # perhaps another program uses the memory now
        return StackingPlan(options.clients_per_pass or 1, options.workers or 1)
    if is_whole or not budget.exhausted:  # other engines' measurements may have left too little time for this one
        _store(key, plan or default)
    return plan or default


def _count_tokens(worker: Worker, assignment: Assignment, examples: Examples) -> int:
    batches = draw_job_batches(worker.settings, worker.seed, assignment, examples)
    return sum(int(examples.lengths[batch].sum()) for batch in batches)


def _list_first_plans(options: EngineConfig, clients: int, threads: int) -> list[StackingPlan]:
    best = StackingPlan(options.clients_per_pass or min(4, clients), options.workers or 1)
    if options.workers is None and threads > 1 and clients > 1:
        return [best, StackingPlan(best.clients_per_pass, threads)]
    return [best]


def search(
    options: EngineConfig,
    clients: int,
    threads: int,
    measure: Callable[[StackingPlan, int], float],
    budget: MeasurementBudget,
) -> StackingPlan | None:
    """Search the fastest plan among those that the budget allows to measure; None: there was time for one alone.

    Args:
        measure: Measures seconds per token of a plan in a number of passes; infinite: they do not fit into memory.
    """
    first = _list_first_plans(options, clients, threads)
    best, best_seconds = first[0], 0.0

    def seconds(plan: StackingPlan) -> float:
        passes = budget.take_passes(plan, best_seconds if math.isfinite(best_seconds) else 0.0)
        return measure(plan, passes) if passes else math.inf

    best_seconds = seconds(best)
    for candidate in first[1:]:
        if (candidate_seconds := seconds(candidate)) < _GAIN * best_seconds:
            best, best_seconds = candidate, candidate_seconds
    if budget.exhausted:  # passes take so long that only one plan was measured
        return None
    if options.clients_per_pass is not None:
        return best
    share = -(-clients // best.workers)
    larger = [
        size
        for size in sorted({8, 16, 32, _MAX_CLIENTS, share})
        if best.clients_per_pass < size <= min(share, _MAX_CLIENTS)
    ]
    if math.isinf(best_seconds):
        larger = []
    for sizes in (larger, (2, 1)):
        start, failed = best, 0
        for size in sizes:
            candidate = StackingPlan(size, best.workers)
            if size > share or failed == _PATIENCE:
                break
            candidate_seconds = seconds(candidate)
            if math.isfinite(candidate_seconds) and candidate_seconds <= _GAIN * best_seconds:
                best, best_seconds, failed = candidate, candidate_seconds, 0
            else:
                failed += 1
        if best != start:
            break
    if (
        options.workers is None and threads > 1 and clients > 1
    ):  # small passes do not predict how large ones share a CPU
        workers = 1 if best.workers > 1 else threads
        candidate = StackingPlan(min(best.clients_per_pass, -(-clients // workers)), workers)
        if seconds(candidate) < _GAIN * best_seconds:
            best = candidate
    return best


def wait_for(device: torch.device) -> None:
    """Wait until a device has done its work, which no pass waits for; a clock that is read before shows none of it."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def _measure_token_seconds(
    team: Sequence[Worker],
    run_parallel: Callable[[Sequence[Callable[[], None]]], None],
    assignments: Sequence[Assignment],
    clients_per_pass: int,
    examples: Examples,
    passes: int = _PASSES,
    seconds_left: float = math.inf,
) -> float:
    """Measure wall-clock seconds per token that is not padding; infinite if the passes do not fit into memory.

    The same passes run three times and the faster of the last two counts: libraries prepare for every new shape. Passes
    that take seconds, or for whose repetition there is no time left, run once.

    Args:
        passes: Number of different passes in each worker, at most.
        seconds_left: Time that this measurement may take, if its first passes do not take longer.
    """
    tokens = [0] * len(team)
    passes_by_worker: list[list[list[tuple[ClientSlot, int]]]] = [[] for _ in team]

    def record(number: int) -> None:
        worker, worker_slots = team[number], slots[number]
        deadline = time.perf_counter() + _SECONDS
        while len(passes_by_worker[number]) < passes and (
            not passes_by_worker[number] or time.perf_counter() < deadline
        ):
            group = select_group(worker_slots, clients_per_pass, not worker.loop.padding.possible)
            tokens[number] += sum(int(examples.lengths[slot.batch].sum()) for slot in group)
            passes_by_worker[number].append([(slot, slot.batches_done) for slot in group])
            worker.advance(group, examples)
            wait_for(worker.adapted.device)
            for slot in group:
                slot.batches_done %= len(slot.batches)

    def repeat(number: int) -> None:
        for replayed in passes_by_worker[number]:
            for slot, batches in replayed:
                slot.batches_done = batches
            team[number].advance([slot for slot, _ in replayed], examples)
        wait_for(team[number].adapted.device)

    try:
        slots = [
            _open_slots(worker, assignments, number, clients_per_pass, examples) for number, worker in enumerate(team)
        ]
        start = time.perf_counter()
        run_parallel([lambda number=number: record(number) for number in range(len(team))])
        elapsed = time.perf_counter() - start
        if elapsed > _LONG or _REPEATS * elapsed > seconds_left:
            return elapsed / sum(tokens)
        fastest = math.inf
        for _ in range(_REPEATS - 1):
            start = time.perf_counter()
            run_parallel([lambda number=number: repeat(number) for number in range(len(team))])
            fastest = min(fastest, time.perf_counter() - start)
        return fastest / sum(tokens)
    except torch.OutOfMemoryError:
        return math.inf


def _open_slots(
    worker: Worker, assignments: Sequence[Assignment], number: int, clients_per_pass: int, examples: Examples
) -> list[ClientSlot]:
    """Open more jobs than fit into a pass, as in training; jobs are repeated if there are too few."""
    repeated = [assignments[(number + index) % len(assignments)] for index in range(2 * clients_per_pass)]
    slots = [slot for slot in (worker.open_slot(one, examples) for one in repeated) if slot is not None]
    place_rows(slots, worker.adapted.device)
    return slots


def _build_key(
    options: EngineConfig,
    worker: Worker,
    slot: ClientSlot,
    clients: int,
    examples: Examples,
    budget: MeasurementBudget,
) -> str:
    """Compute the cache key from everything that the plan depends on: machine, model, jobs."""
    model, device, settings = worker.adapted.model, worker.adapted.device, worker.settings
    parts = {
        "machine": [_get_processor(device), os.cpu_count(), torch.get_num_threads(), torch.__version__],
        "device": device.type,
        "model": [type(model).__name__, sum(value.numel() for value in model.parameters())],
        "dtype": sorted({str(value.dtype) for value in model.parameters()}),
        "layout": [slot.layout.names, [list(shape) for shape in slot.layout.shapes]],
        "padded": not worker.loop.padding.possible,
        "batch": [settings.batch_size, round(float(examples.lengths.mean()), 1), settings.gradient_accumulation_steps],
        "clients": min(clients, _MAX_CLIENTS * torch.get_num_threads()),  # more make no pass larger
        "request": {"clients_per_pass": options.clients_per_pass, "workers": options.workers},
        "budget": budget.size,
    }
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def _get_processor(device: torch.device) -> str:
    """Return the model of the processor that trains; not the host's name, which changes from container to container."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # there is none outside Linux
        lines = []
    names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return ", ".join(sorted(names)) or f"{platform.machine()} {platform.processor()}"


def get_cache_file() -> Path:
    """Return the file of cached plans: under FEDSPAN_CACHE, XDG_CACHE_HOME or ~/.cache."""
    folder = os.environ.get("FEDSPAN_CACHE")
    base = Path(folder) if folder else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedspan"
    return base / "stacking.json"


def read_plans() -> dict[str, StackingPlan]:
    """Read the cached plans; empty if the file is missing or invalid."""
    try:
        rows = json.loads(get_cache_file().read_text(encoding="utf-8"))
        return {key: StackingPlan(int(row["clients_per_pass"]), int(row["workers"])) for key, row in rows.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _store(key: str, plan: StackingPlan) -> None:
    file = get_cache_file()
    plans = {name: asdict(plan) for name, plan in {**read_plans(), key: plan}.items()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f"{file.name}.{os.getpid()}")
        temporary.write_text(json.dumps(plans), encoding="utf-8")
        temporary.replace(file)
    except OSError:  # the home folder is not writable: measure again next time
        return
