"""First rounds that train a new head alone: what they change, send and cost, and that the method's rounds follow."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedspan
from fedspan import FedspanError
from fedspan.assembly.head import begin, find_new_head
from fedspan.assembly.run import Prepared, prepare
from fedspan.core.tensors import is_extra, split_extras
from fedspan.core.values import Client, Message, OptimizerSpec, Spec
from fedspan.deployment.handshake import build_server_config
from fedspan.deployment.node import NodeService
from fedspan.diagnostics.round_diagnosis import diagnose_round
from fedspan.federation.progress import Progress, RoundResult
from fedspan.methods.fedit import FedIT
from fedspan.runs import start
from fedspan.training.optimizers import LocalOptimizer
from fedspan.wrappers.head_rounds import ROUNDS, HeadRounds, NewHead
from helpers import node_service, tiny
from helpers.families import methods_by_family
from helpers.listeners import Notes

HEAD = {"extras/classifier.weight", "extras/classifier.bias"}
WHOLE = {"batch_size": 64, "local_steps": None, "local_epochs": 2}
"""Training whose batches do not depend on the number of the round: each is a client's whole part."""
PERSONAL = {"fedsa-lora", "local-only"}
"""Methods whose heads are local unless the config says otherwise."""


def run_rounds(run: Prepared, progress: Progress, rounds: int) -> tuple[Progress, list[RoundResult]]:
    results: list[RoundResult] = []
    for _ in range(rounds):
        results.append(run.federation.run_round(progress))
        progress = results[-1].progress
    return progress, results


def predict(run: Prepared, progress: Progress) -> torch.Tensor:
    """Predict a client's examples with its model."""
    job = run.evaluator.build_job(progress, "west")
    return run.engine.predict(job, run.train, run.federation.clients["west"].train, 8)


@pytest.mark.parametrize("key", methods_by_family(quick=("fedgalore", "fedsa-lora", "fed-sb", "fedask")))
def test_the_methods_rounds_are_those_of_a_run_that_starts_from_the_trained_head(key: str, tiny_folder: Path) -> None:
    model = {"extras": "average"} if key in PERSONAL else {}
    changes = {"method": {"name": key}, "training": WHOLE, "federation": {"rounds": 4, "clients_per_round": None}}
    run = prepare(tiny.config(tiny_folder, model={**model, "head_rounds": 2}, **changes))
    first = begin(run.federation, run.head)
    trained, results = run_rounds(run, first, 2)
    before, after = split_extras(first.state.tensors), split_extras(trained.state.tensors)
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(value, after[0][name]) for name, value in before[0].items())
    assert {name for name, value in before[1].items() if not torch.equal(value, after[1][name])} == HEAD
    assert results[1].loss < results[0].loss
    assert trained.state.base == first.state.base

    plain = prepare(tiny.config(tiny_folder, model=model, **changes))
    begun = plain.federation.begin()
    tensors = {**begun.state.tensors, **after[1]}
    expected, _ = run_rounds(plain, replace(begun, state=replace(begun.state, tensors=tensors)), 2)
    found, _ = run_rounds(run, trained, 2)
    assert found.state.round == 4
    assert {name: value.shape for name, value in found.state.tensors.items()} == {
        name: value.shape for name, value in expected.state.tensors.items()
    }
    predictions = [predict(run, found), predict(plain, expected)]
    assert torch.allclose(*predictions, atol=1e-3)
    assert not torch.allclose(predictions[0], predict(run, trained), atol=1e-2)


@pytest.mark.parametrize("wrapper", ["scaffold", "fedadam", "fedpaq", "low-precision", "fedprox"])
def test_wrappers_do_not_see_the_rounds(wrapper: str, tiny_folder: Path) -> None:
    method = {"name": "fedit", "wrappers": [wrapper]}
    training = {"optimizer": "sgd"} if wrapper == "scaffold" else {}
    federation = {"rounds": 3, "clients_per_round": None}
    run = prepare(
        tiny.config(tiny_folder, model={"head_rounds": 1}, method=method, training=training, federation=federation)
    )
    first = begin(run.federation, run.head)
    trained, _ = run_rounds(run, first, 1)
    assert trained.state.memory == first.state.memory
    assert all(not state.memory for state in trained.states.values())
    last, _ = run_rounds(run, trained, 2)
    assert any(not torch.equal(value, trained.state.tensors[name]) for name, value in last.state.tensors.items())


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_messages_hold_the_head_alone(engine: str, tiny_folder: Path) -> None:
    run = prepare(tiny.config(tiny_folder, model={"head_rounds": 1}, engine={"name": engine}))
    progress = begin(run.federation, run.head)
    client = run.federation.get_client("west", progress)
    message = run.federation.method.sync(progress.state, client)
    assert set(message.tensors) == HEAD
    job = run.federation.method.start(message, client, {}, 0)
    assert (set(job.trainable_names), job.parametrization) == (HEAD, {})
    size = 4 * sum(value.numel() for value in message.tensors.values())
    trained, (result,) = run_rounds(run, progress, 1)
    assert {transfer.payload for transfer in result.transfers} == {size}
    following = run.federation.method.sync(trained.state, run.federation.get_client("west", trained))
    assert not all(map(is_extra, following.tensors))


