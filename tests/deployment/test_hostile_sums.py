"""A server that lies to data owners under secure aggregation, replayed against their nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra fedspan[secagg] is not installed")
pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")

from test_secure_node import CLINICS, node, served

from fedspan.deployment.node import NodeService
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope, Order, read_header
from fedspan.federation.secagg.messages import SharesOrder, UnmaskReply, decode_request

VICTIM = CLINICS[0]


class Lying:
    """A node behind a server that changes what it sends it."""

    def __init__(self, service: NodeService, change: Any) -> None:
        self.service, self.change = service, change
        self.headers: list[str] = []

    def answer(self, envelope: Envelope) -> Envelope:
        asked = self.change(decode_request(envelope))
        back = self.service.answer(asked.to_envelope())
        self.headers.append(back.header)
        return back


def of_order(**changes: Any) -> Any:
    """Changes to the orders to train; a change of the client's facts is a mapping."""

    def change(asked: Any) -> Any:
        if not isinstance(asked, Order):
            return asked
        assert asked.client is not None
        facts = {"client": replace(asked.client, **changes["client"])} if "client" in changes else {}
        return replace(asked, **{**changes, **facts})

    return change


def of_agreement(**changes: Any) -> Any:
    def change(asked: Any) -> Any:
        if not isinstance(asked, SharesOrder):
            return asked
        return asked.model_copy(update={"agreement": asked.agreement.model_copy(update=changes)})

    return change


def both(**changes: Any) -> Any:
    """A lie that is consistent between the agreement and the order."""

    def change(asked: Any) -> Any:
        return of_order(**changes)(of_agreement(**changes)(asked))

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (of_order(lr=0.0), "the order has lr 0.0"),
        (of_order(client={"weight": 0.0}), "the order has client.weight 0.0"),
        (of_order(client={"scaling": 0.0}), "the order has client.scaling 0.0"),
        (of_order(body=b"another model"), "the order's model differs from the agreement of the sum's clients"),
        (both(lr=0.0), "the order has lr 0.0"),
        (of_agreement(clip=1e-9), "`message.agreement.clip`: 1e-09 is not accepted"),
        (of_agreement(bits=64), "message.agreement.bits"),
        (of_agreement(config="0" * 64), "message.agreement.config"),
        (of_agreement(top=1e9), "have another agreement than this client"),
        (of_agreement(clients=10**6), "have another agreement than this client"),
    ],
)
def test_the_others_are_told_to_contribute_nothing(change: Any, why: str, tiny_folder: Path, tmp_path: Path) -> None:
    """Two of three nodes are to send nothing but their masks, so that the sum is the victim's update."""
    run, transport = served(tiny_folder, tmp_path)
    headers: list[str] = []
    honest = transport.make

    def lied_to(id: str) -> Any:
        if id == VICTIM:
            return honest(id)
        lying = Lying(honest(id), change)
        lying.headers = headers
        return lying

    transport.make = lied_to
    with pytest.raises(FedspanError, match="good replies") as stopped:
        run.federation.run_round(run.federation.begin())
    assert why in " ".join([*headers, str(stopped.value)]), headers
    unmasked = [one for one in transport.came if '"task":"unmask"' in one.header]
    assert all(VICTIM not in read_header(UnmaskReply, one).shares for one in unmasked)


@pytest.mark.parametrize("top", [1e-9, 1.0, 1e9])
def test_the_largest_weight_that_counts_is_part_of_what_the_nodes_agree_on(
    top: float, tiny_folder: Path, tmp_path: Path
) -> None:
    """A server that lowers or raises it for one node alone gets a sum of noise, and no shares of that node."""
    run, transport = served(tiny_folder, tmp_path)
    honest = transport.make
    transport.make = lambda id: Lying(honest(id), of_agreement(top=top)) if id == VICTIM else honest(id)
    with pytest.raises(FedspanError, match="good replies"):
        run.federation.run_round(run.federation.begin())
    unmasked = [one for one in transport.came if '"task":"unmask"' in one.header]
    assert all(VICTIM not in read_header(UnmaskReply, one).shares for one in unmasked)


def test_nodes_that_know_each_other_let_no_others_in(tiny_folder: Path, tmp_path: Path) -> None:
    """Two nodes with pinned keys; the third is the server's invention, with a key of its own."""
    keys = pytest.importorskip("fedspan.transports.flower.keys", reason="the extra fedspan[flower] is not installed")
    from fedspan.crypto.identity import compute_fingerprint

    public = {id: keys.make_node_key(tmp_path / f"{id}.key") for id in CLINICS}
    prints = {id: compute_fingerprint(path.read_text()) for id, path in public.items()}

    def service(id: str, peers: Mapping[str, str] | None) -> NodeService:
        own = node(id, tiny_folder, tmp_path / "nodes")
        return NodeService(own.model_copy(update={"key": str(tmp_path / f"{id}.key"), "peers": peers}))

    run, transport = served(tiny_folder, tmp_path / "nodes")
    for id in CLINICS:  # they joined without keys
        (tmp_path / "nodes" / f"{id}.budget").rename(tmp_path / f"{id}.key.budget")
    transport.make = lambda id: service(id, prints)
    assert not run.federation.run_round(run.federation.begin()).failures
    invented = {**prints, CLINICS[2]: prints[CLINICS[1]]}
    transport.make = lambda id: service(id, invented if id == VICTIM else prints)
    with pytest.raises(FedspanError, match="'clinic-c' cannot share a sum with this node: its key has another finger"):
        run.federation.run_round(run.federation.begin())
    transport.make = lambda id: service(id, {CLINICS[1]: prints[CLINICS[1]]} if id == VICTIM else prints)
    with pytest.raises(FedspanError, match="'clinic-c' cannot share a sum with this node: it is not in this node's"):
        run.federation.run_round(run.federation.begin())
