"""How many nodes a server carries, and how large a message: the transport of a deployment without any training.

    python -m evidence.regression.load --page docs/results/load.md

A server with TLS and keys, and the requested number of nodes' connections, in a few processes, whose answers are as
large as what they were sent: a process with torch for each of 200 nodes would need more memory than there is. So this
measures the server and the way to it, not the nodes. With the first number of nodes, one message of 500 MB goes to a
node and back, and larger ones than the limits are refused.
"""

import argparse
import logging
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from threading import Event
from typing import Any

from fedspan.federation.protocol import Envelope
from fedspan.federation.transport import Orders, Transport
from tests.helpers.stage import Deployment, find_child, read_processor_seconds

MIB = 2**20
BODY = 16 * 1024
"""Bytes of a message under load."""
LONG, GROWTH = 20, 0.05
"""Rounds from which on memory is judged by what it grows by after the tenth round, and how much that may be of it."""
WARM, KEPT = 2, BODY // 4
"""In fewer rounds, the first ones that do not count, in which each thread and connection gets its buffers, and bytes by
which memory may grow per node and round after them: a quarter of one message. A process that kept the order or the
reply of a node would grow by four times as much."""
LOADS = [(3, 20), (40, 50), (200, 12), (1000, 5)]
"""Numbers of nodes, and of rounds with them; memory is not judged with fewer than ``WARM + 3``."""
SECONDS = {200: 3.0, 1000: 15.0}
"""Goals for a round, by the number of nodes, in seconds."""
REQUESTS = 4.0
"""Goal for the requests per node and round."""


def make_answer(envelope: Envelope) -> Envelope:
    """A node's answer: as large as what came, and like no other's."""
    return Envelope(envelope.header, envelope.header.encode() + envelope.body)


class Counter(logging.Handler):
    """Counts the requests that this process sends, from httpx's own log.

    Args:
        count: Shared number of requests.
    """

    def __init__(self, count: Any) -> None:
        super().__init__()
        self.count = count

    def emit(self, record: logging.LogRecord) -> None:
        """Count a request."""
        with self.count.get_lock():
            self.count.value += 1

    def install(self) -> None:
        """Count from now on."""
        logger = logging.getLogger("httpx")
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(self)


def answer(ready: str, authority: str, address: str, keys: list[str], most: int, count: Any) -> None:
    """A process: a link for each key, answering with what was sent."""
    from fedspan.transports.http.client import Link
    from fedspan.transports.http.keys import load_node_key
    from fedspan.transports.http.node import serve

    Counter(count).install()

    def one(key: str) -> None:
        link = Link(address, Path(authority), load_node_key(Path(key)), most)
        serve(link, make_answer, Event())

    for key in keys:
        threading.Thread(target=one, args=(key,), daemon=True).start()
        time.sleep(0.2)  # from one address, only so many may connect at once
    Path(ready).touch()
    threading.Event().wait()


