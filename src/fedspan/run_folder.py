"""The run folder: it holds all files of a run and is owned by one process at a time.

::

    config.yaml          the configuration, with all defaults filled in; its presence makes the folder a run
    environment.json     versions, machine, seed, command
    learning_rate.json   the range test of training.lr: auto
    pooling.json         the pooling of model.pooling: auto, as it was found at the start
    engine.json          the number of clients that train at once, as measured at the start
    partition.json       the examples of each client
    arrivals.json        the arrivals that asynchronous rounds repeat
    base.json            the digest of the frozen weights of clients' own trainers
    privacy.json         privacy cost of the current round, written before its orders are sent
    participants.json    the nodes of a run over Flower, or of each round where nodes may join late
    noise.key            the key of secret noise, readable by its owner only
    metrics.jsonl        one line per round, each chained to those before it
    ledger.jsonl         one line per message, likewise
    progress.json        the round that is being run, for ``fedspan watch``; removed at the end
    checkpoints/         round-00005/ ...: the last rounds, and the best
    clients/             round-00005/ ...: the clients' stored state, by the round that wrote it
    best/                the best round's checkpoint
    predictions/         the predicted classes of the held-out examples: start and result
    adapter/             the exported adapter; one folder for each client where models are personal
    baselines/           one folder each: its checkpoints while it trains, then a report.json; engine.json
    report.json          the summary, once the run is finished; names the config, inputs, logs and exported files
    run.lock             held while a process works on the run; names that process

The logs, ``checkpoints/`` and ``clients/`` number rounds from 1. Schedules and random draws use the number of finished
rounds, from 0.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from filelock import FileLock

from fedspan.errors import FedspanError, find_similar
from fedspan.files import (
    compute_sha256,
    convert_disk_errors,
    delete_temporary_files,
    from_json,
    is_temporary,
    read_bytes,
    require_no_link,
    to_json,
    write_atomic,
)
from fedspan.logs import Position
from fedspan.processes import acquire_lock

CARD = "README.md"
"""File name of the model card beside an exported model."""


def _seal(values: Mapping[str, object]) -> str:
    return hashlib.sha256(to_json(values).encode(errors="surrogatepass")).hexdigest()


def describe_missing_run(folder: str | Path) -> str:
    """Return the sentences that report a missing folder or one without a run, for the ``problem`` of an error."""
    if os.path.exists(folder):
        return f"{str(folder)!r} holds no run."
    return f"there is no folder {str(folder)!r}. {suggest_folder(folder)}".rstrip()


def suggest_folder(folder: str | Path, files: Collection[str] = ("config.yaml",)) -> str:
    """Return a sentence that suggests a folder beside one that does not exist; empty if it exists or none is similar.

    Args:
        files: Files of which a suggested folder has at least one; the default is that of a run.
    """
    path = Path(folder)
    if os.path.exists(path):
        return ""
    try:
        names = [entry.name for entry in path.parent.iterdir() if any((entry / file).is_file() for file in files)]
    except OSError:  # neither does the folder above exist, or it cannot be read
        return ""
    similar = find_similar(path.name, names, 1)
    return f"Did you mean {str(path.parent / similar[0])!r}?" if similar else ""


class RunFolder:
    """The paths of a run; reads its small files. To write, call ``create`` or ``resume``, which acquire the lock.

    A folder that was created or resumed is a context manager; leaving it releases the lock.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.environment = self.path / "environment.json"
        self.pooling = self.path / "pooling.json"
        self.engine = self.path / "engine.json"
        self.learning_rate = self.path / "learning_rate.json"
        self.partition = self.path / "partition.json"
        self.arrivals = self.path / "arrivals.json"
        self.base = self.path / "base.json"
        self.privacy = self.path / "privacy.json"
        self.metrics = self.path / "metrics.jsonl"
        self.ledger = self.path / "ledger.jsonl"
        self.progress = self.path / "progress.json"
        self.checkpoints = self.path / "checkpoints"
        self.clients = self.path / "clients"
        self.best = self.path / "best"
        self.predictions = self.path / "predictions"
        self.adapter = self.path / "adapter"
        self.baselines = self.path / "baselines"
        self.report = self.path / "report.json"
        self.lock = self.path / "run.lock"
        # Not per thread: the folder may be closed from a thread other than the one that created it.
        self._lock = FileLock(self.lock, thread_local=False)

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: str) -> Self:
        """Create the folder of a new run, acquire its lock and write its configuration.

        Args:
            path: An empty folder, or one that does not exist.

        Raises:
            FedspanError: If the folder is not empty, another process uses it, or it cannot be written.
        """
        run = cls(path)
        with convert_disk_errors(run.path, "choose another folder"):
            run.require_empty()  # before the lock, so that no lock file is written to a foreign folder
            run.path.mkdir(parents=True, exist_ok=True)
            run._acquire()
        try:
            with convert_disk_errors(run.path, "choose another folder"):
                run.require_empty()  # again: another process may have been faster
                delete_temporary_files(run.path)
                write_atomic(run.config, config.encode())
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def resume(cls, path: str | os.PathLike[str]) -> Self:
        """Acquire the lock of an existing run; ``checkpoint.resume`` then restores its files.

        Raises:
            FedspanError: If the folder holds no run, another process uses it, or it cannot be written.
        """
        run = cls(path)
        with convert_disk_errors(run.path):
            if not os.path.isfile(run.config):  # Path's own raises for a name that is too long for the disk
                raise FedspanError(
                    "run folder",
                    str(run.path),
                    problem=f"{describe_missing_run(run.path)} Leave --resume out to start one",
                )
            run.require_own()
            run._acquire()
        return run

    def require_own(self) -> None:
        """Check that the run's files and folders are its own: neither the logs nor ``checkpoints/`` may be links."""
        logs = (self.config, self.metrics, self.ledger, self.partition, self.report)
        for path in (self.checkpoints, self.clients, self.best, self.predictions, self.adapter, self.baselines, *logs):
            require_no_link(path)

    def require_empty(self) -> None:
        """Reject a folder that a new run cannot use."""
        if self.path.exists() and not self.path.is_dir():
            raise FedspanError(
                "run folder", str(self.path), problem=f"{str(self.path)!r} is a file. Choose another name"
            )
        if self.config.exists():
            raise FedspanError(
                "run folder",
                str(self.path),
                problem=(
                    f"{str(self.path)!r} already holds a run. Choose another folder, or continue this run with "
                    "--resume, in Python with fedspan.resume"
                ),
            )
        entries = sorted(entry.name for entry in self.path.iterdir()) if self.path.exists() else []
        # A process that is killed while it creates the folder leaves these files: no reason to reject the folder.
        ours = (self.lock.name, f"{self.config.name}.tmp-")
        if others := [name for name in entries if not name.startswith(ours)]:
            raise FedspanError(
                "run folder",
                str(self.path),
                problem=f"{str(self.path)!r} holds other files ({others[0]}). Choose another folder",
            )

    def _acquire(self) -> None:
        if (owner := acquire_lock(self._lock)) is not None:
            raise FedspanError(
                "run folder",
                str(self.path),
                problem=f"{owner} is working on this run. Wait until it has finished, or stop it",
            )

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read_config_text(self) -> str:
        """Read the text of config.yaml."""
        try:
            return read_bytes(self.config).decode()
        except UnicodeDecodeError as error:
            raise FedspanError(
                str(self.config), str(error), problem=f"the file is not text in UTF-8 ({error})"
            ) from error

    def write_json(self, path: Path, value: object) -> None:
        """Write one of the run's JSON files (``run.partition``, ``run.report``) atomically."""
        with convert_disk_errors(self.path):
            write_atomic(path, (to_json(value, indent=2) + "\n").encode())

    def write_sealed(self, path: Path, values: Mapping[str, object]) -> None:
        """Write a JSON object with its own SHA-256 in the field ``sha256``, for ``read_sealed``."""
        self.write_json(path, {**values, "sha256": _seal(values)})

    def read_sealed(self, path: Path) -> dict[str, Any]:
        """Read what ``write_sealed`` wrote, without the field ``sha256``."""
        content = self.read_json(path)
        if not isinstance(content, dict):
            raise FedspanError(str(path), content, "a JSON object")
        values: dict[str, Any] = {str(name): value for name, value in content.items() if name != "sha256"}
        if content.get("sha256") != _seal(values):
            problem = "the file was changed after the run wrote it: it does not have its own SHA-256. Restore the file"
            raise FedspanError(str(path), content.get("sha256"), problem=problem)
        return values

    def read_json(self, path: Path) -> object:
        """Read the value in one of the run's JSON files."""
        try:
            return from_json(read_bytes(path))
        except ValueError as error:
            raise FedspanError(str(path), str(error), problem=f"the file is not valid JSON ({error})") from error


