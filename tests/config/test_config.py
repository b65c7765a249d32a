"""Reading a config: its file, overrides, what a short one means, the settings built from it, and what is refused."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedspan.config import load_config, override, parse_config
from fedspan.config.sections import ClusterConfig
from fedspan.core.noise import derive_seed_key
from fedspan.core.values import OptimizerSpec
from fedspan.errors import FedspanError
from fedspan.federation.settings import RoundSettings
from fedspan.methods.registry import METHODS
from fedspan.training.jobs import Privacy
from helpers.refusals import refused
from helpers.valid_config import SPEC, VALID


def test_a_short_config_is_filled_up_and_a_written_one_comes_back() -> None:
    config = parse_config({"data": {"train": "train.csv"}})
    assert (config.method.name, config.federation.rounds, config.training.optimizer) == ("fedit", 10, "adamw")
    for some in (config, parse_config(VALID)):
        text = yaml.safe_dump(some.model_dump(mode="json"))
        assert parse_config(yaml.safe_load(text)) == some


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


def test_a_section_that_is_null_gets_fields() -> None:
    """As in the config.yaml of a run without a cluster, which goes on on one."""
    stored = parse_config(VALID).model_dump(mode="json")
    assert stored["cluster"] is None
    assert parse_config(override(stored, ["cluster.workers=3"])).cluster == ClusterConfig(workers=3)


def test_a_missing_config_is_named_with_the_ones_beside_it(tmp_path: Path) -> None:
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


def test_a_method_gets_its_options_and_the_run_s_seed() -> None:
    method = parse_config(VALID).build_method(SPEC)
    assert method == METHODS["fedloru"](spec=SPEC, seed=3, r=4, lora_alpha=8.0, tau=2)


def test_a_rank_larger_than_a_layer_is_refused() -> None:
    """Except where there is no rank: FedAvg trains whole weights."""
    config = parse_config({**VALID, "method": {"name": "fedit", "r": 6}})
    with pytest.raises(FedspanError, match="tall is 30 x 5: at most 5") as caught:
        config.build_method(SPEC)
    assert (caught.value.field, caught.value.value) == ("method.r", 6)
    assert parse_config({**VALID, "method": {"name": "fedavg", "r": 6}}).build_method(SPEC)


def test_settings_carry_every_field_of_the_config() -> None:
    """Values that differ from all defaults, so that none can be forgotten or mistaken for another."""
    training = {"optimizer": "sgd", "lr": 0.3, "momentum": 0.8, "eps": 1e-5, "betas": [0.7, 0.95], "weight_decay": 0.02}
    privacy = {"mechanism": "dp-sgd", "clip": 0.5, "noise": 2.0, "epsilon": 3.0, "delta": 1e-6, "accountant": "prv"}
    own = {"clip_ratio": 1.25, "max_norm": 3.0, "max_weight_ratio": 7.0}
    federation = {**VALID["federation"], "trim": 0.2, **own}
    config = parse_config({**VALID, "training": training, "privacy": privacy, "federation": federation})
    optimizer = OptimizerSpec(name="sgd", lr=0.3, momentum=0.8, betas=(0.7, 0.95), eps=1e-5, weight_decay=0.02)
    assert config.build_training_settings().optimizer_spec == optimizer
    private = Privacy("dp-sgd", 0.5, 2.0, 3.0, 1e-6, "prv", 6, derive_seed_key(3))
    assert config.build_privacy_settings() == private
    assert config.build_round_settings() == RoundSettings(6, 2, 3, "mean", 0.2, 1.25, 3.0, 7.0, private)
    secret = config.build_round_settings(bytes(32)).privacy
    assert secret == replace(private, key=bytes(32), secret=True) == config.build_privacy_settings(bytes(32))
    assert (config.evaluation.every, config.evaluation.batch_size) == (2, 8)


RULES = ("median", "trimmed-mean", "multi-krum", "geometric-median", "flame")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": {"name": "fedask", "wrappers": ["scaffold"]}}, "scaffold"),
        *(
            ({"federation": {"reduction": reduction}}, f"{reduction} would combine other clients in each")
            for reduction in RULES
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(FedspanError, match=reason):
        parse_config({"data": {"train": "x.csv"}, "method": {"name": "fedask"}, **changes})


@pytest.mark.parametrize("rule", RULES)
def test_methods_that_stack_and_secure_sums_refuse_them(rule: str) -> None:
    rules: dict[str, Any] = {"reduction": rule}
    values: dict[str, Any] = {"data": {"train": "x.csv"}, "method": {"name": "flora"}, "federation": rules}
    why = f"{rule} cannot be combined with flora, whose server needs single replies"
    with pytest.raises(FedspanError, match=why):
        parse_config(values)
    summed = {**values, "method": {"name": "fedit"}}
    assert parse_config(summed).build_round_settings().reduction == rule
    with pytest.raises(FedspanError, match=f"federation.reduction {rule} compares single replies"):
        parse_config({**summed, "federation": {"reduction": rule, "secure": {}}})


MISTAKES: list[tuple[str, Any, str, str]] = [
    ("federation.secure", "flora", "federation.secure", "for example {} for its defaults"),
    ("data.labels", "lable", "data.labels", "Expected a valid list. A single name belongs in data.label."),
    ("data", "rows.csv", "data", "Expected a section: names of fields with their values."),
    ("data.train", ["a.csv", "b.csv"], "data.train", "a valid string"),
    ("method.taw", 1, "method.taw", "fedloru has no such option"),
    # fields of the class that are no options
    *((f"method.{name}", 1, f"method.{name}", "no such option") for name in ("spec", "seed", "claims", "options")),
    ("training.lr", 0, "training.lr", "above 0"),
    *(
        (f"training.{name}", float("inf"), f"training.{name}", "finite")
        for name in ("weight_decay", "eps", "max_grad_norm")
    ),
    ("training.min_lr", 0.5, "training.min_lr", "at most training.lr, 0.01"),
    ("training.learning_rate", 1, "training.learning_rate", "Did you mean 'lr'"),
    ("centralized_lr", float("inf"), "centralized_lr", "finite"),
    ("model.extras_lr_scale", float("inf"), "model.extras_lr_scale", "finite"),
    ("model.extras", "shared", "model.extras", "'average', 'local' or 'frozen'"),
    ("model.modules_to_save", [""], "model.modules_to_save.0", "at least 1 character"),
    ("method.lora_alpha", float("inf"), "method.lora_alpha", "a finite number"),
    ("method.lora_alpha", -1, "method.lora_alpha", "a finite number above 0"),
    ("method.tau", 2.5, "method.tau", "integer"),
    ("method.use_rslora", "maybe", "method.use_rslora", "boolean"),
    ("method", {"name": "ffa-lora", "init_A": "random"}, "method.init_A", "'kaiming', 'gaussian' or 'orthonormal'"),
    ("training.betas", [0.9], "training.betas.1", "is required"),
    ("seed", 2**64, "seed", "less than 9223372036854775808"),
]
"""Path and value of a change of the valid config, the field that is named, and words; more are in helpers.mistakes."""


@pytest.mark.parametrize(("path", "value", "field", "words"), MISTAKES)
def test_a_wrong_value_or_name_is_refused_with_its_field(path: str, value: Any, field: str, words: str) -> None:
    values = copy.deepcopy(VALID)
    *sections, last = path.split(".")
    place = values
    for section in sections:
        place = place[section]
    place[last] = value
    with refused(field) as caught:
        parse_config(values)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
