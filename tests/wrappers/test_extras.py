"""Running statistics of norms, which move and go where the extras train; and first rounds that train a head alone."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedspan
from fedspan import FedspanError
from fedspan.assembly.head import begin, find_new_head
from fedspan.assembly.run import Prepared, prepare
from fedspan.core.parametrization import LoRA
from fedspan.core.tensors import is_extra, join_extra_name, split_extras
from fedspan.core.values import Client, Job, Message, OptimizerSpec, Spec
from fedspan.deployment.handshake import build_server_config
from fedspan.deployment.node import NodeService
from fedspan.diagnostics.round_diagnosis import diagnose_round
from fedspan.federation import serialization
from fedspan.federation.federation import Federation
from fedspan.federation.progress import Progress, RoundResult
from fedspan.methods.fedit import FedIT
from fedspan.methods.florg import FLoRG
from fedspan.models.adapted import AdaptedModel
from fedspan.models.targets import find_buffers
from fedspan.runs import start
from fedspan.training.jobs import Assignment
from fedspan.training.optimizers import LocalOptimizer
from fedspan.transports.in_process import simulate
from fedspan.wrappers.extras import WithExtras
from fedspan.wrappers.head_rounds import ROUNDS, HeadRounds, NewHead
from helpers import node_service, tiny, tiny_images
from helpers.families import methods_by_family, others_slow
from helpers.listeners import Notes
from helpers.refusals import refused
from helpers.toys.problem import Problem

EPOCHS = {"local_steps": None, "local_epochs": 1, "batch_size": 5}


@pytest.fixture(scope="module")
def resnet(images: Path) -> Prepared:
    """Convolutions are targets, all norms are extras; clients take 2, 3 and 5 steps a round or thereabouts."""
    return prepare(tiny_images.config(images, "resnet", training=EPOCHS))


def under(prepared: Prepared, policy: str, lr_scale: float = 1.0) -> Federation:
    """The prepared federation with another policy."""
    model = prepared.config.model.model_copy(update={"extras": policy, "extras_lr_scale": lr_scale})
    config = prepared.config.model_copy(update={"model": model})
    old = prepared.federation
    method = config.wrap_method(config.build_method(prepared.engine.adapted.spec))
    return simulate(method, old.engine, list(old.clients.values()), old.examples, old.settings)


def statistics(prepared: Prepared) -> dict[str, Tensor]:
    """The model's own buffers, as they are now."""
    return {join_extra_name(name): value.clone() for name, value in prepared.engine.adapted.model.named_buffers()}


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> set[str]:
    return {name for name, value in one.items() if not torch.equal(value, other[name])}


def trained(federation: Federation, progress: Progress, id: str) -> tuple[Job, dict[str, Tensor]]:
    """A client's job in a round and what its training gives."""
    engine, client = federation.engine, federation.get_client(id, progress)
    engine.adapted.set_base(progress.state.base)
    message = serialization.decode(serialization.encode(federation.method.sync(progress.state, client)))
    job = federation.method.start(message, client, progress.load_memory(id), progress.state.round)
    lr, number = engine.settings.compute_lr(progress.state.round, 2), progress.state.round
    done = engine.train(Assignment(id, number, job, federation.clients[id].train, lr), federation.examples)
    return job, dict(done.tensors)