RECORDS = ("config", "files", "logs")
"""Fields of report.json that ``RunReport`` lacks: the run's files are compared with them."""


@dataclass(frozen=True)
class Records:
    """What a finished run's report names beside the results.

    Args:
        files: SHA-256 of inputs and results, by path relative to the run folder.
    """

    config: str
    files: Mapping[str, str]
    positions: Mapping[str, Position]


def read_records(run_folder: RunFolder) -> Records:
    """Read what a finished run's report names."""
    content = run_folder.read_sealed(run_folder.report)
    try:
        positions = {str(name): Position(int(length), str(head)) for name, (length, head) in content["logs"].items()}
        return Records(str(content["config"]), dict(content["files"]), positions)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        expected = f"a report with {', '.join(RECORDS)}"
        raise FedspanError(str(run_folder.report), sorted(content), expected) from error


def compute_result_digests(run_folder: RunFolder) -> dict[str, str]:
    """Return the SHA-256 of environment.json, exported files and predictions, by path relative to the run folder.

    Model cards are left out: their readers complete them.
    """
    exported = sorted(path for path in run_folder.adapter.rglob("*") if path.is_file() and path.name != CARD)
    files = (run_folder.environment, *exported, *sorted(run_folder.predictions.glob("*.safetensors")))
    return {path.relative_to(run_folder.path).as_posix(): compute_sha256(path) for path in files}


