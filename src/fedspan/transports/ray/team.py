"""The workers of a run: how they start, share work and are replaced after a failure."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from fedspan.clients.host import Host
from fedspan.core.base import BaseUpdate
from fedspan.core.values import Message
from fedspan.errors import FedspanError
from fedspan.federation import serialization
from fedspan.training.config import ClusterConfig
from fedspan.transports.ray.adapter import own_token
from fedspan.transports.ray.sharing import enter_shared_or_new
from fedspan.transports.ray.worker import BaseVersion, ClusterWorker

T = TypeVar("T")

MAX_LOSSES = 2
"""Number of workers that may die during one piece of work; after one more, the piece counts as failed."""
_MAX_RESTARTS = 3
_LOST = (NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError)


@contextmanager
def _open_connection(cluster: ClusterConfig) -> Generator[None]:
    """Connect this process to a cluster; a connection that it has already is used and left open."""
    if ray.is_initialized():
        yield
        return
    # Ray listens on all addresses of the machine and runs any code that it receives, so clients need a token.
    with own_token() if cluster.address == "local" else nullcontext():
        _start_ray(cluster)
        try:
            yield
        finally:
            ray.shutdown()


def _start_ray(cluster: ClusterConfig) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if cluster.address != "local":
            ray.init(address=cluster.address, **quiet)
            return
        ray.init(
            address="local",
            num_cpus=cluster.workers * cluster.threads_per_worker,
            num_gpus=None if cluster.gpus_per_worker else 0,
            include_dashboard=False,
            **quiet,
        )
    except (OSError, RuntimeError, ValueError, RayError) as error:
        problem = f"no Ray cluster answers at {cluster.address!r} ({' '.join(str(error).split())[:200]})"
        raise FedspanError("cluster.address", cluster.address, problem=problem) from error


@contextmanager
def _start_team(cluster: ClusterConfig) -> Generator[Team]:
    with _open_connection(cluster), closing(Team(cluster)) as team:
        yield team


def open_team(cluster: ClusterConfig) -> AbstractContextManager[Team]:
    """Start workers for the time of a run, or use those of an earlier run of the same series."""
    return enter_shared_or_new(cluster.model_dump_json(), _start_team(cluster))


class WorkerHandle:
    """A worker, as the driver sees it."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.version: int | None = None
        """Version of the base on the worker; None: the pretrained base."""
        self.prepared: set[str] = set()
        """Clients whose hidden states the worker was told to cache."""
        self.deaths = 0
        """Number of times that the worker died in this run."""
        self.lost = False
        """Whether the worker died too often to be restarted in this run."""
        self.cause = ""
        """Ray's report of the last death."""


class Piece(Generic[T]):
    """A piece of work that moves between workers as a whole.

    Args:
        load: Approximate amount of this work, by which pieces are distributed.
    """

    def __init__(self, content: T, load: int) -> None:
        self.content, self.load = content, load
        self.losses = 0
        """Number of workers that died during this piece."""


