"""The stacking plan: how many clients train at once, measured at the start of a run and cached on the machine.

Stacking pays if a client's own batch is too small to keep the processor busy. Otherwise it costs time, because batches
of several clients are padded to the longest of them. The measurement uses the run's own first jobs and leaves them
unchanged. Its result is stored in the user's cache folder, so that a rerun gives the same bits.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fedspan.models.stacked import Unstackable
from fedspan.tasks.task import Examples
from fedspan.training.client_slot import ClientSlot
from fedspan.training.grouping import select_group
from fedspan.training.jobs import Assignment
from fedspan.training.worker import Worker

__all__ = ["DEFAULT", "StackingPlan", "StackingRequest", "cache_file", "tune"]

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
