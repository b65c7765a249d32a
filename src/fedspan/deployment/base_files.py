"""The files of a base model that a server offers to its nodes, and a node's copy of them.

An invitation lists the files with their sizes and SHA-256. A node that allows it (``limits.accept_base``) and has no
such model of its own receives them over its own connection in blocks, continues after an interruption or a restart,
and uses the model when every file has its hash. Only weights in safetensors and files of a config or a tokenizer are
offered and accepted: nothing that is unpickled or that holds code.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fedspan.config.node import NodeConfig
from fedspan.errors import FedspanError
from fedspan.files import convert_disk_errors, from_json, write_atomic

__all__ = [
    "MOST_FILES",
    "OFFERS",
    "BaseDownloads",
    "BaseFile",
    "BaseMissingError",
    "compute_offer_digest",
    "describe_base",
    "find_local_base",
    "find_received_base",
    "list_base_files",
    "offer_base",
    "read_wanted",
    "require_base",
]

OFFERS = "bases"
"""Folder in the server's folder with the offers, and in a node's folder with the received models."""
_OTHER_NAMES = ("vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_NAME = re.compile(r"(?!adapter)[A-Za-z0-9][A-Za-z0-9._-]{0,119}\.(safetensors|json|jinja)")
MOST_FILES = 256
"""Maximum number of files of a base model."""
_MOST_WANTED = 4
"""Maximum number of models that a node receives at a time, so that no server fills its folder with requests."""
_CODE = "auto_map"
"""Key of a config by which transformers loads code."""

log = logging.getLogger("fedspan.node")

Fetch = Callable[[str, str, int], bytes]
"""Fetches bytes of a file by the offer's digest, the file's SHA-256, and the offset of the first byte."""


def _require_accepted(name: str) -> str:
    if name not in _OTHER_NAMES and _NAME.fullmatch(name) is None:
        raise ValueError("a file of weights in safetensors, of a config or of a tokenizer")
    return name


class BaseFile(BaseModel):
    """A file of a base model.

    Args:
        name: Name of the file, without folders.
        size: Its size, in bytes.
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
    """Return the folder of a model on this machine: a folder, or a snapshot in the hub's cache; None: there is none.

    Args:
        name: ``model.name``.
        revision: ``model.revision``.
    """
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
    """Return the files of a model that a server can offer, with their hashes.

    Args:
        folder: Folder of the model.

    Raises:
        FedspanError: If the folder has no weights in safetensors.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and _is_accepted(path.name))
    if not any(name.endswith(".safetensors") for name in names) or "config.json" not in names:
        problem = "the base model cannot be offered to nodes: its folder has no config.json with *.safetensors"
        raise FedspanError("--offer-base", str(folder), problem=problem)
    files = list[BaseFile]()
    for name in names:
        path = folder / name
        files.append(BaseFile(name=name, size=path.stat().st_size, sha256=_compute_sha256(path)))
    return files


def _is_accepted(name: str) -> bool:
    return name in _OTHER_NAMES or _NAME.fullmatch(name) is not None


def _compute_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def offer_base(server: Path, folder: Path, files: Sequence[BaseFile]) -> Generator[None]:
    """Let the server's nodes fetch the files of a model for the duration of the context.

    Args:
        server: The server's folder.
        folder: Folder of the model.
        files: Its files, from ``list_base_files``.
    """
    path = server / OFFERS / f"{compute_offer_digest(files)}.json"
    paths = {file.sha256: str((folder / file.name).resolve()) for file in files}
    with convert_disk_errors(server, "free some space", field="server"):
        path.parent.mkdir(exist_ok=True, mode=0o700)
        write_atomic(path, json.dumps(paths).encode(), 0o600)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


class BaseMissingError(FedspanError):
    """A base model that the server offers has not been received yet."""


def find_received_base(node: NodeConfig, files: Sequence[BaseFile]) -> Path | None:
    """Return the folder of a model that this node has received as a whole; None: it has not."""
    folder = Path(node.folder) / OFFERS / compute_offer_digest(files)
    return folder if files and folder.is_dir() else None


def require_base(node: NodeConfig, name: str, revision: str | None, files: Sequence[BaseFile]) -> None:
    """Check that a run's base model is on this node, or ask for it if the server offers it and the node accepts it.

    Args:
        node: The node's config.
        name: ``model.name`` of the run.
        revision: ``model.revision`` of the run.
        files: The files that the server offers.

    Raises:
        BaseMissingError: If the files are being received.
        FedspanError: If they are larger than the node allows, or its disk has no room for them.
    """
    if not files or not node.limits.accept_base or name in node.models:
        return
    if find_local_base(name, revision) is not None or find_received_base(node, files) is not None:
        return
    size, limit = sum(file.size for file in files), node.limits.base_mib << 20
    folder, digest = Path(node.folder) / OFFERS, compute_offer_digest(files)
    others = _count_stored(folder, digest)
    if size + others > limit:
        problem = f"the base model has {size / 2**20:.0f} MiB, and this node accepts {node.limits.base_mib}"
        if others:
            problem += f", of which {others / 2**20:.0f} are used. Delete what is no longer needed under {OFFERS}/"
        raise FedspanError("limits.base_mib", node.limits.base_mib, problem=problem)
    received = _count_received(folder, files)
    wanted = folder / f"{digest}.json"
    if not wanted.exists() and sum(1 for _ in folder.glob("*.json")) >= _MOST_WANTED:
        problem = f"{_MOST_WANTED} base models were not received completely. Delete those under {OFFERS}/"
        raise FedspanError("limits.accept_base", True, problem=problem)
    with convert_disk_errors(Path(node.folder), "free some space on the node"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if shutil.disk_usage(folder).free < size - received:
            problem = f"the base model needs {(size - received) / 1e6:.0f} MB, which the node's disk does not have"
            raise FedspanError("limits.accept_base", True, problem=problem)
        write_atomic(wanted, json.dumps([file.model_dump() for file in files]).encode())
    tenths = 10 * received // max(size, 1)
    problem = f"this node receives the base model from the server ({10 * tenths} % of {size / 1e6:.1f} MB)"
    raise BaseMissingError("limits.accept_base", True, problem=problem)


def _count_stored(folder: Path, digest: str) -> int:
    """Return the size in bytes of all models that were received completely or in part, but for one."""
    own = {digest, f"{digest}.part"}
    return sum(path.stat().st_size for path in folder.glob("*/*") if path.parent.name not in own)


def _count_received(folder: Path, files: Sequence[BaseFile]) -> int:
    """Return how many bytes of a model have been received."""
    partial = folder / f"{compute_offer_digest(files)}.part"
    return sum((partial / file.name).stat().st_size for file in files if (partial / file.name).is_file())


def describe_base(node: NodeConfig, name: str) -> str:
    """Describe where a node has a model that a server may name, or gets it from."""
    if name in node.models:
        folder = Path(node.models[name]).expanduser()
        return f"{folder}" if folder.is_dir() else f"{folder}, which is no folder"
    if (folder := find_local_base(name, None)) is not None:
        return str(folder)
    return "not on this machine: " + (
        "received from a server that offers it, else loaded from the hub"
        if node.limits.accept_base
        else "loaded from the hub (limits.accept_base: true receives it from a server that offers it)"
    )


class BaseDownloads:
    """Receives the models that a node has asked for, in a thread of its own.

    Args:
        folder: The node's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / OFFERS
        self._thread: Thread | None = None

    def start(self, fetch: Fetch) -> None:
        """Receive what is missing, unless that is going on; an interrupted file is continued.

        Args:
            fetch: Fetches bytes of a file over the node's connection.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        wanted = sorted(self.folder.glob("*.json")) if self.folder.is_dir() else []
        if not wanted:
            return
        self._thread = Thread(target=self._receive_all, args=(wanted, fetch), daemon=True)
        self._thread.start()

    def _receive_all(self, wanted: Sequence[Path], fetch: Fetch) -> None:
        for path in wanted:
            try:
                self._receive(path, fetch)
            except Exception as error:  # the connection is lost, or the offer has ended; the next invitation continues
                log.warning("the base model was not received completely (%s)", " ".join(str(error).split())[:200])

    def _receive(self, wanted: Path, fetch: Fetch) -> None:
        """Receive the files of an offer, and make the folder of the model when all have their hash.

        Raises:
            ValueError: If a file has another hash; it is deleted.
        """
        files = read_wanted(wanted)
        digest = compute_offer_digest(files)
        partial = self.folder / f"{digest}.part"
        partial.mkdir(exist_ok=True, mode=0o700)
        for file in files:
            self._receive_file(partial / file.name, file, digest, fetch)
        _refuse_code(partial)
        os.replace(partial, self.folder / digest)
        wanted.unlink()
        log.info("the base model was received: %.1f MB", sum(file.size for file in files) / 1e6)

    def _receive_file(self, path: Path, file: BaseFile, digest: str, fetch: Fetch) -> None:
        with path.open("ab") as target:
            while target.tell() < file.size:
                block = fetch(digest, file.sha256, target.tell())
                if not block or target.tell() + len(block) > file.size:
                    path.unlink()
                    raise ValueError(f"{file.name} has another size on the server")
                target.write(block)
            target.flush()
            os.fsync(target.fileno())
        if path.stat().st_size != file.size or _compute_sha256(path) != file.sha256:
            path.unlink()
            raise ValueError(f"{file.name} has another SHA-256 than the offer")


def _refuse_code(folder: Path) -> None:
    """Refuse configs that name code of a model's own.

    Raises:
        ValueError: If there is one, or a config is not a JSON object.
    """
    for path in sorted(folder.glob("*config.json")):
        values = from_json(path.read_bytes())
        if not isinstance(values, dict) or _CODE in values:
            raise ValueError(f"{path.name} names code of its own, or is not a JSON object")


def read_wanted(path: Path) -> list[BaseFile]:
    """Read the files that a node has asked for.

    Raises:
        FedspanError: If the file is damaged.
    """
    try:
        rows: Any = json.loads(path.read_text(encoding="utf-8"))
        files = [BaseFile.model_validate(row) for row in rows]
    except (OSError, ValueError, TypeError, ValidationError) as error:
        raise FedspanError(str(path), None, problem="the file is damaged. Remove it") from error
    if compute_offer_digest(files) != path.stem:
        raise FedspanError(str(path), None, problem="the file is damaged. Remove it")
    return files
