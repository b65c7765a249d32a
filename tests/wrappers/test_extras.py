"""Running statistics of norms: they move where the extras train, are transmitted with them, and nowhere else."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedspan.assembly.run import Prepared, prepare
from fedspan.core.parametrization import LoRA
from fedspan.core.tensors import join_extra_name
from fedspan.core.values import Job
from fedspan.federation import serialization
from fedspan.federation.federation import Federation
from fedspan.federation.progress import Progress
from fedspan.models.adapted import AdaptedModel
from fedspan.models.targets import find_buffers
from fedspan.training.jobs import Assignment
from fedspan.transports.in_process import simulate
from fedspan.wrappers.extras import WithExtras
from helpers import tiny_images
from helpers.families import others_slow

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


def test_training_moves_them_as_the_model_itself_does(images: Path) -> None:
    """One batch of all examples, factors still 0: the statistics are those of a plain model in training mode."""
    made = prepare(tiny_images.config(images, "resnet", training={"local_steps": 1, "batch_size": 100}))
    federation, id = made.federation, "west"
    before, after = trained(federation, federation.begin(), id)
    plain = tiny_images.fresh_classifier(images / "resnet").train()
    batch = made.task.collate(made.train, federation.clients[id].train, torch.device("cpu"))
    with torch.no_grad():
        plain(pixel_values=batch["pixel_values"])
    for name, value in plain.named_buffers():
        assert torch.allclose(after[join_extra_name(name)], value, rtol=1e-5, atol=1e-6), name
        assert not torch.equal(value, before.tensors[join_extra_name(name)]), name


@pytest.mark.parametrize("weights", ["examples", pytest.param("uniform", marks=pytest.mark.slow)])
def test_averaged_statistics_are_means_and_counts_the_largest(resnet: Prepared, weights: str) -> None:
    """Two rounds without clipping; clients of different sizes take different numbers of steps."""
    federation = under(resnet, "average")
    clients = list(federation.clients.values())
    if weights == "uniform":
        clients = [replace(one, client=replace(one.client, weight=1.0)) for one in clients]
    settings = replace(federation.settings, clip_ratio=None)
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
    plain = tiny_images.fresh_classifier(images / "resnet").train()
    batch = made.task.collate(made.train, federation.clients[id].train, torch.device("cpu"))
    with torch.no_grad():
        plain(pixel_values=batch["pixel_values"])
    for name, value in plain.named_buffers():
        assert torch.allclose(after[join_extra_name(name)], value, rtol=1e-5, atol=1e-6), name
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