def require_same_files(run_folder: RunFolder, digests: Mapping[str, str], source: str = "the checkpoint") -> None:
    """Check files of a run.

    Args:
        digests: SHA-256 of the files, by path relative to the run folder. Other files are not checked.
        source: What names the digests, for the error.
    """
    for name, digest in digests.items():
        path = run_folder.path / name
        if not path.is_file():
            problem = f"the file is missing, and {source} names it"
        elif compute_sha256(path) != digest:
            problem = f"the file was changed after the run wrote it: its SHA-256 is not the one that {source} names"
        else:
            continue
        remedy = "Restore the file"
        # Without a checkpoint, a resumed run would start again from its first round.
        is_resumable = not all(map(is_temporary, run_folder.checkpoints.glob("round-*")))
        if path.is_relative_to(run_folder.adapter) and is_resumable:
            remedy += f", or delete {run_folder.report} and resume the run, which exports its models again"
        raise FedspanError(str(path), name, problem=f"{problem}. {remedy}")


def require_intact_model(folder: Path) -> None:
    """Check the files of a trained model against the report of the finished run that exported them.

    Args:
        folder: Folder of the model; nothing names the files of one that is not in a run's ``adapter/``.
    """
    for path in dict.fromkeys((Path(os.path.abspath(folder)), Path(os.path.realpath(folder)))):  # links, too
        for parent in path.parents[:2]:  # adapter/ or, in it, the folder of a client
            run_folder = RunFolder(parent)
            if path.is_relative_to(run_folder.adapter) and run_folder.config.is_file() and run_folder.report.is_file():
                files = read_records(run_folder).files
                exported = {name: files[name] for name in files if (parent / name).is_relative_to(path)}
                require_same_files(run_folder, exported, run_folder.report.name)