class Team:
    """The workers of a run."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self.cluster = cluster
        self.handles = [WorkerHandle(self._start()) for _ in range(cluster.workers)]
        self._recovering: dict[Any, WorkerHandle] = {}
        self._running: dict[Any, tuple[WorkerHandle, Piece[Any]]] = {}
        self._build_arguments: tuple[Any, ...] = ()
        self._base, self._number = BaseUpdate(), 0
        self._rounds: dict[int, int] = {}
        self._patches: dict[int | None, Any] = {}

    def _start(self) -> Any:
        """Start the process of a worker as soon as there is room for it."""
        size = self.cluster
        # A new actor instead of Ray's restarts: calls to it wait for its start, whereas calls to one that Ray restarts
        # fail until it is back.
        options = {
            "num_cpus": size.threads_per_worker,
            "num_gpus": size.gpus_per_worker,
            "scheduling_strategy": "SPREAD",
        }
        return ray.remote(ClusterWorker).options(**options, max_restarts=0).remote(size.threads_per_worker)

    def build(self, build: Callable[[Any], Host], kit: object) -> None:
        """Build the hosts of a run, in new processes where an earlier run lost a worker or left it busy.

        Args:
            build: Builds the host of a worker from the kit; a module-level function.
            kit: Everything that a host is built from; it is put into the object store once.

        Raises:
            FedspanError: If a host cannot be built, or the workers do not start in time.
        """
        self._build_arguments = build, ray.put(kit)  # stored for workers that are restarted later
        self._base, self._patches, self._rounds = BaseUpdate(), {}, {}
        busy = self._pop_busy()
        for handle in self.handles:
            if handle.lost or handle in busy:
                ray.kill(handle.actor)
                handle.actor = self._start()
            handle.lost, handle.deaths = False, 0
        self._recovering = dict(map(self._rebuild, self.handles))
        cluster, deadline = self.cluster, time.monotonic() + self.cluster.start_timeout
        while self._recovering:
            left = max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(self._recovering), num_returns=1, timeout=left)
            if not ready:
                available = ray.cluster_resources()
                problem = (
                    f"{cluster.workers - len(self._recovering)} of {cluster.workers} workers started "
                    f"within {cluster.start_timeout:g} s. Each takes {cluster.threads_per_worker} CPUs and "
                    f"{cluster.gpus_per_worker:g} GPUs; "
                    f"the cluster has {available.get('CPU', 0):g} CPUs and {available.get('GPU', 0):g} GPUs"
                )
                raise FedspanError("cluster.workers", cluster.workers, problem=problem)
            self._finish_restart(ready[0])
        for handle in self.handles:
            if handle.lost:
                problem = f"a worker died {handle.deaths} times while it started ({handle.cause})"
                raise FedspanError("cluster.workers", cluster.workers, problem=problem)

    def _pop_busy(self) -> set[WorkerHandle]:
        """Return and clear the workers that an aborted run left busy."""
        refs = [*self._running, *self._recovering]
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) if refs else set[Any]()
        busy = {handle for ref, (handle, _) in self._running.items() if ref not in ready}
        busy |= {handle for ref, handle in self._recovering.items() if ref not in ready}
        self._running, self._recovering = {}, {}
        return busy

    def _restart(self, handle: WorkerHandle, error: RayError) -> None:
        """Start a worker that died again, unless it died too often."""
        ray.kill(handle.actor)  # it may be unreachable and alive
        handle.deaths, handle.cause = handle.deaths + 1, " ".join(str(error).split())[:300]
        handle.lost = handle.deaths > _MAX_RESTARTS
        if not handle.lost:
            handle.actor = self._start()
            self._recovering.update([self._rebuild(handle)])

    def _rebuild(self, handle: WorkerHandle) -> tuple[Any, WorkerHandle]:
        """Begin to build the host of a worker, and return a reference that is ready when it is built."""
        handle.version, handle.prepared = None, set()
        return handle.actor.build.remote(*self._build_arguments), handle

    def close(self) -> None:
        """End the workers."""
        for handle in self.handles:
            ray.kill(handle.actor)

    def release_memory(self) -> None:
        """Have idle workers return unused memory to the system, without waiting for them."""
        for handle in self.handles:
            if not handle.lost and handle not in self._recovering.values():
                handle.actor.release_memory.remote()

    def set_base(self, base: BaseUpdate) -> None:
        """Set the base for all work from now on; each worker receives the change with its next piece of work."""
        if base is self._base:
            return
        self._base, self._number, self._patches = base, self._number + 1, {}
        self._rounds[self._number] = base.round

    def get_base(self, handle: WorkerHandle) -> tuple[BaseVersion, Any]:
        """Return the version of the base, and a reference to the change since the worker's version, or None."""
        previous, handle.version = handle.version, self._number
        if previous is not None and self._rounds[previous] > self._base.round:  # patches lead to later rounds only
            previous = None
        if previous not in self._patches:
            patch = self._base.build_patch(None if previous is None else self._rounds[previous])
            self._patches[previous] = None if patch is None else ray.put(serialization.encode(Message(base=patch)))
        return BaseVersion(self._number, previous), self._patches[previous]

    def share(
        self,
        queues: Sequence[Sequence[Piece[T]]],
        send: Callable[[WorkerHandle, T], Any],
        on_result: Callable[[T, Any], None],
        on_failure: Callable[[T, str], None],
        *,
        movable: bool = True,
    ) -> None:
        """Distribute work: each worker does its own pieces first, and then those that other workers have not started.

        Args:
            queues: Pieces of each worker, in the order in which it does them.
            send: Begins a piece on a worker and returns the reference of its result.
            on_failure: Called with a piece during which too many workers died, and the reason.
            movable: Whether other workers take pieces that have not been started; if not, only those of lost workers.

        Raises:
            FedspanError: If a worker raises it, or all workers are lost.
        """
        remaining = Queues(queues, lambda worker: movable or self.handles[worker].lost)
        idle = deque(handle for handle in self.handles if not handle.lost and handle not in self._recovering.values())
        running: dict[Any, tuple[WorkerHandle, Piece[T]]] = {}
        self._running = running

        def dispatch() -> None:
            for handle in [*idle]:
                if (piece := remaining.take(self.handles.index(handle))) is not None:
                    idle.remove(handle)
                    running[send(handle, piece.content)] = handle, piece

        dispatch()
        while running or remaining:
            ref = self._take_next(running)
            if ref in self._recovering:
                idle += self._finish_restart(ref)
                dispatch()
                continue
            handle, piece = running.pop(ref)
            try:
                result = ray.get(ref)
            except _LOST as error:
                piece.losses += 1
                self._restart(handle, error)
                # Idle workers may have died with it, such as those of its machine: the piece only goes to living ones.
                self._recovering.update((one.actor.check.remote(), one) for one in idle)
                idle.clear()
                if piece.losses <= MAX_LOSSES:
                    remaining.put_back(piece)
                    dispatch()
                else:
                    on_failure(piece.content, f"{piece.losses} workers died while they carried out its order")
                continue
            except RayTaskError as error:
                raise _find_cause(error) from error
            idle.append(handle)
            dispatch()  # before the result is processed, for which workers need not wait
            on_result(piece.content, result)

    def _take_next(self, running: Mapping[Any, object]) -> Any:
        """Return the reference of the next result, or of a worker that was restarted or checked."""
        waiting, ready = [*running, *self._recovering], list[Any]()
        if waiting:
            seconds = None if running else self.cluster.start_timeout
            ready, _ = ray.wait(waiting, num_returns=1, timeout=seconds)
        if not ready:
            problem = "all workers died. The state before the round is stored: fix the cause and resume"
            raise FedspanError("cluster.workers", len(self.handles), problem=problem)
        return ready[0]

    def _finish_restart(self, ref: Any) -> list[WorkerHandle]:
        """Return the worker that was restarted or checked; empty if it died meanwhile."""
        handle = self._recovering.pop(ref)
        try:
            ray.get(ref)
        except _LOST as error:
            self._restart(handle, error)
            return []
        except RayTaskError as error:
            raise _find_cause(error) from error
        return [handle]


