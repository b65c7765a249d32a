"""Owners under secure sums: what they allow, what is remembered, and a server that lies to them, replayed."""

import functools
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

pytest.importorskip("cryptography", reason="the extra fedspan[secagg] is not installed")
pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")

from fedspan import __version__
from fedspan.assembly.run import prepare
from fedspan.assembly.server import build_method
from fedspan.deployment.handshake import Introduction, Invitation
from fedspan.deployment.limits import OrderTerms
from fedspan.deployment.node import NodeService
from fedspan.deployment.node_folder import STATE
from fedspan.deployment.usage import BOOK
from fedspan.errors import FedspanError
from fedspan.federation.aggregation.secure import SecureAggregation
from fedspan.federation.protocol import Envelope, Order, decode_reply, read_header, serial
from fedspan.federation.secagg import messages
from fedspan.federation.secagg.messages import KeysOrder, SharesOrder, decode_request
from fedspan.federation.secagg.session import SecureSession
from helpers import refusals, tiny
from helpers.families import others_slow
from helpers.node_service import introduced
from helpers.secure_nodes import CLINICS, node, served, values

VICTIM = CLINICS[0]


class Lying:
    """A node behind a server that changes what it sends it."""

    def __init__(self, service: NodeService, change: Any, headers: list[str]) -> None:
        self.service, self.change, self.headers = service, change, headers

    def answer(self, envelope: Envelope) -> Envelope:
        asked = self.change(messages.decode_request(envelope))
        back = self.service.answer(asked.to_envelope())
        self.headers.append(back.header)
        return back


def of_order(**changes: Any) -> Any:
    """Changes to the orders to train; a change of the client's facts is a mapping."""

    def change(asked: Any) -> Any:
        if not isinstance(asked, Order):
            return asked
        facts = {"client": replace(asked.client, **changes["client"])} if "client" in changes else {}
        return replace(asked, **{**changes, **facts})

    return change


def of_agreement(**changes: Any) -> Any:
    def change(asked: Any) -> Any:
        if not isinstance(asked, messages.SharesOrder):
            return asked
        return asked.model_copy(update={"agreement": asked.agreement.model_copy(update=changes)})

    return change


def both(**changes: Any) -> Any:
    """A lie that is consistent between the agreement and the order."""

    def change(asked: Any) -> Any:
        return of_order(**changes)(of_agreement(**changes)(asked))

    return change


