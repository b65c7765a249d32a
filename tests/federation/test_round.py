"""Rounds between machines: what of the replies counts, and what becomes of a round when some do not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedspan.clients.host import Host
from fedspan.clients.refusals import refuse
from fedspan.clients.store import DiskClientStore
from fedspan.core.values import Message
from fedspan.errors import FedspanError
from fedspan.federation import serialization
from fedspan.federation.federation import Federation
from fedspan.federation.progress import Progress, RoundResult
from fedspan.federation.protocol import Envelope, Order, Reply, decode_order
from fedspan.federation.validation import ReplyRules
from fedspan.runs.setup import Prepared, prepare
from fedspan.training.loop import LoopEngine
from helpers import tiny
from helpers.reply_transport import Replies, ReplyingTransport

Spoil = Callable[[Order, Reply], Envelope | str]
BAD = "south"


class LocalTraining(ReplyingTransport):
    """A transport to participants in this process, one of whom does something else."""

    def __init__(self, hosts: Mapping[str, Host], spoil: Spoil) -> None:
        self.hosts, self.spoil = hosts, spoil
        self.asked: list[tuple[int, int, str]] = []

    def replies(self, envelopes: Mapping[str, Envelope], seconds: float, *, wait_for_offline: bool = False) -> Replies:
        for id, envelope in envelopes.items():
            order = decode_order(envelope)
            self.asked.append((order.round, order.attempt, id))
            try:
                answer = self.hosts[id].answer(order)
            except FedspanError as error:
                answer = refuse(order, error)
            yield id, self.spoil(order, answer) if id == BAD else answer.to_envelope()


class Turned(LocalTraining):
    """Everybody has answered before anybody is heard, and in every other round the last one is heard first."""

    def replies(self, envelopes: Mapping[str, Envelope], seconds: float, *, wait_for_offline: bool = False) -> Replies:
        back = list(super().replies(envelopes, seconds, wait_for_offline=wait_for_offline))
        yield from back[:: -1 if self.asked[-1][0] % 2 else 1]


def good(_: Order, answer: Reply) -> Envelope:
    return answer.to_envelope()


def changed(change: Callable[[str, Tensor], Tensor]) -> Spoil:
    """Every tensor of a reply changed."""

    def spoil(_: Order, answer: Reply) -> Envelope:
        message = serialization.decode(answer.body)
        tensors = {name: change(name, value) for name, value in message.tensors.items()}
        return replace(answer, body=serialization.encode(replace(message, tensors=tensors))).to_envelope()

    return spoil


def more(_: Order, answer: Reply) -> Envelope:
    message = serialization.decode(answer.body)
    return replace(
        answer, body=serialization.encode(Message({**message.tensors, "more": torch.zeros(2)}))
    ).to_envelope()


def fewer(_: Order, answer: Reply) -> Envelope:
    tensors = dict(serialization.decode(answer.body).tensors)
    tensors.popitem()
    return replace(answer, body=serialization.encode(Message(tensors))).to_envelope()


def failed(order: Order, _: Reply) -> Envelope:
    return refuse(order, RuntimeError("a patient's name")).to_envelope()


SPOILT: dict[str, tuple[Spoil, str]] = {
    "raises": (failed, "RuntimeError; see the client's own log"),
    "not finite": (changed(lambda _, value: value * float("nan")), "not finite"),
    "infinite": (changed(lambda _, value: value + float("inf")), "not finite"),
    "other shapes": (changed(lambda _, value: value[:1]), "not ["),
    "other numbers": (changed(lambda _, value: value.half()), "torch.float16"),
    "tensors too many": (more, "with ['more'] too"),
    "tensors too few": (fewer, "without ["),
    "far away": (changed(lambda _, value: value + 100), "times the cohort's norm"),
    "another round": (lambda _, answer: replace(answer, round=7).to_envelope(), "a reply of"),
    "another client": (lambda _, answer: replace(answer, id="north").to_envelope(), "a reply of"),
    "an evaluation": (lambda _, answer: replace(answer, task="evaluate").to_envelope(), "evaluate"),
    "no header": (lambda _, answer: Envelope("{}", answer.body), "not a fedspan header"),
    "no message": (lambda _, answer: replace(answer, body=b"\x08").to_envelope(), "not a fedspan message"),
    "silence": (lambda *_: "no reply within 5 s", "no reply within"),
}


def federation(prepared: Prepared, folder: Path, spoil: Spoil, **rules: Any) -> Federation:
    here, engine = prepared.federation, prepared.engine
    loop = LoopEngine(engine.adapted, prepared.task, engine.settings, engine.seed)
    client_store = DiskClientStore(folder)
    known = {
        id: Host(here.method, loop, {id: one}, here.examples, client_store, 32) for id, one in here.clients.items()
    }
    transport = LocalTraining(known, spoil)
    return Federation(here.method, engine, here.clients, here.examples, here.settings, transport, ReplyRules(**rules))


@pytest.fixture(scope="module")
def built(tiny_folder: Path) -> Prepared:
    return prepare(tiny.config(tiny_folder, federation={"clients_per_round": None}))


@pytest.fixture(scope="module")
def without(built: Prepared, tmp_path_factory: pytest.TempPathFactory) -> RoundResult:
    """The first round of all clients but one."""
    others = [one for id, one in built.federation.clients.items() if id != BAD]
    return replace_clients(built, others, tmp_path_factory.mktemp("without")).run_round(built.federation.begin())


ESCAPES = "\x1b]0;title\x07\x1b[2J\u202e"
OBEYED: dict[str, Callable[[dict[str, Any]], object]] = {
    "another field": lambda header: header.update({ESCAPES: 1}),
    "a part": lambda header: header.update(scores={ESCAPES: {"loss": 1.0}}),
    "a metric": lambda header: header.update(scores={"validation": {ESCAPES * 5000: "x"}}),
    "an id": lambda header: header.update(id=ESCAPES),
}


@pytest.mark.parametrize("kind", OBEYED)
def test_the_reason_of_a_refused_header_is_short_and_obeyed_by_no_terminal(
    kind: str, built: Prepared, tmp_path: Path
) -> None:
    """The names in a header are its sender's, and an error that quotes them goes to terminals and logs."""

    def spoil(_: Order, reply: Reply) -> Envelope:
        header = json.loads(reply.to_envelope().header)
        OBEYED[kind](header)
        return Envelope(json.dumps(header), reply.body)

    result = federation(built, tmp_path, spoil).run_round(built.federation.begin())
    (failure,) = result.failures
    assert failure.client == BAD
    assert failure.reason.isprintable(), failure.reason
    assert len(failure.reason) < 5000


