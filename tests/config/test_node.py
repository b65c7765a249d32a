"""The file of a data owner's node: addresses, shares, limits, and paths beside the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from fedspan.config.node import NodeConfig, NodeLimits, load_node, require_data
from fedspan.errors import FedspanError


def node(**values: Any) -> NodeConfig:
    return NodeConfig.model_validate({"id": "east", "server": "server:9092", **values})


@pytest.mark.parametrize("address", ["server:9092", "10.0.0.1:9092", "[2001:db8::1]:9092"])
def test_addresses(address: str) -> None:
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


def test_a_limit_in_mib_is_one_in_bytes() -> None:
    assert NodeLimits(message_mib=3).message_bytes == 3 * 1024 * 1024


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
