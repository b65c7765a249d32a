"""What a client sends, receives and computes in a session of secure aggregation, besides model and vector.

    python -m evidence.pages.secagg 3 101 128 1000

The seconds are CPU time of the shares, which take nearly all of it.
"""

import argparse
import time

from fedspan.clients.secagg import SecureClient
from fedspan.clients.secagg_store import MemorySessionStore
from fedspan.core.values import Client
from fedspan.federation.config import SecureSettings
from fedspan.federation.protocol import ClientFacts
from fedspan.federation.secagg.messages import (
    Agreement,
    ConfirmOrder,
    ConfirmReply,
    KeysOrder,
    KeysReply,
    SharesOrder,
    SharesReply,
    UnmaskOrder,
    UnmaskReply,
    compute_facts_digest,
)
from tests.helpers.secure_game import make_identity


def measure(count: int) -> tuple[int, int, float]:
    """Return the bytes that a client receives and sends, and the seconds that its shares take.

    Args:
        count: Number of clients.
    """
    ids, sessions = [f"clinic-{number:04}" for number in range(count)], MemorySessionStore()
    identity = make_identity("clinic")
    clients = {id: SecureClient(id, sessions, identity=identity) for id in ids}
    facts = {"run": "run", "serial": 1, "round": 0, "attempt": 0, "session": 1}
    replies = {id: clients[id].answer(KeysOrder(**facts, to=id)) for id in ids}
    digest, threshold, first = "0" * 64, SecureSettings().compute_threshold(count), ids[0]
    clients_facts = tuple(ClientFacts.from_client(Client(id, 8, 2.0, 1000, 1000.0, 10)) for id in ids)
    agreement = Agreement(
        config=digest,
        task="train",
        round=0,
        lr=0.1,
        model=digest,
        clients=count,
        threshold=threshold,
        clip=1.0,
        bits=32,
        top=1.0,
        layout=digest,
        facts=compute_facts_digest(clients_facts),
    )
    peers = {id: reply.keys for id, reply in replies.items() if isinstance(reply, KeysReply) and reply.keys is not None}
    shares_order = SharesOrder(**facts, to=first, peers=peers, agreement=agreement, facts=clients_facts)
    started = time.process_time()
    shares = clients[first].answer(shares_order)
    seconds = time.process_time() - started
    assert isinstance(shares, SharesReply)
    received = (
        KeysOrder(**facts, to=first),
        shares_order,
        ConfirmOrder(**facts, to=first, survivors=tuple(ids), dropped=(), sealed=shares.sealed),
        UnmaskOrder(**facts, to=first, signatures=dict.fromkeys(ids, bytes(64))),
    )
    sent = (
        replies[first],
        shares,
        ConfirmReply(id=first, session=1, signature=bytes(64)),
        UnmaskReply(id=first, session=1, shares=dict.fromkeys(ids, bytes(34))),
    )
    down, up = (sum(len(one.to_envelope().header) for one in messages) for messages in (received, sent))
    return down, up, seconds


def main() -> None:
    """Print a line for each number of clients."""
    parser = argparse.ArgumentParser(description="What a client sends, receives and computes in a secure session.")
    parser.add_argument("clients", type=int, nargs="+", help="numbers of clients")
    for count in parser.parse_args().clients:
        down, up, seconds = measure(count)
        print(f"{count} clients: receives {down:,} bytes, sends {up:,} bytes, {seconds:.3f} s")


if __name__ == "__main__":
    main()
