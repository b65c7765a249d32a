"""Checkpoints of a run: their format on disk, writing, pruning and reading."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedspan.clients.state_files import StateFolder, Version
from fedspan.errors import FedspanError
from fedspan.federation.progress import Progress
from fedspan.files import (
    DamagedFileError,
    build_temporary_path,
    convert_disk_errors,
    delete_temporary_files,
    fsync_folder,
    read_bytes,
    remove,
    require_no_link,
    write_file,
)
from fedspan.logs import EMPTY, require_position
from fedspan.run_folder import RunFolder
from fedspan.runs.checkpoint_format import Checkpoint, load, pack, read_index, read_versions
from fedspan.runs.selection import Selection

_FOLDER = re.compile(r"round-(\d{5,})$")


def _get_folder(run: RunFolder, round: int) -> Path:
    return run.checkpoints / f"round-{round:05d}"


def _list_rounds(run: RunFolder) -> dict[int, Path]:
    """List the checkpoints by round, ascending; temporary folders do not match."""
    run.require_own()
    entries = run.checkpoints.iterdir() if run.checkpoints.is_dir() else ()
    folders = {int(match[1]): entry for entry in entries if (match := _FOLDER.match(entry.name))}
    for folder in folders.values():
        require_no_link(folder)
    return dict(sorted(folders.items()))


def read_last_saved_round(run: RunFolder) -> int:
    """Return the number of rounds that a run has finished, from its newest checkpoint."""
    return max(_list_rounds(run), default=0)


def read_selection(run: RunFolder) -> Selection:
    """Return the selection after the last finished round, from the newest checkpoint."""
    rounds = _list_rounds(run)
    return _read_selection_of(rounds[max(rounds)]) if rounds else Selection()


def _read_selection_of(folder: Path) -> Selection:
    return Selection.from_json(read_index(folder)["selection"])


def select_checkpoint(run: RunFolder, round: int | str) -> Path:
    """Find the folder of the checkpoint that a user names.

    Args:
        round: ``best`` (without one, the last), ``last``, or a number.
    """
    folders = _list_rounds(run)
    if not folders:
        raise FedspanError("run folder", str(run.path), problem="the run has no finished round yet")
    if round == "best" and run.best.is_dir():
        return run.best
    number = max(folders) if round in ("best", "last") else round
    if not isinstance(number, int) or number not in folders:
        available = ", ".join(map(str, folders))
        raise FedspanError("round", round, f"best, last, or a round with a checkpoint: {available}")
    return folders[number]


def read_newest_index(run: RunFolder) -> dict[str, Any] | None:
    """Read the index of a run's newest checkpoint, while any process may work on the run; None: there is none."""
    while rounds := _list_rounds(run):
        newest = rounds[max(rounds)]
        try:
            return read_index(newest)
        except DamagedFileError:
            if newest.exists():  # else it was pruned, and a newer one is there
                raise
    return None


def store_clients(run: RunFolder, progress: Progress) -> Progress:
    """Write to disk what a round changed on its clients; the same is read on access in the progress that is returned.

    Raises:
        FedspanError: If the disk is full or refuses to write; nothing of the round is left then.
    """
    return replace(progress, states=StateFolder(run.clients).store_round(progress.state.round, progress.states))


def save(run: RunFolder, checkpoint: Checkpoint) -> Path:
    """Commit a round: write its checkpoint, link the best one as ``best/``, and return the checkpoint's folder.

    Clients' states that are not on the disk yet (``clients.state_files``) are written first.

    Args:
        checkpoint: The checkpoint, with the positions of logs that are already committed.

    Raises:
        FedspanError: If the disk is full or cannot be written; the previous checkpoint is then still the latest.
        ValueError: If the round already has a checkpoint, or a tensor cannot be stored.
    """
    target = _get_folder(run, checkpoint.state.round)
    if target.exists():
        raise ValueError(f"round {checkpoint.state.round} has a checkpoint already: {target}")
    states = StateFolder(run.clients).store_round(checkpoint.state.round, checkpoint.states)
    files = pack(replace(checkpoint, states=states))
    with convert_disk_errors(run.path):
        _commit(target, files)
        _show_best(run, checkpoint)
    return target


def _commit(target: Path, files: Mapping[str, bytes]) -> None:
    partial = build_temporary_path(target)
    remove(partial)  # left by an earlier process with the same id, as in containers
    try:
        partial.mkdir(parents=True)
        for name, data in files.items():
            write_file(partial / name, data)
        fsync_folder(partial)
        partial.rename(target)
    except BaseException:
        with suppress(OSError):  # free the space; the first error is the one to report
            remove(partial)
        raise
    fsync_folder(target.parent)


def _is_same_file(left: Path, right: Path) -> bool:
    return left.exists() and right.exists() and left.samefile(right)


