"""A node's copy of the base model that a server offers (``deployment.base_offers``).

A node that allows it (``limits.accept_base``) and has no such model of its own receives the files over its own
connection in blocks, continues after an interruption or a restart, and uses the model when every file has its hash.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from pydantic import ValidationError

from fedspan.config.node import NodeConfig
from fedspan.deployment.base_checks import require_own_names
from fedspan.deployment.base_offers import OFFERS, BaseFile, compute_offer_digest, find_local_base
from fedspan.errors import FedspanError
from fedspan.files import compute_sha256, convert_disk_errors, write_atomic

_MAX_WANTED = 4
"""Maximum number of models that a node receives at a time, so that no server fills its folder with requests."""
_RESERVE = 2**30
"""Free space that receiving a model leaves on the node's disk, in bytes."""
_HASH_ERRORS = 3
"""Number of files with another hash or size after which a node gives up an offer."""
_REFUSED_SECONDS = 3600.0
"""Time for which a node does not ask again for an offer that it gave up."""
_EXPIRED_SECONDS = 7 * 86400.0
"""Time after which a request that no invitation has renewed is deleted with what has arrived."""
_PAUSES = 10.0, 600.0
"""Pause after the first failure, which doubles with each further one, and the longest, in seconds."""

log = logging.getLogger("fedspan.node")

Fetch = Callable[[str, str, int], bytes]
"""Fetches bytes of a file by the offer's digest, the file's SHA-256, and the offset of the first byte."""


class BaseMissingError(FedspanError):
    """A base model that the server offers has not been received yet."""


def find_received_base(node: NodeConfig, files: Sequence[BaseFile]) -> Path | None:
    """Return the folder of a model that this node has received as a whole; None: it has not, or does not accept any.

    The hashes were verified when the files arrived. Here their sizes are checked, and the names in their configs.
    """
    folder = Path(node.folder) / OFFERS / compute_offer_digest(files)
    if not files or not node.limits.accept_base or not folder.is_dir():
        return None
    try:
        if any((folder / file.name).stat().st_size != file.size for file in files):
            raise ValueError("a file has another size")
        require_own_names(folder, [file.name for file in files])
    except (OSError, ValueError) as error:
        # The server reads this, so it names no path.
        reason = f"{Path(str(error.filename)).name}: {error.strerror}" if isinstance(error, OSError) else error
        problem = f"the received base model is damaged ({reason}). Delete its folder"
        raise FedspanError("limits.accept_base", str(folder), problem=problem) from error
    return folder


def is_received(node: NodeConfig, name: str) -> bool:
    """Check whether the name of a model is the folder of one that this node has received."""
    return Path(name).parent == Path(node.folder) / OFFERS


def refuses_offer(node: NodeConfig, name: str, revision: str | None, files: Sequence[BaseFile]) -> bool:
    """Check whether a server offers a base model that is not on this machine, and the node's limits refuse it.

    Args:
        name: ``model.name`` of the run, or the folder that the node's file names for it.
    """
    return bool(files) and not node.limits.accept_base and find_local_base(name, revision) is None