def test_the_rate_follows_from_the_norm_of_the_features(tiny_folder: Path) -> None:
    def find_rates(**model: Any) -> list[float]:
        config = tiny.config(tiny_folder, model={"head_rounds": 1, **model})
        run = prepare(config)
        head = find_new_head(config, run.model)
        assert head is not None
        assert head.is_alone
        progress = begin(run.federation, run.head)
        client = run.federation.get_client("west", progress)
        job = run.federation.method.start(run.federation.method.sync(progress.state, client), client, {}, 0)
        classes = len(job.tensors["extras/classifier.weight"])
        assert (job.optimizer["lr"], job.clips) == (0.0075 * classes**0.5, False)
        return [group.lr_scale for group in job.trainable]

    assert find_rates(pooling="mean", pooling_normalize=True) == [400.0, 1.0]
    assert find_rates() == [400.0 / 16, 1.0]


@pytest.mark.parametrize("classes", [2, 4, 77])
def test_training_does_not_depend_on_the_scale_of_the_features_and_does_not_diverge(classes: int) -> None:
    rng = torch.Generator().manual_seed(classes)
    centers, labels = torch.randn(classes, 48, generator=rng), torch.randint(classes, (640,), generator=rng)
    common = 2 * torch.randn(48, generator=rng)  # most of a feature vector is the same for all examples
    unit = torch.nn.functional.normalize(common + centers[labels] + torch.randn(640, 48, generator=rng), dim=1)

    def train(norm: float) -> list[float]:
        tensors = {"extras/head.weight": torch.zeros(classes, 48), "extras/head.bias": torch.zeros(classes)}
        rounds = HeadRounds(inner=FedIT(spec=Spec(())), rounds=1, head=NewHead("head", True, norm, is_alone=True))
        job = rounds.start(Message(tensors, {ROUNDS: 1}), Client("west", 2, 1.0, 640, 640.0), {}, 0)
        live = {name: value.clone().requires_grad_() for name, value in job.tensors.items()}
        optimizer = LocalOptimizer(replace(OptimizerSpec(), **job.optimizer), job.trainable, live)
        losses: list[float] = []
        for step in range(200):
            rows = torch.arange(16 * step, 16 * step + 16) % len(unit)
            outputs = norm * unit[rows] @ live["extras/head.weight"].T + live["extras/head.bias"]
            loss = torch.nn.functional.cross_entropy(outputs, labels[rows])
            gradients = torch.autograd.grad(loss, list(live.values()))
            optimizer.step(dict(zip(live, gradients, strict=True)))
            losses.append(loss.item())
        return losses

    losses = train(1.0)
    assert max(losses) < 1.5 * math.log(classes)
    assert sum(losses[-40:]) / 40 < 0.8 * math.log(classes)
    for norm in (1e-3, 1e3):
        assert train(norm) == pytest.approx(losses, rel=1e-2)


@pytest.mark.parametrize("mechanism", ["central", "local", "dp-sgd"])
def test_privacy_covers_the_rounds(mechanism: str, tiny_folder: Path) -> None:
    def train(noise: float) -> tuple[torch.Tensor, RoundResult]:
        privacy = {"mechanism": mechanism, "noise": noise, "clip": 1e-3}
        uniform = {"weights": "uniform"}
        run = prepare(tiny.config(tiny_folder, model={"head_rounds": 1}, privacy=privacy, federation=uniform))
        progress, (result,) = run_rounds(run, begin(run.federation, run.head), 1)
        return progress.state.tensors["extras/classifier.weight"], result

    quiet, result = train(1e-6)
    noisy, _ = train(100.0)
    assert result.charges
    assert float((quiet - noisy).norm()) > 1e-3
    if mechanism != "dp-sgd":  # which bounds gradients
        start = prepare(tiny.config(tiny_folder)).federation.begin().state.tensors["extras/classifier.weight"]
        assert float((quiet - start).norm()) < 1.1e-3


@pytest.mark.parametrize("key", ["fedit", "fedask"])
def test_secure_aggregation_covers_the_rounds(key: str, tiny_folder: Path) -> None:
    def train(**federation: Any) -> Progress:
        federation = {"rounds": 3, "clients_per_round": None, "clip_ratio": None, **federation}
        config = tiny.config(tiny_folder, model={"head_rounds": 1}, method={"name": key}, federation=federation)
        run = prepare(config)
        return run_rounds(run, begin(run.federation, run.head), 2)[0]

    plain, secure = train(), train(secure={"bits": 64, "clip": 1000})
    for name, value in plain.state.tensors.items():
        assert torch.allclose(secure.state.tensors[name], value, atol=1e-4), name


