"""Sections of a config: what each accepts, what it refuses, and what it passes on."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from fedspan.config.model import ModelConfig
from fedspan.config.node import NodeConfig, NodeLimits, load_node, require_data
from fedspan.config.sections import ClusterConfig, EngineConfig, EvaluationConfig, SimulationConfig
from fedspan.config.tags import MOST_TAGS, Tags, explain_missing_tags
from fedspan.errors import FedspanError
from fedspan.federation.conditions import Conditions, Faults, SpeedDistribution
from fedspan.section import Section
from fedspan.training.jobs import PrefixSettings
from helpers.refusals import refused


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


def test_the_cache_gets_its_bytes_its_folder_and_the_batch_size() -> None:
    assert EngineConfig().build_prefix_settings(64) == PrefixSettings(2 * 2**30, None, 64)
    config = EngineConfig(prefix_memory=0.5, prefix_folder="some/disk")
    assert config.build_prefix_settings(3) == PrefixSettings(2**29, Path("some/disk"), 3)
    assert EngineConfig(prefix_memory=0).build_prefix_settings(3) == PrefixSettings(0, None, 3)
    assert EngineConfig(prefix_cache=False, prefix_folder="some/disk").build_prefix_settings(3) is None


def test_rounds_are_compared_by_the_metric_or_the_loss() -> None:
    assert EvaluationConfig().get_selection_metric("accuracy") == "accuracy"
    assert EvaluationConfig(best_by="loss").get_selection_metric("accuracy") == "loss"


@pytest.mark.parametrize("pattern", [None, r"####\s*(\S+)", "a{3}"])
def test_a_regular_expression_is_kept(pattern: str | None) -> None:
    assert EvaluationConfig(answer_pattern=pattern).answer_pattern == pattern


def test_conditions_have_the_run_s_seed_and_every_field() -> None:
    assert SimulationConfig().build_conditions(5) == Conditions(5)
    speed = {"distribution": "uniform", "median": 7.0, "spread": 3.0}
    values = {"dropout": {"a": 0.5}, "speed": speed, "faults": {"share": 0.25, "kind": "scale", "factor": 4.0}}
    found = SimulationConfig.model_validate(values).build_conditions(6)
    assert found == Conditions(
        6,
        {"a": 0.5},
        SpeedDistribution(distribution="uniform", median=7.0, spread=3.0),
        Faults(share=0.25, kind="scale", factor=4.0),
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
        {f"tag {number}": "a" for number in range(MOST_TAGS + 1)},
    ],
)
def test_what_is_no_tag_is_refused(tags: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Tags).validate_python(tags)


def test_as_many_and_as_long_as_allowed() -> None:
    tags = {f"{number:064}": "b" * 64 for number in range(MOST_TAGS)}
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
    with pytest.raises(FedspanError, match=r"the node's data, or fedspan\.join"):
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
    with pytest.raises(FedspanError, match="missing"):
        load_node(tmp_path / "missing.yaml")
