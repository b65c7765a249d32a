"""Files of base models that a server offers: which are offered and accepted, and for how long."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from fedspan.deployment import base_offers
from fedspan.deployment.base_offers import BaseFile
from fedspan.errors import FedspanError


def test_only_weights_configs_and_tokenizers_are_offered(model: Path) -> None:
    assert [file.name for file in base_offers.list_base_files(model)] == [
        "config.json",
        "model.safetensors",
        "vocab.txt",
    ]


def test_the_weights_of_an_index_are_its_shards(model: Path) -> None:
    (model / "model.safetensors").unlink()
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for shard in shards:
        (model / shard).write_bytes(b"weights")
    index = {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[0]}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    names = [file.name for file in base_offers.list_base_files(model)]
    assert names == ["config.json", *shards, "model.safetensors.index.json", "vocab.txt"]
    (model / shards[1]).unlink()
    with pytest.raises(FedspanError, match="cannot be offered"):
        base_offers.list_base_files(model)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_without_weights_in_safetensors_cannot_be_offered(model: Path, missing: str) -> None:
    (model / missing).unlink()
    (model / "model.safetensors.index.json").unlink()
    with pytest.raises(FedspanError, match=r"no config.json with model.safetensors or its index"):
        base_offers.list_base_files(model)


@pytest.mark.parametrize(
    "name",
    [
        "../config.json",
        "/etc/x.json",
        "a/b.json",
        "model.bin",
        "model.pt",
        "code.py",
        "adapter_config.json",
        "",
        ".json",
        "config.json\n",
        "package.json",
        "1_Pooling/../config.json",
        "x" * 200 + ".json",
    ],
)
def test_names_of_other_files_are_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        BaseFile(name=name, size=1, sha256="0" * 64)


def test_files_are_offered_for_the_duration_of_each_run(model: Path, tmp_path: Path) -> None:
    files = base_offers.list_base_files(model)
    (tmp_path / "bases").mkdir()
    killed = tmp_path / "bases" / f"{'a' * 64}.0123.json"  # its process ended without deleting it
    killed.write_text("{}")
    with base_offers.offer_base(tmp_path, model, files):
        (offer,) = (tmp_path / "bases").glob("*.json")
        assert offer.name.partition(".")[0] == base_offers.compute_offer_digest(files)
        paths = json.loads(offer.read_text())
        assert {Path(path).name for path in paths.values()} == {file.name for file in files}
        with base_offers.offer_base(tmp_path, model, files):
            assert len(list((tmp_path / "bases").glob("*.json"))) == 2
        assert list((tmp_path / "bases").glob("*.json")) == [offer]
    assert not list((tmp_path / "bases").iterdir())
