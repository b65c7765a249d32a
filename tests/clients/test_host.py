"""Clients that carry out orders: what is refused, and made known of them."""

import errno
import socket
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedspan.assembly.head import begin
from fedspan.assembly.run import Prepared, prepare
from fedspan.clients.open_training import OpenTraining
from fedspan.clients.refusals import describe_error
from fedspan.clients.second_exchange import FirstExchange
from fedspan.clients.statistics import StatisticsLimits, compute_client_statistics, parse_statistics_order
from fedspan.clients.store import LostStateError, OverlayClientStore
from fedspan.core.heads import HeadKind
from fedspan.core.values import Client, Job, OptimizerState
from fedspan.errors import FedspanError
from fedspan.federation.head_start import BOUND, KIND
from fedspan.federation.progress import ClientData, ClientState
from fedspan.federation.protocol import Order
from fedspan.federation.secagg.messages import KeysOrder
from helpers import tiny
from helpers.head_starts import HEAD, start_of

pytest.importorskip("opacus", reason="the extra fedspan[privacy] is not installed")

from fedspan.clients.host import Host
from fedspan.clients.store import DiskClientStore, compute_state_digest
from fedspan.core.base import BasePatch, BaseUpdate
from fedspan.core.lowrank import LowRank
from fedspan.core.values import Message
from fedspan.federation import serialization
from fedspan.training.config import Privacy
from fedspan.training.dp_sgd import draw_poisson_batches
from fedspan.training.loop import LoopEngine
from helpers.refusals import refused

LAYER = "bert.encoder.layer.0.attention.self.query"


def prepare_private(folder: Path, method: str) -> Prepared:
    privacy = {"mechanism": "dp-sgd", "noise": 1.0, "clip": 0.3}
    return prepare(tiny.config(folder, privacy=privacy, method={"name": method, "r": 2}, training={"local_steps": 8}))


def make_host(prepared: Prepared, folder: Path, *, secret: bool = True) -> Host:
    here, engine = prepared.federation, prepared.engine
    privacy = engine.privacy.model_copy(update={"secret": secret})
    loop = LoopEngine(engine.adapted, prepared.task, engine.settings, engine.seed, privacy=privacy)
    return Host(here.method, loop, here.clients, here.examples, DiskClientStore(folder), 32)


def make_order(prepared: Prepared) -> Order:
    here = prepared.federation
    client = here.clients["west"].client
    body = serialization.encode(here.method.sync(here.begin().state, client))
    return Order("train", 0, 0, 0.1, "west", client, body)


def patch_base(order: Order, value: float, rows: int = 16) -> Order:
    patch = BasePatch(0, whole=True, total={LAYER: torch.full((rows, 16), value)})
    message = serialization.decode(order.body)
    return replace(order, body=serialization.encode(replace(message, base=patch)))


def add_to_tensors(order: Order, value: float) -> Order:
    message = serialization.decode(order.body)
    tensors = {name: tensor + value for name, tensor in message.tensors.items()}
    return replace(order, body=serialization.encode(replace(message, tensors=tensors)))


def draw_samples(host: Host, order: Order) -> list[list[int]]:
    (assignment,) = host.make_first_assignments([order])
    privacy = host.engine.privacy
    assert isinstance(privacy, Privacy)
    return [sample.tolist() for sample in draw_poisson_batches(privacy, host.engine.settings, assignment)]


@pytest.fixture(scope="module")
def fedex(tiny_folder: Path) -> Prepared:
    return prepare_private(tiny_folder, "fedex-lora")


