"""Architecture families: what stacks, trains one by one or is refused, and why; target layers as PEFT chooses them.

Their models are built from their Transformers configs with random weights. docs/models.md has the table.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import fedspan
from fedspan.assembly.run import Prepared, prepare
from fedspan.config import parse_config
from fedspan.errors import FedspanError
from fedspan.models.heads import get_head
from fedspan.models.targets import find_extras, find_targets, make_spec
from fedspan.run_folder import RunFolder
from fedspan.runs.trained_models import write_adapters
from helpers import tiny, tiny_decoders, tiny_families
from helpers.families import others_slow
from helpers.refusals import refused
from helpers.tiny_families import FAMILIES, IMAGES, LANGUAGE, PAIRS

FAST = ("bert", "deberta-v2", "t5", "mamba", "swin")
ALONE = {"deberta-v2": "attention.self.query_proj is given one input for all examples of a batch"}
"""Families whose clients train one by one with PEFT's default target modules, and why."""
NO_HEAD = ("whisper",)
"""Families for which no built-in task has a head."""
REFUSED = {
    "modernbert": "Expected names of modules, for example Wi, Wo, Wqkv.",
    "mamba": "Expected names of modules, for example in_proj, x_proj.",
    "convnext": "Expected names of modules, for example downsampling_layer.1, patch_embeddings, pwconv1, pwconv2.",
    "swin": "Expected names of modules, for example fc1, fc2, k_proj, o_proj, projection, q_proj.",
    "dinov2": "Expected names of modules, for example fc1, fc2, k_proj, o_proj, projection, q_proj.",
    "clip": "Expected names of modules, for example fc1, fc2, k_proj, out_proj, patch_embedding, q_proj.",
    "mobilenet_v2": "Expected names of modules, for example conv_1x1.convolution, expand_1x1.convolution, "
    "first_conv.convolution, reduce_1x1.convolution.",
    **{
        f"{family}-seq2seq": "Expected names of modules, for example fc1, fc2, k_proj, out_proj, q_proj, v_proj."
        for family in ("marian", "mbart", "m2m100")
    },
}
"""Families for which PEFT has no default target modules, and what the error suggests."""
SHARED = ("value_proj", "dense")
"""Target modules with which clients of a DeBERTa-v3 share passes: those that no relative positions enter."""

