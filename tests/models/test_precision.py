"""Bases in narrow formats, merged or on disk: the same results, and weights that nobody changes."""

import copy
import gc
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import fedspan
from fedspan.assembly.run import Prepared, prepare
from fedspan.config import parse_config
from fedspan.core.base import BaseUpdate, Increment
from fedspan.core.parametrization import Effective, Factorized, LoRA, Slots
from fedspan.core.values import Job, Trained
from fedspan.federation.progress import Progress
from fedspan.models import unpadded
from fedspan.models.adapted import AdaptedModel, hash_frozen
from fedspan.models.merging import export_merged, is_merging_required
from fedspan.models.offload import is_offloaded
from fedspan.models.precision import compute_tolerance, has_narrow_weights, keep_in_float32
from fedspan.models.unpadded import Unpadded
from fedspan.training.jobs import Assignment
from helpers import tiny, tiny_decoders, tiny_images
from helpers.exported_models import close, predict_with, run_rounds
from helpers.refusals import refused


def first_job(prepared: Prepared) -> Job:
    """FedIT's, after a round: B is not 0, so that every factor has a gradient."""
    federation = prepared.federation
    progress = federation.run_round(federation.begin()).progress
    return federation.method.start(federation.method.sync(progress.state, None), None, {}, progress.state.round)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_extras_of_a_narrow_base_train_in_float32(dtype: str, tiny_folder: Path, prepared: Prepared) -> None:
    """A step of 1e-5 moves every weight of the head, which a narrow format rounds away; frozen weights stay narrow.

    Embeddings (tied to nothing here), a normalization in the middle and the head: integer inputs, inner and outer ones.
    """
    saved = ["word_embeddings", "LayerNorm"]
    model = {"dtype": dtype, "modules_to_save": saved}
    narrow = prepare(tiny.config(tiny_folder, model=model), prepared.partition)
    adapted = narrow.engine.adapted
    assert {path.rpartition(".")[0].rpartition(".")[2] for path in adapted.extras} >= {*saved, "classifier"}
    for path, parameter in adapted.model.named_parameters():
        assert parameter.dtype == (torch.float32 if path in adapted.extras else getattr(torch, dtype))
    job = first_job(narrow)
    start = {name: value.clone() for name, value in job.tensors.items()}
    indices = narrow.federation.clients["north"].train
    trained = narrow.engine.train(Assignment("north", 0, job, indices, 1e-5), narrow.train)
    head = "extras/classifier.weight"
    moved = trained.tensors[head] != start[head]
    assert trained.tensors[head].dtype == torch.float32
    assert moved.all()
    rounded = getattr(torch, dtype)
    assert (trained.tensors[head].to(rounded) != start[head].to(rounded)).double().mean() < 0.5


class Tied(nn.Module):
    """Embeddings and an output layer that share one parameter, with a frozen layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 5)
        self.lm_head = nn.Linear(5, 7, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.inner(self.embed_tokens(ids)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tied_weights_stay_tied_and_every_owner_is_cast(dtype: torch.dtype) -> None:
    """The first owner's conversion is that of the shared parameter; the second one needs its casts all the same."""
    model = Tied().to(dtype)
    weight = model.get_parameter("embed_tokens.weight")
    keep_in_float32(model, [weight])
    assert model.lm_head.weight is model.embed_tokens.weight is weight
    assert weight.dtype == torch.float32
    assert model.inner.weight.dtype == dtype
    logits = model(torch.tensor([[1, 6, 3]]))
    assert logits.shape == (1, 3, 7)
    assert logits.dtype == dtype
    logits.float().square().sum().backward()
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float16, 5e-2), (torch.bfloat16, 5e-2)])
def test_the_tolerance_is_that_of_the_narrowest_weights(dtype: torch.dtype, tolerance: float) -> None:
    """Wherever they are: trained embeddings are the first parameter and float32, on a base that is not."""
    layers = nn.Embedding(7, 5), nn.Linear(5, 3).to(dtype), nn.LayerNorm(3)
    for order in (layers, layers[::-1]):
        assert compute_tolerance(nn.Sequential(*order)) == tolerance
    quantized = nn.Linear(5, 3)
    quantized.weight = nn.Parameter(torch.ones(3, 5, dtype=torch.uint8), requires_grad=False)
    assert not has_narrow_weights(quantized)


