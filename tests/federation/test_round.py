"""Rounds between machines: what counts, what is exchanged, and what becomes of a round when some clients fail."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from fedspan.assembly.run import Prepared, prepare
from fedspan.clients.host import Host
from fedspan.clients.refusals import refuse
from fedspan.core.values import Client, Message, Reduced, ServerState
from fedspan.errors import FedspanError
from fedspan.federation import serialization
from fedspan.federation.config import BufferedSettings
from fedspan.federation.federation import Federation
from fedspan.federation.progress import ClientData, Failure, Progress, RoundResult, Transfer
from fedspan.federation.protocol import Envelope, Order, Part, Reply, decode_order, decode_reply
from fedspan.federation.round import RoundExchange, compute_mean_loss
from fedspan.federation.round_context import RoundContext, Tally
from fedspan.methods.fedit import FedIT
from fedspan.training.accounting import Charge
from fedspan.training.config import Privacy, TrainingSettings
from fedspan.wrappers.extras import WithExtras
from helpers import tiny
from helpers.refusals import refused
from helpers.remote_federation import remote, require_whole_resend
from helpers.reply_transport import Replies, ReplyingTransport
from helpers.round_settings import make_settings, with_rules
from helpers.toys.problem import Problem

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
    return remote(prepared, folder, lambda hosts: LocalTraining(hosts, spoil), **rules)


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
def test_a_spoilt_reply_is_named_and_leaves_no_trace(
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
    with refused("good replies", r"good replies of at least 4 of 4 clients.*south: no reply") as stopped:
        found.run_round(begin)
    assert stopped.value.value == 3
    transport = found.transport
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
    made.settings = made.settings.model_copy(update={"clients_per_round": count})
    return made


def test_a_round_that_asks_more_continues_with_those_who_reply_first(built: Prepared, tmp_path: Path) -> None:
    found = chosen(built, 2, tmp_path / "more", 1)
    begin = found.begin()
    result = found.run_round(begin)
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


@pytest.mark.parametrize("kind", ["not finite", "far away"])
def test_a_bad_reply_is_made_up_for_by_one_more(kind: str, built: Prepared, tmp_path: Path) -> None:
    found = chosen(built, 3, tmp_path, 1, SPOILT[kind][0])
    result = found.run_round(found.begin())
    assert [failure.client for failure in result.failures] == [BAD]
    assert set(result.progress.last_rounds) == set(built.federation.clients) - {BAD}
    assert result.late == ()


def test_a_late_client_continues_from_what_counted_last(tiny_folder: Path, tmp_path: Path) -> None:
    config = tiny.config(tiny_folder, method={"name": "fedsa-lora"}, federation={"clients_per_round": None})
    built = prepare(config)
    found = chosen(built, 3, tmp_path / "more", 1)
    alone = federation(built, tmp_path / "alone", good)
    found.transport = Turned(found.transport.hosts, good)
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


def test_a_client_that_lost_its_states_is_sent_everything(tiny_folder: Path, tmp_path: Path) -> None:
    config = tiny.config(tiny_folder, method={"name": "fedloru"}, federation={"clients_per_round": None})
    require_whole_resend(federation(prepare(config), tmp_path, good), tmp_path)


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
    host = transport.hosts["north"]
    client = found.get_client("south", Progress(found.begin().state))
    order = Order("train", 0, 0, 0.1, "south", client, b"")
    with pytest.raises(ValueError, match="addressed to 'south'"):
        host.answer(order)
    with pytest.raises(ValueError, match="names another client"):
        host.answer(replace(order, to="north"))


NOTHING = np.arange(0)
UNUSED: Any = None


def build_context(ids: tuple[str, ...] = ("b", "c"), **changes: Any) -> RoundContext:
    """Build a round of clients that declare 100, 2 and 1000 examples."""
    clients = {
        id: ClientData(Client(id, 2, 1.0, examples, examples, last_round=3), NOTHING, NOTHING, NOTHING)
        for id, examples in {"a": 100, "b": 2, "c": 1000}.items()
    }
    fields: dict[str, Any] = {
        "settings": make_settings(3, max_weight_ratio=4.0),
        "state": ServerState(5, {}),
        **dict.fromkeys(("method", "training", "transport"), UNUSED),
        **changes,
    }
    return RoundContext(clients=clients, ids=ids, draw_order=ids, target=len(ids), run="run", **fields)


def test_weights_are_limited_among_the_selected_clients() -> None:
    assert build_context().limit_weights() == {"b": 2.0, "c": 8.0}
    assert build_context(("a", "b", "c")).limit_weights() == {"a": 100.0, "b": 2.0, "c": 400.0}
    assert build_context(settings=make_settings(3)).limit_weights() == {"b": 2.0, "c": 1000.0}


def test_a_second_exchange_has_the_weights_of_the_first() -> None:
    weights = {"a": 100.0, "b": 2.0, "c": 400.0}
    assert build_context(task="second", weights=weights).limit_weights() == weights


def test_a_client_that_was_sent_an_earlier_state_trains_it() -> None:
    context = build_context(sent={"b": ServerState(3, {})})
    assert context.get_sent_state("b").round == 3
    assert context.get_sent_state("c") is context.state


@pytest.mark.parametrize(("task", "purpose"), [("train", "train"), ("second", "train"), ("statistics", "statistics")])
def test_both_exchanges_are_part_of_the_training(task: Literal["train", "second", "statistics"], purpose: str) -> None:
    assert build_context(task=task).purpose == purpose


@pytest.mark.parametrize(("ids", "first"), [(("b", "c"), "b"), ((), "a")])
def test_a_new_client_stores_nothing(ids: tuple[str, ...], first: str) -> None:
    client = build_context(ids).new_client
    assert (client.id, client.last_round) == (first, None)


def test_events_of_both_exchanges_are_sorted_in_whatever_order_they_happened() -> None:
    tally = Tally([Transfer("a", "down", 8, 4)], [Failure("a", 0, "late")], {"a"})
    tally.extend(Tally([Transfer("b", "up", 9, 5)], [Failure("b", 1, "not finite")]))
    assert tally.transfers == [Transfer("a", "down", 8, 4), Transfer("b", "up", 9, 5)]
    assert tally.failures == [Failure("a", 0, "late"), Failure("b", 1, "second exchange: not finite")]
    assert tally.lost == {"a"}
    transfers = (Transfer("a", "down", 1, 1), Transfer("a", "up", 1, 1), Transfer("b", "down", 1, 1))
    failures = (Failure("b", 0, "late"), Failure("a", 1, "late"), Failure("c", 1, "late"))
    tally = Tally([*reversed(transfers)], [*reversed(failures)])
    assert tally.sort_transfers() == transfers
    assert tally.sort_failures() == failures


@pytest.mark.parametrize(
    ("counts", "ratio", "weights"),
    [
        ((1, 1, 100, 100), 4.0, (1, 1, 4, 4)),  # the mean of the middle two would limit nothing
        ((100, 1, 100, 1), 4.0, (4, 1, 4, 1)),
        ((10, 20, 100), 4.0, (10, 20, 80)),
        ((0, 10, 100), 4.0, (0, 10, 40)),
        ((0, 0, 7, 100), 4.0, (0, 0, 7, 100)),  # the lower middle one is 0: no limit
        ((1, 1, 100, 100), None, (1, 1, 100, 100)),
    ],
)
def test_the_mean_loss_weighs_a_phase_up_to_a_multiple_of_the_lower_median(
    counts: tuple[int, ...], ratio: float | None, weights: tuple[int, ...]
) -> None:
    losses = [2.0**number for number in range(len(counts))]
    replies = [
        Reply("train", 0, 0, "a", (Part(loss=loss, examples=float(count)),))
        for loss, count in zip(losses, counts, strict=True)
    ]
    expected = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
    assert compute_mean_loss(replies, ratio) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("parts", [(), (Part(loss=0.5, examples=0.0),)])
def test_a_mean_loss_over_no_examples_is_nan(parts: tuple[Part, ...]) -> None:
    assert math.isnan(compute_mean_loss([Reply("train", 0, 0, "a", parts)] * 2, 4.0))


class Accepting:
    """An aggregation that accepts replies, of all clients but one, until two are there."""

    quorum = 2
    clipped: Mapping[str, float] = {}
    lowered: Mapping[str, float] = {"b": 0.5, "a": 0.25}

    def __init__(self) -> None:
        self.replies: dict[str, Reply] = {}

    def add(self, client: Client, reply: Reply, attempt: int) -> bool:
        if client.id == "bad":
            raise ValueError("not a number")
        self.replies[client.id] = reply
        return len(self.replies) >= self.quorum


class Heard:
    """What listeners heard."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, object]] = []

    def listen(self, kind: str) -> Callable[[str, object], None]:
        return lambda id, value: self.events.append((kind, id, value))