@pytest.mark.parametrize("is_known", [True, False])
def test_the_others_are_invited_again_to_train_nothing(
    is_known: bool, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config is compared before the mask, too, if a node should take another one for a run that it knows."""
    run, transport = served(tiny_folder, tmp_path)
    honest, told = transport.make, list[str]()
    if not is_known:
        monkeypatch.setattr(NodeService, "_require_same_run", lambda self, invitation: None)

    def invited(id: str) -> Any:
        service = honest(id)

        def change(asked: Any) -> Any:
            if id != VICTIM and isinstance(asked, Order):
                config = values(tiny_folder, secure={})
                config["training"] |= {"optimizer": "sgd", "max_grad_norm": 1e-12}
                introduction = introduced(service, config)
                told.append(introduction.refused or "")
            return asked

        return Lying(service, change, told)

    transport.make = invited
    if is_known:
        assert not run.federation.run_round(run.federation.begin()).failures
        assert "`run`: this node knows this run with another config or base model. Start a new run." in told
    else:
        with pytest.raises(FedspanError):
            run.federation.run_round(run.federation.begin())
        assert any("`message.agreement.config`: " in header for header in told)


LIES: dict[str, tuple[Any, str]] = {
    "rate": (of_order(lr=0.0), "the order has lr 0.0"),
    "weight": (of_order(client={"weight": 0.0}), "the order has client.weight 0.0"),
    "scaling": (of_order(client={"scaling": 0.0}), "the order has client.scaling 0.0"),
    "body": (of_order(body=b"another model"), "the order's model differs from the agreement of the sum's clients"),
    "agreed rate": (both(lr=0.0), "the order has lr 0.0"),
    "clip": (of_agreement(clip=1e-9), "`message.agreement.clip`: 1e-09 is not accepted"),
    "bits": (of_agreement(bits=64), "message.agreement.bits"),
    "config": (of_agreement(config="0" * 64), "message.agreement.config"),
    "top": (of_agreement(top=1e3), "have another agreement than this client"),
    "large top": (
        of_agreement(top=1e9),
        "`message.agreement.top`: with 3 clients and weights up to 1e+09, this node's",
    ),
    "clients": (of_agreement(clients=10**6), "`message.agreement.clients`: 1000000 is not accepted"),
}
TOPS = (1e-9, 1.0, 1e3)
LIES |= {f"victim's top {top}": (of_agreement(top=top), "have another agreement than this client") for top in TOPS}


@pytest.mark.parametrize("lie", others_slow(LIES, ["body", "top", "victim's top 1000.0"]))
def test_the_others_are_told_to_contribute_nothing(lie: str, tiny_folder: Path, tmp_path: Path) -> None:
    """Two of three nodes are to send nothing but their masks, so that the sum is the victim's update; or the victim
    alone is told another largest weight, so that the sum is noise."""
    change, why = LIES[lie]
    run, transport = served(tiny_folder, tmp_path)
    headers: list[str] = []
    honest, others = transport.make, not lie.startswith("victim")
    transport.make = lambda id: Lying(honest(id), change, headers) if (id != VICTIM) == others else honest(id)
    with refusals.refused("good replies", "good replies") as stopped:
        run.federation.run_round(run.federation.begin())
    assert why in " ".join([*headers, str(stopped.value)]), headers
    unmasked = [one for one in transport.came if '"task":"unmask"' in one.header]
    assert all(VICTIM not in read_header(messages.UnmaskReply, one).shares for one in unmasked)


TOO_MANY = "the number of keys, 3"
COARSE: dict[str, tuple[dict[str, Any], str]] = {
    "top": ({"top": 1e7}, "would be rounded to"),
    "many": ({"clients": 2**24 - 1}, TOO_MANY),
    "two": ({"clients": 2}, TOO_MANY),
    "both": ({"top": 1e9, "clients": 10**6}, TOO_MANY),
}


@pytest.mark.parametrize("lie", others_slow(COARSE, ["top"]))
def test_all_nodes_are_told_the_same_steps_that_round_changes_to_zero(
    lie: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their agreements are equal, so their masks would cancel; with coarse steps only the heaviest change remains."""
    change, why = COARSE[lie]
    run, transport = served(tiny_folder, tmp_path)
    honest = SecureAggregation._agree
    monkeypatch.setattr(SecureAggregation, "_agree", lambda self, *told: honest(self, *told).model_copy(update=change))
    with pytest.raises(FedspanError, match=why):
        run.federation.run_round(run.federation.begin())
    assert not any('"task":"train"' in one.header for one in transport.came)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [32, 64])