def test_attention_over_texts_of_variable_length_does_not_depend_on_trained_embeddings(
    tiny_folder: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are float32, while attention computes in the base's half precision."""
    model = {"dtype": "bfloat16", "modules_to_save": ["word_embeddings"]}
    adapted = prepare(tiny.config(tiny_folder, model=model), prepared.partition).engine.adapted
    assert next(adapted.model.parameters()).dtype == torch.float32
    monkeypatch.setattr(AdaptedModel, "device", torch.device("cuda"))
    monkeypatch.setattr(unpadded, "import_variable_attention", lambda: len)
    assert Unpadded(adapted).variable
    assert not Unpadded(prepared.engine.adapted).variable


def train(prepared: Prepared, job: Job, *, seed: int = 3, clients: tuple[str, ...] = ("north",)) -> Trained:
    """Of the last of the clients."""
    engine = type(prepared.engine)(prepared.engine.adapted, prepared.task, prepared.engine.settings, seed)
    trained = [
        engine.train(Assignment(id, 0, job, prepared.federation.clients[id].train, 0.1), prepared.train)
        for id in clients
    ]
    return trained[-1]


class Counting(LoRA):
    """LoRA that counts its uses."""

    uses = 0

    def compute_effective(self, slots: Slots) -> Effective:
        Counting.uses += 1
        return super().compute_effective(slots)


def test_gradient_checkpointing_gives_the_same_gradients(tiny_folder: Path, prepared: Prepared) -> None:
    """Bit for bit, with every layer computed twice."""
    config = tiny.config(tiny_folder, model={"gradient_checkpointing": True})
    checkpointed = prepare(config, prepared.partition)
    job = replace(first_job(prepared), steps=0)  # no step: only the mean raw gradient
    job = replace(job, parametrization={name: Counting(2.0) for name in job.parametrization})
    gradients, uses = [], []
    for made in (prepared, checkpointed):
        Counting.uses = 0
        gradients.append(train(made, job).gradient)
        uses.append(Counting.uses)
    assert uses[1] == 2 * uses[0] > 0
    assert gradients[0].keys() == set(job.trainable_names)
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name])
        assert gradient.any()


def test_dropout_on_adapters_is_a_function_of_its_key(tiny_folder: Path, prepared: Prepared) -> None:
    """The same draws again, whoever trained before; others for another seed or client."""
    made = tiny.variant(prepared, tiny.config(tiny_folder, training={"lora_dropout": 0.5}))
    job = first_job(prepared)
    once, again = train(made, job), train(made, job, clients=("south", "north"))
    other, without = train(made, job, seed=4), train(prepared, job)
    for name in job.trainable_names:
        assert torch.equal(once.tensors[name], again.tensors[name])
    name = job.trainable_names[0]
    assert len({tuple(run.tensors[name].flatten().tolist()) for run in (once, other, without)}) == 3