CHANGES: dict[str, Callable[[Order], Order]] = {
    "another base": lambda order: patch_base(order, 2.0),
    "no base": lambda order: replace(
        order, body=serialization.encode(Message(serialization.decode(order.body).tensors))
    ),
    "another model": lambda order: add_to_tensors(order, 0.5),
    "another learning rate": lambda order: replace(order, lr=0.2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_secret_sample_serves_one_order(change: str, fedex: Prepared, tmp_path: Path) -> None:
    """A server that repeats an order with another base learns no second sum over the same sample."""
    order = patch_base(make_order(fedex), 1.0)
    host = make_host(fedex, tmp_path)
    samples = draw_samples(host, order)
    assert samples == draw_samples(host, replace(order, attempt=1, serial=9))
    assert samples != draw_samples(host, CHANGES[change](order))
    reproducible = make_host(fedex, tmp_path, secret=False)
    assert draw_samples(reproducible, order) == draw_samples(reproducible, CHANGES[change](order))


def test_a_secret_sample_serves_one_stored_state(fedex: Prepared, tmp_path: Path) -> None:
    """A server that repeats an earlier round with another base gives the next round's order another start."""
    order = make_order(fedex)
    order = replace(order, round=1, client=replace(order.client, last_round=0))
    host, samples = make_host(fedex, tmp_path), []
    for value in (1.0, 2.0, 1.0):
        state = ClientState(base=BaseUpdate(0, total={LAYER: torch.full((16, 16), value)}))
        host.store.store("west", 0, state, frozenset())
        samples.append(draw_samples(host, order))
    assert samples[0] == samples[2] != samples[1]


def test_only_training_costs_privacy(fedex: Prepared, tmp_path: Path) -> None:
    host, order = make_host(fedex, tmp_path), make_order(fedex)
    assert host.compute_charges(order)
    assert host.compute_charges(replace(order, task="evaluate")) == ()
    assert host.compute_charges(replace(order, task="statistics")) == ()
    assert host.compute_charges(KeysOrder(round=0, attempt=0, to="west", session=7)) == ()


def test_the_digest_of_a_state_depends_on_all_of_it_and_survives_the_disk(tmp_path: Path) -> None:
    def make(
        memory: float = 1.0, moment: float = 1.0, step: int = 3, base: float = 1.0, rho: float = 1.0
    ) -> ClientState:
        def value(number: float) -> Tensor:
            return torch.full((2, 3), number)

        moments = OptimizerState({"exp_avg": {"x": value(moment)}}, {"x": step})
        pair = LowRank(torch.full((4, 1), base), torch.ones(1, 3), 2.0)
        return ClientState(
            {"x": value(memory)}, {"train": (moments, 0)}, BaseUpdate(2, rho, {"l": pair, "m": value(1)})
        )

    states = [make(), make(memory=2), make(moment=2), make(step=4), make(base=2), make(rho=0.5)]
    digests = [compute_state_digest(state) for state in states]
    assert len(set(digests)) == len(digests)
    store = DiskClientStore(tmp_path)
    store.store("a", 0, states[0], frozenset())
    assert compute_state_digest(store.load("a", 0)) == digests[0]


def test_a_base_from_a_method_that_sends_none_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    prepared = prepare_private(tiny_folder, "fedit")
    host, order = make_host(prepared, tmp_path), make_order(prepared)
    host.agreed = "config"
    assert host.make_first_assignments([order])
    for task in ("train", "evaluate"):
        with refused("message.base"):
            host.answer(replace(patch_base(order, 1.0), task=task))
    with refused("message.base", "in its shape"):
        host.answer(patch_base(order, 1.0, 1))


CORES = {f"{LAYER}/A": torch.ones(64, 16), f"{LAYER}/B": torch.ones(16, 64), f"{LAYER}/R": torch.ones(4, 16, 16)}
UNFIT: list[tuple[str, dict[str, Tensor], str]] = [
    ("fedgalore", {f"{LAYER}/P": torch.eye(16), f"{LAYER}/v": torch.ones(16, 16)}, "rank 2"),
    ("fedgalore", {f"{LAYER}/P": torch.eye(16)[:2], f"{LAYER}/v": torch.ones(16, 1)}, "moments and variates"),
    ("ravan", CORES, "rank 2"),
    ("fedit", {f"{LAYER}/A": torch.ones(6, 16), f"{LAYER}/B": torch.ones(16, 6)}, "rank 2"),
    ("fedit", {f"{LAYER}/A": torch.ones(2, 1)}, r"the shape RI with I = 16"),
    ("fedit", {f"{LAYER}/A": torch.ones(2, 16, dtype=torch.float64)}, "not torch.float64"),
    ("fedit", {f"{LAYER}/C": torch.ones(2, 16)}, r"tensors A \(R, I\), B \(O, R\)"),
    ("fedit", {f"{LAYER}/A": torch.ones(10**4, 1)}, r"a tensor for \[16, 16\]"),
    ("fedit", {"extras/classifier.bias": torch.ones(1)}, r"a tensor for \[4\]"),
    ("fedit", {"extras/classifier.bias": torch.ones(5)}, r"the shape \[4\]"),
    ("fedit", {"extras/classifier.bias": torch.ones(4, dtype=torch.int64)}, "not torch.int64"),
    ("fedit", {"scaffold/elsewhere/A": torch.ones(2, 16)}, "a layer that the run trains"),
    ("fedhm", {}, "steps erase at most 10%"),
]


@pytest.mark.parametrize(("method", "tensors", "why"), UNFIT)
def test_tensors_that_do_not_fit_what_was_agreed_are_refused(
    method: str, tensors: dict[str, Tensor], why: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """A projector or cores of full rank would be answered by the whole gradient of a layer."""
    options = {"frobenius_decay": 1e3} if method == "fedhm" else {}
    prepared = prepare(tiny.config(tiny_folder, method={"name": method, "r": 2, **options}))
    here, order = prepared.federation, make_order(prepared)
    stored = DiskClientStore(tmp_path)
    host = Host(here.method, prepared.engine, here.clients, here.examples, stored, 32, agreed="config")
    message = serialization.decode(order.body)
    order = replace(order, body=serialization.encode(replace(message, tensors={**message.tensors, **tensors})))
    for task, client in (("train", order.client), ("evaluate", None)):
        with refused("message.tensors", why):
            host.answer(replace(order, task=task, client=client))


def test_what_a_round_trained_is_of_that_round_alone() -> None:
    store = OverlayClientStore({})
    first = FirstExchange({"l/B": torch.ones(3, 2)})
    store.store_trained("a", 2, first)
    assert store.load_trained("a", 2) is first
    for client, round in (("a", 1), ("b", 2)):
        with pytest.raises(LostStateError, match="did not train"):
            store.load_trained(client, round)
    store.store_trained("a", 2, None)
    with pytest.raises(LostStateError, match="did not train"):
        store.load_trained("a", 2)


FULL = OSError(errno.ENOSPC, "full", "/home/a patient's name")


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FULL, "no space left on device"),
        (
            caused(FedspanError("run folder", "/patients", "free"), OSError(errno.ENOSPC, "full")),
            "no space left on device",
        ),
        (caused(FedspanError("data.train", "/patients", "a file"), OSError(errno.ENOENT, "none")), "data.train"),
        (FedspanError("/patients", "secret", "nothing"), "an error"),
        (OSError("a patient's name"), "OSError"),
        (OSError("a patient's", "name"), "OSError"),
        (ssl.SSLCertVerificationError(1, "a patient's name"), "SSLCertVerificationError"),
        (socket.gaierror(-2, "a patient's name"), "gaierror"),
        (FedspanError("serial", 3, "more than 3"), "`serial`: 3 is not accepted. Expected more than 3."),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_server_is_told_what_but_nothing_of_data_or_paths(error: Exception, said: str) -> None:
    assert describe_error(error).removesuffix("; see the client's own log") == said


CLIENT = Client("east", 2, 0.5, 3, 3.0)
MOMENTS = OptimizerState({"exp_avg": {"fc/A": torch.ones(2, 3)}}, {"fc/A": 4})


def opened() -> OpenTraining:
    order = Order("train", round=5, attempt=1, lr=0.25, to="east", client=CLIENT, body=b"")
    data = ClientData(CLIENT, np.array([7, 3, 8]), np.array([1]), np.array([2]))
    job = Job({}, {}, (), generation=2)
    return OpenTraining(order, CLIENT, data, ClientState(), job, 1.5, "digest", {}, {"train": (MOMENTS, 2)})


def test_an_assignment_has_the_order_s_round_rate_and_noise_and_the_training_examples() -> None:
    training = opened()
    assignment = training.make_assignment(training.job, use_moments=True)
    assert assignment.job is training.job
    assert assignment.indices.tolist() == [7, 3, 8]
    facts = (assignment.client, assignment.round, assignment.lr, assignment.noise, assignment.origin)
    assert facts == ("east", 5, 0.25, 1.5, "digest")
    assert assignment.checkpoint is None


@pytest.mark.parametrize(
    ("changes", "use", "continued"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"generation": 3}, True, False),  # in other coordinates
        ({"phase": "second"}, True, False),  # another phase has moments of its own
    ],
)
def test_moments_continue_in_a_generation_of_a_phase(changes: dict[str, object], use: bool, continued: bool) -> None:
    training = opened()
    assignment = training.make_assignment(replace(training.job, **changes), use)
    assert (assignment.moments is MOMENTS) is continued
    assert continued or assignment.moments is None