def test_which_buffers_are_found(resnet: Prepared) -> None:
    """Three a norm of the six; the layers' own shapes; the count of batches is a whole number."""
    spec = resnet.engine.adapted.spec
    norms = [name for name, module in resnet.engine.adapted.model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    kinds = ("running_mean", "running_var", "num_batches_tracked")
    assert spec.buffers == {f"{name}.{kind}" for name in norms for kind in kinds}
    assert spec.buffers < set(spec.extras)
    assert spec.extras[f"{norms[0]}.running_var"] == (6,)
    assert spec.extras[f"{norms[0]}.num_batches_tracked"] == ()
    job, _ = trained(resnet.federation, resnet.federation.begin(), "east")
    assert job.buffers == {join_extra_name(path) for path in spec.buffers}
    assert not job.buffers & set(job.trainable_names)


def require_plain_statistics(made: Prepared, images: Path, id: str, after: Mapping[str, Tensor]) -> torch.nn.Module:
    """Require the statistics of a plain model in training mode, which has seen all examples of the client once."""
    plain = tiny_images.fresh_classifier(images / "resnet").train()
    batch = made.task.collate(made.train, made.federation.clients[id].train, torch.device("cpu"))
    with torch.no_grad():
        plain(pixel_values=batch["pixel_values"])
    for name, value in plain.named_buffers():
        assert torch.allclose(after[join_extra_name(name)], value, rtol=1e-5, atol=1e-6), name
    return plain


def test_training_moves_them_as_the_model_itself_does(images: Path) -> None:
    """One batch of all examples, factors still 0: the statistics are those of a plain model in training mode."""
    made = prepare(tiny_images.config(images, "resnet", training={"local_steps": 1, "batch_size": 100}))
    federation, id = made.federation, "west"
    before, after = trained(federation, federation.begin(), id)
    for name, value in require_plain_statistics(made, images, id, after).named_buffers():
        assert not torch.equal(value, before.tensors[join_extra_name(name)]), name


@pytest.mark.parametrize("weights", ["examples", pytest.param("uniform", marks=pytest.mark.slow)])
def test_averaged_statistics_are_means_and_counts_the_largest(resnet: Prepared, weights: str) -> None:
    """Two rounds without clipping; clients of different sizes take different numbers of steps."""
    federation = under(resnet, "average")
    clients = list(federation.clients.values())
    if weights == "uniform":
        clients = [replace(one, client=replace(one.client, weight=1.0)) for one in clients]
    settings = federation.settings.model_copy(update={"clip_ratio": None})
    federation = simulate(federation.method, federation.engine, clients, federation.examples, settings)
    progress = federation.begin()
    for round in (1, 2):
        replies = {id: trained(federation, progress, id) for id in federation.clients}
        total = sum(federation.clients[id].client.weight for id in replies)
        progress = federation.run_round(progress).progress
        for name in (join_extra_name(path) for path in federation.method.spec.buffers):
            each = {id: tensors[name] for id, (_, tensors) in replies.items()}
            found = progress.state.tensors[name]
            if name.endswith("num_batches_tracked"):
                assert len({int(value) for value in each.values()}) > 1
                assert found.dtype == torch.int64
                assert int(found) == max(int(value) for value in each.values()) > 40 + round
            else:
                parts = [federation.clients[id].client.weight / total * value.double() for id, value in each.items()]
                assert torch.allclose(found.double(), torch.stack(parts).sum(0), rtol=1e-6, atol=1e-7)


def test_local_statistics_stay_on_the_client(resnet: Prepared) -> None:
    federation = under(resnet, "local")
    begun = federation.begin()
    first = {id: trained(federation, begun, id)[1] for id in federation.clients}
    result = federation.run_round(begun)
    buffers = {join_extra_name(path) for path in federation.method.spec.buffers}
    assert not differing({name: begun.state.tensors[name] for name in buffers}, result.progress.state.tensors)
    for id, own in first.items():
        memory = result.progress.states[id].memory
        assert not differing({name: own[name] for name in buffers}, memory)
        client = federation.get_client(id, result.progress)
        message = federation.method.sync(result.progress.state, client)
        assert not buffers & set(message.tensors)
        job = federation.method.start(message, client, memory, result.progress.state.round)
        assert not differing({name: own[name] for name in buffers}, job.tensors)
        assert buffers == job.buffers
    again = federation.run_round(result.progress).progress
    for id, own in first.items():
        assert differing({name: own[name] for name in buffers}, again.states[id].memory) == buffers
    assert federation.method.declare_claims().personal


def test_frozen_statistics_move_nowhere(resnet: Prepared) -> None:
    """The norms are then in evaluation mode: the loss of a step is that of the model as it predicts."""
    federation = under(resnet, "frozen")
    progress = federation.begin()
    buffers = {join_extra_name(path) for path in federation.method.spec.buffers}
    begun = {name: progress.state.tensors[name] for name in buffers}
    for _ in range(2):
        job, tensors = trained(federation, progress, "north")
        assert job.buffers == frozenset()
        assert not differing(begun, tensors)
        progress = federation.run_round(progress).progress
        assert not differing(begun, progress.state.tensors)
        assert not differing(begun, statistics(resnet))
    assert any(isinstance(module, nn.BatchNorm2d) for module in resnet.engine.adapted.model.modules())
    assert not any(m.training for m in resnet.engine.adapted.model.modules() if isinstance(m, nn.BatchNorm2d))


@pytest.mark.parametrize("method", others_slow(["pfedloru", "pfedlora", "lora-a2", "fed-sb"], ["pfedlora", "fed-sb"]))
def test_norms_are_in_training_mode_where_the_extras_rest(method: str, images: Path) -> None:
    """One batch of all examples: the statistics are those of a plain model in training mode, and nothing trains."""
    training = {"local_steps": 1, "batch_size": 100}
    made = prepare(tiny_images.config(images, "resnet", method={"name": method, "r": 2}, training=training))
    federation, id = made.federation, "west"
    progress = federation.begin()
    before, after = trained(federation, progress, id)
    buffers = {join_extra_name(path) for path in federation.method.spec.buffers}
    assert not before.extras
    assert before.buffers == buffers
    assert not [name for name in before.trainable_names if name.startswith("extras/")]
    require_plain_statistics(made, images, id, after)
    extras = {name: value for name, value in before.tensors.items() if name.startswith("extras/")}
    assert differing(extras, after) == buffers
    if method == "fed-sb":  # its only job in this round
        return
    client = federation.get_client(id, progress)
    done = federation.engine.train(Assignment(id, 0, before, federation.clients[id].train, 0.02), federation.examples)
    following, _ = federation.method.finish(before, done, client, {}, 0)
    assert following.extras
    assert not differing({name: done.tensors[name] for name in buffers}, following.tensors)
    assert {name for name in following.trainable_names if name.startswith("extras/")} == set(extras) - buffers


@pytest.mark.parametrize("method", ["pfedloru", "pfedlora"])
def test_frozen_norms_rest_in_every_phase(method: str, images: Path) -> None:
    model = {"extras": "frozen"}
    made = prepare(tiny_images.config(images, "resnet", model=model, method={"name": method, "r": 2}))
    job, tensors = trained(made.federation, made.federation.begin(), "east")
    assert job.buffers == frozenset()
    assert not differing({name: value for name, value in job.tensors.items() if name.startswith("extras/")}, tensors)


def test_norms_outside_the_extras_are_left_alone(images: Path) -> None:
    made = prepare(tiny_images.config(images, "resnet", model={"modules_to_save": []}))
    assert made.engine.adapted.spec.buffers == frozenset()
    before = statistics(made)
    progress = made.federation.run_round(made.federation.begin()).progress
    assert not differing(before, statistics(made))
    assert not [name for name in progress.state.tensors if "running" in name]


def test_of_some_norms_only_those_that_train_move(images: Path) -> None:
    made = prepare(tiny_images.config(images, "resnet", model={"modules_to_save": ["stages.1.layers.0"]}))
    spec = made.engine.adapted.spec
    assert {path.split(".layers.")[0] for path in spec.buffers} == {"resnet.encoder.stages.1"}
    before = statistics(made)
    trained(made.federation, made.federation.begin(), "west")
    assert differing(before, statistics(made)) == {join_extra_name(path) for path in spec.buffers}


def test_evaluation_never_moves_them(resnet: Prepared) -> None:
    federation = under(resnet, "average")
    progress = federation.run_round(federation.begin()).progress
    evaluator = replace(resnet, federation=federation).evaluator
    evaluator.federation = federation
    job = evaluator.build_job(progress, None)
    expected = resnet.engine.predict(job, resnet.test, np.arange(len(resnet.test)), 32)
    state = {name: value.clone() for name, value in progress.state.tensors.items()}
    evaluator.evaluate_clients(progress)
    evaluator.evaluate_heldout(progress, resnet.test)
    assert not differing(state, progress.state.tensors)
    installed = {name: progress.state.tensors[name] for name in map(join_extra_name, federation.method.spec.buffers)}
    assert not differing(installed, statistics(resnet))
    # one image at a time is the same as all together: in evaluation nothing depends on the batch
    alone = resnet.engine.predict(job, resnet.test, np.arange(len(resnet.test)), 1)
    assert torch.allclose(alone, expected, atol=1e-5)
    moved = replace(job, tensors={**job.tensors, **{n: v + 1 for n, v in installed.items() if "mean" in n}})
    other = resnet.engine.predict(moved, resnet.test, np.arange(len(resnet.test)), 32)
    assert not torch.allclose(other, expected, atol=1e-2)  # they do matter


def test_traffic_counts_them(resnet: Prepared) -> None:
    """What is transmitted beside the factors is the extras, whole, the statistics among them."""
    federation = under(resnet, "average")
    begun = federation.begin()
    client = federation.get_client("east", begun)
    sent = federation.method.sync(begun.state, client)
    extras = {name: value for name, value in sent.tensors.items() if name.startswith("extras/")}
    assert {name: tuple(value.shape) for name, value in extras.items()} == {
        join_extra_name(path): shape for path, shape in federation.method.spec.extras.items()
    }
    reply, _ = federation.method.finish(*_finished(federation, begun, "east"))
    assert {name for name in reply.tensors if name.startswith("extras/")} == set(extras)


def _finished(federation: Federation, progress: Progress, id: str) -> Any:
    client = federation.get_client(id, progress)
    job = federation.method.start(federation.method.sync(progress.state, client), client, {}, progress.state.round)
    done = federation.engine.train(Assignment(id, 0, job, federation.clients[id].train, 0.02), federation.examples)
    return job, done, client, {}, progress.state.round


def test_a_pass_that_only_measures_gradients_leaves_them(resnet: Prepared) -> None:
    """A projector's refresh runs a batch that no step follows."""
    adapted: AdaptedModel = resnet.engine.adapted
    job = resnet.federation.method.start(
        resnet.federation.method.sync(resnet.federation.begin().state, None),
        None,
        {},
        resnet.federation.begin().state.round,
    )
    adapted.train_mode(job.buffers)
    adapted.install(job.parametrization, job.tensors, frozenset(job.trainable_names))
    before = statistics(resnet)
    batch = resnet.task.collate(resnet.train, range(6), torch.device("cpu"))
    with adapted.capture_gradients(lambda layer, gradient: None):
        resnet.task.compute_loss(adapted.model, batch).backward()
        assert differing(before, statistics(resnet)) == set(before)
    assert not differing(before, statistics(resnet))


def test_wide_statistics_in_a_narrow_model(images: Path) -> None:
    """Where a norm trains, its statistics are float32 as its weights are: 0.1 of a small step is lost in bfloat16."""
    made = prepare(tiny_images.config(images, "resnet", model={"dtype": "bfloat16"}))
    _, tensors = trained(made.federation, made.federation.begin(), "east")
    kinds = {value.dtype for name, value in tensors.items() if "running" in name}
    assert kinds == {torch.float32}


class Counting(nn.Module):
    """A layer with a norm without weights of its own, and one without statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.bare = nn.BatchNorm1d(4, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.bare(self.norm(self.layer(x)))


def test_a_norm_without_statistics_uses_its_batch() -> None:
    model = Counting()
    extras = dict(model.norm.named_parameters(prefix="norm")) | dict(model.bare.named_parameters(prefix="bare"))
    adapted = AdaptedModel(model, {"layer": model.layer}, extras, find_buffers(model, extras))
    assert adapted.spec.buffers == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    wrapped = WithExtras(inner=_plain(adapted), policy="average")
    job = wrapped.start(wrapped.sync(wrapped.init(adapted), None), None, {}, wrapped.init(adapted).round)
    adapted.train_mode(job.buffers)
    live = adapted.install({"layer": LoRA(1.0)}, job.tensors, frozenset(job.trainable_names))
    out = model(torch.randn(6, 3) + 5)
    assert float(out.detach().mean(0).abs().max()) < 1e-5
    assert int(live["extras/norm.num_batches_tracked"]) == 1
    assert int(job.tensors["extras/norm.num_batches_tracked"]) == 0  # what was given is left as it was


def _plain(adapted: AdaptedModel) -> Any:
    from fedspan.methods.registry import get_method_class

    return get_method_class("fedit")(spec=adapted.spec, seed=0, r=2, lora_alpha=4)


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
    assert not any(before[1][name].any() for name in HEAD)
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
        assert float(quiet.norm()) < 1.1e-3


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
    with refused("model.head_rounds"):
        method.start(message, client, {}, 0)


def test_a_client_of_the_head_s_rounds_has_the_base_with_which_the_method_starts() -> None:
    adapted, head = Problem().adapted(), NewHead("head", True, 1.0, is_alone=True)
    method = HeadRounds(inner=FLoRG(spec=adapted.spec, center=True), rounds=1, head=head)
    tensors = {"extras/head.weight": torch.zeros(2, 4), "extras/head.bias": torch.zeros(2)}
    state = method.init(adapted)
    state = method.request(replace(state, tensors={**state.tensors, **tensors}), is_short=False).advance_round()
    bases = [method.sync(state, Client("west", 2, 1.0, 1, 1.0, last_round=round)).base for round in (None, 0)]
    assert bases == [state.base.build_patch(None), None]
    assert state.base.moved


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
    notes = Notes()
    config = build_server_config(node_service.values(tiny_folder, **changes))
    start.run(config, tmp_path / "run", build=lambda *_: run, listener=notes)
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
        ({"federation": {"rounds": 12}}, 4),
        ({"federation": {"rounds": 100}}, 5),
        ({"federation": {"rounds": 4}}, 0),
        ({"federation": {"rounds": 20}, "model": {"head_init": "random"}}, 0),
        ({"federation": {"rounds": 20}, "model": {"pretrained": False}}, 0),
        ({"federation": {"rounds": 20}, "privacy": {"mechanism": "local", "noise": 1.0}}, 0),
    ],
)
def test_auto_is_a_third_of_the_rounds(changes: dict[str, Any], rounds: int, tiny_folder: Path) -> None:
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
    with refused("round", "trains the head alone"):
        diagnose_round(run.federation, first, run.train, title=key, seed=0, batch_size=8, pairs=0)
