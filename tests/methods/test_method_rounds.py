"""Every method's rounds: stopped, retried, resumed, between machines, exported, inspected; on every kind of layer."""

import copy
import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

from fedspan.assembly.run import Prepared, prepare
from fedspan.config import RunConfig, parse_config
from fedspan.core.base import to_dense
from fedspan.data.partition import Partition
from fedspan.diagnostics.round_diagnosis import STEPS, Diagnosis, diagnose_round
from fedspan.federation.evaluation import RemoteEvaluator
from fedspan.federation.federation import Federation
from fedspan.federation.progress import Progress
from fedspan.federation.serialization import encode_state
from fedspan.methods.registry import METHODS
from fedspan.run_folder import RunFolder
from fedspan.runs import checkpoint
from fedspan.runs.checkpoint_format import Checkpoint
from fedspan.runs.integrity import format_config
from fedspan.runs.trained_models import write_adapters
from helpers import tiny, tiny_convolutions
from helpers.claim_measures import errors, require_declared_traffic
from helpers.exported_models import predict_with_engine, predict_with_peft
from helpers.families import UNLIKE, methods_by_family, others_slow
from helpers.method_checks import require_exactness
from helpers.refusals import refused
from helpers.remote_federation import remote
from helpers.watched_rounds import MethodRun, Round, RunMethod, differences, flat, method_config, run_watched, snapshot


def interrupted_config(folder: Path, key: str) -> RunConfig:
    """Two passes a step, so that gradients are under way at most moments; heads stay on the clients."""
    training = {"gradient_accumulation_steps": 2, "local_steps": 1, "lora_dropout": 0.1}
    return method_config(folder, key, training=training, federation={"rounds": 3}, model={"extras": "local"})


def uninterrupted(federation: Federation) -> list[Progress]:
    """The progress before the first round and after each."""
    steps = [federation.begin()]
    while steps[-1].state.round < federation.settings.rounds:
        steps.append(federation.run_round(steps[-1]).progress)
    return steps


ReferenceRounds = Callable[[str], tuple[Federation, tuple[Progress, ...]]]


@pytest.fixture(scope="module")
def reference_rounds(tiny_folder: Path, prepared: Prepared) -> ReferenceRounds:
    """A method's federation, and what came of its rounds; run once for both tests that compare with it."""

    @functools.cache
    def get(key: str) -> tuple[Federation, tuple[Progress, ...]]:
        federation = tiny.variant(prepared, interrupted_config(tiny_folder, key)).federation
        return federation, tuple(uninterrupted(federation))

    return get


def one_round_in_a_new_process(folder: Path) -> None:
    """Everything is rebuilt from the folder, one round, and back into the folder."""
    run = RunFolder(folder)
    kept = checkpoint.load_latest(run)
    given = Partition.from_json(run.partition.read_text())
    federation = prepare(parse_config(yaml.safe_load(run.config.read_text())), given).federation
    progress = federation.begin()
    if kept is not None:
        held = {id: round for id, round in kept.last_rounds.items() if round is not None}
        progress = Progress(kept.state, kept.states, held)
    after = federation.run_round(progress).progress
    checkpoint.save(run, Checkpoint(after.state, after.states, after.last_rounds))


@pytest.mark.parametrize("key", methods_by_family(quick=["fedgalore", "fedsa-lora"]))
def test_a_resumed_run_ends_as_one_that_never_stopped(
    key: str, reference_rounds: ReferenceRounds, tiny_folder: Path, prepared: Prepared, tmp_path: Path
) -> None:
    config = interrupted_config(tiny_folder, key)
    run = RunFolder(tmp_path)
    run.config.write_text(format_config(config))
    run.partition.write_text(prepared.partition.to_json())
    for expected in reference_rounds(key)[1][1:]:
        one_round_in_a_new_process(tmp_path)
        kept = checkpoint.load_latest(run)
        resumed = Progress(kept.state, kept.states, kept.last_rounds)
        assert differences(resumed, expected) == []


class _Unplugged(Exception):
    """The machine is gone."""