def exchange(heard: Heard, *, last_rounds: Mapping[str, int] | None = None) -> tuple[RoundExchange, Tally, Accepting]:
    """Round 5 of FedIT on the toy problem, with clients a, b and bad."""
    problem = Problem(clients=2)
    method = WithExtras(inner=FedIT(spec=problem.adapted().spec, r=2), policy="average")
    state = replace(method.init(problem.adapted()), round=4)
    none = np.array([], dtype=np.int64)
    ids = ("a", "b", "bad")
    clients = {id: ClientData(Client(id, 2, 1.0, 3, 3.0), none, none, none) for id in ids}
    settings = make_settings(10)
    training = TrainingSettings(lr=0.5, schedule="linear")
    transport: Any = SimpleNamespace(accept_replies=lambda ids: {}, get_simulated_seconds=lambda: 7.5)
    context = RoundContext(method, settings, training, clients, state, ids, ids, 3, transport, run="name of the run")
    aggregation, tally = Accepting(), Tally()
    progress = Progress(state, last_rounds=last_rounds or {}, last_replies={"b": 1})
    listeners = (heard.listen("arrival"), heard.listen("client"), heard.listen("failure"))
    made = RoundExchange(context, aggregation, tally, progress, {"a": 2}, *listeners)
    return made, tally, aggregation


