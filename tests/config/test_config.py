"""The configuration: what it means, and that every mistake is one line that names the field and what would be right."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from fedspan.config import RunConfig, load_config, override, parse_config
from fedspan.core.noise import derive_seed_key
from fedspan.core.values import LayerSpec, OptimizerSpec, Spec
from fedspan.errors import FedspanError
from fedspan.federation.settings import RoundSettings
from fedspan.methods.registry import METHODS
from fedspan.training.jobs import Privacy, TrainingSettings
from fedspan.wrappers.extras import WithExtras
from fedspan.wrappers.fedadam import FedAdam
from fedspan.wrappers.fedpaq import FedPAQ
from fedspan.wrappers.fedprox import FedProx
from fedspan.wrappers.registry import WRAPPERS

VALID: dict[str, Any] = {
    "task": "sequence-classification",
    "seed": 3,
    "device": "cpu",
    "model": {"name": "org/model", "target_modules": ["query", "value"], "extras": "average"},
    "data": {"train": "train.csv", "label": "topic", "labels": ["a", "b"]},
    "partition": {"partitioner": "dirichlet", "clients": 4, "alpha": 0.3},
    "method": {"name": "fedloru", "r": 4, "lora_alpha": 8, "tau": 2},
    "federation": {"rounds": 6, "clients_per_round": 2, "ranks": {"client-00": 4}},
    "training": {"optimizer": "adamw", "lr": 0.01, "betas": [0.9, 0.99], "local_steps": 3},
    "evaluation": {"every": 2, "batch_size": 8},
    "baselines": ["local"],
}
SPEC = Spec((LayerSpec("wide", 6, 20), LayerSpec("tall", 30, 5)))


def refused(changes: dict[str, Any], field: str, value: object, *words: str) -> None:
    """``changes`` go into the valid config by dotted path."""
    values = copy.deepcopy(VALID)
    for path, new in changes.items():
        *sections, last = path.split(".")
        place = values
        for section in sections:
            place = place[section]
        place[last] = new
    with pytest.raises(FedspanError) as caught:
        parse_config(values)
    assert (caught.value.field, caught.value.value) == (field, value)
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_a_short_config_is_filled_up_and_a_written_one_comes_back() -> None:
    config = parse_config({"data": {"train": "train.csv"}})
    assert (config.method.name, config.federation.rounds, config.training.optimizer) == ("fedit", 10, "adamw")
    for some in (config, parse_config(VALID)):
        text = yaml.safe_dump(some.model_dump(mode="json"))
        assert parse_config(yaml.safe_load(text)) == some


def test_settings_carry_every_field_of_the_config() -> None:
    """Values that differ from all defaults, so that none can be forgotten or mistaken for another."""
    training = {
        **{"optimizer": "sgd", "lr": 0.3, "schedule": "cosine", "warmup_rounds": 2, "momentum": 0.8, "eps": 1e-5},
        **{"min_lr": 0.1, "cycle_rounds": 9},
        **{"betas": [0.7, 0.95], "weight_decay": 0.02, "batch_size": 5, "gradient_accumulation_steps": 3},
        **{"local_epochs": 4, "local_steps": 7, "max_grad_norm": 0.5, "optimizer_state": "keep", "lora_dropout": 0.1},
        "group_by_length": False,
    }
    privacy = {"mechanism": "dp-sgd", "clip": 0.5, "noise": 2.0, "epsilon": 3.0, "delta": 1e-6, "accountant": "prv"}
    own = {"clip_ratio": 1.25, "max_norm": 3.0, "max_weight_ratio": 7.0}
    federation = {**VALID["federation"], "trim": 0.2, **own}
    config = parse_config({**VALID, "training": training, "privacy": privacy, "federation": federation})
    alone = {"logit_adjustment", "head_updates", "label_smoothing", "class_weights"}  # dp-sgd refuses them
    on_nodes = {"checkpoint_steps", "checkpoint_minutes"}  # of the process that trains, not of the training
    assert set(training) | alone | on_nodes == set(type(config.training).model_fields)
    optimizer = OptimizerSpec(name="sgd", lr=0.3, momentum=0.8, betas=(0.7, 0.95), eps=1e-5, weight_decay=0.02)
    private = Privacy("dp-sgd", 0.5, 2.0, 3.0, 1e-6, "prv", 6, derive_seed_key(3))
    expected = TrainingSettings(optimizer, "cosine", 2, 0.1, 9, 5, 3, 4, 7, 0.5, True, 0.1, False, privacy=private)
    default = TrainingSettings(OptimizerSpec())
    assert config.build_training_settings() == expected
    fields = set(TrainingSettings.__dataclass_fields__)
    assert {name for name in fields if getattr(expected, name) != getattr(default, name)} == fields - alone
    changed = {"logit_adjustment": 0.5, "head_updates": "own-classes"}
    adjusted = parse_config({**VALID, "training": changed}).build_training_settings()
    assert {name: getattr(adjusted, name) for name in changed} == changed
    weighted = {"label_smoothing": 0.1, "class_weights": {"a": 2.0}}
    assert {*changed, *weighted} == alone
    built = parse_config({**VALID, "training": weighted}).build_training_settings()
    assert (built.label_smoothing, built.class_weights) == (0.1, (("a", 2.0),))
    assert (default.logit_adjustment, default.head_updates) == (0.0, "all")
    assert config.build_round_settings() == RoundSettings(6, 2, 3, "mean", 0.2, 1.25, 3.0, 7.0, private)
    secret = config.build_round_settings(bytes(32)).privacy
    assert secret == replace(private, key=bytes(32), secret=True) == config.build_training_settings(bytes(32)).privacy
    assert (config.evaluation.every, config.evaluation.batch_size) == (2, 8)


def test_a_schedule_falls_and_does_not_rise() -> None:
    with pytest.raises(
        FedspanError, match=r"^`training.min_lr`: 0.5 is not accepted\. Expected .*at most training.lr, 0.01"
    ):
        parse_config({**VALID, "training": {"lr": 0.01, "min_lr": 0.5}})


def test_a_method_gets_its_options_and_the_run_s_seed() -> None:
    method = parse_config(VALID).build_method(SPEC)
    assert method == METHODS["fedloru"](spec=SPEC, seed=3, r=4, lora_alpha=8.0, tau=2)  # type: ignore[call-arg]


def test_a_rank_larger_than_a_layer_is_refused() -> None:
    """Except where there is no rank: FedAvg trains whole weights."""
    config = parse_config({**VALID, "method": {"name": "fedit", "r": 6}})
    with pytest.raises(FedspanError, match="tall is 30 x 5: at most 5") as caught:
        config.build_method(SPEC)
    assert (caught.value.field, caught.value.value) == ("method.r", 6)
    assert parse_config({**VALID, "method": {"name": "fedavg", "r": 6}}).build_method(SPEC)


def test_values_of_another_kind_get_the_right_form() -> None:
    example = "Expected a section: names of fields with their values, for example {} for its defaults."
    refused({"federation.secure": "flora"}, "federation.secure", "flora", example)
    refused(
        {"data.labels": "lable"}, "data.labels", "lable", "Expected a valid list. A single name belongs in data.label."
    )
    refused({"data": "rows.csv"}, "data", "rows.csv", "Expected a section: names of fields with their values.")


def test_unknown_names_get_the_nearest() -> None:
    refused({"modle": {}}, "modle", {}, "no such field", "Did you mean 'model'")
    refused({"training.momentun": 1}, "training.momentun", 1, "momentum")
    refused({"data.trian": 1}, "data.trian", 1, "train")
    refused({"method.name": "fedlru"}, "method.name", "fedlru", "no method is named", "fedloru")
    refused({"method.taw": 1}, "method.taw", 1, "fedloru has no such option", "r, lora_alpha, use_rslora, tau")
    for hidden in ("spec", "seed", "claims", "options"):  # fields of the class that are no options
        refused({f"method.{hidden}": 1}, f"method.{hidden}", 1, "fedloru has no such option")


def test_wrong_values_are_named() -> None:
    refused({"task": ["regression"], "data": {"dataset": "banking77"}}, "task", ["regression"], "a valid string")
    refused({"data": {}}, "data.train", None, "no value is given. Expected a file or a hub id, or data.dataset")
    refused({"training.lr": 0}, "training.lr", 0, "above 0")
    refused({"training.lr": float("inf")}, "training.lr", float("inf"), "above 0")
    for field in ("training.weight_decay", "training.eps", "training.max_grad_norm", "centralized_lr"):
        refused({field: float("inf")}, field, float("inf"), "finite")
    refused({"model.extras_lr_scale": float("inf")}, "model.extras_lr_scale", float("inf"), "finite")
    refused({"method.lora_alpha": float("inf")}, "method.lora_alpha", float("inf"), "a finite number")
    refused({"training.optimizer": "adam"}, "training.optimizer", "adam", "'adamw' or 'sgd'")
    refused({"training.betas": [0.9]}, "training.betas.1", None, "is required")
    refused({"federation.rounds": "many"}, "federation.rounds", "many", "integer")
    refused({"federation.clients_per_round": 0}, "federation.clients_per_round", 0, "greater than or equal to 1")
    refused({"model": "bert"}, "model", "bert", "a section")
    refused({"model.extras": "shared"}, "model.extras", "shared", "'average', 'local' or 'frozen'")
    refused({"baselines": ["global"]}, "baselines.0", "global", "'local' or 'centralized'")
    refused({"seed": -1}, "seed", -1, "greater than or equal to 0")
    refused({"seed": 2**64}, "seed", 2**64, "less than 9223372036854775808")
    refused({"model.modules_to_save": [""]}, "model.modules_to_save.0", "", "at least 1 character")
    refused({"training.learning_rate": 1}, "training.learning_rate", 1, "Did you mean 'lr'")


def test_method_options_have_types_and_ranges() -> None:
    refused({"method.r": "four"}, "method.r", "four", "integer")
    refused({"method.r": 0}, "method.r", 0, "a finite number above 0")
    refused({"method.tau": 2.5}, "method.tau", 2.5, "integer")
    refused({"method.lora_alpha": -1}, "method.lora_alpha", -1.0, "a finite number above 0")
    refused({"method.use_rslora": "maybe"}, "method.use_rslora", "maybe", "boolean")
    method = {"name": "ffa-lora", "init_A": "random"}
    refused({"method": method}, "method.init_A", "random", "'kaiming', 'gaussian' or 'orthonormal'")


def test_wrappers_are_written_as_keys_or_with_their_options() -> None:
    wrappers = ["fedprox", {"name": "fedadam", "lr": 0.1, "beta1": 0.5}, {"name": "fedpaq", "bits": 4}]
    config = parse_config({**VALID, "method": {"name": "fedit", "r": 4, "wrappers": wrappers}})
    assert config.method.options == {"r": 4}
    assert config.method.title == "fedit+fedprox+fedadam+fedpaq"
    method = config.wrap_method(config.build_method(SPEC))
    assert isinstance(method, FedPAQ)
    assert isinstance(method.inner, FedAdam)
    assert isinstance(method.inner.inner, FedProx)
    assert isinstance(method.inner.inner.inner, WithExtras)
    assert (method.bits, method.seed) == (4, 3)
    assert (method.inner.lr, method.inner.beta1, method.inner.tau) == (0.1, 0.5, 1e-3)
    assert parse_config(config.model_dump(mode="json")) == config


def test_overrides_go_into_lists() -> None:
    values = {"method": {"wrappers": ["fedprox", {"name": "fedadam"}]}}
    changed = override(values, ["method.wrappers.1.lr=0.5", "method.wrappers.0=fedpaq"])
    assert changed == {"method": {"wrappers": ["fedpaq", {"name": "fedadam", "lr": 0.5}]}}
    assert values == {"method": {"wrappers": ["fedprox", {"name": "fedadam"}]}}
    for text in ("method.wrappers.2=fedprox", "method.wrappers.x.lr=1", "method.wrappers.0.mu=1"):
        with pytest.raises(FedspanError) as caught:
            override(values, [text])
        assert caught.value.value == text


def test_overrides_are_applied_in_order() -> None:
    texts = [
        "training.lr=2e-3",
        "method.r=8",
        "method.r=2",
        "model.target_modules=[key, 'a.b']",
        "training.betas=[0, 0.5]",
    ]
    texts += [
        "model.revision=12e4567",
        "federation.clients_per_round=null",
        "new.deep.field=true",
        "device= cuda:1",
        "data.text=a=b",
        "seed=",
    ]
    before = copy.deepcopy(VALID)
    changed = override(VALID, texts)
    assert before == VALID
    parsed = parse_config({key: value for key, value in changed.items() if key in ("data", "training", "model")})
    assert (parsed.training.lr, parsed.training.betas, parsed.model.revision) == (0.002, (0.0, 0.5), "12e4567")
    assert changed["method"]["r"] == 2
    assert changed["model"]["target_modules"] == ["key", "a.b"]
    assert changed["federation"]["clients_per_round"] is None
    assert changed["new"] == {"deep": {"field": True}}
    assert (changed["device"], changed["data"]["text"], changed["seed"]) == ("cuda:1", "a=b", None)


def test_broken_overrides_are_refused() -> None:
    cases = {
        "rounds": "section.field=value",
        "=3": "section.field=value",
        "seed.a=3": "seed is a value, not a section",
        "model.name.a=3": "name is a value, not a section",
        "seed=[1": "a value that is valid YAML",
        "seed=2001-99-99": "a value that is valid YAML",
        "seed=" + "[" * 3000: "a value that is valid YAML",
    }
    for text, words in cases.items():
        with pytest.raises(FedspanError) as caught:
            override(VALID, [text])
        assert (caught.value.field, caught.value.value) == ("--set", text)
        assert words in str(caught.value)


def test_a_missing_config_is_named_with_the_ones_beside_it(tmp_path: Path) -> None:
    with pytest.raises(FedspanError, match="fedspan init DATA"):
        load_config(tmp_path / "run.yaml")
    (tmp_path / "hospital.yaml").touch()
    with pytest.raises(FedspanError, match=r"there is no file '.*hospitl\.yaml'\. Did you mean 'hospital\.yaml'"):
        load_config(tmp_path / "hospitl.yaml")
    with pytest.raises(FedspanError, match="does not exist"):
        load_config(tmp_path / "nowhere" / "run.yaml")


@pytest.mark.parametrize("name", ["train", "test"])
def test_data_in_the_config_are_pointed_to_their_argument(name: str) -> None:
    data = {**VALID["data"], name: [{"text": "a secret", "label": "x"}]}
    with pytest.raises(FedspanError, match=rf"`data\.{name}`: an object \(list\) is not the path .* data=") as caught:
        parse_config({**VALID, "data": data})
    assert "secret" not in str(caught.value)


def test_a_list_of_files_is_not_taken_for_data() -> None:
    with pytest.raises(FedspanError, match="a valid string"):
        parse_config({**VALID, "data": {**VALID["data"], "train": ["a.csv", "b.csv"]}})


def test_files_that_are_no_config_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    contents = {
        b"a: [": "valid YAML",
        b"a: 2001-99-99": "valid YAML",
        b"a: " + b"[" * 3000: "nested more than 20 levels deep",
        b"- 1": "a YAML mapping",
        b"": "fedspan init FILE",
        b"\xff\xfe\x00": "cannot be read as a YAML file",
        None: "there is no file",
    }
    for content, words in contents.items():
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(FedspanError) as caught:
            load_config(path)
        assert (caught.value.field, caught.value.value) == ("config", str(path))
        assert words in str(caught.value)
    path.write_text(yaml.safe_dump(VALID))
    assert load_config(path) == parse_config(VALID)
    assert load_config(str(path), ["seed=9"]).seed == 9


def paths(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Where every section and field of a config stands."""
    found: list[tuple[str, ...]] = []
    for name, field in model.model_fields.items():
        found.append((*prefix, name))
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += paths(field.annotation, (*prefix, name))
    return found


