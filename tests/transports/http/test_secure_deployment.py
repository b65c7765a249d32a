"""Three nodes with TLS and keys: secure sums though one is killed, and a server with the order key that attacks."""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from safetensors.torch import load_file

pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")

import fedspan
from fedspan import __version__
from fedspan.assembly.server import build_server_clients, connect, prepare_server
from fedspan.crypto.identity import compute_fingerprint
from fedspan.deployment.handshake import Introduction, Invitation, build_server_config
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope, Order, decode_reply, read_header, serial
from fedspan.federation.secagg.messages import UnmaskReply, decode_request
from fedspan.federation.transport import OnReply, Orders, Transport
from fedspan.transports.http.admissions import read_admissions
from fedspan.transports.http.invitations import invite
from fedspan.transports.http.server import attach, read_link
from fedspan.transports.http.signing import ServerSigner, UnsignedSigner
from fedspan.transports.http.transport import ServerTransport
from helpers.reply_transport import exchanged
from helpers.sites import SITES, local_values, run_values, site_files
from helpers.stage import Deployment
from helpers.submitted_runs import finish, rounds, submitted, wait_for_round, was_asked_twice

pytestmark = pytest.mark.slow
SECURE = {"secure": {"bits": 64, "clip": 10.0}}
"""Norms of replies are not compared in a secure sum, so the plain run must not clip them either."""


