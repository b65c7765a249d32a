"""Checkpoints within a round: a node that is killed continues its training, with the bits of an undisturbed run."""

import errno
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fedspan.assembly.server import build_server_clients, connect, prepare_server
from fedspan.clients.host import Host
from fedspan.clients.job_checkpoints import DiskJobCheckpoint, JobCheckpoints
from fedspan.core.values import Client, OptimizerState
from fedspan.deployment.handshake import build_server_config
from fedspan.deployment.node import NodeService
from fedspan.errors import FedspanError
from fedspan.federation.evaluation import RemoteEvaluator
from fedspan.federation.protocol import Envelope, Order
from fedspan.federation.transport import AsynchronousTransport, OnReply, Orders
from fedspan.training.jobs import TrainingProgress, TrainingTotals
from fedspan.training.loop import LoopEngine
from helpers import tiny
from helpers.captured_log import CapturedLog
from helpers.families import others_slow
from helpers.node_service import Direct, introduced, node, served, values

STEPS = 5
"""Optimizer steps of a round."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "SGD with momentum and decay": {
        "training": {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.01, "lr": 0.05, "lora_dropout": 0.1}
    },
    "accumulated gradients": {"training": {"gradient_accumulation_steps": 2, "optimizer_state": "keep"}},
    "epochs with an incomplete group": {
        "training": {"local_steps": None, "local_epochs": 2, "gradient_accumulation_steps": 3, "weight_decay": 0.01}
    },
    "memory": {"method": {"name": "fedsa-lora"}},
    "alternating factors": {"method": {"name": "rolora"}},
    "two jobs a round": {"method": {"name": "pfedlora"}},
    "drawn projectors": {"method": {"name": "fedgalore", "steps": STEPS, "period": 2}},
    "offset and penalty": {
        "method": {"name": "fedit", "wrappers": ["fedprox", {"name": "scaffold", "variate": "gradient"}]},
        "training": {"max_grad_norm": 0.0},
    },
    "decaying base": {"method": {"name": "fedloru"}, "training": {"weight_decay": 0.01}},
}


class Killed(BaseException):
    """A process that ends in the middle of its training."""


class Passes:
    """Counts the engines' forward and backward passes, and kills the training at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.killed_at = 0, -1
        original = LoopEngine.set_dropout

        def counted(engine: LoopEngine, *args: Any) -> None:
            self.count += 1
            if self.count == self.killed_at:
                raise Killed
            original(engine, *args)

        monkeypatch.setattr(LoopEngine, "set_dropout", counted)


class Restarting(Direct):
    """A transport to a node whose operator starts it again after each kill."""

    killed = 0

    def __init__(self, service: NodeService, on_kill: Callable[[], object] = lambda: None) -> None:
        super().__init__(service)
        self.on_kill = on_kill

    def replies(self, envelopes: Any, seconds: float, *, wait_for_offline: bool = False) -> Iterator[Any]:
        for id, envelope in envelopes.items():
            yield id, self.answer(envelope)

    def answer(self, envelope: Envelope) -> Envelope:
        """Return the node's reply; a node that was killed is delivered the order again."""
        try:
            return self.service.answer(envelope)
        except Killed:
            self.killed += 1
            self.on_kill()
            self.service = NodeService(self.service.node)
            return self.service.answer(envelope)


def run(
    folder: Path, own: Path, case: str, data: dict[str, Any] | None = None, **training: Any
) -> tuple[Any, Restarting]:
    changes = CASES[case]
    given = {"local_steps": STEPS, **changes.get("training", {}), **training}
    prepared, direct = served(
        folder,
        NodeService(node(folder, own, **({} if data is None else {"data": data}))),
        **{**changes, "training": given},
    )
    transport = Restarting(direct.service)
    prepared.federation.transport = transport
    return prepared, transport


def train(prepared: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in tiny.final_tensors(prepared).items()}


