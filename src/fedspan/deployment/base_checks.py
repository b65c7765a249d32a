"""Checks of the files of a base model that a node has received, before anything is loaded from them.

Transformers joins names in a model's JSON files to its folder, or opens them as they are. These files come from the
server, so every name in them has to be that of a received file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path

from fedspan.errors import FedspanError
from fedspan.files import from_json

INDEX = "model.safetensors.index.json"
"""File that says which file each tensor is in."""
POOLING = "1_Pooling/config.json"
"""Config of a sentence encoder's pooling, the only file in a folder of its own."""
_MODULES = "modules.json"
_TOKENS_ONLY = {"tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json"}
"""Files that hold tokens and no settings; a token may look like a path."""
_CODE = "auto_map"
"""Key of a config by which transformers loads code."""
_FILE_KEY = re.compile(r"(?:file|files|path|paths|dir|folder|spm|dic)$|^(?:vocab|target_vocab|merges)$", re.IGNORECASE)
"""Keys whose values are names of files."""
_WEIGHTS_KEY = re.compile(r"weights$", re.IGNORECASE)
"""Keys whose values, if they are text, are files that transformers may unpickle."""
_TEXT_KEY = re.compile(
    r"^_?name_or_path$|^special_tokens_map_file$|_tokens?$|^content$|template$|^added_tokens_decoder$|^id2label$"
    r"|^label2id$"
)
"""Keys whose values are texts: transformers opens none of them, and their slashes mean no folder."""
_REPEAT_KEY = re.compile(r"(?:layers?|depths?|experts?|blocks?)$", re.IGNORECASE)
"""Keys of how often a part of a model is repeated."""
_MAX_REPEATS = 1024
_POSITIONS_KEY = re.compile(r"positions?(?:_embeddings)?$", re.IGNORECASE)
_WIDTH_KEY = re.compile(r"^(?:dim|d_model|hidden_size|n_embd|emb_dim|embed_dim)$", re.IGNORECASE)
_LEAST_TABLE = 2**26
"""Bound on the entries of a small model's table of positions, which some models compute entry by entry."""
_CONFIG_BYTES = 2**24
"""Maximum size of a file with settings, in bytes."""
_LEAST_BOUND = 2**20
"""Bound on the numbers in the config of a small model."""


def list_shards(index: bytes) -> set[str]:
    """Return the names of the files that an index of weights names.

    Raises:
        ValueError: If it is not an index, or a value is no plain name of a file in safetensors.
    """
    values = from_json(index)
    shards = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"{INDEX} has no weight_map")
    for shard in shards.values():
        if not isinstance(shard, str) or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors", shard) is None:
            raise ValueError(f"{INDEX} names another file than *.safetensors in the model's folder")
    return set(shards.values())


def require_own_names(folder: Path, names: Collection[str]) -> None:
    """Check that the files of a model name no code and no files but those of the model.

    Raises:
        ValueError: If one does, or is not what its name says.
    """
    own = set(names)
    if INDEX in own and not list_shards((folder / INDEX).read_bytes()) <= own:
        raise ValueError(f"{INDEX} names files that are not listed")
    weights = sum((folder / name).stat().st_size for name in own if name.endswith(".safetensors"))
    for name in sorted(own - _TOKENS_ONLY - {INDEX}):
        if not name.endswith(".json"):
            continue
        if (folder / name).stat().st_size > _CONFIG_BYTES:
            raise ValueError(f"{name} has more than {_CONFIG_BYTES >> 20} MiB")
        values = from_json((folder / name).read_bytes())
        if name.endswith("config.json") and not isinstance(values, dict):
            raise ValueError(f"{name} is not a JSON object")
        positions, width = 0, 0
        for key, value in _walk(values):
            if isinstance(value, str):
                _require_own_name(name, key, value, own)
            elif name == "config.json" and isinstance(value, int) and not isinstance(value, bool):
                _require_plausible(key, value, max(weights, _LEAST_BOUND))
                positions = max(positions, value) if _POSITIONS_KEY.search(key) else positions
                width = max(width, value) if _WIDTH_KEY.search(key) else width
        if positions * width > max(2 * weights, _LEAST_TABLE):
            raise ValueError(f"{name} has {positions} positions of {width} numbers, more than the weights allow")


def _walk(values: object) -> Iterator[tuple[str, object]]:
    """Yield the texts and numbers of a JSON value with their keys, except those that are texts by their key."""
    pending: list[tuple[str, object]] = [("", values)]
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            if _CODE in value:
                raise ValueError(f"{_CODE} names code of its own")
            pending += [(str(name), item) for name, item in value.items() if _TEXT_KEY.search(str(name)) is None]
        elif isinstance(value, list):
            pending += [(key, item) for item in value]
        else:
            yield key, value


def _require_own_name(name: str, key: str, value: str, own: Collection[str]) -> None:
    if name == _MODULES and key == "path":
        is_allowed = re.fullmatch(r"[A-Za-z0-9_]*", value) is not None
    elif _WEIGHTS_KEY.search(key):
        is_allowed = False
    elif _FILE_KEY.search(key):
        is_allowed = value in own
    else:
        is_allowed = "/" not in value and "\\" not in value
    if not is_allowed:
        raise ValueError(f"{name} names another file than the model's, in {key!r}")


def _require_plausible(key: str, value: int, most: int) -> None:
    most = _MAX_REPEATS if _REPEAT_KEY.search(key) else most
    if abs(value) > most:
        raise ValueError(f"config.json has {key!r} = {value}, and the weights allow {most} at most")


def require_weights_of_config(folder: Path) -> None:
    """Check that a model as its config describes it is not much larger than its weights, before memory is allocated.

    Weights of 4 bits, the smallest, are two in a byte. The model is built without memory for its weights.
    """
    from fedspan.models.empty import load_empty  # imports torch

    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    model = load_empty(str(folder), "encoder")
    count = sum(tensor.numel() for tensor in chain(model.parameters(), model.buffers()))
    if count > 2 * stored + _LEAST_BOUND:
        problem = f"config.json describes {count} weights, and the files have {stored} bytes"
        raise FedspanError("limits.accept_base", str(folder), problem=problem)
