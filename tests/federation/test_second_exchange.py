"""The second exchange of a round: who is in it, what a lost or hostile reply or a dropout does, and what is refused."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedspan.assembly.run import Prepared, prepare
from fedspan.clients.host import Host
from fedspan.clients.refusals import refuse
from fedspan.clients.store import DiskClientStore, LostStateError
from fedspan.core.method import Wrapper
from fedspan.core.values import Client, Message, Reduced
from fedspan.errors import FedspanError
from fedspan.federation import serialization
from fedspan.federation.aggregation.plaintext import PlaintextAggregation
from fedspan.federation.changes import MODEL, ChangeSize
from fedspan.federation.config import SecureSettings
from fedspan.federation.federation import Federation
from fedspan.federation.progress import ClientState, RoundResult
from fedspan.federation.protocol import Envelope, Order, Reply, decode_order
from fedspan.federation.round_context import RoundContext, Tally
from fedspan.federation.second_exchange import build_second_context
from helpers import secure_rounds, tiny
from helpers.refusals import refused
from helpers.remote_federation import remote
from helpers.reply_transport import Replies, ReplyingTransport
from helpers.watched_rounds import differences

LOST = "south"
Spoil = Callable[[Order, Reply], Envelope | str]


class Second(ReplyingTransport):
    """A transport to hosts in this process; one client's replies of the second exchange are altered."""

    def __init__(self, hosts: Mapping[str, Host], spoil: Spoil) -> None:
        self.hosts, self.spoil = hosts, spoil
        self.asked: list[tuple[str, int, str]] = []
        self.drop: Callable[[Order], bool] = lambda _: False
        self.late, self.waited = "", list[str]()

    def replies(self, envelopes: Mapping[str, Envelope], seconds: float, *, wait_for_offline: bool = False) -> Replies:
        for id, envelope in sorted(envelopes.items(), key=lambda one: one[0] == self.late):
            order = decode_order(envelope)
            if id == self.late:
                self.waited.append(order.task)
                yield id, "no reply within 5 s"
                continue
            self.asked.append((order.task, order.attempt, id))
            if self.drop(order):
                yield id, "gone"
                continue
            try:
                answer = self.hosts[id].answer(order)
            except FedspanError as error:
                answer = refuse(order, error)
            is_spoilt = id == LOST and order.task == "second"
            yield id, self.spoil(order, answer) if is_spoilt else answer.to_envelope()


def good(_: Order, answer: Reply) -> Envelope:
    return answer.to_envelope()


def silent(*_: object) -> str:
    return "no reply within 5 s"


@pytest.fixture(scope="module")
def built(tiny_folder: Path) -> Prepared:
    return prepare(make_config(tiny_folder))


def make_config(folder: Path, **changes: Mapping[str, Any]) -> Any:
    method = {"name": "fedask", "r": 2, **changes.pop("method", {})}
    federation = {"clients_per_round": None, "clip_ratio": None, **changes.pop("federation", {})}
    return tiny.config(
        folder, "deep-bert", method=method, federation=federation, **{"training": {"local_steps": 1}, **changes}
    )


def connect(prepared: Prepared, folder: Path, spoil: Spoil = good, **rules: Any) -> tuple[Federation, Second]:
    """The same federation with its clients behind a transport, and the transport."""
    made = remote(prepared, folder, lambda hosts: Second(hosts, spoil), **rules)
    assert isinstance(made.transport, Second)
    return made, made.transport


def test_every_client_is_asked_twice_and_both_messages_are_training_traffic(built: Prepared, tmp_path: Path) -> None:
    made, transport = connect(built, tmp_path)
    result = made.run_round(made.begin())
    ids = sorted(made.clients)
    assert [(task, id) for task, _, id in transport.asked] == [
        *(("train", id) for id in ids),
        *(("second", id) for id in ids),
    ]
    assert {one.purpose for one in result.transfers} == {"train"}
    assert [(one.client, one.direction) for one in result.transfers] == [
        (id, direction) for id in ids for direction in ("down", "down", "up", "up")
    ]
    here = built.federation.run_round(built.federation.begin())
    assert differences(here.progress.state, result.progress.state) == []
    assert here.progress.states == {id: ClientState() for id in ids}  # what is trained does not outlast the round