@pytest.fixture(scope="module")
def prepared(tiny_folder: Path) -> Prepared:
    """A run on BERT, whose clients are of different sizes and labels."""
    federation = {"clients_per_round": None}
    return prepare(tiny.config(tiny_folder, "deep-bert", model={"head_init": "lda"}, federation=federation))


@pytest.mark.parametrize(
    "changes", [{KIND: "means"}, {KIND: 1}, {BOUND: 1}, {BOUND: -1.0}, {BOUND: float("inf")}, {BOUND: float("nan")}]
)
def test_an_order_for_statistics_has_a_known_kind_and_a_finite_bound(changes: dict[str, object]) -> None:
    message = Message({}, {KIND: "lda", BOUND: 0.0, "steps": 3})
    assert parse_statistics_order(message) == ("lda", 0.0, Message({}, {"steps": 3}))
    with pytest.raises(ValueError, match="an order for statistics of kind"):
        parse_statistics_order(replace(message, scalars={**message.scalars, **changes}))


def test_limits_of_a_data_owner(prepared: Prepared) -> None:
    run = tiny.variant(prepared, prepared.config)
    host = tiny.host_of(run.federation)
    host.limits = StatisticsLimits(class_examples=8)
    assert prepared.head is not None
    small = start_of(replace(run, head=prepared.head))
    assert not torch.equal(small[HEAD[0]], start_of(prepared)[HEAD[0]])
    host.limits = StatisticsLimits(FedspanError("limits.head_statistics", "off", problem="none leave"))
    with refused("limits.head_statistics"):
        begin(run.federation, prepared.head)


@pytest.mark.parametrize("kind", ["class-means", "lda", "least-squares"])
def test_every_kind_leaves_out_what_has_too_few_examples(prepared: Prepared, kind: HeadKind) -> None:
    engine, labels = prepared.engine, prepared.train.labels
    rare = np.flatnonzero(labels == 0)[:2]
    indices = np.sort(np.concatenate([rare, np.flatnonzero(labels == 1)[:3]])) if kind != "least-squares" else rare
    found = compute_client_statistics(engine, None, prepared.train, indices, kind, 0.0, 3)
    whole = compute_client_statistics(engine, None, prepared.train, indices, kind, 0.0, 1)
    if kind == "least-squares":
        assert all(not value.any() for value in found.values())
        assert float(whole["shares"].sum()) == 1.0
        return
    assert found["shares"].tolist() == pytest.approx([0.0, 0.6, 0.0, 0.0])
    assert not found["sums"][0].any()
    assert float(found["square"]) < float(whole["square"])  # nothing of the others' examples is in any number