def read_resident_memory(pid: int) -> float:
    """MiB of a process's memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no memory of process {pid}")


@dataclass(frozen=True)
class Measured:
    """Measurements of a load.

    Args:
        nodes: Number of nodes.
        rounds: Number of rounds.
        lost: Number of replies that did not arrive.
        seconds: Seconds of each round.
        memory: MiB after each round, of the server and of who submits.
        requests: Requests to the server for each node and round, of the nodes and of who submits.
        processor: Seconds of the server's processor time for each round.
    """

    nodes: int
    rounds: int
    lost: int
    seconds: list[float]
    memory: dict[str, list[float]]
    requests: tuple[float, float]
    processor: float


def compare_memory(sizes: Sequence[float], nodes: int) -> tuple[str, str, bool | None]:
    """Compare the memory after the rounds: the two sizes, what they grew by, and whether that is little enough.

    Args:
        sizes: MiB after each round.
        nodes: Number of nodes.

    Returns:
        Texts of the sizes and of the growth, and the verdict; None: there are too few rounds.
    """
    if len(sizes) >= LONG:
        early, late = sizes[9], sizes[-1]
        return f"{early:.0f}, {late:.0f}", f"{late / early - 1:+.1%}", late <= early * (1 + GROWTH)
    warm = sizes[WARM - 1 :] if len(sizes) > WARM else sizes
    text = f"{warm[0]:.0f}, {warm[-1]:.0f}"
    if len(sizes) < WARM + 3:
        return text, "", None
    slopes = [(late - early) / (j - i) for (i, early), (j, late) in combinations(enumerate(warm), 2)]
    kept = statistics.median(slopes) * MIB / nodes  # one size out of line changes it little
    return text, f"{kept / 1000:+.1f} kB", kept <= KEPT


def exchange(transport: Transport, envelopes: dict[str, Envelope], seconds: float) -> dict[str, Envelope | str]:
    """Send envelopes and collect the replies."""
    replies: dict[str, Envelope | str] = {}

    def store(id: str, reply: Envelope | str) -> bool:
        replies[id] = reply
        return False

    transport.exchange(Orders("train", envelopes, envelopes.__getitem__), store, seconds)
    return replies


def measure_load(transport: Transport, nodes: dict[str, int], rounds: int, serving: int, counts: list[Any]) -> Measured:
    lost, seconds, memory = 0, list[float](), dict[str, list[float]]()
    before, busy = [one.value for one in counts], read_processor_seconds(serving)
    for number in range(1, rounds + 1):
        began = time.monotonic()
        body = os.urandom(BODY)  # the same for all, as a round's tensors are
        envelopes = {id: Envelope(f"{number} {id}", body) for id in nodes}
        replies = exchange(transport, envelopes, 600.0)
        lost += sum(replies.get(id) != make_answer(envelope) for id, envelope in envelopes.items())
        seconds.append(time.monotonic() - began)
        for name, pid in (("server", serving), ("submitting process", os.getpid())):
            memory.setdefault(name, []).append(read_resident_memory(pid))
        now = ", ".join(f"{name} {sizes[-1]:.1f} MiB" for name, sizes in memory.items())
        print(f"round {number}: {seconds[-1]:.1f} s, {now}", flush=True)
    sent = [(one.value - earlier) / len(nodes) / rounds for one, earlier in zip(counts, before, strict=True)]
    return Measured(
        len(nodes),
        rounds,
        lost,
        seconds,
        memory,
        (sum(sent[1:]), sent[0]),
        (read_processor_seconds(serving) - busy) / rounds,
    )


def measure_large(
    transport: Transport, nodes: dict[str, int], run: object, megabytes: int, most: int
) -> list[tuple[str, str, bool]]:
    """One message to a node and back, and the errors for messages above the limits."""
    id = next(iter(nodes))
    results: list[tuple[str, str, bool]] = []

    def sent(size: int) -> tuple[object, float]:
        envelope = Envelope("large", os.urandom(size))  # equal pieces would be transmitted once
        began = time.monotonic()
        reply = exchange(transport, {id: envelope}, 590.0)[id]
        return (reply if isinstance(reply, str) else reply == make_answer(envelope)), time.monotonic() - began

    reply, seconds = sent(megabytes * 10**6)
    results.append((f"{megabytes} MB to a node and back", f"{seconds:.0f} s", reply is True))
    reply, seconds = sent(most + 10 * MIB)
    results.append(
        (
            f"{most // MIB + 10} MiB to a node that takes {most // MIB}",
            str(reply),
            "exceeds the size limit" in str(reply),
        )
    )
    run.limit = 8 * MIB  # type: ignore[attr-defined]
    reply, seconds = sent(16 * MIB)
    results.append(
        ("16 MiB from a node, where the server takes 8", str(reply), "larger than its order allows" in str(reply))
    )
    reply, seconds = sent(1 * MIB)
    results.append(("1 MiB after that", f"{seconds:.1f} s", reply is True))
    return results


def measure(
    count: int, rounds: int, processes: int, megabytes: int, folder: Path
) -> tuple[Measured, list[tuple[str, str, bool]]]:
    """Measure a load, and large messages if there are any."""
    from fedspan.transports.http.admissions import admit_node, compute_node_id
    from fedspan.transports.http.keys import make_node_key
    from fedspan.transports.http.server import attach, read_link
    from fedspan.transports.http.signing import ServerSigner
    from fedspan.transports.http.transport import ServerTransport

    most = 768 * MIB
    with Deployment(folder / "deployment") as made:
        link = read_link(made.server)
        keys = [folder / f"node{number}.key" for number in range(count)]
        publics = [make_node_key(key) for key in keys]
        for public in publics:
            admit_node(link, public, public.stem)
        ids = [compute_node_id(public.read_text()) for public in publics]
        nodes = {f"node-{number:03}": id for number, id in enumerate(ids)}
        children: list[multiprocessing.Process] = []
        context = multiprocessing.get_context("spawn")
        marks = [folder / f"ready{number}" for number in range(processes)]
        counts = [context.Value("q", 0) for _ in range(1 + processes)]
        own_count = Counter(counts[0])
        own_count.install()
        for number, mark in enumerate(marks):
            own_keys = [str(key) for key in keys[number::processes]]
            arguments = (str(mark), str(made.server / "ca.crt"), link.address, own_keys, most, counts[1 + number])
            child = context.Process(target=answer, args=arguments, daemon=True)
            child.start()
            children.append(child)  # type: ignore[arg-type]
        try:
            with attach(link, 1024 * MIB) as run:
                began = time.monotonic()
                while not (all(mark.exists() for mark in marks) and len(run.list_online()) == count):
                    if time.monotonic() - began > 600:
                        raise RuntimeError(f"{len(run.list_online())} of {count} nodes came")
                    time.sleep(1)
                print(f"{count} nodes online after {time.monotonic() - began:.0f} s", flush=True)
                server = made.processes["server"].pid
                serving = find_child(server)
                known = {id: public.read_bytes() for id, public in zip(ids, publics, strict=True)}
                transport = ServerTransport(run, nodes, signer=ServerSigner(link.folder, lambda: known))
                result = measure_load(transport, nodes, rounds, serving, counts)
                return result, measure_large(transport, nodes, run, megabytes, most) if megabytes else []
        finally:
            logging.getLogger("httpx").removeHandler(own_count)
            for child in children:
                child.kill()


PAGE = """# Load