def reply(id: str, **changes: Any) -> Envelope:
    parts = changes.pop("parts", (Part(loss=0.5, examples=3.0),))
    return Reply("train", 4, 0, id, parts, **changes).to_envelope()


def test_an_order_has_the_round_s_facts_and_counts_once_however_often_it_is_made() -> None:
    made, tally, _ = exchange(Heard(), last_rounds={"a": 3})
    charge = Charge("a", None, 3)
    envelope = [made.create_order("a", made.context.state, 1, charges=[charge]) for _ in range(2)][-1]
    order = decode_order(envelope)
    assert (order.task, order.run, order.to, order.round, order.attempt) == ("train", "name of the run", "a", 4, 1)
    assert order.lr == pytest.approx(0.5 * (1 - 4 / 10))
    assert (order.best, order.secure) == (2, None)
    assert order.client.last_round == 3
    assert [(one.client, one.direction, one.bytes) for one in tally.transfers] == [("a", "down", len(envelope.body))]
    assert made.charges == [charge]
    made.create_order("a", made.context.state, 2)
    assert len(tally.transfers) == 2


def test_replies_are_heard_and_counted_or_fail_their_client_with_the_reason() -> None:
    heard = Heard()
    made, tally, aggregation = exchange(heard, last_rounds={"a": 3, "b": 3})
    assert made.take_reply("a", reply("a"), 0) is False
    assert made.take_reply("bad", reply("bad"), 0) is False
    assert made.take_reply("b", "its node is not online", 0) is False
    assert made.take_reply("b", reply("b", failed="full disk", lost=True), 1) is False
    assert made.take_reply("b", reply("b", parts=()), 2) is True
    assert list(aggregation.replies) == ["a", "b"]
    kinds = [(kind, id) for kind, id, _ in heard.events]
    assert kinds == [
        *(("arrival", "a"), ("client", "a"), ("arrival", "bad"), ("failure", "bad"), ("failure", "b")),
        *(("failure", "b"), ("arrival", "b"), ("client", "b")),
    ]
    assert [(one.client, one.attempt, one.reason) for one in tally.failures] == [
        ("bad", 0, "not a number"),
        ("b", 0, "its node is not online"),
        ("b", 1, "full disk"),
    ]
    assert tally.lost == {"b"}
    made.forget_lost()
    assert made.last_rounds == {"a": 3}