@pytest.mark.parametrize("kind", sorted(SPOILT))
def test_a_reply_that_does_not_count_is_named_and_leaves_no_trace(
    kind: str, built: Prepared, without: RoundResult, tmp_path: Path
) -> None:
    spoil, reason = SPOILT[kind]
    found = federation(built, tmp_path / "spoilt", spoil)
    result = found.run_round(found.begin())
    (failure,) = result.failures
    assert (failure.client, failure.attempt) == (BAD, 0)
    assert reason in failure.reason
    assert "patient" not in failure.reason
    assert BAD not in result.progress.last_rounds
    for name, value in without.progress.state.tensors.items():
        assert torch.equal(value, result.progress.state.tensors[name])
    assert result.loss == without.loss


def replace_clients(built: Prepared, clients: Any, folder: Path) -> Federation:
    made = federation(built, folder, good)
    made.clients = {one.client.id: one for one in clients}
    return made


def test_missing_clients_are_asked_again_and_then_the_run_stops(built: Prepared, tmp_path: Path) -> None:
    found = federation(built, tmp_path, SPOILT["silence"][0], min_replies=4, retries=2)
    begin = found.begin()
    with pytest.raises(FedspanError, match=r"good replies of at least 4 of 4 clients.*south: no reply") as stopped:
        found.run_round(begin)
    assert stopped.value.value == 3
    transport = found.transport
    assert isinstance(transport, LocalTraining)
    assert [(attempt, id) for _, attempt, id in transport.asked if attempt] == [(1, BAD), (2, BAD)]
    transport.spoil = good
    again = found.run_round(begin)
    clean = federation(built, tmp_path / "clean", good).run_round(begin)
    assert serialization.encode_state(again.progress.state) == serialization.encode_state(clean.progress.state)


def test_a_round_that_some_reply_to_late_is_that_of_a_round_that_all_reply_to(built: Prepared, tmp_path: Path) -> None:
    def late(order: Order, answer: Reply) -> Envelope | str:
        return answer.to_envelope() if order.attempt else "no reply within 5 s"

    found = federation(built, tmp_path / "late", late, min_replies=4)
    clean = federation(built, tmp_path / "clean", good)
    one, other = found.begin(), clean.begin()
    for _ in range(2):
        reported = list[tuple[str, str]]()
        result = found.run_round(one, on_failure=lambda id, reason, reported=reported: reported.append((id, reason)))
        assert [failure.attempt for failure in result.failures] == [0]
        assert reported == [(BAD, "no reply within 5 s")]
        one, other = result.progress, clean.run_round(other).progress
        assert serialization.encode_state(one.state) == serialization.encode_state(other.state)


def chosen(built: Prepared, count: int, folder: Path, more: int, spoil: Spoil = good) -> Federation:
    """Rounds that want some of the clients and ask more."""
    made = federation(built, folder, spoil, over_select=more)
    made.settings = replace(made.settings, cohort=count)
    return made


