"""Adapters from others: their weights are not unpickled, and their config chooses no other class."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedspan
from fedspan.errors import FedspanError
from fedspan.models.export import read_adapter
from helpers import tiny
from helpers.refusals import refused


@pytest.fixture(scope="module")
def exported(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an adapter."""
    folder = tmp_path_factory.mktemp("exported")
    fedspan.run(tiny.settings(tiny_folder, federation={"rounds": 1}), folder / "run")
    return folder / "run" / "adapter"


def refuse(folder: Path) -> None:
    with refused("folder", r"no LoRA adapter with its weights in adapter_model\.safetensors"):
        fedspan.predict(folder, ["word1"])


def test_weights_in_a_pickle_are_not_read(exported: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "adapter"))
    assert fedspan.predict(folder, ["word1"])
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    refuse(folder)


def test_another_kind_of_adapter_is_not_built(exported: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "adapter"))
    config = json.loads((folder / "adapter_config.json").read_text())
    plain = {name: config[name] for name in ("base_model_name_or_path", "task_type", "target_modules")}
    (folder / "adapter_config.json").write_text(json.dumps({**plain, "peft_type": "IA3", "feedforward_modules": []}))
    refuse(folder)


@pytest.mark.parametrize("name", ["fedspan.json", "adapter_config.json"])
def test_a_config_is_not_read_beyond_its_largest_size(name: str, exported: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "adapter"))
    with (folder / name).open("r+b") as file:
        file.seek(1 << 24)
        file.write(b" ")  # of zeros before it, which take no space
    for use in (lambda: fedspan.predict(folder, ["word1"]), lambda: read_adapter(str(folder), {})):
        with pytest.raises(FedspanError, match="16 MiB") as caught:
            use()
        assert caught.value.field == str(folder / name)