trainable = pytest.mark.parametrize("key", others_slow([key for key in FAMILIES if key not in NO_HEAD], FAST))
methods = pytest.mark.parametrize("method", ["fedit", pytest.param("rolora", marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    tiny_families.save_data(folder)
    return folder


@methods
@trainable
def test_a_family_trains_equally_on_both_engines(key: str, method: str, folder: Path) -> None:
    """Adapter, head and loss are equal up to rounding; where clients train one by one, bit for bit."""
    outcome = tiny_families.compare(folder, key, method, FAMILIES[key].targets)
    assert outcome.moved
    assert math.isclose(*outcome.losses, rel_tol=1e-5)
    if key not in ALONE:
        assert outcome.alone is None
        assert outcome.gap < 2e-4
    else:
        assert ALONE[key] in str(outcome.alone)
        assert outcome.gap == 0.0


@pytest.mark.parametrize("key", others_slow(REFUSED, ["modernbert", "mamba", "clip"]))
def test_the_error_names_modules_that_can_be_targets(key: str, folder: Path) -> None:
    with refused("model.target_modules") as caught:
        tiny_families.compare(folder, key)
    assert caught.value.field == "model.target_modules"
    assert str(caught.value).endswith(REFUSED[key])
    suggested = REFUSED[key].removesuffix(".").partition("for example ")[2].split(", ")
    _, progress, _ = tiny_families.train(tiny_families.settings(folder, key, target_modules=suggested))
    assert progress.state.round == 2


def test_deberta_shares_passes_where_no_relative_positions_enter(folder: Path) -> None:
    outcome = tiny_families.compare(folder, "deberta-v2", targets=list(SHARED))
    assert outcome.alone is None
    assert outcome.gap < 2e-4


@pytest.mark.parametrize("name", ["dt_proj", "out_proj"])
def test_layers_of_mamba_that_are_not_called_are_refused(name: str, folder: Path) -> None:
    for targets in ([name], "all-linear"):
        with refused("model.target_modules") as caught:
            tiny_families.compare(folder, "mamba", targets=targets)
        assert str(caught.value).endswith("Expected other modules, for example in_proj, x_proj.")


def test_a_router_of_experts_is_refused(folder: Path) -> None:
    with refused("model.target_modules"):
        tiny_families.compare(folder, "mixtral", targets=["gate"])


@pytest.mark.parametrize("key", NO_HEAD)
def test_a_family_without_a_head_for_the_task_is_refused(key: str, folder: Path) -> None:
    missing = "AutoModelForSequenceClassification"
    problem = f"has the architecture '{key}', for which Transformers has no {missing}. A task of your own"
    for changes in ({}, {"pretrained": False}):
        values = tiny_families.settings(folder, key, **changes)
        with pytest.raises(FedspanError, match=problem) as caught:
            tiny_families.train(values)
        assert caught.value.field == "model.name"


def test_the_encoder_of_t5_pools(folder: Path) -> None:
    values = tiny_families.settings(folder, "t5", pooling="mean")
    loop, progress, loss = tiny_families.train(values)
    assert not any("decoder" in name for name in loop.engine.adapted.layers)
    _, same, other = tiny_families.train({**values, "engine": {"name": "batched", "clients_per_pass": 3, "workers": 1}})
    assert loss == pytest.approx(other, rel=1e-5)
    for name, value in progress.state.tensors.items():
        assert torch.allclose(value, same.state.tensors[name], rtol=1e-3, atol=1e-5)


@trainable
def test_what_peft_loads_gives_the_run_s_numbers(key: str, folder: Path, tmp_path: Path) -> None:
    family = FAMILIES[key]
    prepared, progress, _ = tiny_families.train(tiny_families.settings(folder, key, target_modules=family.targets))
    adapter = write_adapters(prepared, progress, RunFolder(tmp_path))["global"]
    kind = get_head(prepared.config.task_definition.head).load_class()
    options = {} if family.task in (LANGUAGE, PAIRS) else {"num_labels": len(prepared.labels)}
    eager = {} if family.task == IMAGES else {"attn_implementation": "eager"}
    base = kind.from_pretrained(folder / key, **options, **({} if key == "mamba" else eager))
    base.config.pad_token_id = 0
    theirs: nn.Module = PeftModel.from_pretrained(base, str(adapter)).eval()
    if key == "mobilenet_v2":  # its padding reads attributes that PEFT's wrappers of convolutions lack
        theirs = theirs.merge_and_unload()
    batch = prepared.task.collate(prepared.train, [0, 5, 9], torch.device("cpu"))
    own = ("target_tokens",) if family.task == PAIRS else ("labels", "position_ids")  # decoders read shifted labels
    inputs = {name: value for name, value in batch.items() if name not in own}
    adapted, job = prepared.engine.adapted, prepared.evaluator.build_job(progress, None)
    adapted.model.eval()
    adapted.install(job.parametrization, job.tensors, frozenset())
    with torch.no_grad():
        ours, logits = adapted.model(**inputs).logits, theirs(**inputs).logits
    assert torch.allclose(ours, logits, rtol=1e-4, atol=1e-4)


HEADS = ["classifier", "score"]  # what PEFT takes out of a sequence classifier without being asked
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("deep-bert", {"target_modules": ["query", "value"]}, 4),
    ("deep-bert", {"target_modules": ["bert.encoder.layer.1.attention.self.query", "intermediate.dense"]}, 3),
    ("deep-bert", {"target_modules": ["dense"]}, 7),
    ("deep-bert", {"target_modules": ["dense"], "modules_to_save": ["pooler"]}, 6),
    ("deep-bert", {"target_modules": r".*layer\.0\..*\.(key|dense)"}, 4),
    ("deep-bert", {"target_modules": "all-linear"}, 13),
    ("deep-bert", {"target_modules": "all-linear", "exclude_modules": ["key", "pooler.dense"]}, 10),
    ("deep-bert", {"target_modules": ["query", "dense"], "exclude_modules": r".*layer\.0.*"}, 5),
    ("deep-bert", {"target_modules": ["dense"], "layers_to_transform": 1}, 3),
    ("deep-bert", {"target_modules": ["dense"], "layers_to_transform": [0, 1], "layers_pattern": "layer"}, 6),
    ("deep-bert", {"target_modules": None}, 4),
    ("roberta", {"target_modules": ["dense", "key"]}, 8),
    ("roberta", {"target_modules": "all-linear"}, 12),
    ("roberta", {"target_modules": None}, 4),
    ("distilbert", {"target_modules": ["q_lin", "lin1", "lin2"]}, 6),
    ("gpt2", {"target_modules": None}, 2),
    ("gpt2", {"target_modules": ["c_proj"], "layers_to_transform": [1]}, 2),
    ("gpt2", {"target_modules": "all-linear"}, 8),
]


def config(**options: Any) -> LoraConfig:
    saved = [*HEADS, *options.pop("modules_to_save", [])]
    return LoraConfig(task_type="SEQ_CLS", modules_to_save=saved, **options)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize(("kind", "options", "count"), CASES)
def test_target_layers_are_peft_s(kind: str, options: dict[str, Any], count: int, tiny_folder: Path) -> None:
    model = tiny.fresh_classifier(tiny_folder / kind)
    found = find_targets(model, config(**options))
    assert len(found) == count
    assert [name for name, module in model.named_modules() if found.get(name) is module] == list(found)
    theirs = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", **options)).base_model.targeted_module_names
    assert list(found) == theirs


def test_shapes_are_rows_by_columns_of_the_weight_matrix(tiny_folder: Path) -> None:
    """(O, I) although GPT-2's Conv1D stores (I, O)."""
    model = tiny.fresh_classifier(tiny_folder / "gpt2")
    targets = find_targets(model, config(target_modules=["c_attn", "mlp.c_proj"], layers_to_transform=[0]))
    spec = make_spec(targets, find_extras(model, ["score"]))
    assert [(layer.name.partition("h.0.")[2], layer.shape) for layer in spec.layers] == [
        ("attn.c_attn", (48, 16)),
        ("mlp.c_proj", (16, 24)),
    ]
    assert targets["transformer.h.0.attn.c_attn"].weight.shape == (16, 48)
    assert spec.extras == {"score.weight": (4, 16)}


def test_extras_are_the_parameters_of_the_named_modules(tiny_folder: Path) -> None:
    model = tiny.fresh_classifier(tiny_folder / "deep-bert")
    found = find_extras(model, ["classifier", "attention.output.LayerNorm"])
    assert sorted(found) == sorted(
        [
            *("classifier.weight", "classifier.bias"),
            *(
                f"bert.encoder.layer.{layer}.attention.output.LayerNorm.{kind}"
                for layer in (0, 1)
                for kind in ("weight", "bias")
            ),
        ]
    )
    assert all(model.get_parameter(path) is parameter for path, parameter in found.items())


def test_a_name_that_matches_nothing_gets_the_nearest(tiny_folder: Path) -> None:
    model = tiny.fresh_classifier(tiny_folder / "deep-bert")
    cases: list[tuple[dict[str, Any], object, str]] = [
        ({"target_modules": ".*valeu"}, ".*valeu", "value"),
        ({"target_modules": ["attention"]}, "bert.encoder.layer.0.attention", "is a BertAttention"),
    ]
    for options, value, words in cases:
        with pytest.raises(FedspanError) as caught:
            find_targets(model, config(**options))
        assert (caught.value.field, caught.value.value) == ("model.target_modules", value)
        assert words in str(caught.value)


def test_the_head_is_not_suggested_as_a_target(tiny_folder: Path) -> None:
    model = tiny.fresh_classifier(tiny_folder / "deep-bert")
    for wanted in ("clasifier", "classifier"):
        with refused("model.target_modules") as caught:
            find_targets(model, config(target_modules=[wanted]))
        _, _, suggested = str(caught.value).partition("matches no layer")
        assert "'dense'" in suggested
        assert "classifier" not in suggested


def test_an_architecture_without_a_default_has_to_name_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with refused("model.target_modules"):
        find_targets(model, LoraConfig())


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": "("},
        {"exclude_modules": "["},
        {"modules_to_save": ["("]},
        {"target_modules": "all-linear", "layers_to_transform": [1]},
        {"layers_pattern": "layer"},
    ],
)
def test_what_peft_refuses_is_the_user_s_mistake(
    options: dict[str, object], tiny_folder: Path, prepared: Prepared
) -> None:
    """No traceback for a broken pattern, nor for options of LoraConfig that exclude each other."""
    with refused("model.target_modules"):
        prepare(tiny.config(tiny_folder, model=options), prepared.partition)


def test_what_peft_takes_for_a_head_is_no_target(tiny_folder: Path, tmp_path: Path) -> None:
    """PEFT saves modules whose names end with "classifier": DistilBERT's pre_classifier too, new or from a checkpoint.

    As a target layer it would make an adapter that PEFT refuses to load.
    """
    tiny.fresh_classifier(tiny_folder / "distilbert").save_pretrained(tmp_path)
    tiny.save_tokenizer(tmp_path)
    for folder in (tiny_folder / "distilbert", tmp_path):
        prepared = prepare(tiny.config(tiny_folder, model={"name": str(folder), "target_modules": "all-linear"}))
        spec = prepared.engine.adapted.spec
        assert len(spec.layers) == 12
        assert {path.rpartition(".")[0] for path in spec.extras} == {"classifier", "pre_classifier"}
        adapters = write_adapters(prepared, prepared.federation.begin(), RunFolder(tmp_path))
        model = PeftModel.from_pretrained(tiny.fresh_classifier(folder), str(adapters["global"]))
        assert len(model.base_model.targeted_module_names) == 12


def test_a_name_that_the_head_has_too_is_no_target_there(tiny_folder: Path, tmp_path: Path) -> None:
    """RoBERTa's classifier has a layer called dense; it trains whole, with the head, and PEFT loads what is written."""
    prepared = prepare(tiny.config(tiny_folder, "roberta", model={"target_modules": ["dense"]}))
    spec = prepared.engine.adapted.spec
    assert len(spec.layers) == 6  # attention.output, intermediate and output of two layers
    assert not any("classifier" in layer.name for layer in spec.layers)
    assert {"classifier.dense.weight", "classifier.out_proj.weight"} <= set(spec.extras)
    adapter = write_adapters(prepared, prepared.federation.begin(), RunFolder(tmp_path))["global"]
    model = PeftModel.from_pretrained(tiny.fresh_classifier(tiny_folder / "roberta"), str(adapter))
    assert len(model.base_model.targeted_module_names) == 6


families = pytest.mark.parametrize("family", others_slow(tiny_decoders.FAMILIES, ["llama", "gpt2"]))


def classifier(folder: Path, family: str, **changes: Any) -> dict[str, Any]:
    data = {"train": str(folder / "questions.jsonl"), "text": "question", "label": "kind", "test_fraction": 0.2}
    return {**tiny_decoders.settings(folder, family, **changes), "task": "sequence-classification", "data": data}


def exported(prepared: Prepared, tmp_path: Path, auto: Any, **options: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """After two rounds: PEFT's model, and logits of both on one padded batch."""
    progress = tiny.run_all_rounds(prepared)
    adapter = write_adapters(prepared, progress, RunFolder(tmp_path))["global"]
    base = auto.from_pretrained(prepared.config.model.name, attn_implementation="eager", **options)
    base.config.pad_token_id = prepared.task.tokenizer.pad_token_id
    theirs = PeftModel.from_pretrained(base, str(adapter)).eval()
    batch = prepared.task.collate(prepared.train, [0, 5, 9], torch.device("cpu"))
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    job = prepared.evaluator.build_job(progress, None)
    prepared.engine.adapted.model.eval()
    prepared.engine.adapted.install(job.parametrization, job.tensors, frozenset())
    with torch.no_grad():
        return theirs, prepared.engine.adapted.model(**inputs).logits, theirs(**inputs).logits


@families
def test_a_language_model_s_adapter_gives_the_same_logits_in_peft(family: str, decoders: Path, tmp_path: Path) -> None:
    prepared = prepare(parse_config(tiny_decoders.settings(decoders, family)))
    before = prepare(parse_config(tiny_decoders.settings(decoders, family)))
    theirs, ours, logits = exported(prepared, tmp_path, AutoModelForCausalLM)
    assert torch.allclose(ours, logits, rtol=1e-4, atol=1e-5)
    batch = before.task.collate(before.train, [0, 5, 9], torch.device("cpu"))
    with torch.no_grad():
        untrained = before.engine.adapted.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    assert not torch.allclose(ours, untrained.logits, atol=1e-2)  # and it did learn something
    assert theirs.peft_config["default"].task_type == "CAUSAL_LM"


@families
def test_a_decoder_s_classifier_gives_the_same_logits_in_peft(family: str, decoders: Path, tmp_path: Path) -> None:
    """Also the tokenizers that pad on the left, or not at all: the padding is on the right, behind the last token."""
    prepared = prepare(parse_config(classifier(decoders, family)))
    _, ours, logits = exported(prepared, tmp_path, AutoModelForSequenceClassification, num_labels=4)
    assert torch.allclose(ours, logits, rtol=1e-4, atol=1e-5)
    batch = prepared.task.collate(prepared.train, [0, 5, 9], torch.device("cpu"))
    assert (batch["attention_mask"][:, 0] == 1).all()
    assert (batch["attention_mask"].sum(1) == torch.from_numpy(prepared.train.lengths[[0, 5, 9]])).all()


@families
def test_padding_does_not_change_what_a_decoder_s_classifier_says(family: str, decoders: Path) -> None:
    prepared = prepare(parse_config(classifier(decoders, family)))
    job, indices = prepared.evaluator.build_job(prepared.federation.begin(), None), np.arange(12)
    together = prepared.engine.predict(job, prepared.train, indices, 12)
    alone = prepared.engine.predict(job, prepared.train, indices, 1)
    assert torch.allclose(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_run_of_a_language_model_from_config_to_answers(family: str, decoders: Path, tmp_path: Path) -> None:
    """Loss falls, the best round has the least, and an exported model answers as the run's report says."""
    changes = {"federation": {"rounds": 4}, "training": {"lr": 0.02, "local_steps": None, "batch_size": 8}}
    values = {**tiny_decoders.settings(decoders, family, **changes), "baselines": ["centralized"]}
    report = fedspan.run(values, tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line)["validation"]["loss"] for line in lines]
    assert (report.task, report.metric) == ("causal-lm", "loss")
    assert rows[-1] < rows[0]
    assert report.best_round == 1 + int(np.argmin(rows))
    assert set(report.scores["test"]) == {"loss", "perplexity", "token_accuracy", "exact_match"}
    assert set(report.baselines["centralized"]["scores"]["clients"]) == {
        "loss",
        "perplexity",
        "token_accuracy",
        "worst",
    }
    measured = fedspan.evaluate(tmp_path / "run")
    for name, value in report.scores["test"].items():
        assert measured[name] == pytest.approx(value, rel=1e-4)
    questions = [row["text"].removeprefix("Q: ").removesuffix(" A:") for row in report.examples]
    assert fedspan.predict(tmp_path / "run", questions) == [row["prediction"] for row in report.examples]
    merged = fedspan.export(tmp_path / "run", tmp_path / "merged", "merged")
    assert fedspan.predict(merged, questions) == [row["prediction"] for row in report.examples]
    assert fedspan.evaluate(merged, data=decoders / "questions.jsonl", generate=False)["examples"] == 100