def test_a_dropout_between_the_exchanges_is_in_the_first_mean_alone(built: Prepared, tmp_path: Path) -> None:
    """By hand: Q of all clients' sketches, and the others' products, by the others' shares, on it."""
    made, _ = connect(built, tmp_path, silent)
    result = made.run_round(made.begin())
    assert [(one.client, one.reason) for one in result.failures] == [(LOST, "second exchange: no reply within 5 s")]
    assert set(result.progress.last_rounds) == set(made.clients) - {LOST}  # its next order starts from before
    store = DiskClientStore(tmp_path)
    trained = {id: store.load_trained(id, 0).tensors for id in made.clients}
    everybody, others = (sum_by_examples(made, trained, ids) for ids in (set(trained), set(trained) - {LOST}))
    after = result.progress.state.tensors
    for layer in built.engine.adapted.spec.layers:
        U = torch.linalg.svd(everybody[layer.name], full_matrices=False)[0][:, :2]  # B's common columns: rank 2
        expected = U @ (U.T @ others[layer.name])
        found = after[f"{layer.name}/B"].double() @ after[f"{layer.name}/A"].double()
        assert float((found - expected).norm()) < 1e-4 * float(expected.norm())
        assert float((found - everybody[layer.name]).norm()) > 1e-3 * float(expected.norm())


def sum_by_examples(made: Federation, trained: Mapping[str, Any], ids: set[str]) -> dict[str, torch.Tensor]:
    """The mean product of clients by their numbers of examples, by layer."""
    total = sum(made.clients[id].client.examples for id in ids)
    return {
        layer.name: sum(
            (
                made.clients[id].client.examples / total
                * trained[id][f"{layer.name}/B"].double() @ trained[id][f"{layer.name}/A"].double()
                for id in sorted(ids)
            ),
            torch.zeros((), dtype=torch.float64),
        )
        for layer in made.method.spec.layers
    }  # fmt: skip


def test_a_reply_that_is_lost_once_is_asked_for_again_and_changes_nothing(built: Prepared, tmp_path: Path) -> None:
    """The client trains once; its second reply is the same."""

    def once(order: Order, answer: Reply) -> Envelope | str:
        return good(order, answer) if order.attempt else silent()

    made, transport = connect(built, tmp_path / "once", once, min_replies=4)
    result = made.run_round(made.begin())
    assert transport.asked[-1] == ("second", 1, LOST)
    assert [task for task, _, id in transport.asked if id == LOST] == ["train", "second", "second"]
    clean, _ = connect(built, tmp_path / "clean")
    assert differences(clean.run_round(clean.begin()).progress.state, result.progress.state) == []


def test_too_few_second_replies_fail_the_round_as_a_whole(built: Prepared, tmp_path: Path) -> None:
    made, transport = connect(built, tmp_path, silent, min_replies=4, retries=1)
    begin = made.begin()
    with refused("good replies", r"the second exchange of round 1 needs good replies of at least 4 of 4"):
        made.run_round(begin)
    transport.spoil = good
    again = made.run_round(begin)
    clean, _ = connect(built, tmp_path / "clean")
    assert differences(clean.run_round(clean.begin()).progress.state, again.progress.state) == []


def forget_before_second(host: Host, folder: Path) -> None:
    """Let a client lose what it stores between its training and the second exchange."""
    answer = host.answer

    def forget(order: Order) -> Reply:
        host.store = DiskClientStore(folder / "elsewhere" if order.task == "second" else folder)
        return answer(order)

    host.answer = forget


def test_a_client_that_lost_its_training_says_so_and_is_sent_everything_next(built: Prepared, tmp_path: Path) -> None:
    made, transport = connect(built, tmp_path)
    forget_before_second(transport.hosts[LOST], tmp_path)
    result: RoundResult = made.run_round(made.begin())
    (failure,) = result.failures
    assert failure.client == LOST
    assert "no state of round 1" in failure.reason
    assert LOST not in result.progress.last_rounds
    assert result.progress.last_replies[LOST] == 0


def test_a_client_that_lost_everything_between_later_exchanges_trains_in_the_next(
    built: Prepared, tmp_path: Path
) -> None:
    """It had a state of the round before, which the next order must not name."""
    made, transport = connect(built, tmp_path)
    progress, host = made.run_round(made.begin()).progress, transport.hosts[LOST]
    answer = host.answer
    forget_before_second(host, tmp_path)
    result = made.run_round(progress)
    assert [one.client for one in result.failures] == [LOST]
    assert LOST not in result.progress.last_rounds
    host.answer = answer
    after = made.run_round(result.progress)
    assert after.failures == ()
    assert after.progress.last_rounds == dict.fromkeys(made.clients, 2)


