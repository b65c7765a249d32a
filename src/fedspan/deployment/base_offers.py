"""The files of a base model that a server offers to its nodes.

An invitation lists the files with their sizes and SHA-256. Only weights in safetensors and known files of a config or a
tokenizer are offered and accepted: nothing that is unpickled or that holds code, and no config that names other files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

from filelock import FileLock, Timeout
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from fedspan.deployment.base_checks import INDEX, POOLING, list_shards, require_own_names
from fedspan.errors import FedspanError
from fedspan.files import compute_sha256, convert_disk_errors, write_atomic

OFFERS = "bases"
"""Folder in the server's folder with the offers, and in a node's folder with the received models."""
_NAMES = {
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "modules.json",
    POOLING,
    INDEX,
}
"""Names of the files that are offered and accepted, beside those of weights."""
_WEIGHTS = "model.safetensors"
_WEIGHTS_NAME = re.compile(r"(?!adapter)[A-Za-z0-9][A-Za-z0-9._-]{0,119}\.safetensors")
MAX_FILES = 256


def _require_accepted(name: str) -> str:
    if name not in _NAMES and _WEIGHTS_NAME.fullmatch(name) is None:
        raise ValueError("a file of weights in safetensors, of a config or of a tokenizer")
    return name


class BaseFile(BaseModel):
    """A file of a base model.

    Args:
        size: Size of the file in bytes.
        sha256: SHA-256 of its content, in hexadecimal digits.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, AfterValidator(_require_accepted)]
    size: Annotated[int, Field(ge=0, lt=2**50)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def compute_offer_digest(files: Sequence[BaseFile]) -> str:
    """Return the digest by which an offer is named: SHA-256 of its files' names, sizes and hashes."""
    rows = sorted(f"{file.name} {file.size} {file.sha256}\n" for file in files)
    return hashlib.sha256("".join(rows).encode()).hexdigest()


def find_local_base(name: str, revision: str | None) -> Path | None:
    """Return the folder of a model on this machine: a folder, or a snapshot in the hub's cache; None: there is none."""
    if os.path.isdir(os.path.expanduser(name)):
        return Path(name).expanduser()
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def list_base_files(folder: Path) -> list[BaseFile]:
    """Return the files of a model that a server can offer, with their hashes: no others that lie in its folder.

    The weights are ``model.safetensors``, or else the files that its index names.
    """
    names = sorted(name for name in _NAMES if (folder / name).is_file())
    try:
        if (folder / _WEIGHTS).is_file():
            names = sorted({*names, _WEIGHTS} - {INDEX})
        elif INDEX in names:
            names = sorted({*names, *list_shards((folder / INDEX).read_bytes())})
        if not any(name.endswith(".safetensors") for name in names) or "config.json" not in names:
            raise ValueError("its folder has no config.json with model.safetensors or its index")
        require_own_names(folder, names)
    except (OSError, ValueError) as error:
        problem = f"the base model cannot be offered to nodes: {error}"
        raise FedspanError("--offer-base", str(folder), problem=problem) from error
    files = list[BaseFile]()
    for name in names:
        path = folder / name
        files.append(BaseFile(name=name, size=path.stat().st_size, sha256=compute_sha256(path)))
    return files


@contextmanager
def offer_base(server: Path, folder: Path, files: Sequence[BaseFile]) -> Generator[None]:
    """Let the server's nodes fetch the files of a model for the duration of the context.

    Each run has a file of its own, with a lock beside it, so that several runs can offer one model. The offers of
    processes that were killed, whose locks are free, are deleted.
    """
    path = server / OFFERS / f"{compute_offer_digest(files)}.{secrets.token_hex(8)}.json"
    paths = {file.sha256: str((folder / file.name).resolve()) for file in files}
    lock = FileLock(path.with_suffix(".lock"))
    with convert_disk_errors(server, "free some space", field="server"):
        path.parent.mkdir(exist_ok=True, mode=0o700)
        _delete_ended_offers(path.parent)
        lock.acquire()
        write_atomic(path, json.dumps(paths).encode(), 0o600)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
        path.with_suffix(".lock").unlink(missing_ok=True)


def _delete_ended_offers(folder: Path) -> None:
    for path in folder.glob("*.json"):
        lock = path.with_suffix(".lock")
        with suppress(Timeout), FileLock(lock, timeout=0):
            path.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