class Queues(Generic[T]):
    """The pieces that no worker has started.

    Args:
        can_move: Tells whether other workers may take the pieces of a worker; None: they may.
    """

    def __init__(self, queues: Sequence[Sequence[Piece[T]]], can_move: Callable[[int], bool] | None = None) -> None:
        self._queues, self._can_move = [deque(queue) for queue in queues], can_move or (lambda worker: True)
        self._returned: deque[Piece[T]] = deque()

    def __bool__(self) -> bool:
        return bool(self._returned) or any(self._queues)

    def put_back(self, piece: Piece[T]) -> None:
        """Return a piece; the next idle worker takes it."""
        self._returned.append(piece)

    def take(self, worker: int) -> Piece[T] | None:
        """Take the next piece of a worker: its own, or the last of the worker with the most work left.

        Returns:
            The piece; None: there is none that this worker may take.
        """
        if self._returned:
            return self._returned.popleft()
        if self._queues[worker]:
            return self._queues[worker].popleft()
        others = [queue for number, queue in enumerate(self._queues) if queue and self._can_move(number)]
        return max(others, key=lambda queue: sum(piece.load for piece in queue)).pop() if others else None


def _find_cause(error: RayTaskError) -> BaseException:
    """Return the error to raise for one of a worker: its cause if a user can correct it."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, FedspanError) else error