def test_only_the_last_training_is_answered_for_and_only_one_message(built: Prepared, tmp_path: Path) -> None:
    made, transport = connect(built, tmp_path)
    made.retain((first := made.run_round(made.begin())).progress)  # pins the version of round 0
    second = made.run_round(first.progress)
    host, client = transport.hosts[LOST], replace(made.clients[LOST].client, last_round=1)
    assert len(list((tmp_path).glob("*/round-*/*.safetensors"))) == 2 * len(made.clients)
    assert len(list((tmp_path).glob("*/trained.safetensors"))) == len(made.clients)
    identity = {
        f"{layer.name}/Q": torch.eye(layer.out_features)[:, : min(layer.out_features, 6)].contiguous()
        for layer in made.method.spec.layers
    }
    order = Order("second", 0, 0, 0.1, LOST, client, serialization.encode(Message(identity)))
    with pytest.raises(LostStateError, match=r"in round 1"):
        host.answer(order)  # of round 0, whose version the client still holds
    with refused("message.tensors"):
        host.answer(replace(order, round=1))
    evaluated = made.method.sync(second.progress.state, client)
    host.answer(Order("evaluate", 2, 0, 0.1, LOST, client, serialization.encode(evaluated)))
    assert len(list((tmp_path).glob("*/trained.safetensors"))) == len(made.clients) - 1
    with pytest.raises(LostStateError, match="no state of round 2"):
        host.answer(replace(order, round=1))


def test_after_a_training_that_fails_no_earlier_one_is_answered_for(built: Prepared, tmp_path: Path) -> None:
    made, transport = connect(built, tmp_path)
    begin, client = made.begin(), made.clients[LOST].client
    made.run_round(begin)
    host, sent = transport.hosts[LOST], made.method.sync(begin.state, client)
    damaged = Message({name: value * float("nan") for name, value in sent.tensors.items()}, sent.scalars)
    with pytest.raises(FedspanError):
        host.answer(Order("train", 0, 1, 0.1, LOST, client, serialization.encode(damaged)))
    with pytest.raises(LostStateError, match="no state of round 1"):
        host.answer(Order("second", 0, 1, 0.1, LOST, client, serialization.encode(Message())))


def test_weights_that_are_limited_are_the_same_in_both_exchanges(tiny_folder: Path, tmp_path: Path) -> None:
    """A client without a first reply moves the median by which the others' weights are limited."""
    made, transport = connect(prepare(make_config(tiny_folder, federation={"max_weight_ratio": 1.0})), tmp_path)
    made.clients = {id: replace(data, train=data.train[:0]) for id, data in made.clients.items()}  # declared numbers
    examples = {id: data.client.weight for id, data in made.clients.items()}
    silent_one = min(examples, key=lambda id: examples[id])
    transport.drop = lambda order: order.to == silent_one and order.task == "train"
    result = made.run_round(made.begin())
    rest = sorted(set(examples) - {silent_one})
    limit, other = statistics.median_low(examples.values()), statistics.median_low(examples[id] for id in rest)
    shares = {id: min(examples[id], limit) for id in rest}
    assert limit != other
    assert sum(examples[id] > limit for id in rest) > 0
    store, after = DiskClientStore(tmp_path), result.progress.state.tensors
    trained = {id: store.load_trained(id, 0).tensors for id in rest}
    for layer in made.method.spec.layers:
        mean = torch.zeros(())
        for id, one in trained.items():
            share = shares[id] / sum(shares.values())
            mean = mean + share * one[f"{layer.name}/B"].double() @ one[f"{layer.name}/A"].double()
        found = after[f"{layer.name}/B"].double() @ after[f"{layer.name}/A"].double()
        assert float((found - mean).norm()) < 1e-4 * float(mean.norm())