def test_a_round_that_asks_more_than_it_wants_continues_with_those_who_reply_first(
    built: Prepared, tmp_path: Path
) -> None:
    found = chosen(built, 2, tmp_path / "more", 1)
    begin = found.begin()
    result = found.run_round(begin)
    assert isinstance(found.transport, LocalTraining)
    asked = sorted(found.select_clients(0, 1))
    assert list(result.cohort) == asked
    assert [id for _, _, id in found.transport.asked] == asked[:2]  # nobody waits for the third
    assert result.late == (asked[2],)
    assert not result.failures
    assert set(result.progress.last_rounds) == set(asked[:2])
    counted = [one for id, one in built.federation.clients.items() if id in asked[:2]]
    alone = replace_clients(built, counted, tmp_path / "alone").run_round(begin)
    assert serialization.encode_state(alone.progress.state) == serialization.encode_state(result.progress.state)
    assert set(found.select_clients(0)) <= set(asked)  # who would be asked otherwise is among them


def test_a_bad_reply_is_made_up_for_by_one_more(built: Prepared, tmp_path: Path) -> None:
    found = chosen(built, 3, tmp_path, 1, SPOILT["not finite"][0])
    result = found.run_round(found.begin())
    assert [failure.client for failure in result.failures] == [BAD]
    assert set(result.progress.last_rounds) == set(built.federation.clients) - {BAD}
    assert result.late == ()


def test_a_reply_that_is_too_far_from_the_others_does_not_count_as_enough(built: Prepared, tmp_path: Path) -> None:
    found = chosen(built, 3, tmp_path, 1, SPOILT["far away"][0])
    result = found.run_round(found.begin())
    assert [failure.client for failure in result.failures] == [BAD]
    assert set(result.progress.last_rounds) == set(built.federation.clients) - {BAD}


def test_a_late_client_continues_from_what_counted_last(tiny_folder: Path, tmp_path: Path) -> None:
    config = tiny.config(tiny_folder, method={"name": "fedsa-lora"}, federation={"clients_per_round": None})
    built = prepare(config)
    found = chosen(built, 3, tmp_path / "more", 1)
    alone = federation(built, tmp_path / "alone", good)
    found.transport = Turned(found.transport.hosts, good)  # type: ignore[attr-defined]
    progress = other = found.begin()
    for number in range(3):
        result = found.run_round(progress)
        progress = result.progress
        assert result.late == (("west", "east", "west")[number],)
        assert not result.failures
        # The same rounds without the late one, which then has trained nothing in them.
        without = replace_clients(built, [], tmp_path / "unused")
        without.transport = alone.transport
        without.clients = {id: one for id, one in built.federation.clients.items() if id not in result.late}
        other = without.run_round(other).progress
        assert serialization.encode_state(other.state) == serialization.encode_state(progress.state)
        assert other.last_rounds == progress.last_rounds


def test_a_client_that_lost_what_it_kept_is_sent_everything(tiny_folder: Path, tmp_path: Path) -> None:
    config = tiny.config(tiny_folder, method={"name": "fedloru"}, federation={"clients_per_round": None})
    built = prepare(config)
    found = federation(built, tmp_path, good)
    progress = found.run_round(found.begin()).progress
    lost = next(path for path in tmp_path.rglob("*.safetensors"))
    lost.write_bytes(lost.read_bytes()[:-1])
    result = found.run_round(progress)
    (failure,) = result.failures
    assert "client memory" in failure.reason
    assert failure.client not in result.progress.last_rounds
    after = found.run_round(result.progress)
    assert not after.failures
    assert set(after.progress.last_rounds.values()) == {2}


def test_a_client_that_loses_its_state_in_every_round_is_absent(built: Prepared, tmp_path: Path) -> None:
    """Its last accepted reply counts, however often it says since then that its state is gone."""

    def spoil(order: Order, reply: Reply) -> Envelope:
        return (reply if order.round == 0 else Reply("train", order.round, order.attempt, BAD, lost=True)).to_envelope()

    found = federation(built, tmp_path, spoil, max_missed_rounds=2)
    progress, absent = found.begin(), list[bool]()
    for _ in range(4):
        absent.append(BAD in found.find_absent(progress, found.clients))
        progress = found.run_round(progress).progress
    assert absent == [False, False, False, True]
    assert progress.last_replies == {BAD: 0}


def test_an_order_that_is_not_for_this_client_is_refused(built: Prepared, tmp_path: Path) -> None:
    found = federation(built, tmp_path, good)
    transport = found.transport
    assert isinstance(transport, LocalTraining)
    host = transport.hosts["north"]
    client = found.get_client("south", Progress(found.begin().state))
    order = Order("train", 0, 0, 0.1, "south", client, b"")
    with pytest.raises(ValueError, match="addressed to 'south'"):
        host.answer(order)
    with pytest.raises(ValueError, match="names another client"):
        host.answer(replace(order, to="north"))