@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_a_round_that_fails_midway_leaves_nothing_behind(
    key: str, reference_rounds: ReferenceRounds, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the progress nor in the model: the same round, rerun in the same process, has the same bits."""
    federation, (progress, *rest) = reference_rounds(key)
    loss, calls = prepared.task.compute_loss, 0

    def failing(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 6:  # the third client's second pass
            raise _Unplugged
        return loss(model, batch)

    for expected in rest:
        before, calls = snapshot(progress), 0
        with monkeypatch.context() as patch:
            patch.setattr(prepared.task, "compute_loss", failing)
            with pytest.raises(_Unplugged):
                federation.run_round(progress)
        assert differences(before, flat(progress)) == []
        progress = federation.run_round(progress).progress
        assert differences(progress, expected) == []


@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_a_round_run_twice_counts_once(key: str, run_method: RunMethod) -> None:
    """Memories, moments and what clients hold advance from the progress that is given, not from the last call."""
    run = run_method(key)
    for round in run.rounds[-2:]:
        again = run.federation.run_round(round.before)
        assert differences(again.progress, round.after) == []
        assert again.transfers == round.result.transfers
        assert again.loss == round.result.loss


def test_a_failed_round_leaves_no_dropout_in_the_model(
    tiny_folder: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny.variant(prepared, tiny.config(tiny_folder, training={"lora_dropout": 0.5}))
    progress = made.federation.run_round(made.federation.begin()).progress
    indices = made.federation.clients["west"].train

    def predictions() -> Tensor:
        return made.engine.predict(made.evaluator.build_job(progress, None), made.train, indices, 8)

    before = predictions()
    with monkeypatch.context() as patch:
        patch.setattr(made.task, "compute_loss", None)
        with pytest.raises(TypeError, match="NoneType"):
            made.federation.run_round(progress)
    assert torch.equal(predictions(), before)


@pytest.mark.parametrize("key", methods_by_family(quick=["fedgalore"]))
def test_rounds_between_machines_have_the_bits_of_those_on_one(
    key: str, prepared: Prepared, tiny_folder: Path, tmp_path: Path
) -> None:
    training = {"local_steps": None, "batch_size": 12}  # one step to four, by a client's number of texts
    config = method_config(tiny_folder, key, training=training, federation={"rounds": 3})
    here = tiny.variant(prepared, config)
    there = remote(here, tmp_path)
    progress, other = here.federation.begin(), there.begin()
    for _ in range(there.settings.rounds):
        result, got = here.federation.run_round(progress), there.run_round(other)
        progress, other = result.progress, got.progress
        assert not got.failures
        assert encode_state(progress.state) == encode_state(other.state)
        assert progress.last_rounds == other.last_rounds
        assert result.transfers == got.transfers
        assert result.loss == pytest.approx(got.loss, rel=1e-12)
    validation, test = here.evaluator.evaluate_clients(progress)
    theirs = RemoteEvaluator(there, 32).evaluate_clients(other)
    for mine, found in zip((validation, test), theirs, strict=True):
        assert (mine is None) == (found is None)
        if mine is not None and found is not None:
            assert mine.by_client == {id: pytest.approx(row) for id, row in found.by_client.items()}
            assert mine.pooled["accuracy"] == pytest.approx(found.pooled["accuracy"])


@pytest.mark.parametrize("adaptive", [pytest.param(0, marks=pytest.mark.slow), 99])
def test_replies_with_several_projectors_are_accepted(
    adaptive: int, prepared: Prepared, tiny_folder: Path, tmp_path: Path
) -> None:
    """Projectors that are renewed within a round enlarge a reply, which the expected structure allows for."""
    options = {"name": "fedgalore", "r": 2, "steps": 5, "period": 2, "adaptive_refreshes": adaptive}
    config = tiny.config(tiny_folder, method=options, federation={"rounds": 2})
    here = tiny.variant(prepared, config)
    there = remote(here, tmp_path)
    progress, other = here.federation.begin(), there.begin()
    for _ in range(there.settings.rounds):
        progress, got = here.federation.run_round(progress).progress, there.run_round(other)
        other = got.progress
        assert not got.failures
    assert encode_state(progress.state) == encode_state(other.state)


MODELS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "bert": ("bert", {}),
    "gpt2": ("gpt2", {}),  # Conv1D: weights are stored transposed (fan_in_fan_out)
    "bert-last-layer": ("deep-bert", {"layers_to_transform": [1]}),
    "bert-local-head": ("bert", {"extras": "local"}),
}


@pytest.fixture(scope="module", params=others_slow(MODELS, ["bert", "gpt2"]))
def case(request: pytest.FixtureRequest, tiny_folder: Path, prepared: Prepared) -> tuple[str, Prepared]:
    """A model with the target layers of its case, loaded once for all methods."""
    kind, model = MODELS[request.param]
    config = tiny.config(tiny_folder, kind, model=model)
    return request.param, prepare(config, prepared.partition)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_pretrained_weights_that_count_as_zero_are_gone_from_what_is_written(
    case: tuple[str, Prepared], tiny_folder: Path, tmp_path: Path
) -> None:
    """FedLoRU from scratch: rho = 0, which no adapter expresses, so the model is written whole."""
    name, loaded = case
    kind, model = MODELS[name]
    config = method_config(
        tiny_folder,
        "fedloru",
        kind,
        model={**model, "extras": "average"},
        federation={"rounds": 3},
        method={"from_scratch": True},
    )
    prepared = tiny.variant(loaded, config)
    progress = tiny.run_all_rounds(prepared)
    assert progress.state.base.rho == 0.0
    assert progress.state.base.total
    folder = write_adapters(prepared, progress, RunFolder(tmp_path))["global"]
    expected = predict_with_engine(prepared, progress, None)
    assert torch.allclose(predict_with_peft(prepared, folder), expected, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_peft_gives_the_engine_s_logits(
    key: str, case: tuple[str, Prepared], tiny_folder: Path, tmp_path: Path
) -> None:
    name, loaded = case
    kind, model = MODELS[name]
    rounds = {"rounds": 2, "clients_per_round": 2}
    training = {"lr": 0.05, "weight_decay": 0}  # no adapter can say that the base itself has decayed
    config = method_config(tiny_folder, key, kind, model=model, federation=rounds, training=training)
    prepared = tiny.variant(loaded, config)
    begin, progress = prepared.federation.begin(), tiny.run_all_rounds(prepared)
    folders = write_adapters(prepared, progress, RunFolder(tmp_path))
    personal = METHODS[key].claims.personal or name == "bert-local-head"
    assert set(folders) == (set(prepared.federation.clients) if personal else {"global"})
    gained = 0.0
    for id, folder in folders.items():
        client = None if id == "global" else id
        expected = predict_with_engine(prepared, progress, client)
        assert torch.allclose(predict_with_peft(prepared, folder), expected, rtol=0, atol=1e-4)
        gained = max(gained, float((expected - predict_with_engine(prepared, begin, client)).abs().max()))
        notes = json.loads((folder / "fedspan.json").read_text())
        assert (notes["method"], notes["round"], notes["client"]) == (key, 2, client)
    assert gained > 0.01, "training changed nothing"
    if personal:  # whoever was trained has a model of its own
        models = {id: predict_with_engine(prepared, progress, id) for id in progress.last_rounds}
        assert len({tuple(model.flatten().tolist()) for model in models.values()}) == len(models) > 1


def diagnosed(prepared: Prepared, before: Progress, *, pairs: int, examples: int = 500) -> Diagnosis:
    return diagnose_round(
        prepared.federation, before, prepared.test, title="one", seed=0, batch_size=64, pairs=pairs, examples=examples
    )


def learnt(run: MethodRun, round: Round, layer: str) -> tuple[Tensor, Tensor]:
    """The mean of the clients' updates of a layer in a round, and the mean of their changes since the start."""
    whole = run.mean_change(layer, round)
    return whole - run.global_change(layer, round.before), whole


@pytest.mark.parametrize("key", methods_by_family())
def test_of_every_method_the_numbers_are_those_of_dense_weights(key: str, run_method: RunMethod) -> None:
    run = run_method(key)
    round = run.rounds[-1]
    before = snapshot(round.before)
    found = diagnosed(run.prepared, round.before, pairs=1, examples=10)
    assert not [name for name in differences(before, snapshot(round.before)) if name]
    assert found.clients == round.result.cohort
    assert (found.round, found.examples) == (len(run.rounds), 10)
    assert set(found.layers) == {layer.name for layer in run.layers}
    if METHODS[key].claims.personal:
        assert all(layer.accumulated is None for layer in found.layers.values())
        assert all(math.isnan(layer.updates.aggregation_error) for layer in found.layers.values())
        return
    oracle = errors(run, round)
    for layer, one in found.layers.items():
        step, whole = learnt(run, round, layer)
        lost = one.updates.aggregation_error * float(step.norm())
        assert lost == pytest.approx(oracle[layer] * float(whole.norm()), rel=1e-3, abs=1e-6 * float(whole.norm()))
        change = run.global_change(layer, round.after)
        assert one.accumulated.norm == pytest.approx(float(change.norm()), rel=1e-4)
        values = torch.linalg.svdvals(change)
        wanted = float((values.norm() / values[0]) ** 2)
        assert one.accumulated.stable_rank == pytest.approx(wanted, rel=1e-3)
        assert one.updates.drift >= 0


@pytest.mark.parametrize(
    "key", others_slow(["fedit", "fedsa-lora", "fedgalore", "fedavg", "florg"], ["fedit", "fedsa-lora", "fedgalore"])
)
def test_a_barrier_ends_at_the_losses_of_the_clients_models(key: str, run_method: RunMethod) -> None:
    run = run_method(key)
    round = run.rounds[-1]
    found = diagnosed(run.prepared, round.before, pairs=2, examples=10_000)
    assert [one.clients for one in found.barriers] == [
        (round.result.cohort[0], other) for other in round.result.cohort[1:]
    ]
    engine, held = run.prepared.engine, run.prepared.test
    for one in found.barriers:
        assert len(one.losses) == len(STEPS)
        for id, loss in zip(one.clients, (one.losses[0], one.losses[-1]), strict=True):
            local = [local for local in round.trained if local.client == id][-1]
            base = round.before.state.base
            engine.adapted.set_base(base)
            if local.trained.decay != 1.0:
                continue  # its base is no state of the server's
            job = replace(local.job, tensors=local.trained.tensors)
            indices = np.arange(len(held))
            predictions = engine.predict(job, held, indices, 64)
            wanted = engine.task.compute_metrics(predictions, held, indices.tolist())["loss"]
            assert loss == pytest.approx(wanted, rel=1e-4)


def test_a_round_without_clients_is_said_to_be_one(run_method: RunMethod) -> None:
    run = run_method("fedit")
    made = replace(run.prepared, federation=copy.copy(run.prepared.federation))
    made.federation.select_clients = lambda round, extra=0: []
    with refused("round", "no client participates"):
        diagnosed(made, run.rounds[-1].before, pairs=0)


KINDS = ("convolution", "embedding")
SHAPES = {
    "convolution": {"tall": (5, 9), "wide": (6, 30), "point": (7, 6)},
    "embedding": {"bert.embeddings.word_embeddings": (16, 48)},
}
GLOBAL = [key for key, cls in METHODS.items() if not cls.claims.personal]
each = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def folder(tiny_folder: Path) -> Path:
    """Also holds ``convolutions`` and ``pictures``."""
    tiny_convolutions.save_model(tiny_folder)
    tiny_convolutions.save_pictures(tiny_folder)
    return tiny_folder


def layers_config(folder: Path, kind: str, key: str, **changes: Mapping[str, Any]) -> RunConfig:
    """Three rounds, three of four clients."""
    changes = {
        "federation": {"rounds": 3, "clients_per_round": 3},
        "training": {"lr": 0.05, "weight_decay": 0},  # no adapter can say that the base itself has decayed
        **changes,
    }
    if kind == "embedding":
        model = {"target_modules": ["word_embeddings"], **changes.pop("model", {})}
        return method_config(folder, key, model=model, **changes)
    model = {
        "name": str(folder / "convolutions"),
        "target_modules": tiny_convolutions.LAYERS,
        **changes.pop("model", {}),
    }
    config = method_config(
        folder, key, model=model, data={"train": str(folder / "pictures")}, partition={"column": "domain"}, **changes
    )
    return parse_config({**config.model_dump(mode="json"), "task": "image-classification"})


@pytest.fixture(scope="module")
def loaded(folder: Path) -> dict[str, Prepared]:
    """A model of each kind, for all methods."""
    return {kind: prepare(layers_config(folder, kind, "fedit")) for kind in KINDS}


@pytest.fixture(scope="module")
def runs(folder: Path, loaded: dict[str, Prepared]) -> RunMethod:
    """``runs(kind, key)``: a method's rounds; the same object every time."""
    known: dict[tuple[str, str], MethodRun] = {}

    def get(kind: str, key: str) -> MethodRun:
        if (kind, key) not in known:
            known[kind, key] = run_watched(loaded[kind], layers_config(folder, kind, key))
        return known[kind, key]

    return get


@each
def test_the_layers_are_those_meant(kind: str, loaded: dict[str, Prepared]) -> None:
    layers = loaded[kind].engine.adapted.spec.layers
    assert {layer.name: layer.shape for layer in layers} == SHAPES[kind]


@each
@pytest.mark.parametrize("key", methods_by_family(GLOBAL, UNLIKE))
def test_exact_where_claimed_and_measurably_not_elsewhere(kind: str, key: str, runs: RunMethod) -> None:
    require_exactness(key, lambda key: runs(kind, key))


@each
@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_bytes_sent_are_bytes_declared(kind: str, key: str, runs: RunMethod) -> None:
    require_declared_traffic(runs(kind, key), METHODS[key].claims.extras)


@each
@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_what_is_exported_gives_the_engine_s_logits(kind: str, key: str, runs: RunMethod, tmp_path: Path) -> None:
    run = runs(kind, key)
    made, progress = run.prepared, run.rounds[-1].after
    folders = write_adapters(made, progress, RunFolder(tmp_path))
    assert set(folders) == (set(made.federation.clients) if METHODS[key].claims.personal else {"global"})
    gained = 0.0
    for id, adapter in folders.items():
        client = None if id == "global" else id
        expected = predict_with_engine(made, progress, client)
        assert torch.allclose(predict_with_peft(made, adapter), expected, rtol=0, atol=1e-4)
        gained = max(gained, float((expected - predict_with_engine(made, run.rounds[0].before, client)).abs().max()))
    assert gained > 0.01, "training changed nothing"


@each
@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_a_rank_equal_to_a_layer_s_side_is_taken_for_nothing_else(
    kind: str, key: str, folder: Path, loaded: dict[str, Prepared]
) -> None:
    """A (r, I) and B (O, r) cannot be told apart by a side of length r, as code that looks for one does."""
    rank = min(min(shape) for shape in SHAPES[kind].values())
    run = run_watched(loaded[kind], layers_config(folder, kind, key, method={"r": rank, "lora_alpha": rank}))
    assert all(loss.result.loss > 0 for loss in run.rounds)
    if METHODS[key].claims.exact and key in GLOBAL:
        stepped = [round for round in run.rounds if any(local.trained.steps for local in round.trained)]
        assert max(max(errors(run, round).values()) for round in stepped) < 1e-6
    require_declared_traffic(run, METHODS[key].claims.extras)


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def narrow(request: pytest.FixtureRequest, tiny_folder: Path, prepared: Prepared) -> Prepared:
    return prepare(method_config(tiny_folder, "fedit", model={"dtype": request.param}), prepared.partition)


@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_a_narrow_base_is_never_written_to_nor_anything_narrow_sent(
    key: str, narrow: Prepared, tiny_folder: Path
) -> None:
    """No SVD, QR or eigenvalue comes in 16 bits, and a weight of so few loses a step's change."""
    training = {"weight_decay": 0}  # a base that decays needs float32, and says so
    model = {"dtype": narrow.config.model.dtype}
    before = {name: layer.stored_weight.detach().clone() for name, layer in narrow.engine.adapted.layers.items()}
    run = run_watched(narrow, method_config(tiny_folder, key, model=model, federation={"rounds": 3}, training=training))
    adapted = run.prepared.engine.adapted
    for round in run.rounds:
        state = round.after.state
        for value in (*state.tensors.values(), *state.memory.values()):
            assert value.dtype not in (torch.bfloat16, torch.float16)
            assert not value.is_floating_point() or value.isfinite().all()
        for layer, delta in state.base.total.items():
            assert to_dense(delta).dtype == torch.float32, layer
    for name, layer in adapted.layers.items():
        assert layer.stored_weight.dtype == getattr(torch, model["dtype"])
        assert torch.equal(layer.stored_weight, before[name])
    losses = [round.result.loss for round in run.rounds]
    assert len(set(losses)) == len(losses)