def test_a_client_without_second_replies_is_not_waited_for_in_the_third_round(built: Prepared, tmp_path: Path) -> None:
    """It trains in every round, and its stored state stays that before the first one."""
    made, transport = connect(built, tmp_path, silent, max_missed_rounds=2)
    progress = made.begin()
    for number in range(2):
        assert made.find_absent(progress, made.clients) == frozenset()
        progress = made.run_round(progress).progress
        assert LOST not in progress.last_rounds, number
    assert made.find_absent(progress, made.clients) == {LOST}
    transport.asked.clear()
    transport.late = LOST
    progress = made.run_round(progress).progress
    assert progress.last_rounds == dict.fromkeys(set(made.clients) - {LOST}, 2)
    assert transport.waited == []  # both exchanges ended before its turn
    transport.late = ""


def test_a_second_reply_of_an_absent_client_is_not_waited_for(built: Prepared, tmp_path: Path) -> None:
    """Its first reply came in time: the second exchange ends with the others."""
    made, _ = connect(built, tmp_path)
    context = replace(made._build_context(made.begin()), absent=frozenset({LOST, "nobody"}))
    assert build_second_context(context, Message(), set(made.clients), {}).absent == {LOST}
    assert build_second_context(context, Message(), set(made.clients) - {LOST}, {}).absent == frozenset()


def test_a_client_that_over_selection_does_not_need_is_in_no_second_exchange(tiny_folder: Path, tmp_path: Path) -> None:
    prepared = prepare(make_config(tiny_folder, federation={"clients_per_round": 3}))
    made, transport = connect(prepared, tmp_path, over_select=1)
    transport.late = LOST  # its turn is last
    result = made.run_round(made.begin())
    assert result.late == (LOST,)
    assert transport.waited == []
    assert [id for task, _, id in transport.asked if task == "second"] == sorted({*made.clients} - {LOST})
    assert result.failures == ()


def test_an_outlier_of_the_second_exchange_is_measured_as_it_counts(built: Prepared, tmp_path: Path) -> None:
    """Changes are compared after scaling by the first exchange's factors, at twice the ratio."""
    made, _ = connect(built, tmp_path, max_norm_ratio=2.0)
    first = made._build_context(made.begin())
    assert find_outlying(first, {LOST: 2.1}) == {LOST}
    order = made.method.build_second_order(first.state, Reduced(zeros_of(made, "Y")))
    assert find_outlying(build_second_context(first, order, set(made.clients), {LOST: 0.9}), {LOST: 4.1}) == set()
    assert find_outlying(build_second_context(first, order, set(made.clients), {}), {LOST: 4.1}) == {LOST}


def find_outlying(context: RoundContext, norms: Mapping[str, float]) -> set[str]:
    """The clients whose changes are too far, if the others' norms are 1."""
    aggregation = PlaintextAggregation(context, Tally())
    aggregation._changes = {id: {MODEL: ChangeSize(norms.get(id, 1.0), 9)} for id in context.ids}
    return set(aggregation._find_outliers())


def zeros_of(made: Federation, slot: str) -> dict[str, torch.Tensor]:
    return {f"{layer.name}/{slot}": torch.ones(layer.out_features, 6) for layer in made.method.spec.layers}


def test_replies_with_the_same_names_are_an_error_of_the_method(built: Prepared, tmp_path: Path) -> None:
    class Same(Wrapper):
        """A method whose second replies are named like the first ones."""

        def build_second_reply(self, order: Message, tensors: Any, client: Client, round: int) -> Message:
            reply = self.inner.build_second_reply(order, tensors, client, round)
            return Message({f"{name.removesuffix('P')}Y": value for name, value in reply.tensors.items()})

    again = built.federation.replace_transport(built.federation.transport)
    prepared = replace(built, federation=again)
    prepared.federation.method = Same(inner=built.federation.method)
    made, _ = connect(prepared, tmp_path)
    with refused("method", "have a tensor of this name"):
        made.run_round(made.begin())


HOSTILE: dict[str, tuple[Spoil, str]] = {
    "not a number": (lambda _, answer: alter(answer, lambda value: value * float("nan")), "not finite"),
    "another shape": (lambda _, answer: alter(answer, lambda value: value[:1]), "not ["),
    "far away": (lambda _, answer: alter(answer, lambda value: value + 100), "times the cohort's norm"),
    "the first reply": (lambda _, answer: replace(answer, task="train").to_envelope(), "where the order was to"),
    "no message": (lambda _, answer: replace(answer, body=b"\x08").to_envelope(), "not a fedspan message"),
}


def alter(answer: Reply, change: Callable[[torch.Tensor], torch.Tensor]) -> Envelope:
    tensors = {name: change(value).contiguous() for name, value in serialization.decode(answer.body).tensors.items()}
    return replace(answer, body=serialization.encode(Message(tensors))).to_envelope()


