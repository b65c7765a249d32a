"""A client's half of secure aggregation: phases go forward only, and nobody is told both shares of a client."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("cryptography", reason="the extra fedspan[secagg] is not installed")
pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")

from fedspan.clients.secagg import SecureClient
from fedspan.clients.secagg_store import DiskSessionStore, MemorySessionStore, SessionStore
from fedspan.core.values import Client, Contribution, Message
from fedspan.crypto.identity import Identity, compute_fingerprint, load_identity
from fedspan.crypto.keys import SessionKeys
from fedspan.crypto.masks import Ring, add_mask
from fedspan.crypto.shares import combine
from fedspan.errors import FedspanError
from fedspan.federation import serialization
from fedspan.federation.changes import clip_change, compute_change
from fedspan.federation.config import SecureSettings
from fedspan.federation.protocol import ClientFacts, Masking, Order
from fedspan.federation.secagg import messages
from fedspan.federation.secagg.session import Masked, SharesError, require_openable, unmask

IDS = ("a", "b", "c", "d")
BODY = serialization.encode(Message({}))
ZEROS = serialization.encode(Message({"layer/A": torch.zeros(2, 3)}))
START = {"layer/A": torch.arange(6.0).view(2, 3), "layer/B": torch.ones(4)}


class Sums:
    """A session, run by hand."""

    def __init__(
        self,
        session_store: SessionStore,
        weights: Mapping[str, float],
        start: Mapping[str, Tensor],
        session: int = 1,
        **options: Any,
    ) -> None:
        self.sessions, self.weights, self.start, self.session = session_store, weights, start, session
        self.clip, self.bits = options.get("clip", 10.0), options.get("bits", 32)
        self.keys: dict[str, messages.PublicKeys] = {}
        self.sealed: dict[str, Mapping[str, bytes]] = {}
        self.agreements: dict[str, messages.Agreement] = {}
        self.confirmed: dict[str, messages.ConfirmReply] = {}

    def client(self, id: str, least: int = 3, **owner: Any) -> SecureClient:
        return SecureClient(id, self.sessions, least, **owner)

    def agreement(self, **changes: Any) -> messages.Agreement:
        given: dict[str, Any] = {
            "config": "",
            "task": "train",
            "round": 0,
            "lr": 0.1,
            "model": hashlib.sha256(BODY).hexdigest(),
            "clients": len(self.keys),
            "threshold": self.threshold(),
            "clip": self.clip,
            "bits": self.bits,
            "top": max(self.weights[id] for id in self.keys),
            "layout": messages.compute_layout_digest(messages.create_initial_values(self.start, self.start)),
            "facts": messages.compute_facts_digest(self.facts()),
        }
        return messages.Agreement(**{**given, **changes})

    def facts(self) -> tuple[ClientFacts, ...]:
        return tuple(ClientFacts.from_client(self.describe(id)) for id in sorted(self.keys))

    def describe(self, id: str) -> Client:
        return Client(id, 2, 1.0, 1, self.weights[id], None)

    def common(self, id: str) -> dict[str, Any]:
        return {"run": "run", "serial": 1, "round": 0, "attempt": 0, "to": id, "session": self.session}

    def give_keys(self, *ids: str) -> None:
        for id in ids:
            answer = self.client(id).answer(messages.KeysOrder(**self.common(id)))
            self.keys[id] = answer.keys

    def shares_order(self, id: str, **changes: Any) -> messages.SharesOrder:
        given = {"peers": self.keys, "agreement": self.agreed(id), "facts": self.facts(), **changes}
        return messages.SharesOrder(**self.common(id), **given)

    def agreed(self, id: str) -> messages.Agreement:
        """What a client is told to agree to."""
        return self.agreements.get(id, self.agreement())

    def threshold(self) -> int:
        return SecureSettings().compute_threshold(len(self.keys))

    def give_shares(self, *ids: str) -> None:
        for id in ids:
            answer = self.client(id).answer(self.shares_order(id))
            self.sealed[id] = answer.sealed

    def present(self) -> tuple[str, ...]:
        return tuple(sorted(self.sealed))

    def order(self, id: str, **changes: Any) -> tuple[Order, Masking]:
        masking = Masking(session=self.session, peers=changes.pop("peers", self.present()))
        order = Order("train", 0, 0, self.agreed(id).lr, id, self.describe(id), BODY, run="run", secure=masking)
        return replace(order, **changes), masking

    def vector(self, id: str, values: Mapping[str, Tensor], **changes: Any) -> np.ndarray[Any, Any]:
        order, masking = self.order(id, **changes)
        message, _ = self.client(id).mask(order, masking, Contribution(sum=values), self.start)
        return message.tensors[messages.MASKED].numpy()

    def confirm_order(self, id: str, stayed: Any, **changes: Any) -> messages.ConfirmOrder:
        present = self.present()
        given: dict[str, Any] = {
            "survivors": tuple(peer for peer in present if peer in stayed),
            "dropped": tuple(peer for peer in present if peer not in stayed),
            "sealed": {peer: self.sealed[peer][id] for peer in present},
        }
        return messages.ConfirmOrder(**self.common(id), **{**given, **changes})

    def confirm(self, survivors: Any, *ids: str) -> None:
        for id in ids:
            self.confirmed[id] = self.client(id).answer(self.confirm_order(id, survivors))

    def unmask_order(self, id: str) -> messages.UnmaskOrder:
        return messages.UnmaskOrder(
            **self.common(id), signatures={peer: answer.signature for peer, answer in self.confirmed.items()}
        )

    def opened(self, id: str, survivors: Any) -> Mapping[str, bytes]:
        if not self.confirmed:
            self.confirm(survivors, *survivors)
        answer = self.client(id).answer(self.unmask_order(id))
        return answer.shares

    def mean(self, vectors: Mapping[str, np.ndarray[Any, Any]], opening: Any) -> tuple[dict[str, Tensor], float]:
        """The mean of the changes, and what an entry may be off by."""
        ring, total, _ = self.unmask(vectors, {id: self.opened(id, set(vectors)) for id in opening})
        top = self.agreement().top
        share = sum(self.weights[id] / top for id in vectors)
        return messages.unflatten_change(ring.decode(total) / share, self.start), ring.bound_error(len(vectors)) / share

    def unmask(self, vectors: Mapping[str, Any], opened: Mapping[str, Any]) -> tuple[Ring, Any, Mapping[str, str]]:
        """The ring, the sum without its masks, and the clients that revealed wrong shares."""
        ring = Ring(self.bits, self.clip, len(self.keys))
        total = np.zeros(sum(value.numel() for value in self.start.values()), ring.dtype)
        for vector in vectors.values():
            total += vector.view(ring.dtype)
        transcript = self.agreement().build_transcript(messages.build_session_context("run", self.session), self.keys)
        unopened = {id: answer.unopened for id, answer in self.confirmed.items()}
        needed = self.threshold()
        masked = Masked(transcript, self.present(), needed, self.keys, self.sealed, set(vectors), unopened)
        return ring, total, unmask(total, masked, opened)


def sums(session_store: SessionStore | None = None, **options: Any) -> Sums:
    return Sums(session_store or MemorySessionStore(), dict.fromkeys(IDS, 1.0), START, **options)


def sums_of_keys() -> Sums:
    made = sums()
    made.give_keys(*IDS)
    return made


def sums_of_shares() -> Sums:
    made = sums_of_keys()
    made.give_shares(*IDS)
    return made


shapes = st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(3, 9), st.sampled_from([32, 64]), st.floats(0.01, 1000.0), st.integers(0, 2**32))
def test_the_mean_is_that_of_the_survivors_within_the_bound(
    layout: list[list[int]], clients: int, bits: int, clip: float, seed: int
) -> None:
    """Any shapes and weights; some are gone before the shares, some after, some in the end."""
    rng = np.random.default_rng(seed)
    torch_rng = torch.Generator().manual_seed(seed)
    start = {f"layer-{n}/A": torch.randn(shape, generator=torch_rng) for n, shape in enumerate(layout)}
    ids = tuple(f"client-{number}" for number in range(clients))
    weights = {id: float(weight) for id, weight in zip(ids, rng.choice([0.5, 1, 3, 100], clients), strict=True)}
    made = Sums(MemorySessionStore(), weights, start, clip=clip, bits=bits)
    made.give_keys(*ids)
    spare = clients - made.threshold()
    gone = list(rng.permutation(ids))[: rng.integers(0, spare + 1)]
    early, middle, late = (set(gone[at::3]) for at in range(3))
    made.give_shares(*(id for id in ids if id not in early))
    present = [id for id in ids if id not in early]
    values = {
        id: {name: one + clip * torch.randn(one.shape, generator=torch_rng) for name, one in start.items()}
        for id in ids
    }
    vectors = {id: made.vector(id, values[id]) for id in present if id not in middle}
    mean, error = made.mean(vectors, [id for id in vectors if id not in late])
    total = sum(weights[id] for id in vectors)
    for name in start:
        exact = torch.zeros_like(start[name], dtype=torch.float64)
        for id in vectors:
            own, _ = clip_change(compute_change(Contribution(sum=values[id]), start), clip)
            exact += own[name] * (weights[id] / total)
        assert float((mean[name] - exact).abs().max()) <= error * (1 + 1e-9)


@pytest.fixture(params=["memory", "disk"])
def session_store(request: pytest.FixtureRequest, tmp_path: Path) -> SessionStore:
    return MemorySessionStore() if request.param == "memory" else DiskSessionStore(tmp_path)


def require_refused(what: str, call: Any, *arguments: Any, **options: Any) -> None:
    with pytest.raises(FedspanError, match=what):
        call(*arguments, **options)


def test_phases_come_in_their_order_each_once(session_store: SessionStore) -> None:
    made = sums(session_store)
    made.give_keys(*IDS)
    require_refused("a number above 1", made.client("a").answer, messages.KeysOrder(**made.common("a")))
    for id in IDS:
        made.sealed[id] = dict.fromkeys(IDS, bytes(92))
    require_refused("phases must come in order", made.client("a").require_maskable, *made.order("a"))
    require_refused("phases must come in order", made.client("a").answer, made.confirm_order("a", IDS))
    made.give_shares(*IDS)
    require_refused("phases must come in order", made.client("a").answer, made.shares_order("a"))
    require_refused("phases must come in order", made.client("a").answer, made.confirm_order("a", IDS))
    vectors = {id: made.vector(id, START) for id in IDS}
    require_refused("phases must come in order", made.vector, "a", START)
    require_refused("phases must come in order", made.client("a").answer, made.unmask_order("a"))
    mean, _ = made.mean(vectors, IDS)
    assert all(float(value.abs().max()) < 1e-6 for value in mean.values())
    for survivors in (IDS, IDS[:3]):  # again, and with another set of survivors
        require_refused("phases must come in order", made.client("a").answer, made.confirm_order("a", survivors))
    require_refused("phases must come in order", made.client("a").answer, made.unmask_order("a"))
    require_refused("a number above 1,", made.client("a").answer, messages.KeysOrder(**made.common("a")))


def test_a_new_session_ends_the_last_one_whatever_phase_it_was_in(session_store: SessionStore) -> None:
    made = sums(session_store)
    made.give_keys(*IDS)
    made.give_shares(*IDS)
    made.vector("a", START)
    later = sums(session_store, session=2)
    later.give_keys(*IDS)
    assert later.keys["a"] != made.keys["a"]
    require_refused("the client's last session", made.client("a").answer, made.confirm_order("a", IDS))
    require_refused("a number above 2,", made.client("a").answer, messages.KeysOrder(**made.common("a")))
    unknown = sums(session_store, session=3)
    unknown.keys = later.keys
    require_refused("the client's last session", unknown.client("a").answer, unknown.shares_order("a"))


def test_clients_that_are_not_what_they_seem_are_refused() -> None:
    made = sums_of_keys()
    others = {id: made.keys[id] for id in IDS[1:]}
    fewer = made.shares_order("a", peers={id: made.keys[id] for id in IDS[:3]})
    require_refused("the number of keys, 3", made.client("a").answer, fewer)
    client = made.client("a")
    require_refused("this client's own keys", client.answer, made.shares_order("a", peers=others))
    swapped = {**made.keys, "a": made.keys["b"]}
    require_refused("this client's own keys", client.answer, made.shares_order("a", peers=swapped))
    doubled = {**made.keys, "c": made.keys["b"]}
    require_refused("different keys", client.answer, made.shares_order("a", peers=doubled))
    for threshold in (2, 5):
        order = made.shares_order("a", agreement=made.agreement(threshold=threshold))
        require_refused("can open a sum, which does not withstand 1 that", client.answer, order)
    require_refused(
        r"`limits\.secure_clients`: a sum of 4 clients is too small\. Expected at least 5 clients",
        made.client("a", 5).answer,
        made.shares_order("a"),
    )
    with pytest.raises(ValueError, match="addressed to 'b'"):
        client.answer(made.shares_order("b"))
    made.give_shares(*IDS)  # none of that counts as the phase


def test_a_vector_is_masked_with_enough_of_those_who_got_shares_or_not_at_all() -> None:
    made = sums_of_shares()
    client = made.client("a")
    for peers in (("b", "c", "d"), (*IDS, "e"), ("a", "a", "b", "c")):
        require_refused("this client, and clients to which", client.require_maskable, *made.order("a", peers=peers))
    require_refused(
        r"`limits\.secure_clients`: a sum of 2 clients is too small\. Expected at least 3 clients, and at least 3 to",
        client.require_maskable,
        *made.order("a", peers=("a", "b")),
    )
    assert messages.compute_share(1.5, 1.25) == 1.0, "a larger weight counts as the largest one that all agreed on"
    assert messages.compute_share(0.25, 1.25) == 0.2
    client.require_maskable(*made.order("a"))
    client.require_maskable(*made.order("a"))  # asking is no phase


def test_no_client_learns_both_shares_of_another() -> None:
    made = sums_of_shares()
    for id in IDS:
        made.vector(id, START)
    client = made.client("a")
    wrong: list[tuple[Any, Any]] = [
        (IDS, ("d",)),  # both
        (("a", "b"), ("c",)),  # of d neither
        (("b", "c", "d"), ("a",)),  # itself as dropped
        ((*IDS, "e"), ()),
    ]
    for survivors, dropped in wrong:
        order = made.confirm_order("a", IDS, survivors=survivors, dropped=dropped)
        require_refused(r"message\.survivors", client.answer, order)
    order = made.confirm_order("a", IDS[:2])
    require_refused(r"`limits\.secure_clients`: a sum of 2 clients is too small", client.answer, order)
    shares = made.opened("a", IDS[:3])
    assert set(shares) == set(IDS)
    own = made.sealed
    assert len({share for share in shares.values()}) == 4
    assert all(len(sealed) == 4 for sealed in own.values())


def test_whose_shares_were_not_what_they_should_be_is_passed_over() -> None:
    """One client sealed for somebody else; if a second one sealed noise, too few are left."""
    made = sums_of_shares()
    vectors = {id: made.vector(id, START) for id in IDS}
    sealed = {**{peer: made.sealed[peer]["a"] for peer in IDS}, "c": made.sealed["c"]["d"]}
    too_few = made.confirm_order("a", IDS, sealed={**sealed, "b": bytes(200)})
    require_refused("only the shares of 2 of 4 clients can be opened", made.client("a").answer, too_few)
    answer = made.confirmed["a"] = made.client("a").answer(made.confirm_order("a", IDS, sealed=sealed))
    assert answer.unopened == ("c",)
    made.confirm(IDS, *IDS[1:])
    assert set(made.opened("a", IDS)) == {"a", "b", "d"}
    assert set(vectors) == set(IDS)


@pytest.mark.parametrize("stayed", [IDS, IDS[:3]], ids=["all stay", "one is gone"])
def test_whose_secret_no_shares_give_is_named(stayed: tuple[str, ...]) -> None:
    """Against the public keys, for a client that stays and for one that is gone."""
    made, vectors, opened = revealed(IDS, stayed)
    liar = IDS[3]
    made.keys[liar] = made.keys[liar].model_copy(update={"own": bytes(32), "masking": made.keys["a"].masking})
    with pytest.raises(SharesError, match=f"{liar}: the shares that it sealed are not of its secret") as raised:
        unmask_with(made, vectors, opened)
    assert raised.value.faults.keys() == {liar}
    assert not raised.value.disputes


@pytest.mark.parametrize(
    ("count", "liars", "victim", "opens"),
    [
        (4, (0, 1), 2, False),
        (5, (1,), 4, True),
        (5, (0,), 2, True),
        (12, (4, 5, 6, 7), 3, True),
        (12, (4, 5, 6, 7, 8), 3, False),
    ],
)
@pytest.mark.parametrize("stays", [True, False])
def test_clients_that_reveal_wrong_shares_of_another_convict_themselves(
    count: int, liars: tuple[int, ...], victim: int, opens: bool, stays: bool
) -> None:
    """However many agree to, and whichever they are: if enough right shares remain, they are found and used."""
    ids = tuple(f"c{number:02}" for number in range(count))
    made, vectors, opened = revealed(ids, tuple(id for id in ids if stays or id != ids[victim]))
    hostile = {ids[number] for number in liars}
    spoilt = {
        id: {**shares, ids[victim]: shares[ids[victim]][:2] + bytes(32)} if id in hostile else shares
        for id, shares in opened.items()
    }
    if len(vectors) - len(hostile) >= made.threshold():
        assert opens or stays
        assert unmask_with(made, vectors, spoilt).keys() == hostile
        return
    assert not opens or not stays
    with pytest.raises(SharesError) as raised:
        unmask_with(made, vectors, spoilt)
    assert raised.value.faults.keys() == hostile
    assert not raised.value.disputes


@pytest.mark.parametrize(("silent", "convicted"), [(2, False), (3, True)])
def test_shares_that_are_said_not_to_open_convict_their_owner_by_a_majority_only(silent: int, convicted: bool) -> None:
    hostile = IDS[:silent]
    unopened = {id: ("d",) if id in hostile else () for id in IDS}
    with pytest.raises(SharesError, match=r"do(es)? not open") as raised:
        require_openable(IDS, 3, unopened)
    assert raised.value.faults.keys() == ({"d"} if convicted else set())
    assert raised.value.disputes.keys() == (set() if convicted else {"d", *hostile})
    require_openable(IDS, 3, {**dict.fromkeys(IDS, ()), "a": ("d",)})  # three others can open them


def test_a_client_that_withholds_a_share_that_it_can_open_is_named() -> None:
    made, vectors, opened = revealed(IDS, IDS)
    opened["a"] = {id: share for id, share in opened["a"].items() if id != "d"}
    assert unmask_with(made, vectors, opened) == {"a": "it withholds its share of 'd', which it can open"}


def test_shares_are_revealed_after_enough_signatures_of_the_same_survivors_alone() -> None:
    """The server names other survivors to two of four clients, or signs itself, or uses signatures twice."""
    made = sums_of_shares()
    for id in IDS:
        made.vector(id, START)
    made.confirm(IDS, "a", "b")
    made.confirm(IDS[1:], "c", "d")
    for id in IDS:
        require_refused("2 clients have signed", made.client(id).answer, made.unmask_order(id))
    signatures = made.unmask_order("a").signatures
    for forged in ({**signatures, "c": signatures["a"]}, {**signatures, "e": signatures["a"], "c": bytes(64)}):
        order = made.unmask_order("a").model_copy(update={"signatures": forged})
        require_refused("2 clients have signed", made.client("a").answer, order)


def revealed(
    ids: tuple[str, ...], stayed: tuple[str, ...]
) -> tuple[Sums, dict[str, Any], dict[str, Mapping[str, bytes]]]:
    """Return a session, the vectors of the clients that stay, and the shares that they reveal."""
    made = Sums(MemorySessionStore(), dict.fromkeys(ids, 1.0), START)
    made.give_keys(*ids)
    made.give_shares(*ids)
    vectors = {id: made.vector(id, START) for id in stayed}
    return made, vectors, {id: made.opened(id, set(vectors)) for id in stayed}


def unmask_with(made: Sums, vectors: Mapping[str, Any], opened: Mapping[str, Any]) -> Mapping[str, str]:
    ring, total, faults = made.unmask(vectors, opened)
    limit = ring.bound_error(len(vectors))
    assert np.abs(ring.decode(total)).max() <= limit, "the changes are zero, so the masks are not"
    return faults


def test_too_few_shares_open_nothing() -> None:
    made = sums_of_shares()
    vectors = {id: made.vector(id, START) for id in IDS}
    with pytest.raises(ValueError, match=r"2 right shares of '.'; it takes 3"):
        made.mean(vectors, IDS[:2])


def test_a_session_is_on_the_disk_before_its_answer_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    made = sums(DiskSessionStore(tmp_path))
    made.give_keys(*IDS)
    files = sorted(tmp_path.rglob("session.json"))
    assert len(files) == 4
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    kept = [path.read_bytes() for path in files]
    made.give_shares(*IDS)
    vectors = {id: made.vector(id, START) for id in IDS}
    made.mean(vectors, IDS)
    last = DiskSessionStore(tmp_path).load("a")
    assert (last.phase, last.secret, last.peers) == ("unmasked", b"", {})
    assert all(path.read_bytes() not in kept for path in files)
    for path in files:
        path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(FedspanError, match="damaged"):
        DiskSessionStore(tmp_path).load("a")


def test_an_order_is_the_one_that_was_agreed_on() -> None:
    """Whatever decides what a vector is: model, learning rate, round, kind."""
    made = sums_of_shares()
    client = made.client("a")
    for changes, name in (({"body": b"x"}, "model"), ({"lr": 0.0}, "lr"), ({"round": 1}, "round")):
        require_refused(
            f"the order's {name} differs from the agreement", client.require_maskable, *made.order("a", **changes)
        )
    require_refused("the order's task differs", client.require_maskable, *made.order("a", task="statistics"))
    for facts in ({"weight": 2.0}, {"rank": 1}, {"last_round": 0}, {"scaling": 2.0}, {"examples": 2}):
        changed = replace(made.describe("a"), **facts)
        require_refused("facts about this client differ", client.require_maskable, *made.order("a", client=changed))
    require_refused("facts about this client differ", client.require_maskable, *made.order("a", client=None))
    early = sums_of_keys()
    for shown in (early.facts()[1:], early.facts()[::-1], early.facts()[:1] * 4):
        agreement = early.agreement(facts=messages.compute_facts_digest(shown))
        order = early.shares_order("a", agreement=agreement, facts=shown)
        require_refused("the facts about the clients that sent keys", early.client("a").answer, order)
    told = early.shares_order("a", agreement=early.agreement(facts="0" * 64))
    require_refused("the facts about the clients that sent keys", early.client("a").answer, told)
    require_refused(
        "the order's, 0", early.client("a").answer, early.shares_order("a", agreement=early.agreement(round=1))
    )


@pytest.mark.parametrize(
    "lie",
    [{"lr": 0.0}, {"top": 1e300}, {"clip": 1e-9}, {"model": hashlib.sha256(ZEROS).hexdigest()}, {"config": "other"}],
)
def test_a_victim_among_clients_that_were_told_otherwise_stays_hidden(lie: dict[str, Any]) -> None:
    """Their contributions vanish, so the sum would be the victim's vector: instead it is noise, and nobody unmasks."""
    made = sums_of_keys()
    made.agreements = {id: made.agreement(**lie) for id in IDS[1:]}
    bodies = dict.fromkeys(IDS[1:], ZEROS) if "model" in lie else {}
    made.give_shares(*IDS)
    values = {"a": {name: value + 1.0 for name, value in START.items()}}
    vectors = {id: made.vector(id, values.get(id, START), body=bodies.get(id, BODY)) for id in IDS}
    refused = made.client("a")
    require_refused("the other clients have another agreement", refused.answer, made.confirm_order("a", IDS))
    made.confirm(IDS, *IDS[1:])
    given = {id: made.opened(id, set(IDS)) for id in IDS[1:]}
    assert all("a" not in shares for shares in given.values())
    # Even with the victim's own mask, which nobody gave away, its masks with the others would remain.
    ring = Ring(made.bits, made.clip, len(IDS))
    total = np.zeros(10, ring.dtype)
    for vector in vectors.values():
        total += vector.view(ring.dtype)
    session = made.sessions.load("a")
    add_mask(total, SessionKeys.derive(session.secret, messages.build_session_context("run", 1)).own, -1)
    for id in IDS[1:]:
        add_mask(total, combine([shares[id] for shares in given.values()], made.threshold()), -1)
    assert float(np.abs(ring.decode(total) - 1.0).max()) > 1.0


