"""Reading a config: its file, overrides, and what each section means, accepts, refuses and passes on."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from fedspan.config import load_config, override, parse_config
from fedspan.config.node import NodeConfig, NodeLimits, load_node, require_data
from fedspan.core.noise import derive_seed_key
from fedspan.core.values import OptimizerSpec
from fedspan.errors import FedspanError
from fedspan.federation.conditions import Conditions, Faults, SimulationConfig, SpeedDistribution
from fedspan.federation.config import EvaluationConfig, RoundSettings
from fedspan.federation.tags import MAX_TAGS, Tags, explain_missing_tags
from fedspan.methods.registry import METHODS
from fedspan.models.config import ModelConfig
from fedspan.section import Section
from fedspan.training.config import ClusterConfig, EngineConfig, Privacy
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
    with refused("config", r"there is no file '.*hospitl\.yaml'\. Did you mean 'hospital\.yaml'"):
        load_config(tmp_path / "hospitl.yaml")
    with refused("config", "does not exist"):
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
    with refused("method.r") as caught:
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
    private = Privacy(**privacy, rounds=6, key=derive_seed_key(3))
    assert config.build_privacy_settings() == private
    assert config.build_round_settings() == RoundSettings(**federation, seed=3, privacy=private)
    secret = config.build_round_settings(bytes(32)).privacy
    assert (
        secret
        == private.model_copy(update={"key": bytes(32), "secret": True})
        == config.build_privacy_settings(bytes(32))
    )
    assert (config.evaluation.every, config.evaluation.batch_size) == (2, 8)


@pytest.mark.parametrize("clip", [1e-40, 9e-7, 1.1e6, 1e38, float("inf")])
def test_a_clip_whose_sums_or_steps_a_float32_does_not_hold_is_refused(clip: float) -> None:
    for bound in (1e-6, 1e6):
        parse_config({**VALID, "privacy": {"mechanism": "dp-sgd", "noise": 1.0, "clip": bound}})
    with refused("privacy.clip"):
        parse_config({**VALID, "privacy": {"mechanism": "dp-sgd", "noise": 1.0, "clip": clip}})


@pytest.mark.parametrize("noise", [1e-160, 9e-10, 1.1e9, 1e160])
def test_a_noise_whose_square_no_accountant_holds_is_refused(noise: float) -> None:
    """At a rate of 0.1, the accountant did not finish with 1e-160."""
    for bound in (1e-9, 1e9):
        parse_config({**VALID, "privacy": {"mechanism": "dp-sgd", "noise": bound}})
    with refused("privacy.noise"):
        parse_config({**VALID, "privacy": {"mechanism": "dp-sgd", "noise": noise}})


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
    ("centralized_lr", float("inf"), "centralized_lr", "finite"),
    ("model.extras_lr_scale", float("inf"), "model.extras_lr_scale", "finite"),
    ("model.extras", "shared", "model.extras", "'average', 'local' or 'frozen'"),
    ("model.modules_to_save", [""], "model.modules_to_save.0", "at least 1 character"),
    ("method.lora_alpha", float("nan"), "method.lora_alpha", "a finite number"),
    ("training.lora_dropout", 1, "training.lora_dropout", "less than 1"),
    ("federation.secure", {"bits": 16}, "federation.secure.bits", "32 or 64"),
    ("partition.clients", 0, "partition.clients", "greater than or equal to 1"),
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


@pytest.mark.parametrize("address", ["local", "auto", "10.0.0.1:6379", "head.example:6379", "ray://head:10001"])
def test_addresses_of_a_cluster(address: str) -> None:
    assert ClusterConfig(address=address, workers=1).address == address


@pytest.mark.parametrize(
    "address", ["", "Local", "head", "head:", "head:123456", "http://head:80", "a b:1", "head:6379/x", "head:6379\n"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValidationError, match=r"local, auto, HOST:PORT or ray://HOST:PORT"):
        ClusterConfig(address=address, workers=1)


REFUSED: dict[type[Section], dict[str, list[Any]]] = {
    ClusterConfig: {
        "workers": [0, 4097],
        "threads_per_worker": [0],
        "gpus_per_worker": [-0.5, 1.5, 0.00001, float("nan")],
        "start_timeout": [0, float("inf")],
        "gpus": [1],
    },
    EngineConfig: {
        "name": ["flower"],
        "clients_per_pass": [0],
        "workers": [1025],
        "prefix_memory": [-1, float("inf")],
        "prefix_folder": [""],
    },
    EvaluationConfig: {
        "every": [0],
        "clients": [0],
        "by": [""],
        "diagnostics": [0],
        "max_new_tokens": [2**17 + 1],
        "answer_pattern": ["", "(", "[", "a{9999999999}", "(" * 9999],
        "best_by": ["accuracy"],
    },
    SimulationConfig: {
        "present": [{"a": [3, 2]}, {"a": [0, 2]}],
        "dropout": [1.5, {"a": -0.1}],
        "speed": [{"spread": 0.5}],
        "faults": [{"share": 0.0, "kind": "nan"}, {"share": 0.5}],
    },
}


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [(section, field, value) for section, fields in REFUSED.items() for field in fields for value in fields[field]],
)
def test_what_no_section_has_is_refused(section: type[Section], field: str, value: object) -> None:
    required = {"workers": 2} if section is ClusterConfig else {}
    with pytest.raises(ValidationError, match=field) as caught:
        section.model_validate({**required, field: value})
    assert {error["loc"][0] for error in caught.value.errors()} == {field}


def test_rounds_are_compared_by_the_metric_or_the_loss() -> None:
    assert EvaluationConfig().get_selection_metric("accuracy") == "accuracy"
    assert EvaluationConfig(best_by="loss").get_selection_metric("accuracy") == "loss"


@pytest.mark.parametrize("pattern", [None, r"####\s*(\S+)", "a{3}"])
def test_a_regular_expression_is_kept(pattern: str | None) -> None:
    assert EvaluationConfig(answer_pattern=pattern).answer_pattern == pattern


def test_conditions_have_the_run_s_seed_and_every_field() -> None:
    assert SimulationConfig().build_conditions(5) == Conditions(seed=5)
    speed = {"distribution": "uniform", "median": 7.0, "spread": 3.0}
    values = {"dropout": {"a": 0.5}, "speed": speed, "faults": {"share": 0.25, "kind": "scale", "factor": 4.0}}
    found = SimulationConfig.model_validate(values).build_conditions(6)
    assert found == Conditions(
        seed=6,
        dropout={"a": 0.5},
        speed=SpeedDistribution(distribution="uniform", median=7.0, spread=3.0),
        faults=Faults(share=0.25, kind="scale", factor=4.0),
    )


def test_rounds_count_from_1_in_a_config_and_from_0_in_the_run() -> None:
    config = SimulationConfig.model_validate({"present": {"late": [3, None], "early": [1, 2], "once": [2, 2]}})
    presence = config.build_presence()
    assert presence.spans == {"late": ((2, None),), "early": ((0, 2),), "once": ((1, 2),)}
    present = [[id for id in ("late", "early", "once") if presence.is_present(id, round)] for round in range(4)]
    assert present == [["early"], ["early", "once"], ["late"], ["late"]]
    assert SimulationConfig().build_presence().spans == {}


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"pooling_normalize": True}, "pooling_normalize"),
        ({"pooling_normalize": False, "pooling": "stock"}, "pooling_normalize"),
        ({"max_memory": {"cpu": 1.0}}, "max_memory"),
        ({"device_map": "auto", "quantization": "nf4"}, "device_map"),
        ({"pretrained": False, "quantization": "int8"}, "quantization"),
        ({"pretrained": False, "device_map": "auto"}, "device_map"),
        ({"pretrained": False, "adapter": "a"}, "adapter"),
        ({"name": "builtin:resnet-8", "modules_to_save": ["fc"]}, "modules_to_save"),
    ],
)
def test_options_of_a_model_that_do_not_fit_are_refused(values: dict[str, Any], field: str) -> None:
    with refused(f"model.{field}"):
        ModelConfig.model_validate(values)


@pytest.mark.parametrize(
    "values",
    [
        {"pooling": "mean", "pooling_normalize": True},
        {"device_map": "auto", "max_memory": {"device": 2.0, "cpu": 1.0}},
        {"quantization": "nf4", "adapter": "a", "modules_to_save": ["fc"]},
    ],
)
def test_options_that_fit_are_kept(values: dict[str, Any]) -> None:
    config = ModelConfig.model_validate(values)
    assert {name: getattr(config, name) for name in values} == values


def test_models_from_scratch_are_those_without_pretrained_weights() -> None:
    assert not ModelConfig().is_from_scratch
    assert ModelConfig(pretrained=False).is_from_scratch
    assert all(ModelConfig(name=f"builtin:resnet-{layers}").is_from_scratch for layers in (8, 10, 18))
    assert not ModelConfig(name="microsoft/resnet-18").is_from_scratch


def test_plain_values_are_the_text_that_was_written() -> None:
    assert TypeAdapter(Tags).validate_python({"gpu": True, "beds": 12, "share": 0.5, "site": "eu"}) == {
        "gpu": "true",
        "beds": "12",
        "share": "0.5",
        "site": "eu",
    }


@pytest.mark.parametrize(
    "tags",
    [
        {"": "a"},
        {"a": ""},
        {"a": "b" * 65},
        {"a" * 65: "b"},
        {"a": None},
        {"a": ["b"]},
        {"a": "\x1b[2J"},
        {"a\x00": "b"},
        {f"tag {number}": "a" for number in range(MAX_TAGS + 1)},
    ],
)
def test_what_is_no_tag_is_refused(tags: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Tags).validate_python(tags)


def test_as_many_and_as_long_as_allowed() -> None:
    tags = {f"{number:064}": "b" * 64 for number in range(MAX_TAGS)}
    assert TypeAdapter(Tags).validate_python(tags) == tags


def test_missing_tags_are_named_with_their_values() -> None:
    """One of another value is as good as none; further tags of the node do not matter."""
    tags = {"site": "eu", "gpu": "true", "ward": "3"}
    assert explain_missing_tags(tags, {}) is None
    assert explain_missing_tags(tags, {"site": "eu", "gpu": "true"}) is None
    required = {"site": "us", "gpu": "true", "beds": "12"}
    assert explain_missing_tags(tags, required) == "this run requires the tags site: us, beds: 12"


def node(**values: Any) -> NodeConfig:
    return NodeConfig.model_validate({"id": "east", "server": "server:9092", **values})


def test_a_masked_sum_has_all_peers_unless_the_owner_allows_fewer() -> None:
    prints = {id: f"SHA256:{'A' * 43}" for id in ("east", "west", "north", "south")}
    assert node(peers=prints).min_secure_clients == 4
    assert node(peers={"west": prints["west"]}).min_secure_clients == node().min_secure_clients == 3
    assert node(peers=prints, limits={"secure_clients": 3}).min_secure_clients == 3


@pytest.mark.parametrize("address", ["server:9092", "10.0.0.1:9092", "[2001:db8::1]:9092"])
def test_addresses_of_a_server(address: str) -> None:
    assert node(server=address).server == address


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"server": "2001:db8::1:9092"}, "an IPv6 address in brackets"),
        ({"id": "east\x1b[2J"}, "id"),
        ({"id": ""}, "id"),
        ({"validation": 0.5, "test": 0.5}, "validation \\+ test below 1, not 1: the rest trains"),
        ({"validation": 1.0}, "validation"),
        ({"peers": {"west": "SHA256:short"}}, "peers"),
        ({"bandwidth": {"up_mbit": 0.01}}, "bandwidth"),
        ({"limits": {"epsilon": 0}}, "limits"),
        ({"limits": {"message_mib": 2049}}, "limits"),
        ({"limits": {"round": 5}}, "limits"),
    ],
)
def test_what_no_node_has_is_refused(values: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        node(**values)


@pytest.mark.parametrize(
    ("limits", "only"),
    [
        ({}, False),
        ({"epsilon": 10.0}, True),  # the default, if the file sets it
        ({"epsilon": None}, False),
        ({"epsilon": 1.0, "private_only": False}, False),
        ({"private_only": True}, True),
    ],
)
def test_a_node_whose_file_sets_a_budget_refuses_runs_without_privacy(limits: dict[str, Any], only: bool) -> None:
    assert NodeLimits.model_validate(limits).is_private_only is only


def test_the_marker_of_a_budget_is_beside_the_key_or_the_folder() -> None:
    assert node(folder="state/east").budget_marker == Path("state/east.budget")
    assert node(folder="state/east", key="keys/east.pem").budget_marker == Path("keys/east.pem.budget")


def test_a_node_without_data_needs_a_trainer() -> None:
    require_data(node(data={"train": "notes.csv"}))
    with refused("data", r"the node's data, or fedspan\.join"):
        require_data(node())


def test_paths_are_relative_to_the_file_if_they_lead_to_something(tmp_path: Path) -> None:
    """A train that is no file beside it stays a hub id; a pattern with placeholders is a path."""
    (tmp_path / "notes.csv").touch()
    written = {
        **{"id": "east", "server": "server:9092", "key": "~/east.pem", "authority": "../ca.crt"},
        "data": {"train": "notes.csv", "test": "user/corpus", "text": "notes.csv"},
    }
    path = tmp_path / "node.yaml"
    path.write_text(yaml.safe_dump(written))
    found = load_node(path)
    assert found.data == {"train": str(tmp_path / "notes.csv"), "test": "user/corpus", "text": "notes.csv"}
    assert found.folder == str(tmp_path / "fedspan-node")
    assert found.authority == str(tmp_path.parent / "ca.crt")
    assert found.key == str(Path.home() / "east.pem")
    written["data"] = {"train": "images/{label}/*.png"}
    path.write_text(yaml.safe_dump(written))
    assert load_node(path).data == {"train": str(tmp_path / "images" / "{label}" / "*.png")}


@pytest.mark.parametrize(
    ("text", "field", "why"),
    [
        ("- a", None, "mapping"),
        ("id: east", "server", "required|missing|Expected"),
        ("{id: east, server: 'a:1', limits: {rnk: 3}}", "limits.rnk", "Did you mean 'rank'"),
    ],
)
def test_a_mistake_is_named_with_its_field(tmp_path: Path, text: str, field: str | None, why: str) -> None:
    (tmp_path / "node.yaml").write_text(text)
    with pytest.raises(FedspanError, match=why) as caught:
        load_node(tmp_path / "node.yaml")
    assert field is None or caught.value.field == field
    with refused("config", "missing"):
        load_node(tmp_path / "missing.yaml")