@pytest.fixture(scope="module")
def without(built: Prepared, tmp_path_factory: pytest.TempPathFactory) -> RoundResult:
    """The first round, without one client's second reply."""
    made, _ = connect(built, tmp_path_factory.mktemp("without"), silent)
    return made.run_round(made.begin())


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_second_reply_is_none(kind: str, built: Prepared, without: RoundResult, tmp_path: Path) -> None:
    spoil, reason = HOSTILE[kind]
    made, _ = connect(built, tmp_path / "hostile", spoil)
    result = made.run_round(made.begin())
    (failure,) = result.failures
    assert failure.client == LOST
    assert reason in failure.reason
    assert differences(without.progress.state, result.progress.state) == []


def test_scaled_changes_have_the_same_factor_in_both_exchanges(tiny_folder: Path) -> None:
    """With B alone trained, clipping the clients' products by one factor each leaves an exact average of them."""
    prepared = prepare(
        make_config(tiny_folder, training={"local_steps": None, "batch_size": 12}, federation={"clip_ratio": 1.2})
    )
    trained: dict[str, Any] = {}
    made = prepared.federation
    result = made.run_round(made.begin(), on_trained=lambda work, one: trained.update({work.client: one.tensors}))
    assert result.clipped
    scaled = {
        id: {name: value * (result.clipped.get(id, 1.0) if name.endswith("/B") else 1.0) for name, value in one.items()}
        for id, one in trained.items()
    }  # B starts at 0, so its change is itself
    expected, after = sum_by_examples(made, scaled, set(scaled)), result.progress.state.tensors
    for layer, mean in expected.items():
        found = after[f"{layer}/B"].double() @ after[f"{layer}/A"].double()
        assert float((found - mean).norm()) < 1e-4 * float(mean.norm())


def test_dropouts_act_in_each_exchange(tiny_folder: Path) -> None:
    prepared = prepare(make_config(tiny_folder, simulation={"dropout": 0.3}, federation={"rounds": 4}))
    progress, reasons = prepared.federation.begin(), list[str]()
    for _ in range(4):
        result = prepared.federation.run_round(progress)
        progress = result.progress
        reasons += [one.reason for one in result.failures]
    assert set(reasons) == {"it dropped out (simulated)", "second exchange: it dropped out (simulated)"}


def test_an_order_without_training_or_a_second_exchange_is_refused(
    built: Prepared, tiny_folder: Path, tmp_path: Path
) -> None:
    _, transport = connect(built, tmp_path)
    client = Client(LOST, 2, 1.0, 1, 1.0)
    order = Order("second", 0, 0, 0.1, LOST, client, serialization.encode(Message()))
    with refused("client memory", "no state of round 1"):
        transport.hosts[LOST].answer(order)
    with pytest.raises(ValueError, match="names another client"):
        transport.hosts[LOST].answer(replace(order, client=replace(client, id="north")))
    other = prepare(tiny.config(tiny_folder, method={"name": "fedit"}))
    _, transport = connect(other, tmp_path)
    with refused("message.task"):
        transport.hosts[LOST].answer(order)


def test_a_secure_round_of_three_needs_all_of_them_for_its_second_sum(tiny_folder: Path, tmp_path: Path) -> None:
    """One drops out of the first attempt: with two left, the second exchange would have too few to hide among."""
    prepared = prepare(make_config(tiny_folder, federation={"clients_per_round": 3, "max_weight_ratio": None}))
    made, stage = secure_rounds.secured(prepared, tmp_path, settings=SecureSettings(clip=1e4, bits=64))
    cohort = made.draw_cohort(0)
    stage.lose = lambda asked: (asked.task, asked.attempt, asked.to) == ("train", 0, cohort[0])
    result = made.run_round(made.begin())
    assert {(one.client, one.attempt) for one in result.failures} == {(cohort[0], 0)}
    assert set(result.progress.last_rounds) == set(cohort)


