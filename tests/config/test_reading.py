"""Reading a config: its file, and overrides."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

from fedspan.config import load_config, override, parse_config
from fedspan.config.cluster import ClusterConfig
from fedspan.errors import FedspanError
from helpers.valid_config import VALID


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