def test_dropout_zeroes_its_share_and_scales_the_rest(
    tiny_folder: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny.variant(prepared, tiny.config(tiny_folder, training={"lora_dropout": 0.2}))
    job, drawn = first_job(prepared), list[Callable[[Tensor, str], Tensor]]()
    set_dropout = AdaptedModel.set_dropout

    def keep(self: AdaptedModel, dropout: Callable[[Tensor, str], Tensor] | None) -> None:
        set_dropout(self, dropout)
        if dropout is not None:
            drawn.append(dropout)

    monkeypatch.setattr(AdaptedModel, "set_dropout", keep)
    train(made, job)
    assert len(drawn) == 2  # passes
    x, kept = torch.full((20, 50), 4.0), set[tuple[bool, ...]]()
    for dropout in drawn:
        for layer in ("one", "other"):
            y = dropout(x, layer)
            assert set(y.unique().tolist()) == {0.0, 5.0}
            assert 0.15 < float((y == 0).double().mean()) < 0.25  # four standard deviations of 1000 draws
            kept.add(tuple((y == 0).flatten().tolist()))
    assert len(kept) == 4
    assert all(layer.dropout is None for layer in prepared.engine.adapted.layers.values())


@pytest.mark.parametrize("accumulate", [1, 2, 5])
def test_every_step_decays_the_base(accumulate: int, tiny_folder: Path, prepared: Prepared) -> None:
    """The last, incomplete group of an accumulation is a step too: 3 passes, hence 3, 2 and 1 steps."""
    training = {"gradient_accumulation_steps": accumulate, "weight_decay": 0.5, "batch_size": 8, "local_steps": None}
    made = tiny.variant(prepared, tiny.config(tiny_folder, training=training))
    examples, job = made.federation.clients["west"].train[:20], replace(first_job(made), decay_base=True)
    trained = made.engine.train(Assignment("west", 0, job, examples, 0.1), made.train)
    assert trained.steps == -(-3 // accumulate)
    assert trained.decay == pytest.approx((1 - 0.1 * 0.5) ** trained.steps)


@pytest.mark.parametrize(("kind", "positions"), [("roberta", 34 - 1), ("bert", 32), ("gpt2", 32)])
def test_long_texts_are_cut_to_the_positions_there_are(
    kind: str, positions: int, tiny_folder: Path, tmp_path: Path
) -> None:
    """RoBERTa's positions begin behind the padding's index; only the model says so if the tokenizer is silent."""
    folder = tmp_path / kind
    shutil.copytree(tiny_folder / kind, folder)
    path = folder / "tokenizer_config.json"
    described = json.loads(path.read_text())
    del described["model_max_length"]
    path.write_text(json.dumps(described))
    made = prepare(tiny.config(tiny_folder, kind=kind, model={"name": str(folder), "max_length": 500}))
    assert made.task.max_length == positions
    text = datasets.Dataset.from_dict({"text": ["word1 " * 60], "label": [0]})
    job = made.evaluator.build_job(made.federation.begin(), None)
    assert made.engine.predict(job, made.task.encode(text), np.array([0]), 1).isfinite().all()


ROOM = {"cpu": 4 / (1 << 20)}
"""4 KiB: less than the tiny models have."""


def offloaded(values: dict[str, Any]) -> dict[str, Any]:
    """The same run with most of its base on disk."""
    return {**values, "model": {**values["model"], "device_map": "auto", "max_memory": ROOM}}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param("bert", {}, marks=pytest.mark.slow),
        pytest.param("bert", {"model": {"gradient_checkpointing": True}}, marks=pytest.mark.slow),
        pytest.param("deep-bert", {"model": {"layers_to_transform": [1]}}, marks=pytest.mark.slow),
        pytest.param("bert", {"model": {"pooling": "mean"}}, marks=pytest.mark.slow),
        pytest.param("bert", {"method": {"name": "fed-sb"}}, marks=pytest.mark.slow),
        ("bert", {"method": {"name": "flora"}}),  # moves the base
        pytest.param("gpt2", {}, marks=pytest.mark.slow),
        ("llama-lm", {}),
    ],
)
def test_training_ends_where_it_ends_with_the_base_in_memory(
    kind: str, changes: dict[str, Any], tiny_folder: Path, decoders: Path
) -> None:
    if kind == "llama-lm":
        values = tiny_decoders.settings(decoders, "llama", **changes)
    else:
        values = tiny.settings(tiny_folder, kind, **changes)
    plain, apart = prepare(parse_config(values)), prepare(parse_config(offloaded(values)))
    adapted = apart.engine.adapted
    assert all(is_offloaded(layer.module) for layer in adapted.layers.values())
    assert all(layer.stored_weight.is_meta for layer in adapted.layers.values())
    for name in adapted.layers:
        assert torch.equal(adapted.get_weight(name), plain.engine.adapted.get_weight(name))
    expected, found = tiny.final_tensors(plain), tiny.final_tensors(apart)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-5 * value.norm().clamp(min=1e-3), name


def test_a_run_from_config_to_predictions(tiny_folder: Path, tmp_path: Path) -> None:
    report = fedspan.run(offloaded(tiny.settings(tiny_folder)), tmp_path / "run")
    plain = fedspan.run(tiny.settings(tiny_folder), tmp_path / "plain")
    assert report.scores["test"] == plain.scores["test"]


def test_files_go_with_the_model(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = prepare(parse_config(offloaded(tiny.settings(tiny_folder))))
    assert list(tmp_path.iterdir())
    del made
    gc.collect()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"engine": {"name": "batched"}}, "the engine batched shares a base"),
        ({"privacy": {"mechanism": "dp-sgd", "noise": 1.0, "clip": 1.0}}, "privacy.mechanism: dp-sgd"),
        ({"model": {"quantization": "nf4"}}, "model.quantization"),
        ({"model": {"pretrained": False}}, "have to be on the device"),
    ],
)
def test_what_cannot_be_combined_with_it(changes: dict[str, Any], why: str, tiny_folder: Path) -> None:
    with refused("model.device_map") as caught:
        parse_config(offloaded(tiny.settings(tiny_folder, **changes)))
    assert why in str(caught.value)


