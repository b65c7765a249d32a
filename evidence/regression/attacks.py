"""What attacks cost a server at work: its memory, how long connections stay open, and the rounds of honest nodes.

    python -m evidence.regression.attacks --page docs/results/attacks.md

A SuperLink with TLS and keys, three honest nodes that reply with what they were sent, and attackers: strangers without
a key, and one node with an admitted key that floods the server or sends the largest reply it may. The attacks are those
that ``tests/transports/flower/test_attacks.py`` replays, at full size; nothing is trained. Linux only, as root or as
the user who started the server (/proc).
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import platform
import select
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

from evidence.regression.load import MIB, exchange
from fedspan.federation.protocol import Envelope
from fedspan.federation.transport import Orders
from tests.helpers.hostile_node import HostileNode, connect, id_of, name_of, tree_of
from tests.helpers.stage import Deployment, find_child

HONEST = ("north", "south", "west")
BODY = 4 * MIB
"""Bytes of a message of an honest node's round, in each direction."""
THREADS = 8
"""Threads of the flooding node."""
PIECE = 5 * MIB
"""Bytes of an object of the hostile node's large reply: the largest that the server accepts."""


def answer_honestly(address: str, authority: str, keys: list[str]) -> None:
    """Serve a link for each key, which replies with what was sent."""
    from fedspan.transports.flower.keys import load_node_key
    from fedspan.transports.flower.supernode import Link, serve

    for key in keys:
        link = Link(address, Path(authority), load_node_key(Path(key)), 64 * MIB)
        threading.Thread(target=serve, args=(link, lambda envelope: envelope, Event()), daemon=True).start()
    Event().wait()


def flood(address: str, authority: str, key: str, id: int, count: Any) -> None:
    """Send requests of an admitted node from several threads until killed, and count the accepted ones."""
    from fedspan.transports.flower.keys import load_node_key

    private = load_node_key(Path(key))[0]

    def send() -> None:
        node = HostileNode(address, Path(authority), private)
        node.node = id
        request = name_of("flwr.proto.fleet_pb2", "PullMessagesRequest")(node=node.own())
        while True:
            with suppress(Exception):  # closed and refused requests are what the server does about it
                if node.post("pull-messages", request)[0] == 200:
                    with count.get_lock():
                        count.value += 1

    for _ in range(THREADS):
        threading.Thread(target=send, daemon=True).start()
    Event().wait()


@contextmanager
def run_process(target: Any, *arguments: Any) -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


