"""What a client's host makes of a server's orders: which it refuses, and on what its random draws depend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("opacus", reason="the extra fedspan[privacy] is not installed")

from fedspan.clients.host import Host
from fedspan.clients.store import DiskClientStore, compute_state_digest
from fedspan.core.base import BasePatch, BaseUpdate
from fedspan.core.lowrank import LowRank
from fedspan.core.values import Message, OptimizerState
from fedspan.errors import FedspanError
from fedspan.federation import serialization
from fedspan.federation.progress import ClientState
from fedspan.federation.protocol import Order
from fedspan.runs.setup import Prepared, prepare
from fedspan.training.dp_sgd import draw_poisson_batches
from fedspan.training.jobs import Privacy
from fedspan.training.loop import LoopEngine
from helpers import tiny

LAYER = "encoder.layer.0.attention.self.query"


def prepare_private(folder: Path, method: str) -> Prepared:
    privacy = {"mechanism": "dp-sgd", "noise": 1.0, "clip": 0.3}
    return prepare(tiny.config(folder, privacy=privacy, method={"name": method, "r": 2}, training={"local_steps": 8}))


def make_host(prepared: Prepared, folder: Path, *, secret: bool = True) -> Host:
    here, engine = prepared.federation, prepared.engine
    settings = replace(engine.settings, privacy=replace(engine.settings.privacy, secret=secret))
    loop = LoopEngine(engine.adapted, prepared.task, settings, engine.seed)
    return Host(here.method, loop, here.clients, here.examples, DiskClientStore(folder), 32)


def make_order(prepared: Prepared) -> Order:
    here = prepared.federation
    client = here.clients["west"].client
    body = serialization.encode(here.method.sync(here.begin().state, client))
    return Order("train", 0, 0, 0.1, "west", client, body)


def patch_base(order: Order, value: float) -> Order:
    patch = BasePatch(0, whole=True, total={LAYER: torch.full((16, 16), value)})
    message = serialization.decode(order.body)
    return replace(order, body=serialization.encode(replace(message, base=patch)))


def add_to_tensors(order: Order, value: float) -> Order:
    message = serialization.decode(order.body)
    tensors = {name: tensor + value for name, tensor in message.tensors.items()}
    return replace(order, body=serialization.encode(replace(message, tensors=tensors)))


def draw_samples(host: Host, order: Order) -> list[list[int]]:
    (assignment,) = host.make_first_assignments([order])
    privacy = host.engine.settings.privacy
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
    assert host.make_first_assignments([order])
    for task in ("train", "evaluate"):
        with pytest.raises(FedspanError, match=r"message\.base"):
            host.answer(replace(patch_base(order, 1.0), task=task))