def adapter(run: Path) -> dict[str, Any]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def require_close(one: Path, other: Path, relative: float = 1e-6) -> None:
    mine, theirs = adapter(one), adapter(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert float((value - theirs[name]).norm()) <= relative * float(value.norm()), name


@pytest.fixture
def files(tiny_folder: Path, tmp_path: Path) -> dict[str, Path]:
    return site_files(tiny_folder / "corpus.csv", tmp_path)


def test_a_deployment_gives_the_plain_adapter_and_a_node_that_is_killed_costs_no_round(
    files: dict[str, Path], tiny_folder: Path, tmp_path: Path
) -> None:
    with Deployment(tmp_path / "deployment") as made:
        for site in SITES:
            limits = {"secure_only": True}
            made.join(site, made.node_file(site, files[site], limits=limits))
        values = run_values(
            tiny_folder, {"name": "fedit", "r": 2}, federation={**SECURE, "deadline": 120.0, "rounds": 3}
        )
        secure_config = tmp_path / "secure_config.yaml"

        plain = tmp_path / "plain"
        open_values = {
            **values,
            "federation": {key: value for key, value in values["federation"].items() if key != "secure"},
        }
        fedspan.run(local_values(open_values, files["all"], {"name": "loop"}), plain)
        secure_config.write_text(yaml.safe_dump(values))
        run = tmp_path / "secure"
        finish(submitted(made, secure_config, run), made)
        require_close(plain, run)

        # In the open, these nodes take no part.
        secure_config.write_text(yaml.safe_dump(open_values))
        done = made.submit(secure_config, tmp_path / "open", "--wait", "20", check=False)
        assert done.returncode == 2
        assert "limits.secure_only" in done.stdout + done.stderr

        # Between the shares and the vector: while it trains, a node goes; back, it gets its order again.
        values["training"] = {**values["training"], "local_steps": 600}
        secure_config.write_text(yaml.safe_dump(values))
        run = tmp_path / "killed"
        process = submitted(made, secure_config, run)
        wait_for_round(run, 1, process)
        made.wait_for_training(SITES[0], used=0.5)  # more than the other exchanges of a secure round take
        made.end(SITES[0])
        made.join(SITES[0], made.folder / f"{SITES[0]}.yaml")
        finish(process, made)
        assert [row["round"] for row in rounds(run)] == [1, 2, 3]
        failures = [one for row in rounds(run) for one in row.get("failures", [])]
        assert {one["client"] for one in failures} <= {SITES[0]}
        assert failures or was_asked_twice(made, SITES[0])


VICTIM = SITES[0]
ROUNDS = 3
"""Of all runs together: the limit of every node."""


class Scene(NamedTuple):
    """A server and three nodes at work."""

    made: Deployment
    link: Any
    signer: Any
    values: dict[str, Any]

    def invite(self, run: str, values: Mapping[str, Any]) -> dict[str, tuple[int, Introduction]]:
        """Invite all nodes to a run; their replies by id."""
        invitation = Invitation(run=run, version=__version__, config=json.dumps(values))
        found: dict[str, tuple[int, Introduction]] = {}
        for node, back in invite(self.link, invitation.to_envelope(), 120.0, self.signer):
            assert isinstance(back, Envelope), back
            introduction = read_header(Introduction, back)
            found[introduction.id] = node, introduction
            if len(found) == len(SITES):
                break
        return found

    def joined(self, run: str, lie: Callable[[str, Any], Any] = lambda id, asked: asked, **federation: Any) -> Any:
        """Begin a run that all nodes join, over a transport that changes what it sends."""
        values = {**self.values, "federation": {**self.values["federation"], **federation}}
        met = self.invite(run, values)
        assert {introduction.refused for _, introduction in met.values()} == {None}
        prepared = prepare_server(build_server_config(values))
        clients = build_server_clients(
            prepared.config,
            prepared.engine.adapted.spec,
            {id: introduction.examples for id, (_, introduction) in met.items()},
        )
        inner = ServerTransport(self.link, {id: node for id, (node, _) in met.items()}, signer=self.signer)
        transport = Lying(inner, lie)
        digest = Invitation(run=run, version=__version__, config=json.dumps(values)).digest
        made = connect(prepared, transport, clients=clients, run=run, agreed=digest)
        return made.federation, transport


class Lying(Transport):
    """A transport that changes what it sends, and records what comes back."""

    def __init__(self, inner: Transport, lie: Callable[[str, Any], Any]) -> None:
        self.inner, self.lie = inner, lie
        self.sent: list[Any] = []
        self.came: list[tuple[str, Envelope | str]] = []

    def exchange(self, orders: Orders, on_reply: OnReply, seconds: float, *, wait_for_offline: bool = False) -> None:
        def changed(id: str) -> Envelope:
            asked = self.lie(id, decode_request(orders[id]))
            self.sent.append(asked)
            return asked.to_envelope()

        def replied(id: str, back: Envelope | str) -> bool:
            self.came.append((id, back))
            return on_reply(id, back)

        self.inner.exchange(Orders(orders.task, orders, changed), replied, seconds, wait_for_offline=wait_for_offline)


@pytest.fixture(scope="module")
def scene(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("hostile-server")
    files = site_files(tiny_folder / "corpus.csv", folder)
    values = run_values(tiny_folder, {"name": "fedit", "r": 2}, federation={"retries": 0, "deadline": 120.0})
    with Deployment(folder / "deployment") as made:
        limits = {"rounds": ROUNDS, "models": [values["model"]["name"]], "evaluations": 1}
        paths = {site: made.node_file(site, files[site], limits=limits) for site in SITES}
        prints = {site: compute_fingerprint((made.folder / f"{site}.key.pub").read_text()) for site in SITES}
        for site in SITES:
            peers = {id: mark for id, mark in prints.items() if id != site}
            paths[site].write_text(yaml.safe_dump({**yaml.safe_load(paths[site].read_text()), "peers": peers}))
            made.join(site, paths[site])
        link = read_link(made.server)
        signer = ServerSigner(link.folder, lambda: {id: one.key.encode() for id, one in read_admissions(link).items()})
        with attach(link, 2**24) as run:
            until = time.monotonic() + 120
            while len(set(run.list_online())) < len(SITES):
                assert time.monotonic() < until, made.logs()
                time.sleep(0.2)
            yield Scene(made, run, signer, values)


def test_configs_beyond_the_limits_are_refused(scene: Scene) -> None:
    lies: list[tuple[str, dict[str, Any], str]] = [
        ("training", {"local_steps": 10**12}, "limits.steps"),
        ("training", {"batch_size": 10**9}, "limits.batch"),
        ("model", {"adapter": "somebody/adapter"}, "this node does not allow the adapter 'somebody/adapter'"),
        ("model", {"name": "somebody/model"}, "limits.models"),
        ("model", {"pretrained": False}, "limits.from_scratch"),
        ("federation", {"rounds": 50}, "limits.rounds"),
    ]
    for number, (section, own, why) in enumerate(lies):
        met = scene.invite(f"lie-{number}", {**scene.values, section: {**scene.values[section], **own}})
        assert all(why in (introduction.refused or "") for _, introduction in met.values()), met


def test_a_forged_order_with_the_largest_serial_does_not_stop_the_server_s_own_orders(scene: Scene) -> None:
    """It was stored on the server by another process. The node refuses it, and its serial counts for nothing."""
    _, transport = scene.joined("forged")
    order = Order("train", 0, 0, 0.0, VICTIM, None, b"", run="forged", serial=2**53 - 1)
    forged = ServerTransport(scene.link, transport.inner.nodes, signer=UnsignedSigner())
    assert "ValueError" in str(exchanged(forged, {VICTIM: order.to_envelope()}, 120.0)[VICTIM])
    # by its serial the next order would be refused before its learning rate is compared
    assert "the order has lr 0.0" in refusal(transport.inner, order)


def test_a_victim_is_not_revealed_by_what_the_others_are_told(scene: Scene) -> None:
    """The others train with a rate of 0: alone in the order, and in the agreement as well."""

    def lie(id: str, asked: Any) -> Any:
        return replace(asked, lr=0.0) if isinstance(asked, Order) and id != VICTIM else asked

    federation, transport = scene.joined("secure", lie, secure={})
    with pytest.raises(FedspanError, match=r"the order has lr 0\.0"):
        federation.run_round(federation.begin())
    replies = [back for _, back in transport.came if isinstance(back, Envelope) and '"task":"unmask"' in back.header]
    assert not any(read_header(UnmaskReply, back).shares for back in replies)


def test_orders_that_differ_from_the_config_are_refused_and_totals_end(scene: Scene) -> None:
    federation, transport = scene.joined("plain", rounds=2)
    first = federation.run_round(federation.begin())
    assert not first.failures, scene.made.logs()
    order = next(asked for asked in transport.sent if asked.to == VICTIM)
    weightless = replace(order.client, weight=0.0)
    for change, why in (
        ({"round": 49}, "an order for round 50 of a run with 2 rounds"),
        ({"lr": 0.0}, "the order has lr 0.0"),
        ({"client": weightless}, "the order has client.weight 0.0"),
        ({"round": 2, "task": "statistics"}, "an order for round 3"),
    ):
        assert why in refusal(transport.inner, replace(order, **change))
    evaluation = replace(order, task="evaluate", client=None)
    assert not refusal(transport.inner, evaluation)
    assert "this server has used 1 evaluations of this node's data" in refusal(transport.inner, evaluation)
    # Every model is another question about the data, and a new run starts no new count. Whether the victim trained in
    # the secure round, too, depends on how early the others refused it.
    assert not federation.run_round(first.progress).failures
    last = [asked for asked in transport.sent if asked.to == VICTIM][-1]
    book = json.loads((scene.made.folder / f"{VICTIM}-state" / "budget.json").read_text())
    used = sum(run["rounds"] for account in book["accounts"].values() for run in account["runs"].values())
    assert used in (ROUNDS - 1, ROUNDS)
    bodies = itertools.cycle([order.body, last.body])
    for body in itertools.islice(bodies, ROUNDS - used):
        assert not refusal(transport.inner, replace(last, body=body))
    assert f"this server has used {ROUNDS} rounds of this node's data" in refusal(
        transport.inner, replace(last, body=next(bodies))
    )
    rounds = {**scene.values["federation"], "rounds": 1}
    met = scene.invite("another name", {**scene.values, "federation": rounds})
    assert f"this server has used {ROUNDS} rounds of this node's data" in (met[VICTIM][1].refused or "")


def test_a_deleted_record_restores_nothing(scene: Scene) -> None:
    """The last test: the node answers nothing any more until a person has put that right."""
    folder = scene.made.folder / f"{VICTIM}-state"
    (folder / "budget.json").unlink()
    introduction = scene.invite("after", scene.values)[VICTIM][1]
    assert introduction.refused == "an error; see the client's own log"
    assert "the record of what servers have used of this node's data is missing" in scene.made.log(VICTIM)


def refusal(transport: Transport, order: Order) -> str:
    """Why a node refuses an order, signed and with a new serial."""
    back = exchanged(transport, {order.to: replace(order, serial=serial()).to_envelope()}, 120.0)[order.to]
    assert isinstance(back, Envelope), back
    return decode_reply(back).failed or ""
