"""Files of a received base model: none may name code or other files, or describe a model that its weights are not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedspan.deployment.base_checks import list_shards, require_own_names, require_weights_of_config
from fedspan.errors import FedspanError
from helpers import tiny


def write(folder: Path, **files: Any) -> list[str]:
    """Write JSON files, each named by its stem, beside weights; the names of all."""
    (folder / "model.safetensors").write_bytes(bytes(10))
    (folder / "vocab.txt").write_text("a")
    for stem, value in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(value))
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize(
    "shard",
    ["../private/secret.safetensors", "/etc/secret.safetensors", "a/b.safetensors", "../x.bin", "x.bin", "", 1, None],
)
def test_an_index_names_files_of_its_folder_only(shard: object, tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": shard}}).encode()
    with pytest.raises(ValueError, match="names another file"):
        list_shards(index)


def test_an_index_names_listed_files_only(tmp_path: Path) -> None:
    shards = ["model-1.safetensors", "model-2.safetensors"]
    for name in shards:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "config.json").write_text("{}")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}))
    names = ["config.json", index.name]
    require_own_names(tmp_path, [*names, *shards])
    with pytest.raises(ValueError, match="not listed"):
        require_own_names(tmp_path, [*names, shards[0]])
    for content in ("{}", "[]", '{"weight_map": {}}'):
        index.write_text(content)
        with pytest.raises(ValueError, match="no weight_map"):
            require_own_names(tmp_path, [*names, *shards])


@pytest.mark.parametrize(
    "value",
    [
        {"vocab_file": "/etc/passwd"},
        {"tokenizer_file": "other.json"},
        {"merges": "../merges.txt"},
        {"source_spm": "C:\\x"},
        {"nested": [{"some_kwarg": "../secret"}]},
        {"fast_tokenizer_files": ["tokenizer.json", "../x.json"]},
        {"transformers_weights": "vocab.txt"},
        {"_attn_implementation": "someone/kernel"},
        {"text_config": {"auto_map": {}}},
        [],
    ],
)
@pytest.mark.parametrize("stem", ["config", "tokenizer_config"])
def test_a_config_names_no_other_files_and_no_code(stem: str, value: Any, tmp_path: Path) -> None:
    names = write(tmp_path, **{stem: value})
    with pytest.raises(ValueError, match=r"names another file|names code|not a JSON object"):
        require_own_names(tmp_path, names)


def test_texts_with_slashes_and_own_files_are_allowed(tmp_path: Path) -> None:
    names = write(
        tmp_path,
        config={"_name_or_path": "/home/me/model", "id2label": {"0": "a/b"}, "vocab_size": 2**20},
        tokenizer_config={
            "eos_token": "</s>",
            "added_tokens_decoder": {"0": {"content": "/"}},
            "chat_template": "</s>",
            "vocab_file": "vocab.txt",
            "tokenizer_file": None,
            "special_tokens_map_file": "/tmp/x",
            "model_max_length": 10**30,
        },
        vocab={"/": 0},
        modules=[{"path": "", "type": "a.Transformer"}, {"path": "1_Pooling", "type": "a.Pooling"}],
    )
    require_own_names(tmp_path, names)


def test_the_folder_of_a_pooling_is_the_models_own(tmp_path: Path) -> None:
    names = write(tmp_path, modules=[{"path": "../other", "type": "a.Pooling"}])
    with pytest.raises(ValueError, match="names another file"):
        require_own_names(tmp_path, names)


_TABLE = {"max_position_embeddings": 2**20, "dim": 65}
"""Each number is small enough, and some models compute a table of that size before anything is allocated."""


@pytest.mark.parametrize(
    "value", [{"vocab_size": 2**20 + 1}, {"num_hidden_layers": 1025}, {"a": [{"b": -(10**9)}]}, _TABLE]
)
def test_a_config_has_no_numbers_beyond_its_weights(value: Any, tmp_path: Path) -> None:
    names = write(tmp_path, config=value)
    with pytest.raises(ValueError, match="the weights allow"):
        require_own_names(tmp_path, names)


def test_a_model_that_is_larger_than_its_weights_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.config(tiny_folder).model.name, folder)
    require_weights_of_config(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 10**9}))
    with pytest.raises(FedspanError, match=r"config.json describes \d{10,} weights"):
        require_weights_of_config(folder)
