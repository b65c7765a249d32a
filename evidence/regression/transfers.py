"""A large message to a node and back over a link that is slow and is cut again and again.

    python -m evidence.regression.transfers
    python -m evidence.regression.transfers --megabytes 2 --mbit 4 --cut-after 1

A server with TLS and keys, and a node whose connections pass a proxy on this machine (``tests/helpers/slow_link.py``).
The node returns the message that it is sent. Printed are the bytes that the proxy forwarded in each direction over the
size of the message, and seconds; a ratio above 1.1 is an error.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any

from tests.helpers.slow_link import SlowLink

MAX_RATIO = 1.1
"""Maximum of the bytes on the link over the size of the message."""
_NODE = """
import logging, sys, threading
from pathlib import Path
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
logging.getLogger("httpx").setLevel(logging.WARNING)
from fedspan.transports.http.client import Link
from fedspan.transports.http.keys import load_node_key
from fedspan.transports.http.node import serve
link = Link(sys.argv[1], Path(sys.argv[2]), load_node_key(Path(sys.argv[3])), 1 << 30)
serve(link, lambda envelope: envelope, threading.Event())
"""


def measure(folder: Path, size: int, rate: float, cut_after: float | None) -> dict[str, Any]:
    """Send a message to a node and back.

    Args:
        folder: Folder for keys and logs.
        size: Size of the message, in bytes.
        rate: Bytes per second of the link, in each direction.
        cut_after: Seconds after which the link is cut, again and again; None: never.

    Returns:
        The seconds until the message is back, the cuts of the link, and the bytes on the link over the size of the
        message to the node (``order``) and back (``reply``).
    """
    from fedspan.federation.protocol import Envelope
    from fedspan.federation.transport import Orders
    from fedspan.transports.http.admissions import admit_node, read_admissions
    from fedspan.transports.http.invitations import invite
    from fedspan.transports.http.keys import make_node_key
    from fedspan.transports.http.server import attach, prepare_folder
    from fedspan.transports.http.signing import ServerSigner
    from fedspan.transports.http.supervision import supervise
    from fedspan.transports.http.transport import ServerTransport
    from tests.helpers.stage import build_environment, free_port

    link = prepare_folder(folder / "server", free_port(), ["127.0.0.1"], insecure=False)
    stop, ready = Event(), Event()
    server = Thread(target=supervise, args=(folder / "server", link, "127.0.0.1", stop, ready.set))
    server.start()
    node: subprocess.Popen[bytes] | None = None
    try:
        if not ready.wait(120):
            raise RuntimeError((folder / "server" / "server.log").read_text())
        make_node_key(folder / "node.key")
        admit_node(link, folder / "node.key.pub", "far")
        signer = ServerSigner(
            folder / "server", lambda: {id: one.key.encode() for id, one in read_admissions(link).items()}
        )
        port = int(link.address.rpartition(":")[2])
        with SlowLink(port, rate, cut_after, is_cut=False) as slow, attach(link, 1 << 30) as run:
            arguments = f"127.0.0.1:{slow.port}", str(folder / "server" / "ca.crt"), str(folder / "node.key")
            with (folder / "node.log").open("wb") as log:
                node = subprocess.Popen(
                    [sys.executable, "-c", _NODE, *arguments], env=build_environment(), stdout=log, stderr=log
                )
            ((id, hello),) = [next(invite(run, Envelope("hello"), 120.0, signer))]
            if hello != Envelope("hello"):
                raise RuntimeError(f"the node replied {hello!r}")
            slow.cutting.set()
            before, cuts, began = (slow.received, slow.up), slow.cuts, time.monotonic()
            order, replies = Envelope("{}", os.urandom(size)), dict[str, Any]()

            def take(client: str, reply: Any) -> bool:
                replies[client] = reply
                return False

            patience = 120 + 8 * size / rate
            orders = Orders("train", ["a"], lambda _: order, lambda _: size)
            ServerTransport(run, {"a": id}, signer=signer).exchange(orders, take, patience, wait_for_offline=True)
            seconds = time.monotonic() - began
            if replies != {"a": order}:
                raise RuntimeError(f"{str(replies)[:500]}\n{(folder / 'node.log').read_text()[-5000:]}")
            return {
                "seconds": round(seconds, 1),
                "cuts": slow.cuts - cuts,
                "order": round((slow.received - before[0]) / size, 3),
                "reply": round((slow.up - before[1]) / size, 3),
            }
    finally:
        stop.set()
        if node is not None:
            node.kill()
            node.wait()
        server.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=20.0, help="size of the message, in 10**6 bytes")
    parser.add_argument("--mbit", type=float, default=1.0, help="rate of the link in each direction, in Mbit/s")
    parser.add_argument("--cut-after", type=float, default=4.0, help="seconds between two cuts; 0: none")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fedspan-") as temporary:
        row = measure(Path(temporary), int(options.megabytes * 1e6), options.mbit * 1e6 / 8, options.cut_after or None)
    print(json.dumps(row))
    if max(row["order"], row["reply"]) > MAX_RATIO:
        sys.exit(f"more than {MAX_RATIO} times the message")


if __name__ == "__main__":
    main()