def test_a_round_with_too_few_replies_names_each_client_s_last_reason_and_the_way_on() -> None:
    made, _, _ = exchange(Heard())
    made.take_reply("bad", reply("bad"), 0)
    made.take_reply("bad", "its node is not online", 1)
    error = made.build_error(["a"])
    assert error.problem == (
        "round 5 needs good replies of at least 2 of 3 clients, and has 1 (b: no reply; bad: its node is not online). "
        "The state before the round is stored: fix the cause and resume"
    )
    for task, words in (("second", "the second exchange of round 5 needs"), ("statistics", "the exchange of statist")):
        made.context = replace(made.context, task=task)
        assert str(made.build_error(["a"]).problem).startswith(words)


def test_the_result_has_what_counted_and_what_clients_store() -> None:
    """A client whose reply counted but that trains on from an earlier state, or lost its own, is in no new round."""
    made, _, aggregation = exchange(Heard(), last_rounds={"a": 2, "b": 2, "bad": 1})
    made.take_reply("a", reply("a", parts=(Part(loss=1.0, examples=1.0),)), 0)
    made.take_reply("b", reply("b", parts=(Part(loss=2.0, examples=3.0),)), 0)
    made.forget_replied(["bad"])
    mean = dict(made.context.state.tensors)
    result = made.build_result(Reduced(mean=mean, count=2), missed=["b"])
    assert result.progress.state.round == 5
    assert result.progress.last_rounds == {"a": 4, "b": 2}
    assert result.progress.last_replies == {"b": 1, "bad": 4}
    assert result.cohort == ("a", "b", "bad")
    assert result.loss == pytest.approx((1.0 + 3 * 2.0) / 4)
    assert result.simulated_seconds == 7.5
    assert list(result.lowered.items()) == [("a", 0.25), ("b", 0.5)]
    assert result.failures == ()
    aggregation.replies["a"] = replace(aggregation.replies["a"], parts=(Part(loss=-1.0, examples=1.0),))
    made.context = replace(made.context, settings=with_rules(made.context.settings))
    checked = made.build_result(Reduced(mean=mean, count=2), attempt=3)
    assert checked.loss == 2.0
    ((failure),) = checked.failures
    assert (failure.client, failure.attempt) == ("a", 3)
    assert failure.reason.startswith("of its training, ")


@pytest.mark.parametrize(
    ("exponent", "staleness", "factor"), [(0.5, 0, 1.0), (0.5, 3, 0.5), (1.0, 3, 0.25), (0.0, 7, 1.0)]
)
def test_the_change_of_an_old_order_is_scaled_down(exponent: float, staleness: int, factor: float) -> None:
    assert BufferedSettings(concurrency=4, staleness_exponent=exponent).compute_factor(staleness) == factor


CENTRAL = Privacy(mechanism="central", clip=1.0, noise=0.5)
LOCAL = Privacy(mechanism="local", clip=1.0, noise=0.5)


@pytest.mark.parametrize(
    ("changes", "clips"),
    [
        ({}, False),
        ({"clip_ratio": 2.0}, True),
        ({"max_norm": 1.0}, True),
        ({"max_norm": 1.0, "reduction": "median"}, False),
        ({"max_norm": 1.0, "privacy": LOCAL}, True),
        ({"clip_ratio": 2.0, "max_norm": 1.0, "privacy": CENTRAL}, False),
    ],
)
def test_changes_are_scaled_down_under_the_mean_without_central_privacy(changes: dict[str, Any], clips: bool) -> None:
    assert make_settings(3, **changes).clips == clips


def test_headers_survive_the_way(built: Prepared) -> None:
    client = built.federation.get_client("south", Progress(built.federation.begin().state, last_rounds={"south": 3}))
    order = Order("train", 4, 1, 0.125, "south", client, b"\x00body", 2, "run", 17)
    assert decode_order(order.to_envelope()) == order
    answer = Reply("train", 4, 1, "south", failed="why", lost=True, body=b"x")
    assert decode_reply(answer.to_envelope()) == replace(answer, scores={})
