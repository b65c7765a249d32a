"""Heads that start from statistics: exact over any partition, for every method, in plaintext and in secure sums."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedspan.assembly.head import begin, begin_locally
from fedspan.assembly.run import Prepared, prepare
from fedspan.core.heads import compute_statistics_shapes, summarize_features
from fedspan.core.values import Client, Message
from fedspan.federation.aggregation.reduction import MessageBuffer
from fedspan.federation.head_start import HeadStart, check_statistics, start_head
from fedspan.federation.progress import ClientData, Failure, Progress
from fedspan.federation.protocol import Envelope
from fedspan.federation.serialization import decode, encode
from fedspan.federation.transport import OnReply, OnTrained, Orders, Transport
from fedspan.methods.registry import METHODS
from fedspan.models.head import OutputLayer
from helpers import tiny
from helpers.head_starts import HEAD, start_of

LAYER = OutputLayer("classifier", outputs=4, features=16, bias=True)


@pytest.fixture(scope="module")
def prepared(tiny_folder: Path) -> Prepared:
    """A run on BERT, whose clients are of different sizes and labels."""
    federation = {"clients_per_round": None}
    return prepare(tiny.config(tiny_folder, "deep-bert", model={"head_init": "lda"}, federation=federation))


@pytest.mark.parametrize("kind", ["class-means", "lda"])
def test_the_start_is_that_of_all_examples_in_one_place(prepared: Prepared, kind: Any) -> None:
    head = replace(prepared.head, kind=kind)
    federated = start_of(replace(prepared, head=head))
    all_clients = prepared.federation.clients
    train = np.concatenate([client_data.train for client_data in all_clients.values()])
    whole = replace(next(iter(all_clients.values())), train=train)
    alone = tiny.variant(prepared, prepared.config)
    one = {"all": replace(whole, client=replace(whole.client, id="all", examples=len(train), weight=1.0))}
    tiny.use_clients(alone.federation, one)
    central = start_of(replace(alone, head=head))
    for name in HEAD:
        torch.testing.assert_close(federated[name], central[name], rtol=1e-3, atol=1e-3)


def test_features_are_those_that_enter_the_head(prepared: Prepared) -> None:
    engine, indices = prepared.engine, np.arange(5)
    features = engine.compute_features(None, prepared.train, indices, 2)
    job = prepared.evaluator.build_job(prepared.federation.begin(), None)
    predictions = engine.predict(job, prepared.train, indices, 2)
    layer = engine.adapted.model.get_submodule("classifier")
    expected = torch.nn.functional.linear(features, layer.weight, layer.bias)
    torch.testing.assert_close(predictions, expected, rtol=1e-5, atol=1e-5)


def test_transfers_have_a_purpose_of_their_own(prepared: Prepared) -> None:
    run = tiny.variant(prepared, prepared.config)
    start_of(replace(run, head=prepared.head))
    transfers = run.federation.pop_events().transfers
    assert {transfer.purpose for transfer in transfers} == {"statistics"}
    up = [transfer.payload for transfer in transfers if transfer.direction == "up"]
    shapes = compute_statistics_shapes("lda", 4, 16)
    assert up == [4 * sum(int(np.prod(shape)) for shape in shapes.values())] * 4
    assert {transfer.payload for transfer in transfers if transfer.direction == "down"} == {0}


@pytest.mark.parametrize("name", METHODS)
def test_clients_of_every_method_start_from_the_head(prepared: Prepared, tiny_folder: Path, name: str) -> None:
    config = tiny.config(tiny_folder, model={"head_init": "lda"}, method={"name": name})
    run = replace(tiny.variant(prepared, config), head=prepared.head)
    progress = begin(run.federation, run.head)
    down = [one.payload for one in run.federation.pop_events().transfers if one.direction == "down"]
    assert (min(down) > 0) == (name == "florg")  # whose factors of A^T A are not 0 at first
    for id in (None, "east"):
        if id is None and run.federation.method.declare_claims().personal:
            continue
        job = run.evaluator.build_job(progress, id)
        for path in HEAD:
            assert torch.equal(job.tensors[path], progress.state.tensors[path])
            assert not torch.equal(job.tensors[path], prepared.engine.adapted.get_extra(path.removeprefix("extras/")))


@pytest.mark.parametrize("policy", ["average", "local", "frozen"])
def test_every_policy_of_extras_begins_with_the_head(prepared: Prepared, tiny_folder: Path, policy: str) -> None:
    config = tiny.config(tiny_folder, model={"head_init": "lda", "extras": policy})
    run = tiny.variant(prepared, config)
    progress = begin(run.federation, prepared.head)
    after = run.federation.run_round(progress).progress
    moved = not torch.equal(after.state.tensors[HEAD[0]], progress.state.tensors[HEAD[0]])
    assert moved == (policy == "average")
    job = run.evaluator.build_job(after, "west")
    own = not torch.equal(job.tensors[HEAD[0]], progress.state.tensors[HEAD[0]])
    assert own == (policy != "frozen")


def test_the_local_baseline_starts_from_each_clients_own_examples(prepared: Prepared, tiny_folder: Path) -> None:
    config = tiny.config(tiny_folder, model={"head_init": "lda"}, method={"name": "local-only"})
    run = tiny.variant(prepared, config)
    assert prepared.head is not None
    progress = begin_locally(run.federation, prepared.head)
    heads = {id: run.evaluator.build_job(progress, id).tensors[HEAD[0]] for id in run.federation.clients}
    for id, client_data in run.federation.clients.items():
        alone = tiny.variant(prepared, prepared.config)
        tiny.use_clients(alone.federation, {id: client_data})
        torch.testing.assert_close(heads[id], start_of(replace(alone, head=prepared.head))[HEAD[0]])
    assert not torch.equal(heads["east"], heads["west"])
    trained = run.federation.run_round(progress).progress
    assert trained.last_rounds == dict.fromkeys(run.federation.clients, 0)


@pytest.mark.parametrize("kind", ["class-means", "lda"])
def test_a_secure_sum_gives_the_head_of_plaintext(prepared: Prepared, tiny_folder: Path, kind: str) -> None:
    federation = {"clients_per_round": None, "secure": {"bits": 64}}
    run = prepare(tiny.config(tiny_folder, "deep-bert", model={"head_init": kind}, federation=federation))
    assert run.head.bound == 8.0
    secure = start_of(run)
    plain = start_of(replace(prepared, head=replace(prepared.head, kind=run.head.kind, bound=8.0)))
    for name in HEAD:
        torch.testing.assert_close(secure[name], plain[name], rtol=2e-3, atol=2e-3)
    assert {one.purpose for one in run.federation.pop_events().transfers} == {"statistics"}


def test_a_declared_number_moves_the_start_by_no_more_than_the_limit(prepared: Prepared) -> None:
    clients = prepared.federation.clients
    sizes = {id: float(len(data.train)) for id, data in clients.items()}

    def start(**changes: float | None) -> Tensor:
        run, west = tiny.variant(prepared, prepared.config), clients["west"]
        declared = replace(west.client, examples=1000 * len(west.train))
        tiny.use_clients(run.federation, {**clients, "west": replace(west, client=declared, **changes)})
        return start_of(replace(run, head=prepared.head))[HEAD[0]]

    ratio = prepared.federation.settings.max_weight_ratio
    assert ratio is not None
    limit = ratio * median_low(sizes[id] if id != "west" else 1e9 for id in sizes)
    assert torch.equal(start(), start(max_weight=limit))
    assert not torch.equal(start(), start(max_weight=1000.0 * sizes["west"]))  # as an operator may allow


class Rescaling(Transport):
    """A transport that changes the replies of one client."""

    def __init__(self, transport: Transport, id: str, change: Callable[[Message], Message]) -> None:
        self.transport, self.id, self.change = transport, id, change

    def begin(self, progress: Progress, on_trained: OnTrained | None = None) -> None:
        self.transport.begin(progress, on_trained)

    def exchange(self, orders: Orders, on_reply: OnReply, seconds: float, **options: Any) -> None:
        def replied(id: str, reply: Envelope | str) -> bool:
            if id == self.id and isinstance(reply, Envelope):
                reply = replace(reply, body=encode(self.change(decode(reply.body))))
            return on_reply(id, reply)

        self.transport.exchange(orders, replied, seconds, **options)


def mislabel(scale: float) -> Callable[[Message], Message]:
    """Return statistics that a client has if it multiplies its features by a number and moves every label by one."""

    def change(message: Message) -> Message:
        powers = {"shares": 0, "sums": 1, "square": 2, "products": 2}
        tensors = {name: value * scale ** powers[name] for name, value in message.tensors.items()}
        return Message({**tensors, **{name: tensors[name].roll(1, 0) for name in ("shares", "sums")}})

    return change


@pytest.mark.parametrize(("kind", "scale"), [("class-means", 10.0), ("class-means", 1000.0), ("lda", 1000.0)])
def test_features_of_a_false_scale_count_little(prepared: Prepared, kind: Any, scale: float) -> None:
    """They decided the start: the pooled covariance and the class means grow with the scale.

    LDA's weights follow from a larger covariance; they classify the examples (36 % by the largest class) as before.
    """
    head = replace(prepared.head, kind=kind)
    features = prepared.engine.compute_features(None, prepared.train, np.arange(len(prepared.train)), 2)
    labels = torch.as_tensor(prepared.train.labels)  # type: ignore[attr-defined]

    def start(change: Callable[[Message], Message] | None) -> tuple[dict[str, Tensor], tuple[Failure, ...]]:
        run = tiny.variant(prepared, prepared.config)
        run.federation.settings = run.federation.settings.model_copy(update={"validates": True})
        all_clients = prepared.federation.clients
        if change is None:
            tiny.use_clients(
                run.federation, {id: client_data for id, client_data in all_clients.items() if id != "east"}
            )
        else:
            run.federation.transport = Rescaling(run.federation.transport, "east", change)
        return start_of(replace(run, head=head)), run.federation.pop_events().failures

    def measure(tensors: dict[str, Tensor]) -> float:
        guessed = torch.nn.functional.linear(features, *(tensors[name] for name in HEAD)).argmax(1)
        return float((guessed == labels).float().mean())

    others, _ = start(None)
    attacked, failures = start(mislabel(scale))
    assert measure(attacked) > measure(others) - 0.05
    if kind == "class-means":
        centered = [(one[HEAD[0]] - one[HEAD[0]].mean(0)).double().flatten() for one in (attacked, others)]
        assert float(torch.cosine_similarity(*centered, dim=0)) > 0.9
    ((client, reason),) = {(failure.client, failure.reason) for failure in failures}
    assert client == "east"
    assert "its features are longer than the others'" in reason


def test_a_reply_that_is_far_longer_than_the_others_is_dropped(prepared: Prepared) -> None:
    """It is measured as a whole: the size of the features, by which statistics count less, contains no targets."""
    run = tiny.variant(prepared, prepared.config)
    rules = {"validates": True, "max_norm_ratio": 10.0, "min_replies": 1}
    run.federation.settings = run.federation.settings.model_copy(update=rules)
    run.federation.transport = Rescaling(run.federation.transport, "east", mislabel(1000.0))
    start_of(replace(run, head=replace(prepared.head, kind="class-means")))
    ((client, reason),) = {(failure.client, failure.reason) for failure in run.federation.pop_events().failures}
    assert client == "east"
    assert "has a norm of" in reason


def test_trusted_replies_are_added_on_arrival(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[str] = []
    monkeypatch.setattr(MessageBuffer, "store", lambda self, id, *_: waiting.append(id))
    assert start_of(prepared)
    assert waiting == []


def test_a_client_that_refuses_is_left_out(prepared: Prepared, tiny_folder: Path) -> None:
    config = tiny.config(tiny_folder, "deep-bert", model={"head_init": "lda"}, simulation={"dropout": {"east": 1.0}})
    run = prepare(config)
    got = start_of(run)
    beside = run.federation.pop_events()
    assert {(failure.client, failure.purpose) for failure in beside.failures} == {("east", "statistics")}
    others = tiny.variant(prepared, prepared.config)
    all_clients = {id: client_data for id, client_data in prepared.federation.clients.items() if id != "east"}
    tiny.use_clients(others.federation, all_clients)
    torch.testing.assert_close(got, start_of(replace(others, head=prepared.head)))


def honest(kind: Any = "lda") -> tuple[Message, Client]:
    rng = torch.Generator().manual_seed(0)
    features, labels = torch.randn(30, 16, generator=rng), torch.randint(0, 4, (30,), generator=rng)
    answers = {"least-squares": features.sum(1), "by-label": torch.nn.functional.one_hot(labels, 4)}.get(kind, labels)
    outputs = 4 if kind != "least-squares" else 1
    tensors = summarize_features(features, answers, outputs, kind).to_tensors()
    return Message({name: value.float() for name, value in tensors.items()}), Client("a", 2, 2.0, 30, 30.0)


@pytest.mark.parametrize("kind", ["class-means", "lda", "least-squares", "by-label"])
def test_honest_statistics_pass(kind: Any) -> None:
    layer = LAYER if kind != "least-squares" else replace(LAYER, outputs=1)
    check_statistics(*honest(kind), HeadStart(kind, layer))


def set_entry(name: str, value: float) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    def change(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        copy = tensors[name].clone()
        copy.view(-1)[0] = value
        return {**tensors, name: copy}

    return change


@pytest.mark.parametrize(
    ("kind", "change", "why"),
    [
        ("lda", set_entry("shares", -0.1), "negative"),
        ("lda", set_entry("shares", 0.9), "more than its examples"),
        ("lda", set_entry("shares", 0.0101), "whole numbers"),
        ("lda", set_entry("sums", float("nan")), "finite"),
        ("lda", set_entry("sums", 100.0), "class means are longer"),
        ("lda", set_entry("square", 0.01), "class means are longer"),
        ("lda", set_entry("products", -4.0), "products are not"),
        ("lda", set_entry("products", 1e6), "do not belong"),
        ("lda", lambda tensors: {**tensors, "more": torch.zeros(1)}, "tensors are not"),
        ("lda", lambda tensors: {**tensors, "sums": torch.zeros(16, 4)}, "tensors are not"),
        ("lda", lambda tensors: {name: value for name, value in tensors.items() if name != "square"}, "are not"),
        ("lda", lambda tensors: {**tensors, **{name: 0 * tensors[name] for name in ("shares", "sums")}}, "no example"),
        ("least-squares", set_entry("targets", 1e5), "with the targets"),
        ("by-label", set_entry("shares", 1.1), "more than its examples"),
        ("by-label", set_entry("sums", 100.0), "class means are longer"),
    ],
)
def test_hostile_statistics_are_rejected(kind: Any, change: Callable[..., dict[str, Tensor]], why: str) -> None:
    message, client = honest(kind)
    layer = LAYER if kind != "least-squares" else replace(LAYER, outputs=1)
    with pytest.raises(ValueError, match=why):
        check_statistics(Message(change(message.tensors)), client, HeadStart(kind, layer))


def test_long_features_are_rejected_under_a_bound() -> None:
    message, client = honest()
    with pytest.raises(ValueError, match="longer than the order allows"):
        check_statistics(message, client, HeadStart("lda", LAYER, bound=1.0))


def test_the_progress_that_it_starts_from_is_unchanged(prepared: Prepared) -> None:
    before = prepared.federation.begin()
    assert prepared.head is not None
    after = start_head(prepared.federation, before, prepared.head)
    assert isinstance(after, Progress)
    assert not torch.equal(before.state.tensors[HEAD[0]], after.state.tensors[HEAD[0]])
    other = {name: value for name, value in after.state.tensors.items() if name not in HEAD}
    assert all(value is before.state.tensors[name] for name, value in other.items())


def test_clients_without_examples_take_part(prepared: Prepared) -> None:
    run = tiny.variant(prepared, prepared.config)
    all_clients: dict[str, ClientData] = dict(run.federation.clients)
    empty = all_clients["east"]
    none = np.zeros(0, np.int64)
    all_clients["east"] = replace(empty, train=none, client=replace(empty.client, examples=0, weight=0.0))
    tiny.use_clients(run.federation, all_clients)
    got = start_of(replace(run, head=prepared.head))
    assert all(bool(torch.isfinite(value).all()) for value in got.values())