def require_base(node: NodeConfig, name: str, revision: str | None, files: Sequence[BaseFile]) -> None:
    """Check that a run's base model is on this node, or ask for it if the server offers it and the node accepts it.

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
    _require_not_given_up(folder, digest)
    requests = _read_requests(folder)
    requests.pop(digest, None)
    others = _count_announced(folder, requests, digest)
    if size + others > limit:
        problem = f"the base model has {size / 2**20:.0f} MiB, and this node accepts {node.limits.base_mib}"
        if others:
            problem += f", of which {others / 2**20:.0f} are used. Delete what is no longer needed under {OFFERS}/"
        raise FedspanError("limits.base_mib", node.limits.base_mib, problem=problem)
    if len(requests) >= _MAX_WANTED:
        problem = f"{_MAX_WANTED} base models were not received completely. Delete those under {OFFERS}/"
        raise FedspanError("limits.accept_base", True, problem=problem)
    received = _count_received(folder, files)
    with convert_disk_errors(Path(node.folder), "free some space on the node"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        needed = (
            size
            - received
            + sum(_count_size(pending) - _count_received(folder, pending) for pending in requests.values())
        )
        if shutil.disk_usage(folder).free < needed + _RESERVE:
            problem = (
                f"receiving the base model needs {needed / 1e6:.0f} MB and a reserve of {_RESERVE >> 20} MiB, which "
                "the node's disk does not have"
            )
            raise FedspanError("limits.accept_base", True, problem=problem)
        write_atomic(folder / f"{digest}.json", json.dumps([file.model_dump() for file in files]).encode())
    tenths = 10 * received // max(size, 1)
    problem = f"this node receives the base model from the server ({10 * tenths} % of {size / 1e6:.1f} MB)"
    raise BaseMissingError("limits.accept_base", True, problem=problem)


def _require_not_given_up(folder: Path, digest: str) -> None:
    """Check that the node did not give up an offer a short time ago."""
    with suppress(FileNotFoundError):
        path = folder / f"{digest}.refused"
        if 0 <= time.time() - path.stat().st_mtime < _REFUSED_SECONDS:
            problem = f"the files that the server sent are not those that it offered, {_HASH_ERRORS} times"
            raise FedspanError("limits.accept_base", True, problem=f"{problem}. This node asks again in an hour")
        path.unlink()


def _read_requests(folder: Path) -> dict[str, list[BaseFile]]:
    """Return the files of all models that a node has asked for and not received, by the digest of the offer."""
    requests = dict[str, list[BaseFile]]()
    for path in folder.glob("*.json"):
        with suppress(FileNotFoundError):  # it was completed in this moment
            requests[path.stem] = read_request(path)
    return requests


def _count_size(files: Sequence[BaseFile]) -> int:
    return sum(file.size for file in files)


def _count_announced(folder: Path, requests: dict[str, list[BaseFile]], digest: str) -> int:
    """Return the size in bytes of all models that were received or asked for, but for one; the latter in full."""
    counted = {digest, f"{digest}.part", *requests, *(f"{request}.part" for request in requests)}
    stored = 0
    for model in folder.glob("*"):
        for path in model.rglob("*") if model.name not in counted else ():
            with suppress(FileNotFoundError):
                stored += path.stat().st_size if path.is_file() else 0
    return stored + sum(_count_size(files) for files in requests.values())


def _count_received(folder: Path, files: Sequence[BaseFile]) -> int:
    partial, received = folder / f"{compute_offer_digest(files)}.part", 0
    for file in files:
        with suppress(FileNotFoundError):  # not begun, or completed in this moment
            received += (partial / file.name).stat().st_size
    return received


def describe_base(node: NodeConfig, name: str) -> str:
    """Describe where a node has a model that a server may name, or gets it from."""
    if name in node.models:
        folder = Path(node.models[name]).expanduser()
        return f"{folder}" if folder.is_dir() else f"{folder}, which is not a folder"
    if (folder := find_local_base(name, None)) is not None:
        return str(folder)
    return "not on this machine: " + (
        "received from a server that offers it, else loaded from the hub"
        if node.limits.accept_base
        else "loaded from the hub (limits.accept_base: true receives it from a server that offers it)"
    )


class _ContentError(ValueError):
    """Files of the server are not those that it offered, or not such as a node uses."""


class BaseDownloads:
    """Receives the models that a node has asked for, in a thread of its own.

    After a failure an offer is tried again with a growing pause. A request is deleted when its offer has ended (the
    server replies 404), after several wrong files, and after a week in which no invitation has renewed it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / OFFERS
        self._thread: Thread | None = None
        self._failures: dict[str, int] = {}
        self._hash_errors: dict[str, int] = {}
        self._paused_until: dict[str, float] = {}

    def start(self, fetch: Fetch) -> None:
        """Receive what is missing, unless that is going on or paused; an interrupted file is continued.

        Args:
            fetch: Fetches bytes of a file over the node's connection.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        if not self.folder.is_dir():
            return
        self._delete_expired()
        now = time.monotonic()
        requests = [
            path for path in sorted(self.folder.glob("*.json")) if self._paused_until.get(path.stem, now) <= now
        ]
        if not requests:
            return
        self._thread = Thread(target=self._receive_all, args=(requests, fetch), daemon=True)
        self._thread.start()

    def _delete_expired(self) -> None:
        oldest = time.time() - _EXPIRED_SECONDS
        for path in (*self.folder.glob("*.json"), *self.folder.glob("*.part")):
            with suppress(FileNotFoundError):
                request = path.with_suffix(".json")
                if (request if request.exists() else path).stat().st_mtime < oldest:
                    self._delete(path.stem)
        for path in self.folder.glob("*.refused"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - _REFUSED_SECONDS:
                    path.unlink()

    def _delete(self, digest: str) -> None:
        (self.folder / f"{digest}.json").unlink(missing_ok=True)
        shutil.rmtree(self.folder / f"{digest}.part", ignore_errors=True)

    def _receive_all(self, requests: Sequence[Path], fetch: Fetch) -> None:
        for path in requests:
            digest = path.stem
            try:
                self._receive(path, fetch)
                for counts in (self._failures, self._hash_errors, self._paused_until):
                    counts.pop(digest, None)
            except Exception as error:  # the connection is lost, or the offer has ended; it is continued after a pause
                self._pause(digest, error)

    def _pause(self, digest: str, error: Exception) -> None:
        """Decide when an offer is tried again after a failure, or give it up."""
        failures = self._failures[digest] = self._failures.get(digest, 0) + 1
        pause = min(_PAUSES[0] * 2 ** min(failures - 1, 16), _PAUSES[1])
        self._paused_until[digest] = time.monotonic() + pause
        reason = " ".join(str(error).split())[:200]
        if isinstance(error, _ContentError):
            self._hash_errors[digest] = self._hash_errors.get(digest, 0) + 1
            if self._hash_errors[digest] >= _HASH_ERRORS:
                self._hash_errors.pop(digest)
                self._delete(digest)
                with suppress(OSError):  # a full disk: the server may send the model again
                    write_atomic(self.folder / f"{digest}.refused", b"")
                log.warning("the base model is given up for an hour (%s)", reason)
                return
        if getattr(error, "status", None) == 404:  # a RefusedError, whose module needs fedspan[deploy]
            (self.folder / f"{digest}.json").unlink(missing_ok=True)  # what has arrived is used if it is offered again
            log.warning("the server does not offer the base model any more; the next invitation asks for it again")
            return
        log.warning("the base model was not received completely (%s); continued in %.0f s", reason, pause)

    def _receive(self, request: Path, fetch: Fetch) -> None:
        """Receive the files of an offer, and make the folder of the model when all have their hash.

        Raises:
            ValueError: If a file has another hash, size or content than may be; it is deleted.
            OSError: If the connection breaks, or the disk has no room beside its reserve.
        """
        digest = request.stem
        if (self.folder / digest).exists():  # the node's worker asked in the moment in which it was completed
            self._delete(digest)
            return
        try:
            files = read_request(request)
        except FedspanError:
            if not request.exists():
                return
            raise
        partial = self.folder / f"{digest}.part"
        partial.mkdir(exist_ok=True, mode=0o700)
        for file in files:
            (partial / file.name).parent.mkdir(exist_ok=True, mode=0o700)
            self._receive_file(partial / file.name, file, digest, fetch)
        try:
            require_own_names(partial, [file.name for file in files])
        except ValueError as error:
            raise _ContentError(str(error)) from error
        os.replace(partial, self.folder / digest)
        request.unlink(missing_ok=True)
        log.info("the base model was received: %.1f MB", _count_size(files) / 1e6)

    def _receive_file(self, path: Path, file: BaseFile, digest: str, fetch: Fetch) -> None:
        with path.open("ab") as target:
            while target.tell() < file.size:
                if shutil.disk_usage(path.parent).free < _RESERVE:
                    raise OSError(f"the node's disk has less than {_RESERVE >> 20} MiB left")
                block = fetch(digest, file.sha256, target.tell())
                if not block or target.tell() + len(block) > file.size:
                    path.unlink()
                    raise _ContentError(f"{file.name} has another size on the server")
                target.write(block)
            target.flush()
            os.fsync(target.fileno())
        if path.stat().st_size != file.size or compute_sha256(path) != file.sha256:
            path.unlink()
            raise _ContentError(f"{file.name} has another SHA-256 than the offer")


def read_request(path: Path) -> list[BaseFile]:
    """Read the files that a node has asked for."""
    try:
        rows: Any = json.loads(path.read_text(encoding="utf-8"))
        files = [BaseFile.model_validate(row) for row in rows]
    except (OSError, ValueError, TypeError, ValidationError) as error:
        raise FedspanError(str(path), None, problem="the file is damaged. Remove it") from error
    if compute_offer_digest(files) != path.stem:
        raise FedspanError(str(path), None, problem="the file is damaged. Remove it")
    return files