def test_a_clip_beyond_all_changes_silences_no_node(bits: int, tiny_folder: Path, tmp_path: Path) -> None:
    """The server chooses ``clip`` and with it the steps; four times as large as any entry, they would round all changes
    to zero, and slightly smaller ones all but the heaviest."""

    def run_round(folder: str, secure: dict[str, Any]) -> torch.Tensor:
        federation = served(tiny_folder, tmp_path / folder, secure=secure)[0].federation
        begin = federation.begin()
        after = federation.run_round(begin).progress.state.tensors
        return torch.cat([(after[name] - value).flatten() for name, value in begin.state.tensors.items()])

    exact = run_round("exact", {})
    clip = 4 * float(exact.abs().max()) * (2 ** (bits - 1) // 3 - 1)
    coarse = run_round("coarse", {"clip": clip, "bits": bits})
    assert float(coarse.abs().max()) > float(exact.abs().max())  # whole steps, of which most entries have none
    assert float(torch.cosine_similarity(coarse, exact, dim=0)) > 0.2


@pytest.mark.parametrize(
    ("clients", "weight_ratio", "bits", "is_accepted"),
    [
        (3, 1e4, 32, True),
        (100, 300.0, 32, True),
        (100, 400.0, 32, False),
        (128, 250.0, 32, True),
        (128, 260.0, 32, False),
        (128, 65_000.0, 64, True),
        (128, 66_000.0, 64, False),
    ],
)
def test_the_weights_at_which_a_node_still_joins_an_honest_sum(
    clients: int, weight_ratio: float, bits: Literal[32, 64], is_accepted: bool, tiny_folder: Path
) -> None:
    """The default ``max_weight_ratio`` lets the heaviest client weigh four times the median."""
    config = tiny.config(tiny_folder, federation={"clients_per_round": None, "secure": {"bits": bits}})
    prepared = prepare(config)
    client = next(iter(prepared.federation.clients.values())).client
    terms = OrderTerms(config, build_method(config, prepared.engine.adapted.spec), client, frozenset(), "")
    agreement = messages.Agreement(
        config="",
        task="train",
        round=0,
        lr=config.build_training_settings().compute_lr(0, config.federation.rounds),
        model="0" * 64,
        clients=clients,
        threshold=clients,
        clip=100.0,
        bits=bits,
        top=client.examples * weight_ratio,
        layout="0" * 64,
        facts="0" * 64,
    )
    with refusals.refused("message.agreement.clients"):  # the time for shares grows with the square
        terms.require_agreement(agreement.model_copy(update={"clients": 129}))
    if is_accepted:
        terms.require_agreement(agreement)
    else:
        with refusals.refused("message.agreement.top"):
            terms.require_agreement(agreement)


def test_nodes_that_know_each_other_let_no_others_in(tiny_folder: Path, tmp_path: Path) -> None:
    """Two nodes with pinned keys; the third is the server's invention, with a key of its own."""
    keys = pytest.importorskip("fedspan.transports.http.keys", reason="the extra fedspan[deploy] is not installed")
    from fedspan.crypto.identity import compute_fingerprint

    public = {id: keys.make_node_key(tmp_path / f"{id}.key") for id in CLINICS}
    prints = {id: compute_fingerprint(path.read_text()) for id, path in public.items()}

    def service(id: str, peers: Mapping[str, str] | None) -> NodeService:
        own = node(id, tiny_folder, tmp_path / "nodes")
        return NodeService(own.model_copy(update={"key": str(tmp_path / f"{id}.key"), "peers": peers}))

    run, transport = served(tiny_folder, tmp_path / "nodes")
    for id in CLINICS:  # they joined without keys
        (tmp_path / "nodes" / f"{id}.budget").rename(tmp_path / f"{id}.key.budget")
    transport.make = functools.cache(lambda id: service(id, prints))
    assert not run.federation.run_round(run.federation.begin()).failures
    invented = {**prints, CLINICS[2]: prints[CLINICS[1]]}
    transport.make = functools.cache(lambda id: service(id, invented if id == VICTIM else prints))
    with refusals.refused("good replies", "'clinic-c' cannot share a sum with this node: its key has another finger"):
        run.federation.run_round(run.federation.begin())
    others = {**dict.fromkeys(CLINICS, prints), VICTIM: {CLINICS[1]: prints[CLINICS[1]]}}
    transport.make = functools.cache(lambda id: service(id, others[id]))
    with refusals.refused("good replies", "'clinic-c' cannot share a sum with this node: it is not in this node's"):
        run.federation.run_round(run.federation.begin())
    more = {**prints, "clinic-d": prints[VICTIM]}
    transport.make = functools.cache(lambda id: service(id, more))  # by default, a sum has all that an owner lists
    with refusals.refused("good replies", r"a sum of 3 clients is too small\. Expected at least 4 clients"):
        run.federation.run_round(run.federation.begin())


def test_nodes_continue_after_a_restart_between_any_two_phases(tiny_folder: Path, tmp_path: Path) -> None:
    run, transport = served(tiny_folder, tmp_path, restarts=True, secure_only=True)
    first = run.federation.run_round(run.federation.begin())
    assert not first.failures
    transport.make = functools.cache(transport.make)  # one more restart, before the second round
    second = run.federation.run_round(first.progress)
    assert not second.failures
    assert second.progress.last_rounds == dict.fromkeys(CLINICS, 1)
    assert len(transport.sent) == 2 * 5 * 3
    sessions = sorted(tmp_path.rglob("session.json"))
    assert len(sessions) == 3
    assert {path.stat().st_mode & 0o777 for path in sessions} == {0o600}
    validation, test = run.evaluator.evaluate_clients(second.progress)
    assert (validation is None, set(test.by_client)) == (False, set(CLINICS))


@pytest.mark.parametrize("epsilon", [None, 1.0])
def test_no_training_loss_leaves_the_nodes_of_a_secure_sum(
    epsilon: float | None, tiny_folder: Path, tmp_path: Path
) -> None:
    """Masks hide the reply, of which a loss would tell; without noise an owner chooses metrics as measured."""
    run, transport = served(tiny_folder, tmp_path, evaluation_epsilon=epsilon)
    result = run.federation.run_round(run.federation.begin())
    assert not result.failures
    replies = [
        decode_reply(back)
        for sent, back in zip(transport.sent, transport.came, strict=True)
        if messages.decode_request(sent).task == "train"
    ]
    assert [len(reply.parts) for reply in replies] == [int(epsilon is None)] * 3
    assert math.isnan(result.loss) is (epsilon is not None)


def test_every_envelope_that_comes_again_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    run, transport = served(tiny_folder, tmp_path)
    run.federation.run_round(run.federation.begin())
    transport.make.cache_clear()  # what a node has answered outlives its process
    for envelope in transport.sent:
        asked = messages.decode_request(envelope)
        back = transport.make(asked.to).answer(envelope)
        kind = messages.KeysReply if asked.task == "keys" else messages.UnmaskReply if asked.task == "unmask" else None
        if isinstance(asked, Order):
            assert "arrived before" in (decode_reply(back).failed or "")
        elif kind is not None:
            assert "arrived before" in (read_header(kind, back).failed or "")
        newer = asked.serial + 10**9 + len(transport.came)
        if not isinstance(asked, Order):  # newer by its serial: the session still knows
            again = transport.make(asked.to).answer(asked.model_copy(update={"serial": newer}).to_envelope())
            assert '"failed":"`message.session`: ' in again.header


def test_a_node_that_sends_nothing_in_plaintext_joins_no_plaintext_run(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node("clinic-a", tiny_folder, tmp_path, secure_only=True))
    invitation = Invitation(run="run", version=__version__, config=json.dumps(values(tiny_folder)))
    told = read_header(Introduction, service.answer(invitation.to_envelope()))
    assert "`limits.secure_only`: this node only joins runs with federation.secure" in (told.refused or "")
    assert not list(tmp_path.rglob("invitation.json"))


@pytest.mark.parametrize(
    ("selected", "limits", "joins"), [(3, {}, False), ("3", {}, False), (4, {}, True), (3, {"secure_clients": 3}, True)]
)
def test_a_node_joins_no_run_whose_rounds_select_too_few_nodes(
    selected: object, limits: dict[str, int], joins: bool, tiny_folder: Path, tmp_path: Path
) -> None:
    prints = {f"clinic-{letter}": "SHA256:" + "A" * 43 for letter in "abcd"}
    owner = node("clinic-a", tiny_folder, tmp_path, **limits).model_copy(update={"peers": prints})
    config = values(tiny_folder, clients_per_round=selected, secure={})
    refused = introduced(NodeService(owner), config).refused
    expected = "`federation.clients_per_round`: a sum of 3 nodes is too small: this node requires 4. Expected at least"
    assert refused is None if joins else expected in (refused or "")


def test_a_server_cannot_leave_the_masks_out_later(tiny_folder: Path, tmp_path: Path) -> None:
    run, transport = served(tiny_folder, tmp_path, secure_only=True)
    run.federation.run_round(run.federation.begin())
    order = next(asked for asked in map(messages.decode_request, transport.sent) if isinstance(asked, Order))
    answer = decode_reply(transport.make(order.to).answer(replace(order, secure=None, serial=2**52).to_envelope()))
    assert "this run sends replies only under masks" in (answer.failed or "")
    assert not answer.body


def test_a_node_says_in_how_small_a_sum_it_is(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three is gone before its vector came: the other two do not sign that the sum is of them."""
    run, transport = served(tiny_folder, tmp_path, lambda asked: asked.to == "clinic-c" and asked.task == "train")
    begin = run.federation.begin()
    monkeypatch.setattr(SecureSession, "require", lambda self, clients: None)  # a server that goes on with two
    too_small = r"`limits\.secure_clients`: a sum of 2 clients is too small\. Expected at least 3 clients"
    with pytest.raises(FedspanError, match=too_small):
        run.federation.run_round(begin)
    answers = [one for one in transport.came if '"task":"confirm"' in one.header]
    assert len(answers) == 2
    assert all(not read_header(messages.ConfirmReply, one).signature for one in answers)
    assert not any('"task":"unmask"' in one.header for one in transport.came)


def test_a_round_that_the_server_lost_is_repeated_with_the_same_nodes(tiny_folder: Path, tmp_path: Path) -> None:
    """The second time, the nodes are restarted, and have revealed shares in a sum of the model."""
    run, transport = served(tiny_folder, tmp_path)
    begin = run.federation.begin()
    once = run.federation.run_round(begin)
    transport.make.cache_clear()
    again = run.federation.run_round(begin)
    assert not once.failures
    assert not again.failures
    assert once.loss == again.loss
    assert len(list(tmp_path.glob("*/sums/*/*.json"))) == 3
    books = list(tmp_path.glob(f"*/{BOOK}"))
    assert len(books) == 3
    for path in books:  # keys and shares of two sums
        (account,) = json.loads(path.read_text())["accounts"].values()
        assert [use["exchanges"] for use in account["runs"].values()] == [4]
    assert {
        asked.agreement.threshold for asked in map(decode_request, transport.sent) if isinstance(asked, SharesOrder)
    } == {3}
    for path in tmp_path.glob("*/sums/*/*.json"):  # as if the sum had been of other nodes
        path.write_text(path.read_text().replace(CLINICS[2], "clinic-d"))
    with refusals.refused("good replies", "in a sum of this model with other clients or other facts"):
        run.federation.run_round(begin)
    for path in tmp_path.glob("*/sums"):
        shutil.rmtree(path)
    assert not run.federation.run_round(begin).failures


def test_the_number_of_a_session_is_not_used_again_when_the_state_of_its_run_is_removed(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """The server may know keys of the old session: those of clients that dropped out of its sum."""
    run, transport = served(tiny_folder, tmp_path)
    run.federation.run_round(run.federation.begin())
    states = sorted(tmp_path.glob(f"*/*/{STATE}"))
    assert len(states) == 3
    for path in states:  # as ``remove_old_states`` does
        shutil.rmtree(path)
    transport.make.cache_clear()
    asked = next(asked for asked in map(decode_request, transport.sent) if isinstance(asked, KeysOrder))
    repeated = asked.model_copy(update={"serial": serial()}).to_envelope()
    assert "a number above" in transport.make(asked.to).answer(repeated).header


def test_three_nodes_do_not_withstand_two_colluders(tiny_folder: Path, tmp_path: Path) -> None:
    run, transport = served(tiny_folder, tmp_path, colluders=2)
    with refusals.refused("good replies", r"a sum of 3 clients is too small\. Expected at least 4 clients"):
        run.federation.run_round(run.federation.begin())
    assert not any('"task":"train"' in reply.header for reply in transport.came)
