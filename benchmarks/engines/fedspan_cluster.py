"""A fedspan federation on the workers of a local Ray, round by round as the driver asks; the config comes as JSON.

python fedspan_cluster.py CONFIG.json FOLDER [--peak]

FOLDER takes a file of each worker: its process id, and the seconds within its engine after every stack. With --peak,
the workers' memory is also read every 50 ms while they train, which takes time of its own.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import ray
from peers_answers import Answers
from watch import Watch
from work import CHECKED

from fedspan.clients.host import Host
from fedspan.config import parse_config
from fedspan.federation.protocol import Order, Reply
from fedspan.runs.cluster import WorkerKit, build_host, connect_workers, get_resources
from fedspan.runs.setup import prepare
from fedspan.transports.ray.team import open_team

FOLDER = "FEDSPAN_BENCHMARK_FOLDER"


class TimedHost(Host):
    """A worker's host that writes down how long its engine works."""

    watch: Watch

    def train(self, orders: Mapping[str, Order], on_answer: Callable[[Reply], None]) -> None:
        super().train(orders, on_answer)
        with (Path(os.environ[FOLDER]) / f"{os.getpid()}.txt").open("a") as file:
            file.write(f"{self.watch.take()}\n")


def build(kit: WorkerKit) -> Host:
    """A worker's host, watched."""
    host = build_host(kit)
    host.__class__ = TimedHost
    assert isinstance(host, TimedHost)
    host.watch = Watch(host.engine)
    return host


def read_proportional_memory(pid: int) -> int:
    """Memory of a process in bytes; pages that it shares count by the number of their processes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


@contextmanager
def measure_memory_peak(pids: Sequence[int], peak: list[int]) -> Generator[None]:
    """Put the memory of processes at the moment when it was the most, all together, into ``peak``."""
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(0.05):
            now = [read_proportional_memory(pid) for pid in pids]
            if sum(now) > sum(peak):
                peak[:] = now

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def main() -> None:
    """Serve the driver."""
    answers, folder = Answers(), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.txt"):
        path.unlink()
    os.environ[FOLDER] = str(folder.resolve())
    prepared = prepare(parse_config(json.loads(Path(sys.argv[1]).read_text())))
    examples = sum(len(client_data.train) for client_data in prepared.federation.clients.values())
    with open_team(get_resources(prepared.config)) as team:
        federation = connect_workers(prepared, team, build=build).federation
        progress, first, known = federation.begin(), dict[str, float](), 0.0

        def record_loss(client: str, loss: float) -> None:
            first.setdefault(client, loss)

        def run_numbered(round: int) -> dict[str, Any]:
            nonlocal progress, known
            peak = list[int]()
            known_pids = [int(path.stem) for path in folder.glob("*.txt")]
            with measure_memory_peak(known_pids, peak) if known_pids and "--peak" in sys.argv else nullcontext():
                result = federation.run_round(progress, record_loss)
            progress = result.progress
            files = list(folder.glob("*.txt"))
            total = sum(float(line) for path in files for line in path.read_text().splitlines())
            spent, known = total - known, total
            training = spent / len(team.handles)
            values = {"loss": result.loss, "examples": examples, "training": training}
            if "--peak" not in sys.argv:
                return values
            ray.get([handle.actor.release_memory.remote() for handle in team.handles])  # as they do in a moment
            return {**values, "memory": [read_proportional_memory(int(path.stem)) for path in files], "peak": peak}

        def report() -> dict[str, object]:
            stacking = getattr(prepared.engine, "stacking", None)
            return {
                "first": first[min(federation.clients)],
                "stacking": None if stacking is None else stacking.clients_per_pass,
            }

        answers.serve(run_numbered, CHECKED, report)


if __name__ == "__main__":
    main()