def _show_best(run: RunFolder, checkpoint: Checkpoint | None) -> None:
    """Make ``best/`` the best checkpoint, by hard links where the file system supports them, else by copies."""
    if checkpoint is None or checkpoint.selection.best is None:
        remove(run.best)
        return
    source = _get_folder(run, checkpoint.selection.best.round)
    names = sorted(entry.name for entry in source.iterdir()) if source.is_dir() else []
    if all(_is_same_file(run.best / name, source / name) for name in names):
        return
    partial, old = build_temporary_path(run.best), build_temporary_path(run.path / "best-old")
    remove(partial)
    remove(old)
    partial.mkdir()
    for name in names:
        try:
            os.link(source / name, partial / name)
        except OSError:
            write_file(partial / name, read_bytes(source / name))
    fsync_folder(partial)
    # A folder with content cannot be replaced in one step; `resume` repairs what a kill leaves in between.
    if run.best.exists():
        run.best.rename(old)
    partial.rename(run.best)
    remove(old)
    fsync_folder(run.path)


def load_latest(run: RunFolder) -> Checkpoint | None:
    """Load the newest checkpoint and check every byte of it; None if no round is finished.

    Raises:
        FedspanError: If it is damaged (names the file, and the newest older checkpoint that is intact), or was written
            by another version of fedspan.
    """
    rounds = _list_rounds(run)
    if not rounds:
        return None
    newest, *older = sorted(rounds, reverse=True)
    try:
        return load(rounds[newest])
    except DamagedFileError as error:
        way_on = "No older checkpoint is intact. Start again in another folder."
        for round in older:
            with suppress(FedspanError):
                load(rounds[round])
                way_on = f"Round {round} is intact. Delete {rounds[newest]} to continue from there."
                break
        raise error.relocate(note=way_on) from error


def truncate_logs(run: RunFolder, checkpoint: Checkpoint | None) -> None:
    """Truncate metrics and ledger to their ends at a checkpoint (None: to nothing).

    Raises:
        FedspanError: If a log does not start with the lines that it had then, or cannot be written; the error names the
            line.
    """
    for path in (run.metrics, run.ledger):
        position = checkpoint.positions.get(path.name, EMPTY) if checkpoint else EMPTY
        require_position(path, position)
        with convert_disk_errors(run.path):
            if path.exists() and path.stat().st_size > position.length:
                with path.open("r+b") as file:
                    file.truncate(position.length)
                    os.fsync(file.fileno())


def resume(run: RunFolder, keep: int = 2) -> Checkpoint | None:
    """Restore a run that was stopped at any moment to its last finished round, and return that checkpoint.

    Truncates the logs, repairs ``best/``, prunes checkpoints and removes partially written files, so that an
    interrupted run ends with the same files as an uninterrupted one.

    Args:
        run: A run folder from ``RunFolder.resume`` or ``RunFolder.create``.
        keep: Number of checkpoints to keep, as for ``prune``.

    Raises:
        FedspanError: If ``load_latest`` or ``truncate_logs`` raises it.
    """
    checkpoint = load_latest(run)
    truncate_logs(run, checkpoint)
    with convert_disk_errors(run.path):
        delete_temporary_files(run.path)
        _show_best(run, checkpoint)
    prune(run, keep)
    with convert_disk_errors(run.path):
        delete_temporary_files(run.clients)
        StateFolder(run.clients).discard(_list_needed_versions(_list_rounds(run).values()))
    return checkpoint


def prune(run: RunFolder, keep: int = 2) -> None:
    """Delete all checkpoints except the newest ones and that of the best round, as of each of them.

    A run whose newest checkpoint is damaged can continue from an older one, which needs what was the best round then.

    Args:
        keep: Number of newest checkpoints to keep; at least 1.

    Raises:
        FedspanError: If the newest checkpoint is damaged (nothing is deleted then), or the disk cannot be written.
    """
    if keep < 1:
        raise ValueError(f"keep at least 1 checkpoint, not {keep}")
    rounds = _list_rounds(run)
    newest = sorted(rounds)[-keep:]
    selections = [read_selection(run)]
    for round in newest[:-1]:
        with suppress(FedspanError):  # nothing continues from a damaged one
            selections.append(_read_selection_of(rounds[round]))
    retained = {*newest, *(selection.best.round for selection in selections if selection.best is not None)}
    removed = [folder for round, folder in rounds.items() if round not in retained]
    stale = _list_needed_versions(removed)
    with convert_disk_errors(run.path):
        for folder in removed:
            # Renamed first: a folder with a checkpoint's name is always complete.
            trash = build_temporary_path(folder)
            remove(trash)
            folder.rename(trash)
        delete_temporary_files(run.checkpoints)
        if stale:
            needed = _list_needed_versions(rounds[round] for round in rounds if round in retained)
            StateFolder(run.clients).discard(needed, stale)


def _list_needed_versions(folders: Iterable[Path]) -> set[Version]:
    """Collect the versions of clients' states that checkpoints name; an unreadable checkpoint needs none."""
    needed: set[Version] = set()
    for folder in folders:
        with suppress(FedspanError):
            needed |= read_versions(folder)
    return needed