TEXTS = st.text(max_size=5)
NAMES = st.sampled_from(["name", "r", "tau", "init_A", "spec", "options", "model_config", "a.b", "clients"]) | TEXTS
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.sampled_from([*METHODS, *WRAPPERS, "average"])
)
NESTED = st.lists(SCALARS, max_size=3) | st.dictionaries(NAMES | st.integers(), SCALARS, max_size=3)
JUNK = SCALARS | NESTED | st.dictionaries(NAMES, NESTED, max_size=2)
PATHS = st.sampled_from([*paths(RunConfig), *(("method", name) for name in ("r", "tau", "lora_alpha", "wrappers"))])
MUTATIONS = st.lists(st.tuples(PATHS, st.sampled_from(["set", "drop", "add"]), NAMES, JUNK), min_size=1, max_size=3)


@settings(max_examples=75, deadline=None)
@given(MUTATIONS)
def test_any_config_is_a_run_or_one_line(mutations: list[tuple[tuple[str, ...], str, str, Any]]) -> None:
    """Whatever a valid config is changed into: a ``RunConfig`` that can be read again, or a FedspanError."""
    values = copy.deepcopy(VALID)
    for path, what, name, junk in mutations:
        place: Any = values
        for section in path[:-1]:
            place = place.get(section) if isinstance(place, dict) else None
        if not isinstance(place, dict):
            continue
        if what == "drop":
            place.pop(path[-1], None)
        else:
            place[path[-1] if what == "set" else name] = junk
    try:
        config = parse_config(values)
    except FedspanError as error:
        refusal = error
    else:
        assert parse_config(config.model_dump()) == config
        config.build_training_settings()
        return
    assert refusal.field
    assert "\n" not in str(refusal)


@settings(max_examples=25, deadline=None)
@given(st.lists(TEXTS | st.tuples(PATHS.map(".".join), st.text(max_size=9)).map("=".join), max_size=3))
def test_any_override_is_applied_or_refused(texts: list[str]) -> None:
    with suppress(FedspanError):
        parse_config(override(VALID, texts))
