"""Heads and what enters them: which layer it is, pooled features, how a repository names them; sentence encoders."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForTextEncoding, BartConfig, BertConfig, T5Config
from transformers.models.auto import modeling_auto

import fedspan
from fedspan.assembly.model import get_pooling
from fedspan.assembly.run import prepare
from fedspan.config import parse_config
from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.models.head import (
    FeatureTap,
    NoOutputLayer,
    OutputLayer,
    find_frozen_heads,
    find_output_layer,
    find_untrained_head,
)
from fedspan.models.heads import HEADS, Head, get_head
from fedspan.models.loading import load_pretrained
from fedspan.models.names import resolve_model
from fedspan.models.pooling import Pooling
from fedspan.models.sentence_encoders import PooledClassifier, PoolingSearch, find_pooling, get_encoder_class
from fedspan.run_folder import CARD
from fedspan.serving.load import load_served
from fedspan.tasks.classification import SequenceClassification
from fedspan.tasks.registry import get_task
from helpers import tiny
from helpers.exported_models import load_as_its_card_says, run_its_card
from helpers.listeners import Notes
from helpers.refusals import refused

TEXTS = ["admin1 word3", "lab2 word1 lab3 word5 billing1", "symptom4"]
KINDS = ("bert", "roberta", "distilbert")
TARGETS = {"distilbert": ["q_lin", "v_lin"]}


def save_modules(folder: Path, *kinds: str, **settings: Any) -> None:
    """Make a model's folder one of a sentence encoder."""
    modules = [{"idx": at, "path": f"{at}_{kind}" if at else "", "type": f"x.{kind}"} for at, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def encoders(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny encoders as sentence encoders, and ``corpus.csv``."""
    folder = tmp_path_factory.mktemp("encoders")
    shutil.copy(tiny_folder / "corpus.csv", folder)
    for kind in (*KINDS, "deep-bert"):
        shutil.copytree(tiny_folder / kind, folder / kind)
        save_modules(folder / kind, "Transformer", "Pooling", "Normalize", pooling_mode_mean_tokens=True)
    return folder


def settings(folder: Path, kind: str, **changes: Any) -> dict[str, Any]:
    model = {"head_init": "auto", "target_modules": TARGETS.get(kind, tiny.BERT), **changes.pop("model", {})}
    return tiny.settings(folder, kind, model=model, **changes)


@pytest.fixture(scope="module")
def runs(encoders: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run on each encoder, not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    for kind in KINDS:
        fedspan.run(settings(encoders, kind, engine={"name": "batched", "clients_per_pass": 3}), folder / kind)
    return {kind: folder / kind for kind in KINDS}


def logits_of(folder: Path, first: str | None = None) -> Tensor:
    """What fedspan predicts for the texts, or for pairs of a first text and each, with an exported model."""
    served, count = load_served(folder, device="cpu"), len(TEXTS)
    texts = {"text": TEXTS} if first is None else {"text": [first] * count, "text_pair": TEXTS}
    answers = {"label": [0] * count, "labels": [[]] * count, "target": [0.0] * count}
    return served.compute_predictions(served.task.encode(datasets.Dataset.from_dict({**texts, **answers})))


def test_the_builtin_encoder_is_known_as_mean_and_normalized() -> None:
    assert find_pooling(resolve_model("builtin:all-minilm-l6-v2")).pooling == Pooling("mean", normalize=True)


@pytest.mark.parametrize(
    ("kinds", "config", "expected"),
    [
        (("Transformer", "Pooling"), {"pooling_mode_cls_token": True}, Pooling("cls")),
        (("Transformer", "Pooling"), {"pooling_mode": "max"}, Pooling("max")),
        (("Transformer", "Pooling", "Normalize"), {"pooling_mode_lasttoken": True}, Pooling("last", normalize=True)),
        (("Transformer", "Pooling"), {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, None),
        (("Transformer", "Pooling"), {"pooling_mode_weightedmean_tokens": True}, None),
        (("Transformer", "Pooling", "Dense"), {"pooling_mode_mean_tokens": True}, None),
        (("StaticEmbedding",), {}, None),
    ],
)
def test_what_a_repository_says_of_its_pooling(
    kinds: tuple[str, ...], config: dict[str, Any], expected: Pooling | None, tmp_path: Path
) -> None:
    save_modules(tmp_path, *kinds, **config)
    assert find_pooling(str(tmp_path)).pooling == expected


def test_a_folder_without_or_with_damaged_modules_names_none(tmp_path: Path) -> None:
    assert find_pooling(str(tmp_path)) == PoolingSearch(None)
    (tmp_path / "modules.json").write_text("{")
    assert find_pooling(str(tmp_path)) == PoolingSearch(None, "its modules.json cannot be read")


def test_what_is_in_doubt_is_named(tmp_path: Path) -> None:
    save_modules(tmp_path, "Transformer", "Pooling", "Dense")
    assert find_pooling(str(tmp_path)).doubt == "its modules are Transformer, Pooling, Dense"
    # The tests are offline, and nothing of this repository is in the cache.
    assert find_pooling("nobody/knows").doubt == "its modules.json could not be looked up, and is not in the cache"


@pytest.mark.slow
def test_a_resumed_run_has_the_pooling_of_its_start(encoders: Path, runs: dict[str, Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(encoders / "bert", model)
    values = settings(encoders, "bert", engine={"name": "batched", "clients_per_pass": 3})
    values["model"]["name"] = str(model)
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(values, tmp_path / "run", listener=Notes(1))
    (model / "modules.json").unlink()
    assert json.loads((tmp_path / "run" / "pooling.json").read_text()) == {"pooling": "mean", "pooling_normalize": True}
    fedspan.resume(tmp_path / "run")
    weights = [
        (place / "adapter" / "3_Dense" / "model.safetensors").read_bytes() for place in (tmp_path / "run", runs["bert"])
    ]
    assert weights[0] == weights[1]
    fedspan.export(tmp_path / "run", tmp_path / "last", round="last")
    assert (tmp_path / "last" / "modules.json").is_file()
    (tmp_path / "run" / "pooling.json").write_text("[]")
    with pytest.raises(FedspanError, match="pooling and pooling_normalize"):
        fedspan.export(tmp_path / "run", tmp_path / "again", round="last")


def test_a_fallback_is_noted(encoders: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(encoders / "bert", model)
    (model / "modules.json").write_text("{")
    values, notes = settings(encoders, "bert", federation={"rounds": 1}), Notes()
    values["model"]["name"] = str(model)
    fedspan.run(values, tmp_path / "run", listener=notes)
    assert any("model.pooling is stock" in note and "its modules.json cannot be read" in note for note in notes.notes)


def test_normalization_can_be_named(encoders: Path) -> None:
    def pooling(**model: Any) -> Pooling | None:
        return get_pooling(parse_config(settings(encoders, "bert", model=model)))

    assert pooling(pooling="cls") == Pooling("cls", normalize=True)  # as modules.json has it
    assert pooling(pooling="cls", pooling_normalize=False) == Pooling("cls")
    assert pooling(pooling="stock") is None
    with refused("model.pooling_normalize"):
        pooling(pooling_normalize=True)


def test_target_layers_have_the_paths_that_they_have_without_pooling(encoders: Path) -> None:
    pooled = load_pretrained(str(encoders / "bert"), labels=tiny.LABELS, pooling=Pooling("mean"))
    stock = load_pretrained(str(encoders / "bert"), labels=tiny.LABELS)
    assert isinstance(pooled.model, PooledClassifier)
    assert pooled.new_modules == ("classifier",)
    own = {name for name, _ in pooled.model.named_parameters()}
    assert own <= {name for name, _ in stock.model.named_parameters()}
    assert not any("pooler" in name for name in own)


@pytest.mark.parametrize("kind", KINDS)
def test_sentence_transformers_gives_the_logits_of_an_exported_adapter(kind: str, runs: dict[str, Path]) -> None:
    place = runs[kind] / "adapter"
    found = torch.from_numpy(SentenceTransformer(str(place), device="cpu").encode(TEXTS))
    torch.testing.assert_close(found, logits_of(place), rtol=1e-4, atol=1e-4)
    assert find_pooling(str(place)).pooling is None  # its Dense is a head for these labels, not a part of an encoder


@pytest.mark.parametrize("kind", KINDS)
def test_sentence_transformers_gives_the_logits_of_a_merged_model(
    kind: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    place = fedspan.export(runs[kind], tmp_path / "merged", form="merged")
    found = torch.from_numpy(SentenceTransformer(str(place), device="cpu").encode(TEXTS))
    expected = logits_of(runs[kind])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(logits_of(place), expected, rtol=1e-3, atol=1e-3)


def settings_with_columns(folder: Path, encoders: Path, task: str, *, pairs: bool, **changes: Any) -> dict[str, Any]:
    """Settings of a run on rows with two texts, a number and a label, which are written to the folder."""
    rows = (encoders / "corpus.csv").read_text().splitlines()[1:]
    lines = [f"word{number % 9} word3,{len(row) / 40:.3f},{row}" for number, row in enumerate(rows)]
    (folder / "rows.csv").write_text("\n".join(["first,number,text,label,site", *lines]) + "\n")
    columns = {"text": "first", "text_pair": "text"} if pairs else {}
    label = {"label": "number" if task == "regression" else "label"}
    data = {"train": str(folder / "rows.csv"), **columns, **label}
    return {**settings(encoders, "bert", data=data, **changes), "task": task}


@pytest.mark.parametrize("task", ["regression", "multi-label-classification"])
def test_the_cards_of_pooled_models_load_them(task: str, encoders: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"federation": {"rounds": 1}, "model": {"head_init": "random"}}
    fedspan.run(settings_with_columns(tmp_path, encoders, task, pairs=False, **changes), tmp_path / "run")
    merged = fedspan.export(tmp_path / "run", tmp_path / "merged", form="merged")
    for folder in (tmp_path / "run" / "adapter", merged):
        found = torch.from_numpy(load_as_its_card_says(folder).encode(TEXTS))
        if task == "regression":
            assert found[:, 0].tolist() == pytest.approx(fedspan.predict(merged, TEXTS), abs=1e-3)
        else:
            torch.testing.assert_close(found, logits_of(merged), rtol=1e-3, atol=1e-3)
        assert "`pipeline` does not know this model's pooling" in (folder / CARD).read_text()


@pytest.mark.parametrize(
    ("task", "start"),
    [
        ("sequence-classification", {"head_init": "auto"}),
        pytest.param("sequence-classification", {"head_init": "random", "head_rounds": 2}, marks=pytest.mark.slow),
        pytest.param("regression", {"head_init": "auto"}, marks=pytest.mark.slow),
        pytest.param("multi-label-classification", {"head_init": "auto"}, marks=pytest.mark.slow),
    ],
)
def test_pairs_of_a_sentence_encoder(task: str, start: dict[str, Any], encoders: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model": start, "federation": {"rounds": 3}}
    values = settings_with_columns(tmp_path, encoders, task, pairs=True, **changes)
    batched = {**values, "engine": {"name": "batched", "clients_per_pass": 3}}
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(batched, tmp_path / "run", listener=Notes(2))
    fedspan.resume(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "engine.json").read_text())["clients_per_pass"] == 3
    fedspan.run(values, tmp_path / "loop")
    merged = fedspan.export(tmp_path / "run", tmp_path / "merged", form="merged")
    expected = logits_of(merged, "word3")
    torch.testing.assert_close(expected, logits_of(tmp_path / "loop", "word3"), rtol=1e-2, atol=1e-2)
    assert not torch.allclose(expected, logits_of(merged, "lab2"), atol=1e-3)
    for folder in (tmp_path / "run" / "adapter", merged):
        names = run_its_card(folder, {'["a text"]': repr(["word3"] * 3), '["its second text"]': repr(TEXTS)})
        torch.testing.assert_close(names["logits"], expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(logits_of(folder, "word3"), expected, rtol=1e-3, atol=1e-3)
        assert find_pooling(str(folder)).pooling == Pooling("mean", normalize=True)  # the head is beside the modules
    with refused("texts", "pairs of texts"):
        fedspan.predict(merged, TEXTS)
    metrics = fedspan.evaluate(merged, data=values["data"]["train"])
    assert metrics["examples"] == 120
    assert metrics == pytest.approx(fedspan.evaluate(tmp_path / "run", data=values["data"]["train"]), abs=1e-3)


def test_features_of_pairs_are_both_vectors_and_their_difference(encoders: Path) -> None:
    pooling = Pooling("mean", normalize=True, pairs=True)
    loaded = load_pretrained(str(encoders / "roberta"), labels=tiny.LABELS, pooling=pooling)
    alone = load_pretrained(str(encoders / "roberta"), pooling=Pooling("mean", normalize=True)).model
    alone.classifier = torch.nn.Identity()
    first, second = ["lab2 word3", "word1", "admin1"], TEXTS
    u, v = (
        torch.cat([alone(**loaded.processor(text, return_tensors="pt")).logits for text in texts])
        for texts in (first, second)
    )
    task = SequenceClassification(loaded.processor, tiny.LABELS, 32, pairs=True)
    columns = {"text": first, "text_pair": second, "label": [0, 1, 2]}
    examples = task.encode(datasets.Dataset.from_dict(columns))
    assert examples.lengths.tolist() == [4, 7, 3]  # of the longer text
    logits = task.predict(loaded.model, task.collate(examples, [0, 1, 2], torch.device("cpu")))
    expected = loaded.model.classifier(torch.cat([u, v, (u - v).abs()], 1))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert task.describe_examples(examples) == ()


def test_pairs_are_known_by_column_or_data_set(encoders: Path) -> None:
    def pooling(task: str, model: dict[str, Any], **data: Any) -> Pooling | None:
        values = settings(encoders, "bert", model=model)
        return get_pooling(parse_config({**values, "task": task, "data": data}))

    classify, pairs = "sequence-classification", Pooling("mean", normalize=True, pairs=True)
    assert pooling(classify, {}, train="x.csv", text_pair="b") == pairs
    assert pooling(classify, {}, train="x.csv", dataset="mrpc") == pairs
    assert pooling(classify, {}, train="x.csv", dataset="sst2") == Pooling("mean", normalize=True)
    assert pooling(classify, {"pooling": "stock"}, train="x.csv", text_pair="b") is None
    assert pooling("text-embedding", {}, train="x.csv", text_pair="b") == Pooling("mean", normalize=True)


def test_a_task_of_ones_own_that_joins_pairs_is_refused(encoders: Path, tmp_path: Path) -> None:
    values = settings_with_columns(tmp_path, encoders, "sequence-classification", pairs=True)
    own = dataclasses.replace(
        get_task("sequence-classification"),
        name="joined",
        build=lambda tokenizer, settings, data: SequenceClassification(tokenizer, settings.labels, settings.max_length),
    )
    with refused("model.pooling"):
        fedspan.run({**values, "task": "joined"}, tmp_path / "run", task=own)


def test_the_cards_lines_compute_the_logits(runs: dict[str, Path], encoders: Path) -> None:
    text = (runs["bert"] / "adapter" / "README.md").read_text()
    first, second = re.findall(r"```python\n(.*?)```", text.partition("## Use")[2], re.S)[:2]
    expected = logits_of(runs["bert"])
    for block in (first, second):
        code = block.replace("FOLDER", str(runs["bert"] / "adapter")).replace('"bert"', f'"{encoders / "bert"}"')
        code = re.sub(r'\["a text".*?\]', repr(TEXTS), code)
        names: dict[str, Any] = {}
        exec(compile(code, "card", "exec"), names)
        torch.testing.assert_close(torch.as_tensor(names["logits"]).detach(), expected, rtol=1e-4, atol=1e-4)


def test_engines_agree(encoders: Path, runs: dict[str, Path], tmp_path: Path) -> None:
    fedspan.run(settings(encoders, "bert"), tmp_path / "loop")
    torch.testing.assert_close(logits_of(tmp_path / "loop"), logits_of(runs["bert"]), rtol=1e-2, atol=1e-2)
    # no note: all clients shared passes, without padding and with the cache of the prefix where it applies
    assert json.loads((runs["bert"] / "engine.json").read_text())["clients_per_pass"] == 3


def test_a_run_starts_from_an_exported_adapter(encoders: Path, runs: dict[str, Path]) -> None:
    run = prepare(parse_config(settings(encoders, "bert", model={"adapter": str(runs["bert"] / "adapter")})))
    assert run.head is None  # the adapter has a head for these labels
    job = run.evaluator.build_job(run.federation.begin(), None)
    import numpy as np

    predicted = run.engine.predict(job, run.train, np.arange(4), 4)
    served = load_served(runs["bert"], device="cpu")
    torch.testing.assert_close(predicted, served.compute_predictions(run.train)[:4], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param("bert", {"model": {"gradient_checkpointing": True}}, marks=pytest.mark.slow),
        pytest.param("bert", {"model": {"dtype": "bfloat16"}}, marks=pytest.mark.slow),
        pytest.param("deep-bert", {"model": {"layers_to_transform": [1]}}, marks=pytest.mark.slow),
        pytest.param("bert", {"model": {"pretrained": False, "head_init": "random"}}, marks=pytest.mark.slow),
        pytest.param("bert", {"method": {"name": "fedavg"}}, marks=pytest.mark.slow),
        ("bert", {"method": {"name": "fedsa-lora"}, "model": {"modules_to_save": ["LayerNorm"]}}),
    ],
)
def test_what_runs_on_a_stock_classifier_runs_on_a_pooled_one(
    kind: str, changes: dict[str, Any], encoders: Path, tmp_path: Path
) -> None:
    report = fedspan.run(settings(encoders, kind, **changes), tmp_path / "run")
    assert report.rounds == 2
    place = tmp_path / "run" / next(iter(report.adapters.values()))
    found = torch.from_numpy(SentenceTransformer(str(place), device="cpu").encode(TEXTS))
    close: Callable[..., None] = torch.testing.assert_close
    close(found.float(), logits_of(place).float(), rtol=1e-3, atol=1e-3)


def test_numbers_are_predicted_from_pooled_features(encoders: Path, tmp_path: Path) -> None:
    rows = (encoders / "corpus.csv").read_text().splitlines()
    lines = [f"{row.rsplit(',', 2)[0]},{len(row.split())},{row.rsplit(',', 1)[1]}" for row in rows[1:]]
    (tmp_path / "numbers.csv").write_text("\n".join(["text,target,site", *lines]) + "\n")
    data = {"train": str(tmp_path / "numbers.csv"), "label": "target"}
    values = settings(encoders, "deep-bert", data=data)
    report = fedspan.run({**values, "task": "regression"}, tmp_path / "run")
    assert report.start["head_init"] == "least-squares"
    assert report.start["validation"]["pearson"] > 0.5
    place = tmp_path / "run" / "adapter"
    found = torch.from_numpy(SentenceTransformer(str(place), device="cpu").encode(TEXTS))
    assert found.shape == (len(TEXTS), 1)


def test_only_an_encoder_alone_pools() -> None:
    assert get_encoder_class(BertConfig()) is AutoModel
    assert get_encoder_class(T5Config()) is AutoModelForTextEncoding
    with pytest.raises(ValueError, match="has an encoder and a decoder, whose hidden states are not pooled"):
        get_encoder_class(BartConfig())


class Classifier(nn.Module):
    """A body of one layer with a pooler, and a head of two; every token has outputs if asked to."""

    base_model_prefix = "body"

    def __init__(self, labels: int = 3, tokens: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.ModuleDict({"layer": nn.Linear(5, 4), "pooler": nn.Linear(4, 6)})
        self.dense, self.out = nn.Linear(6, 7), nn.Linear(7, labels)
        self.config = SimpleNamespace(num_labels=labels)
        self.tokens = tokens

    def forward(self, x: Tensor) -> Tensor:
        features = torch.tanh(self.dense(self.body["pooler"](self.body["layer"](x))))
        outputs = self.out(features)
        return outputs[torch.arange(len(x)), torch.arange(len(x)) % x.shape[1]] if self.tokens else outputs


def adapted(model: nn.Module, *extras: str) -> AdaptedModel:
    parameters = dict(model.named_parameters())
    chosen = {name: parameters[name] for name in extras}
    return AdaptedModel(model, {"body.layer": model.get_submodule("body.layer")}, chosen)


HEAD = ("dense.weight", "dense.bias", "out.weight", "out.bias")


def test_the_output_layer_has_the_outputs_of_the_labels_and_trains() -> None:
    assert find_output_layer(adapted(Classifier(), *HEAD)) == OutputLayer("out", 3, 7, True)
    bare = Classifier()
    bare.out = nn.Linear(7, 3, bias=False)
    assert find_output_layer(adapted(bare, *HEAD[:3])) == OutputLayer("out", 3, 7, False)


@pytest.mark.parametrize(
    ("labels", "extras", "why"),
    [
        (3, HEAD[:2], "0 linear layers of its head have 3 outputs"),  # it does not train
        (7, HEAD, "2 linear layers of its head have 7 outputs"),
    ],
)
def test_no_or_several_such_layers_are_an_error(labels: int, extras: tuple[str, ...], why: str) -> None:
    model = adapted(Classifier(labels), *extras)
    with pytest.raises(NoOutputLayer, match=why):
        find_output_layer(model)
    assert find_untrained_head(model) == ()


def test_a_bias_of_zeros_looks_untrained() -> None:
    model = Classifier()
    assert find_untrained_head(adapted(model, *HEAD)) == ()
    with torch.no_grad():
        model.out.bias.zero_()
    assert find_untrained_head(adapted(model, *HEAD)) == ("out",)
    with torch.no_grad():
        model.out.bias[2] = 1e-9
    assert find_untrained_head(adapted(model, *HEAD)) == ()


def test_untrained_layers_that_do_not_train_are_found() -> None:
    """Behind the body, or in one whose other layers were trained; not those that train or are targets."""
    model = Classifier()
    with torch.no_grad():
        for layer in (model.out, model.dense, model.body["pooler"]):
            layer.bias.zero_()
    assert find_frozen_heads(adapted(model, *HEAD)) == ("body.pooler",)
    assert find_frozen_heads(adapted(model, *HEAD[2:])) == ("body.pooler", "dense")
    with torch.no_grad():
        model.body["layer"].bias.zero_()
    assert find_frozen_heads(adapted(model, *HEAD[2:])) == ("dense",)  # a whole body without a trained bias
    model.base_model_prefix = ""
    assert find_frozen_heads(adapted(model, *HEAD[2:])) == ()


@pytest.mark.parametrize("tokens", [False, True])
def test_features_are_the_input_of_the_layer_for_the_token_that_was_selected(tokens: bool) -> None:
    model, layer = Classifier(tokens=tokens), OutputLayer("out", 3, 7, True)
    tap, x = FeatureTap(model, layer), torch.randn(4, 2, 5) if tokens else torch.randn(4, 5)
    with torch.no_grad():
        expected = model(x)
        with tap.record():
            features = tap.take(logits := model(x))
        assert features.shape == (4, 7)
        assert torch.allclose(model.out(features), expected, atol=1e-6)
        model.out.weight.zero_()  # the same outputs for every token
        with tap.record():
            assert torch.equal(tap.take(model(x)), features)
        model(x)
    with pytest.raises(NoOutputLayer, match="out is not called"):
        tap.take(logits)


def test_logits_that_are_not_the_layer_s_outputs_are_an_error() -> None:
    """Scaled, or of fewer rows than the layer was given."""
    model = Classifier()
    tap = FeatureTap(model, find_output_layer(adapted(model, *HEAD)))
    with tap.record(), torch.no_grad():
        logits = model(torch.randn(4, 5))
        for wrong in (2 * logits, logits[:3]):
            with pytest.raises(NoOutputLayer, match="its logits are not the outputs of out"):
                tap.take(wrong)


MAPPINGS = {
    "AutoModelForSequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForTokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForImageClassification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForMaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}


@pytest.mark.parametrize("name", [name for name, head in HEADS.items() if head.auto_class in MAPPINGS])
def test_model_classes_of_a_head_end_as_it_says(name: str) -> None:
    """Those of BERT, or of ViT where images are read."""
    head = get_head(name)
    kind = MAPPINGS[head.auto_class]["vit" if head.has_image_inputs else "bert"]
    assert kind.endswith(head.suffixes)


def test_a_head_of_one_s_own_is_itself_and_an_unknown_name_is_none() -> None:
    own = Head("AutoModelForMultipleChoice", ("ForMultipleChoice",))
    assert get_head(own) is own
    assert own.load_class() is transformers.AutoModelForMultipleChoice
    with pytest.raises(KeyError, match="classifier"):
        get_head("classifier")


HIDDEN = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mode", ["mean", "max", "cls", "last"])
def test_padding_does_not_matter(mode: Any) -> None:
    hidden = HIDDEN[:1]
    padded = torch.cat([hidden, torch.full((1, 2, 4), torch.nan)], 1)
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    torch.testing.assert_close(Pooling(mode)(padded, mask), Pooling(mode)(hidden, None))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("mode", ["mean", "max", "cls", "last"])
def test_each_text_is_pooled_over_its_own_tokens(mode: Any, normalize: bool) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    pooled = Pooling(mode, normalize)(HIDDEN, mask)
    for text, length, vector in zip(HIDDEN, (2, 3), pooled, strict=True):
        tokens = text[:length]
        expected = {"mean": tokens.mean(0), "max": tokens.max(0).values, "cls": tokens[0], "last": tokens[-1]}[mode]
        torch.testing.assert_close(vector, expected / expected.norm() if normalize else expected)