class Memory:
    """Memory of a process in MiB.

    Args:
        pid: Id of the process.
    """

    def __init__(self, pid: int) -> None:
        self.folder = Path(f"/proc/{pid}")

    def begin(self) -> float:
        """Forget the peak, and return the memory now."""
        (self.folder / "clear_refs").write_text("5")
        return self._read("VmRSS")

    def get_peak(self) -> float:
        """Return the peak since ``begin``."""
        return self._read("VmHWM")

    def _read(self, name: str) -> float:
        lines = (self.folder / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def send_body(address: str, authority: Path, size: int) -> int:
    """Send a body without credentials until the server closes the connection; return the bytes that were sent."""
    sent = 0
    with connect(address, authority) as line:
        line.sendall(f"POST /v1/fleet/push-object HTTP/1.1\r\nHost: a\r\nContent-Length: {size}\r\n\r\n".encode())
        line.settimeout(30)
        with suppress(OSError):
            while sent < size:
                sent += line.send(bytes(2**16))
    return sent


def hold_requests(address: str, authority: Path, count: int) -> tuple[int, float]:
    """Send the beginnings of requests; return how many connections were accepted, and the seconds until all closed."""
    began, lines = time.monotonic(), []
    for _ in range(count):
        with suppress(OSError):
            line = connect(address, authority)
            line.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: a\r\nContent-Le")
            lines.append(line)
    accepted = len(lines)
    while lines:
        for line in select.select(lines, [], [], 60)[0]:
            with suppress(OSError):
                line.recv(1)
            line.close()
            lines.remove(line)
    return accepted, time.monotonic() - began


def measure_rounds(transport: Any, rounds: int) -> list[float]:
    """Return the seconds of rounds of the honest nodes.

    Raises:
        RuntimeError: If a reply is missing.
    """
    seconds: list[float] = []
    for _ in range(rounds):
        envelopes = {id: Envelope(id, os.urandom(BODY)) for id in HONEST}
        began = time.monotonic()
        if (back := exchange(transport, envelopes, 120.0)) != envelopes:
            missing = {id: reply for id, reply in back.items() if isinstance(reply, str)}
            raise RuntimeError(f"honest replies are missing: {missing}")
        seconds.append(time.monotonic() - began)
    return seconds


def send_large_reply(transport: Any, hostile: HostileNode, size: int) -> tuple[int, float]:
    """Let the hostile node reply with objects of a size together; return the accepted bytes, and the seconds.

    The objects are no message of fedspan, so the reply is dropped when it is fetched.
    """
    envelope = Envelope("{}", b"order")
    orders = Orders("train", ["hostile"], lambda _: envelope)
    acting = threading.Thread(target=lambda: transport.exchange(orders, lambda *_: False, 60.0))
    acting.start()
    while (pulled := hostile.pull()) is None:
        time.sleep(0.1)
    pieces = [number.to_bytes(8, "big") + bytes(PIECE - 8) for number in range(size // PIECE)]
    began, accepted = time.monotonic(), 0
    status, content = hostile.reply(pulled[0], tree_of(id_of(b"root"), [tree_of(id_of(piece)) for piece in pieces]))
    if status != 200:
        raise RuntimeError(f"the announcement is refused: {status} {content!r}")
    request = name_of("flwr.proto.message_pb2", "PushObjectRequest")
    for piece in pieces:
        body = request(
            node=hostile.own(), run_id=pulled[0].metadata.run_id, object_id=id_of(piece), object_content=piece
        )
        status, _ = hostile.post("push-object", body)
        accepted += len(piece) if status == 200 else 0
    seconds = time.monotonic() - began
    acting.join()
    return accepted, seconds


def measure(folder: Path, body_mib: int, requests: int, rounds: int, reply_mib: int) -> list[tuple[str, str, str]]:
    """Run all attacks; rows of the page: attack, before (from the issue), measured."""
    from fedspan.transports.flower.admissions import admit_node, read_admissions
    from fedspan.transports.flower.grid import attach
    from fedspan.transports.flower.keys import load_node_key, make_node_key
    from fedspan.transports.flower.server import read_link
    from fedspan.transports.flower.signing import ServerSigner
    from fedspan.transports.flower.transport import GridTransport

    rows: list[tuple[str, str, str]] = []

    def add(attack: str, before: str, measured: str) -> None:
        rows.append((attack, before, measured))
        print(f"{attack}: {measured} (before: {before})", flush=True)

    with Deployment(folder / "deployment") as made:
        link = read_link(made.server)
        assert link.authority is not None
        keys = {name: folder / f"{name}.key" for name in (*HONEST, "hostile")}
        for name, key in keys.items():
            admit_node(link, make_node_key(key), name)
        nodes = {one.name: id for id, one in read_admissions(link).items()}
        server = made.processes["server"].pid
        superlink = Memory(find_child(server))
        signer = ServerSigner(link.folder, lambda: {id: one.key.encode() for id, one in read_admissions(link).items()})
        honest = [str(keys[name]) for name in HONEST]
        given = link.address, str(link.authority)
        with run_process(answer_honestly, *given, honest), attach(link, 1024 * MIB) as grid:
            until = time.monotonic() + 180
            while not {nodes[name] for name in HONEST} <= set(grid.get_node_ids()):
                if time.monotonic() > until:
                    raise RuntimeError(f"the honest nodes are not online\n{made.logs()}")
                time.sleep(0.2)
            transport = GridTransport(grid, nodes, signer=signer)
            measure_rounds(transport, 1)
            usual = statistics.median(measure_rounds(transport, rounds))

            start = superlink.begin()
            sent = send_body(link.address, link.authority, body_mib * MIB)
            add(
                f"one body of {body_mib} MiB without credentials: memory of the SuperLink",
                "160 to 1,763 MiB",
                f"{start:.0f} to {superlink.get_peak():.0f} MiB; closed after {sent / MIB:.1f} MiB",
            )
            accepted, seconds = hold_requests(link.address, link.authority, requests)
            add(
                f"{requests} half-sent requests: time until all are closed",
                "20 s",
                f"{seconds:.1f} s; {accepted} got through TLS",
            )
            hostile = HostileNode(link.address, link.authority, load_node_key(keys["hostile"])[0])
            hostile.activate()
            count = multiprocessing.get_context("spawn").Value("q", 0)
            with run_process(flood, *given, str(keys["hostile"]), nodes["hostile"], count):
                until = time.monotonic() + 60
                while not count.value and time.monotonic() < until:
                    time.sleep(0.1)
                first, began = count.value, time.monotonic()
                flooded = statistics.median(measure_rounds(transport, rounds))
                rate = (count.value - first) / (time.monotonic() - began)
            add(
                f"{THREADS} threads of one admitted node flood: round of three honest nodes",
                "3.7 to 8.5 s",
                f"{usual:.2f} to {flooded:.2f} s; {rate:.0f} requests a second were answered",
            )
            usual = statistics.median(measure_rounds(transport, rounds))
            start = superlink.begin()
            large, seconds = send_large_reply(transport, hostile, reply_mib * MIB)
            hostile.close()
            add(
                f"a reply of {reply_mib} MiB of one admitted node: memory of the SuperLink",
                "not measured",
                f"{start:.0f} to {superlink.get_peak():.0f} MiB, while {large / MIB:.0f} MiB were stored in "
                f"{seconds:.0f} s",
            )
            after = statistics.median(measure_rounds(transport, rounds))
            add(
                "rounds of the honest nodes before and after that reply",
                "not measured",
                f"{usual:.2f} and {after:.2f} s",
            )
    return rows


PAGE = """# Attacks on a server at work

This page measures what attacks cost a server and its honest nodes. [Security](../security.md) lists the attacks and the
tests that replay them.

A SuperLink with TLS and keys runs with three honest nodes, which reply with the {body} MiB that they were sent; nothing
is trained. The figures before are those of the report that found these attacks (issue 26); its rounds trained a model,
so compare the ratio.

Command: `{command}`  
Date: {date}. Machine: {machine}, {cores} cores, CPU only; load average of other work before the start: {load:.1f}.

| attack | before | now |
|---|---|---|
{rows}

An order of a run limits its reply to what the job's tensors take, and the server refuses a larger one while it arrives.
The last rows measure an order without such a limit, whose reply may have 2 GiB, the largest possible
`federation.message_mib`: the objects are written to the database as they arrive.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--body-mib", type=int, default=800, help="body without credentials, in MiB")
    parser.add_argument("--requests", type=int, default=400, help="half-sent requests")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of the honest nodes, whose median counts")
    parser.add_argument("--reply-mib", type=int, default=1000, help="reply of the hostile node, in MiB")
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), args.body_mib, args.requests, args.rounds, args.reply_mib)
    if args.page is not None:
        arguments = [word for word in sys.argv[1:] if word not in ("--page", str(args.page))]
        text = PAGE.format(
            body=BODY // MIB,
            command=" ".join(["python evidence/regression/attacks.py", *arguments]),
            date=datetime.date.today(),
            machine=platform.machine(),
            cores=os.cpu_count(),
            load=load,
            rows="\n".join(f"| {attack} | {before} | {now} |" for attack, before, now in rows),
        )
        args.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
