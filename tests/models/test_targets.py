"""Target layers and extras are those that PEFT itself would choose, whatever way they are named."""

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from fedspan.assembly.run import Prepared, prepare
from fedspan.errors import FedspanError
from fedspan.models.targets import find_extras, find_targets, make_spec
from fedspan.run_folder import RunFolder
from fedspan.runs.trained_models import write_adapters
from helpers import tiny
from helpers.refusals import refused

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
        with pytest.raises(FedspanError, match="matches no layer") as caught:
            find_targets(model, config(target_modules=[wanted]))
        _, _, suggested = str(caught.value).partition("matches no layer")
        assert "'dense'" in suggested
        assert "classifier" not in suggested


def test_an_architecture_without_a_default_has_to_name_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(FedspanError, match=r"the architecture None. Expected names of modules, for example 0"):
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