@pytest.mark.parametrize("case", others_slow(CASES, ["memory", "drawn projectors"]))
def test_a_node_that_was_killed_in_a_round_continues_with_the_same_bits(
    case: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes(monkeypatch)
    undisturbed = train(run(tiny_folder, tmp_path / "a", case)[0])
    whole = passes.count
    passes.count, passes.killed_at = 0, round(0.8 * whole)
    prepared, transport = run(tiny_folder, tmp_path / "b", case, checkpoint_steps=1)
    disturbed = train(prepared)
    assert transport.killed == 1
    assert disturbed.keys() == undisturbed.keys()
    assert all(torch.equal(disturbed[name], value) for name, value in undisturbed.items())
    accumulated = CASES[case].get("training", {}).get("gradient_accumulation_steps", 1)
    assert passes.count <= whole + accumulated  # only the passes of the interrupted step were repeated


class Clinics(AsynchronousTransport):
    """Three nodes that carry out their orders one after the other; whichever is killed is started again."""

    def __init__(self, nodes: dict[str, Restarting]) -> None:
        self.nodes, self.open = nodes, dict[str, Envelope]()
        self.replied = list[str]()

    def exchange(self, orders: Orders, on_reply: OnReply, seconds: float, *, wait_for_offline: bool = False) -> None:
        for id in orders:
            self.replied.append(id)
            on_reply(id, self.nodes[id].answer(orders[id]))

    def send_orders(self, orders: Orders, seconds: float, *, wait_for_offline: bool = False) -> None:
        self.open |= {id: orders[id] for id in orders}

    def receive_reply(self) -> tuple[str, Envelope | str] | None:
        for id in self.open:
            self.replied.append(id)
            return id, self.nodes[id].answer(self.open.pop(id))
        return None

    def retain_orders(self, ids: Collection[str]) -> frozenset[str]:
        self.open = {id: order for id, order in self.open.items() if id in ids}
        return frozenset(self.open)

    def list_training(self) -> frozenset[str]:
        return frozenset(self.open)

    def list_stalled(self) -> frozenset[str]:
        return frozenset()

    def assume_training(self, ids: Collection[str]) -> None:
        assert not ids, "no order is lost"


@pytest.mark.parametrize("federation", [{}, {"clients_per_round": 2, "buffered": {"concurrency": 2}}])
def test_a_node_that_was_killed_counts_in_the_same_round_without_another_attempt(
    federation: dict[str, Any], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quorum is the default one, which the other nodes reach: the server sends no second order in the round."""
    given = values(tiny_folder, federation=federation, training={"local_steps": STEPS, "checkpoint_steps": 1})
    prepared = prepare_server(build_server_config(given))
    services = {id: NodeService(node(tiny_folder, tmp_path / id, id=id)) for id in ("east", "north", "west")}
    examples = {id: introduced(service, given).examples for id, service in services.items()}
    clients = build_server_clients(prepared.config, prepared.engine.adapted.spec, examples)
    transport = Clinics({id: Restarting(service) for id, service in services.items()})
    assert prepared.settings.min_replies is None
    prepared = connect(prepared, transport, clients=clients, run="run")
    passes = Passes(monkeypatch)
    passes.killed_at = STEPS - 1
    result = prepared.federation.run_round(prepared.federation.begin())
    killed = transport.replied[0]
    assert transport.nodes[killed].killed == 1
    assert result.failures == ()
    assert killed in result.progress.last_rounds
    assert len(result.progress.last_rounds) == len(result.cohort)
    assert passes.count == STEPS * len(result.cohort) + 1  # the interrupted step was repeated


@pytest.mark.parametrize(
    "case",
    others_slow(
        ["epochs with an incomplete group", "two jobs a round", "accumulated gradients"], ["accumulated gradients"]
    ),
)
def test_a_reply_that_was_lost_is_sent_again_with_the_same_bits(
    case: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node is killed after its training, before the reply: nothing is trained again."""
    passes = Passes(monkeypatch)
    undisturbed = train(run(tiny_folder, tmp_path / "a", case)[0])
    whole, passes.count = passes.count, 0
    prepared, transport = run(tiny_folder, tmp_path / "b", case, checkpoint_steps=100)
    encode, lost = Host._encode_reply, []

    def lose(host: Host, *args: Any) -> tuple[bytes, float]:
        if len(lost) == 0:
            lost.append(1)
            raise Killed
        return encode(host, *args)

    monkeypatch.setattr(Host, "_encode_reply", lose)
    disturbed = train(prepared)
    assert transport.killed == 1
    assert passes.count == whole
    assert all(torch.equal(disturbed[name], value) for name, value in undisturbed.items())


def test_progress_is_deleted_when_the_round_is_evaluated(tiny_folder: Path, tmp_path: Path) -> None:
    prepared, transport = run(tiny_folder, tmp_path / "a", "plain", checkpoint_steps=1)
    progress = prepared.federation.run_round(prepared.federation.begin()).progress
    assert list((tmp_path / "a").rglob("training/*.safetensors"))
    RemoteEvaluator(prepared.federation, 32).evaluate_clients(progress)
    assert transport.killed == 0
    assert not list((tmp_path / "a").rglob("training/*"))


def test_a_disk_that_refuses_a_checkpoint_stops_no_training(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: CapturedLog
) -> None:
    error = OSError(errno.ENOSPC, "no space left on device")
    monkeypatch.setattr("fedspan.clients.job_checkpoints.write_atomic", Mock(side_effect=error))
    with caplog.at_level(logging.WARNING, logger="fedspan.node"):
        train(run(tiny_folder, tmp_path / "a", "plain", checkpoint_steps=1)[0])
    assert "no checkpoint after step 1" in caplog.text


def test_without_checkpoints_it_starts_over(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(monkeypatch)
    undisturbed = train(run(tiny_folder, tmp_path / "a", "plain")[0])
    passes.count, passes.killed_at = 0, STEPS
    prepared, _ = run(tiny_folder, tmp_path / "b", "plain")
    disturbed = train(prepared)
    assert all(torch.equal(disturbed[name], value) for name, value in undisturbed.items())
    assert passes.count == 4 * STEPS
    assert not list((tmp_path / "b").rglob("training"))


def test_progress_on_other_data_is_not_used(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner replaces an example while its node is down."""
    path = tmp_path / "own.csv"
    path.write_text((tiny_folder / "corpus.csv").read_text())
    passes = Passes(monkeypatch)
    passes.killed_at = STEPS
    prepared, transport = run(tiny_folder, tmp_path / "b", "plain", {"train": str(path)}, checkpoint_steps=1)

    def withdraw() -> None:
        lines = path.read_text().splitlines()
        path.write_text("\n".join([lines[0], lines[2], *lines[2:]]) + "\n")

    transport.on_kill = withdraw
    train(prepared)
    assert transport.killed == 1
    assert passes.count == 4 * STEPS


def test_a_damaged_checkpoint_is_named_and_not_used(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: CapturedLog
) -> None:
    passes = Passes(monkeypatch)
    undisturbed = train(run(tiny_folder, tmp_path / "a", "plain")[0])
    passes.count, passes.killed_at = 0, STEPS
    prepared, transport = run(tiny_folder, tmp_path / "b", "plain", checkpoint_steps=1)

    def damage() -> None:
        (path,) = (tmp_path / "b").rglob("training/*.safetensors")
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)

    transport.on_kill = damage
    with caplog.at_level(logging.WARNING, logger="fedspan.node"):
        disturbed = train(prepared)
    assert "the training starts over" in caplog.text
    assert passes.count == 4 * STEPS
    assert all(torch.equal(disturbed[name], value) for name, value in undisturbed.items())


def make_order(**changes: Any) -> Order:
    client = Client(id="clinic", rank=2, scaling=2.0, examples=9, weight=9.0, last_round=None)
    return replace(Order("train", 0, 0, 0.1, "clinic", client, b"message", run="run", serial=1), **changes)


def make_progress(steps: int) -> TrainingProgress:
    state = OptimizerState({"exp_avg": {"l/A": torch.ones(2, 3)}}, {"l/A": steps})
    tensors = {"l/A": torch.rand(2, 3), "l/acc": torch.rand(5, 4).T}
    return TrainingProgress(TrainingTotals(steps, steps, 0.1 + 0.2, 7.0, 0.9), tensors, state)


def store(checkpoints: JobCheckpoints, order: Order, steps: int = 3) -> TrainingProgress:
    progress = make_progress(steps)
    checkpoints.open(order, 0).store(progress)
    return progress


def test_progress_is_loaded_as_it_was_stored(tmp_path: Path) -> None:
    checkpoints = JobCheckpoints(tmp_path / "training", "run", 1, None)
    stored = store(checkpoints, make_order())
    loaded = checkpoints.open(make_order(attempt=1, serial=2), 0).load()  # the same round, requested again
    assert loaded.totals == stored.totals
    assert torch.equal(loaded.tensors["l/A"], stored.tensors["l/A"])
    assert torch.equal(loaded.tensors["l/acc"], stored.tensors["l/acc"])
    assert loaded.tensors["l/acc"].stride() == (1, 4)
    assert torch.equal(loaded.optimizer_state.moments["exp_avg"]["l/A"], torch.ones(2, 3))
    assert loaded.optimizer_state.steps == {"l/A": 3}
    assert oct((next((tmp_path / "training").iterdir())).stat().st_mode)[-3:] == "600"


@pytest.mark.parametrize(
    "changes", [{"body": b"another"}, {"round": 1}, {"lr": 0.2}, {"run": "other"}, {"client": None}]
)
def test_progress_belongs_to_what_the_training_depends_on(changes: dict[str, Any], tmp_path: Path) -> None:
    checkpoints = JobCheckpoints(tmp_path / "training", "run", 1, None)
    store(checkpoints, make_order())
    assert checkpoints.open(make_order(**changes), 0).load() is None
    assert not list((tmp_path / "training").iterdir())  # and older progress is gone


def test_progress_belongs_to_the_config_of_its_run(tmp_path: Path) -> None:
    store(JobCheckpoints(tmp_path / "training", "one config", 1, None), make_order())
    assert JobCheckpoints(tmp_path / "training", "another", 1, None).open(make_order(), 0).load() is None


def test_the_jobs_of_an_order_are_stored_separately(tmp_path: Path) -> None:
    checkpoints = JobCheckpoints(tmp_path / "training", "run", 1, None)
    store(checkpoints, make_order())
    assert checkpoints.open(make_order(), 1).load() is None
    assert checkpoints.open(make_order(), 0).load() is not None


def test_a_checkpoint_is_due_after_steps_or_minutes(tmp_path: Path) -> None:
    now = [0.0]
    checkpoint = DiskJobCheckpoint(tmp_path / "file", "key", 0, steps=10, seconds=60.0, clock=lambda: now[0])
    assert not checkpoint.is_due(9)
    assert checkpoint.is_due(10)
    now[0] = 60.0
    assert checkpoint.is_due(1)
    checkpoint.store(make_progress(4))
    assert not checkpoint.is_due(13)
    assert checkpoint.is_due(14)
    assert JobCheckpoints(tmp_path / "training", "run", None, 0.5).open(make_order(), 0).seconds == 30.0


@pytest.mark.parametrize("name", ["checkpoint_steps", "checkpoint_minutes"])
def test_dp_sgd_has_no_checkpoints(name: str, tiny_folder: Path) -> None:
    privacy = {"mechanism": "dp-sgd", "epsilon": 8.0, "clip": 1.0}
    with pytest.raises(FedspanError, match=f"training.{name}.*dp-sgd"):
        tiny.config(tiny_folder, training={name: 2}, privacy=privacy)