def test_only_clients_that_the_owner_knows_share_a_sum(tmp_path: Path) -> None:
    """The server invents clients, puts its own keys in a client's place, and uses signatures of another session."""
    owners = {id: identity(tmp_path / id) for id in (*IDS, "server")}
    known = {id: compute_fingerprint(owners[id].public) for id in IDS}
    made = sums()
    for id in IDS:
        answer = made.client(id, identity=owners[id]).answer(messages.KeysOrder(**made.common(id)))
        made.keys[id] = answer.keys
    client = made.client("a", identity=owners["a"], known=known)
    other = sums(session=2)
    later = other.client("b", identity=owners["b"]).answer(messages.KeysOrder(**other.common("b")))
    invented = other.client("b", identity=owners["server"]).answer(
        messages.KeysOrder(**{**other.common("b"), "session": 3})
    )
    lies: list[tuple[dict[str, messages.PublicKeys], str]] = [
        ({**made.keys, "e": invented.keys}, "'e' cannot share a sum with this node: it is not in this node's file"),
        ({**made.keys, "b": invented.keys}, "its key has another fingerprint"),
        ({**made.keys, "b": later.keys}, "the signature is not valid"),
        ({**made.keys, "b": made.keys["b"].model_copy(update={"identity": ""})}, "not a public key"),
        ({**made.keys, "b": made.keys["b"].model_copy(update={"signature": b""})}, "the signature is not valid"),
    ]
    for peers, why in lies:
        agreement = made.agreement(clients=len(peers), threshold=len(peers))
        require_refused(why, client.answer, made.shares_order("a", peers=peers, agreement=agreement))
    assert isinstance(client.answer(made.shares_order("a")), messages.SharesReply)


def identity(path: Path) -> Identity:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    form = serialization.PrivateFormat.OpenSSH
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return load_identity(path)