This page measures rounds, requests and memory of a server with many nodes, without training.

A server with TLS and keys and the nodes' connections, in {processes} processes without torch, run on one machine. In
a round, all nodes receive the same {body} kB, and each replies with {body} kB of its own.

Command: `{command}`  
{machine}{busy}

| nodes | rounds | lost replies | seconds per round: median, maximum | goal | |
|---|---|---|---|---|---|
{rounds}

| nodes | requests per node and round: node, submitting process | goal | | server's processor time per round, s |
|---|---|---|---|---|
{requests}

Memory in MiB after an early round and the last, and its growth. From {long} rounds on, growth is that after the tenth
round, and the limit is {growth:.0%}. In fewer rounds, it is the median growth per node and round after round {warm}, by
which threads and connections have their buffers. The limit is {kept:.1f} kB, a quarter of one message: a process that
kept a node's order or reply would grow by {body} kB.

| nodes | rounds compared | server | growth | submitting process | growth | |
|---|---|---|---|---|---|---|
{memory}
{large}"""

LARGE = """
Large messages, one node:

| | measured | |
|---|---|---|
"""


def page(
    results: list[Measured],
    messages: list[tuple[str, str, bool]],
    args: argparse.Namespace,
    command: str,
) -> tuple[str, bool]:
    """The page, and whether all goals are met."""
    rounds, requests, memory = list[str](), list[str](), list[str]()
    good = all(ok for *_, ok in messages)
    for one in results:
        median, goal = statistics.median(one.seconds), SECONDS.get(one.nodes)
        ok = one.lost == 0 and (goal is None or median <= goal)
        expected = "none lost" if goal is None else f"none lost, {goal:g} s"
        rounds.append(
            f"| {one.nodes} | {one.rounds} | {one.lost} of {one.nodes * one.rounds} | {median:.1f}, "
            f"{max(one.seconds):.1f} | {expected} | {_format_verdict(ok)} |"
        )
        few = sum(one.requests) <= REQUESTS
        requests.append(
            f"| {one.nodes} | {one.requests[0]:.1f}, {one.requests[1]:.1f} | {REQUESTS:g} | {_format_verdict(few)} | "
            f"{one.processor:.1f} |"
        )
        compared = [compare_memory(sizes, one.nodes) for sizes in one.memory.values()]
        judged = [verdict for *_, verdict in compared if verdict is not None]
        cells = " | ".join(f"{sizes} | {growth}" for sizes, growth, _ in compared)
        early = 10 if one.rounds >= LONG else min(WARM, one.rounds)
        verdict = _format_verdict(all(judged)) if judged else "not judged"
        memory.append(f"| {one.nodes} | {early} and {one.rounds} | {cells} | {verdict} |")
        good = good and ok and few and all(judged)
    from evidence.claims.report import describe_machine  # it loads torch, which the nodes' processes do without

    large = "".join(f"| {description} | {outcome} | {_format_verdict(ok)} |\n" for description, outcome, ok in messages)
    text = PAGE.format(
        processes=args.processes,
        body=BODY // 1000,
        command=command,
        machine=describe_machine(),
        busy=" The machine had other work, too, so times are upper bounds." if args.busy else "",
        rounds="\n".join(rounds),
        requests="\n".join(requests),
        long=LONG,
        growth=GROWTH,
        warm=WARM,
        kept=KEPT / 1000,
        memory="\n".join(memory),
        large=LARGE + large if large else "",
    )
    return text, good


def _format_verdict(ok: bool) -> str:
    return "pass" if ok else "**FAIL**"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--load",
        type=int,
        nargs=2,
        action="append",
        metavar=("NODES", "ROUNDS"),
        help="number of nodes and of rounds; may be repeated",
    )
    parser.add_argument("--processes", type=int, default=4, help="number of processes with the nodes' links")
    parser.add_argument("--megabytes", type=int, default=500, help="of the large message; 0: none")
    parser.add_argument("--busy", action="store_true", help="write on the page that the machine had other work to do")
    parser.add_argument("--page", type=Path, help="write the table to this file")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server and the links end, too
    loads = "".join(f" --load {nodes} {rounds}" for nodes, rounds in args.load or ())
    megabytes = "" if args.megabytes == 500 else f" --megabytes {args.megabytes}"
    command = f"python -m evidence.regression.load{loads}{megabytes}{' --busy' if args.busy else ''}"
    results, messages = list[Measured](), list[tuple[str, str, bool]]()
    with tempfile.TemporaryDirectory(prefix="fedspan-load-") as temporary:
        for number, (nodes, rounds) in enumerate(args.load or LOADS):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            result, large = measure(nodes, rounds, args.processes, 0 if number else args.megabytes, folder)
            results.append(result)
            messages += large
    text, good = page(results, messages, args, command)
    print(text)
    if args.page:
        args.page.write_text(text, encoding="utf-8")
    if not good:
        raise SystemExit("a goal was missed")


if __name__ == "__main__":
    main()