@pytest.mark.parametrize("attempts", [1, 2])
def test_both_secure_sums_of_a_round_have_the_same_clients(attempts: int, tiny_folder: Path, tmp_path: Path) -> None:
    """Of four, three would be enough for a sum; but the difference of both would show the sketch of the fourth."""
    prepared = prepare(make_config(tiny_folder, federation={"clients_per_round": None, "max_weight_ratio": None}))
    settings = SecureSettings(clip=1e4, bits=64)
    made, stage = secure_rounds.secured(prepared, tmp_path, settings=settings, retries=1)
    stage.lose = lambda asked: asked.task == "second" and asked.to == LOST and asked.attempt < attempts
    if attempts == 2:
        with refused("good replies", "needs good replies of at least 4 of 4 clients"):
            made.run_round(made.begin())
        return
    result = made.run_round(made.begin())
    assert {one.client for one in result.failures} == {LOST}
    assert len(result.progress.last_rounds) == 4


def test_a_clipped_change_of_a_secure_sum_has_one_factor_in_both_exchanges(tiny_folder: Path, tmp_path: Path) -> None:
    """Sketches Y are longer than P, so a limit between both clips Y alone."""
    training = {"local_steps": None, "batch_size": 12}
    prepared = prepare(make_config(tiny_folder, training=training, federation={"max_weight_ratio": None}))
    clip = 0.02
    made, _ = secure_rounds.secured(prepared, tmp_path / "secure", settings=SecureSettings(clip=clip, bits=64))
    result = made.run_round(made.begin())
    store, scaled = DiskClientStore(tmp_path / "secure"), {}
    factors = {id: store.load_trained(id, 0).factor for id in made.clients}
    assert len({factor for factor in factors.values() if factor < 1}) > 1
    for id, factor in factors.items():
        tensors = store.load_trained(id, 0).tensors
        scaled[id] = {name: value * (factor if name.endswith("/B") else 1.0) for name, value in tensors.items()}
    expected, after = sum_by_examples(made, scaled, set(scaled)), result.progress.state.tensors
    for layer, mean in expected.items():
        found = after[f"{layer}/B"].double() @ after[f"{layer}/A"].double()
        assert float((found - mean).norm()) < 1e-4 * float(mean.norm())


def build_two_exchanges(folder: Path, simulation: dict[str, Any]) -> Prepared:
    federation = {"clients_per_round": None, "min_replies": 1, "deadline": 50000.0, "max_norm_ratio": None, "rounds": 3}
    method = {"name": "fedask", "r": 2}
    return prepare(tiny.config(folder, method=method, federation=federation, simulation=simulation))


def test_a_dropout_in_a_second_exchange_takes_a_deadline_of_its_own(tiny_folder: Path) -> None:
    federation = build_two_exchanges(tiny_folder, {"dropout": 0.3, "speed": {"median": 1000.0}}).federation
    progress, kinds = federation.begin(), set[tuple[bool, bool]]()
    for _ in range(3):
        result = federation.run_round(progress)
        progress = result.progress
        seconds = result.simulated_seconds
        second = [one.reason.startswith("second exchange") for one in result.failures]
        kinds.add((False in second, True in second))
        assert seconds is not None
        least = 50000.0 * len(set(second))
        assert seconds == least if False in second else least < seconds < least + 50000.0
    assert any(in_second for _, in_second in kinds)


def test_a_fault_s_change_of_a_second_reply_is_from_an_untrained_one(tiny_folder: Path) -> None:
    """A flipped sign mirrors the reply at that of a client whose training changes nothing, by hand A^T (B^T Q)."""
    federation = build_two_exchanges(tiny_folder, {"faults": {"kind": "sign-flip", "share": 0.25}}).federation
    transport = federation.transport
    tamper, seen = transport.host.tamper, list[tuple[Message, Message, Message]]()
    assert tamper is not None

    def watch(order: Order, message: Message, reply: Message) -> Message:
        altered = tamper(order, message, reply)
        if order.task == "second" and altered is not reply:
            seen.append((message, reply, altered))
        return altered

    transport.host.tamper = watch
    progress = federation.run_round(federation.begin()).progress
    seen.clear()
    federation.run_round(progress)
    (message, reply, altered), *_ = seen
    for layer in federation.method.spec.layers:
        A, B = (progress.state.tensors[f"{layer.name}/{slot}"].double() for slot in "AB")
        start = A.T @ (B.T @ message.tensors[f"{layer.name}/Q"].double())
        name = f"{layer.name}/P"
        assert float(start.norm()) > 0
        expected = 2 * start - reply.tensors[name].double()
        assert float((altered.tensors[name].double() - expected).norm()) < 1e-4 * float(expected.norm())