def test_what_limits_of_memory_cannot_offload_is_refused(tiny_folder: Path) -> None:
    with refused("model.max_memory"):
        parse_config(tiny.settings(tiny_folder, model={"max_memory": ROOM}))
    values = offloaded(tiny.settings(tiny_folder, model={"modules_to_save": ["LayerNorm"]}))
    with refused("model.modules_to_save"):
        prepare(parse_config(values))


def test_a_method_that_scales_the_base_is_refused(tiny_folder: Path) -> None:
    made = prepare(parse_config(offloaded(tiny.settings(tiny_folder))))
    base = made.federation.begin().state.base
    with refused("model.device_map"):
        made.engine.adapted.set_base(type(base)(1, 0.5, {}))


def factorized(made: Prepared, progress: Progress) -> Job:
    """The trained model with other factors in place of its weights."""
    job = made.evaluator.build_job(progress, None)
    tensors = {name: value for name, value in job.tensors.items() if name.startswith("extras/")}
    rng = torch.Generator().manual_seed(0)
    for layer in made.engine.adapted.spec.layers:
        tensors[f"{layer.name}/U"] = torch.randn(layer.out_features, 2, generator=rng) / 4
        tensors[f"{layer.name}/V"] = torch.randn(2, layer.in_features, generator=rng) / 4
    return Job({layer.name: Factorized() for layer in made.engine.adapted.spec.layers}, tensors, ())


@pytest.mark.parametrize("what", [pytest.param("factors", marks=pytest.mark.slow), "decay"])
@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_what_is_no_change_of_the_base_is_written_whole(kind: str, what: str, images: Path, tmp_path: Path) -> None:
    """Factors in place of the weights, and a base that was scaled: the model on disk computes what the engine does."""
    made, progress = run_rounds(tiny_images.config(images, kind), 1)
    job, base = made.evaluator.build_job(progress, None), BaseUpdate()
    assert not is_merging_required(job, base)
    if what == "factors":
        job = factorized(made, progress)
    else:
        layers = made.engine.adapted.spec.layers
        base = base.add(Increment(1, {one.name: torch.ones(one.shape) / 50 for one in layers}, decay=0.7))
    assert is_merging_required(job, base)
    adapted = made.engine.adapted
    adapted.set_base(base)
    expected = made.engine.predict(job, made.test, np.arange(len(made.test)), 50)
    notes = {"base_model": made.config.model.name}
    export_merged(tmp_path, adapted, job, base, made.model.processor, notes)
    back = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    assert close(predict_with(made, back), expected)
    assert all(value.dtype == torch.float32 for value in back.parameters())
    adapted.set_base(BaseUpdate())


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def digest(module: nn.Module, extras: tuple[str, ...] = ("2.weight", "2.bias")) -> str:
    return hash_frozen(module, {name: module.get_parameter(name) for name in extras}).hexdigest()


def test_weights_and_stored_buffers_count_to_the_last_bit() -> None:
    whole = digest(model())
    assert digest(copy.deepcopy(model())) == whole
    for name in ("0.weight", "0.bias", "1.running_var"):
        changed = model()
        value = changed.state_dict()[name].flatten()
        value[0] = torch.nextafter(value[0], torch.tensor(torch.inf))
        assert digest(changed) != whole, name


def test_extras_do_not_count_under_their_own_name_or_another() -> None:
    whole, changed = digest(model()), model()
    with torch.no_grad():
        changed[2].weight.add_(1)
    assert digest(changed) == whole
    assert digest(model(), ()) != whole
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    before = digest(tied, ("0.weight",))
    with torch.no_grad():
        tied[1].weight.add_(1)
    assert digest(tied, ("0.weight",)) == before


def test_names_formats_and_shapes_count() -> None:
    """The same bytes under another name, in another format or shape are another model."""
    zeros = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2, 3))})
    others = (
        nn.ParameterDict({"b": nn.Parameter(torch.zeros(2, 3))}),
        nn.ParameterDict({"a": nn.Parameter(torch.zeros(3, 2))}),
        nn.ParameterDict({"a": nn.Parameter(torch.zeros(2, 3, dtype=torch.int32), requires_grad=False)}),
    )
    found = {hash_frozen(one, {}).hexdigest() for one in (zeros, *others)}
    assert len(found) == 1 + len(others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool])
def test_formats_without_numpy_have_a_digest(dtype: torch.dtype) -> None:
    module = nn.Module()
    module.register_buffer("mask", torch.tensor([0, 1, 1]).to(dtype))
    other = copy.deepcopy(module)
    other.get_buffer("mask")[0] = 1
    assert hash_frozen(module, {}).hexdigest() != hash_frozen(other, {}).hexdigest()