def test_another_number_of_rounds_is_refused(tiny_folder: Path) -> None:
    run = prepare(tiny.config(tiny_folder, model={"head_rounds": 1}))
    method = run.federation.method
    assert isinstance(method, HeadRounds)
    progress = begin(run.federation, run.head)
    client = run.federation.get_client("west", progress)
    message = replace(method, rounds=2).sync(
        replace(method, rounds=2).request(method.init(run.engine.adapted), is_short=True), client
    )
    with pytest.raises(FedspanError, match="head_rounds"):
        method.start(message, client, {}, 0)


@pytest.mark.parametrize("stop", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_interrupted_run_has_the_bits_of_an_uninterrupted_one(stop: int, tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(tiny_folder, model={"head_rounds": 2}, federation={"rounds": 4})
    whole = fedspan.run(values, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(values, tmp_path / "stopped", listener=Notes(stop))
    assert fedspan.resume(tmp_path / "stopped").scores == whole.scores
    files = [tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("whole", "stopped")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_deployment_begins_with_the_rounds(tiny_folder: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model": {"head_init": "auto"}, "federation": {"rounds": 5}}
    service = NodeService(node_service.node(tiny_folder, tmp_path / "node"))
    run, transport = node_service.served(tiny_folder, service, **changes)

    def build(config: Any, partition: Any, key: bytes | None, callbacks: Any) -> Prepared:
        return run

    notes = Notes()
    config = build_server_config(node_service.values(tiny_folder, **changes))
    start.run(config, tmp_path / "run", build=build, listener=notes)
    assert "rounds 1 to 1 train the head alone (model.head_rounds)" in notes.notes
    rows = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    sent = [row for row in rows if row.get("purpose", "train") == "train" and row["direction"] == "up"]
    assert sent[0]["payload"] < sent[1]["payload"]
    assert not any(
        row.get("failures") for row in map(json.loads, (tmp_path / "run" / "metrics.jsonl").open()) if row["round"]
    )
    assert transport.sent


@pytest.mark.parametrize(
    ("changes", "rounds"),
    [
        ({"federation": {"rounds": 20}}, 4),
        ({"federation": {"rounds": 100}}, 5),
        ({"federation": {"rounds": 4}}, 0),
        ({"federation": {"rounds": 20}, "model": {"head_init": "random"}}, 0),
        ({"federation": {"rounds": 20}, "model": {"pretrained": False}}, 0),
        ({"federation": {"rounds": 20}, "privacy": {"mechanism": "local", "noise": 1.0}}, 0),
    ],
)
def test_auto_is_a_fifth_of_the_rounds(changes: dict[str, Any], rounds: int, tiny_folder: Path) -> None:
    model = {"head_init": "auto", **changes.pop("model", {})}
    assert tiny.config(tiny_folder, model=model, **changes).head_rounds == rounds


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"method": {"name": "local-only"}}, "the heads are not averaged"),
        ({"federation": {"rounds": 2}}, "no round remains for the method"),
        ({"model": {"pretrained": False}}, "from scratch"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], why: str, tiny_folder: Path) -> None:
    model = {"head_rounds": 2, **changes.pop("model", {})}
    with pytest.raises(FedspanError, match=why):
        tiny.config(tiny_folder, model=model, federation={"rounds": 3, **changes.pop("federation", {})}, **changes)


def test_a_trained_head_is_not_trained_alone(tiny_folder: Path, tmp_path: Path) -> None:
    model = tiny.fresh_classifier(tiny_folder / "bert")
    model.save_pretrained(tmp_path / "fitted")  # type: ignore[operator]
    tiny.save_tokenizer(tmp_path / "fitted")
    run = prepare(tiny.config(tiny_folder, model={"head_rounds": 1, "name": str(tmp_path / "fitted")}))
    assert not isinstance(run.federation.method, HeadRounds)


@pytest.mark.parametrize("key", ["fedit", "fr-lora"])
def test_diagnostics_begin_with_the_methods_rounds(key: str, tiny_folder: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"method": {"name": key}, "evaluation": {"diagnostics": 1}, "federation": {"rounds": 2}}
    fedspan.run(tiny.settings(tiny_folder, model={"head_rounds": 1}, **changes), tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert ["diagnostics" in row for row in rows] == [False, True]
    run = prepare(tiny.config(tiny_folder, model={"head_rounds": 1}, **changes))
    first = begin(run.federation, run.head)
    with pytest.raises(FedspanError, match="trains the head alone"):
        diagnose_round(run.federation, first, run.train, title=key, seed=0, batch_size=8, pairs=0)
