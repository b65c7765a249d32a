"""Checkpoints: everything that a run needs to go on, committed in one rename.

A checkpoint is a folder ``checkpoints/round-00005`` (its files: ``runs.packing``). It is written under a temporary
name, brought to the disk and renamed, so a folder of that name is whole, and a process killed at any moment leaves the
round before. What clients keep (``runs.clients``) and the logs are committed first; the logs are cut back on resume to
the lengths that it names, and clients' files that no checkpoint names are deleted: nothing counts twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fedspan.clients.store import Version, discard, store
from fedspan.errors import FedspanError
from fedspan.files import disk_errors, fsync_folder, read_bytes, remove, sweep, temporary, write_file
from fedspan.runs.checkpoint_format import Checkpoint, DamagedFileError, load, pack, read_index, read_versions
from fedspan.runs.folder import RunFolder

__all__ = ["Checkpoint", "latest", "load", "prune", "resume", "save", "saved", "select_checkpoint", "truncate_logs"]

_FOLDER = re.compile(r"round-(\d{5,})$")


def _folder_of(run: RunFolder, round: int) -> Path:
    return run.checkpoints / f"round-{round:05d}"


def _rounds(run: RunFolder) -> dict[int, Path]:
    """Checkpoints by round, ascending; temporary folders do not match."""
    entries = run.checkpoints.iterdir() if run.checkpoints.is_dir() else ()
    found = {int(match[1]): entry for entry in entries if (match := _FOLDER.match(entry.name))}
    return dict(sorted(found.items()))


def saved(run: RunFolder) -> int:
    """How many rounds a run has finished, by its newest checkpoint."""
    return max(_rounds(run), default=0)


def select_checkpoint(run: RunFolder, round: int | str) -> Path:
    """The folder of a checkpoint that a user names.

    Args:
        run: the run.
        round: ``best`` (without one, the last), ``last``, or a number.

    Raises:
        FedspanError: if there is none of it.
    """
    there = _rounds(run)
    if not there:
        raise FedspanError("run folder", str(run.path), "a run with a finished round; this one has none yet")
    if round == "best" and run.best.is_dir():
        return run.best
    wanted = max(there) if round in ("best", "last") else round
    if not isinstance(wanted, int) or wanted not in there:
        kept = ", ".join(map(str, there))
        raise FedspanError("round", round, f"best, last, or a round whose checkpoint was kept: {kept}")
    return there[wanted]


def save(run: RunFolder, checkpoint: Checkpoint) -> Path:
    """Commit a round: write its checkpoint, and let ``best/`` show the best one.

    What clients keep and is not on the disk yet (``clients.store``) is brought there first.

    Args:
        run: a run whose lock this process holds.
        checkpoint: with the positions of logs that are committed already.

    Returns:
        The checkpoint's folder.

    Raises:
        FedspanError: if the disk is full or refuses; the checkpoint before is then still the latest.
        ValueError: if the round has a checkpoint, or a tensor cannot be stored.
    """
    target = _folder_of(run, checkpoint.state.round)
    if target.exists():
        raise ValueError(f"round {checkpoint.state.round} has a checkpoint already: {target}")
    kept = store(run.clients, checkpoint.progress)
    files = pack(replace(checkpoint, memories=kept.memories, optimizer_states=kept.optimizers))
    with disk_errors(run.path):
        _commit(target, files)
        _show_best(run, checkpoint)
    return target


def _commit(target: Path, files: Mapping[str, bytes]) -> None:
    partial = temporary(target)
    remove(partial)  # of an earlier process with the same id, as in containers
    try:
        partial.mkdir(parents=True)
        for name, data in files.items():
            write_file(partial / name, data)
        fsync_folder(partial)
        partial.rename(target)
    except BaseException:
        with suppress(OSError):  # give the space back; the first error is the one to report
            remove(partial)
        raise
    fsync_folder(target.parent)


def _same_file(left: Path, right: Path) -> bool:
    return left.exists() and right.exists() and left.samefile(right)


def _show_best(run: RunFolder, checkpoint: Checkpoint | None) -> None:
    """Make ``best/`` the best checkpoint, by hard links where the disk has them, copies elsewhere."""
    if checkpoint is None or checkpoint.best is None:
        remove(run.best)
        return
    source = _folder_of(run, checkpoint.best[0])
    names = sorted(entry.name for entry in source.iterdir()) if source.is_dir() else []
    if all(_same_file(run.best / name, source / name) for name in names):
        return
    partial, old = temporary(run.best), temporary(run.path / "best-old")
    remove(partial)
    remove(old)
    partial.mkdir()
    for name in names:
        try:
            os.link(source / name, partial / name)
        except OSError:
            write_file(partial / name, read_bytes(source / name))
    fsync_folder(partial)
    # A folder with content cannot be replaced in one step; `resume` mends what a kill leaves in between.
    if run.best.exists():
        run.best.rename(old)
    partial.rename(run.best)
    remove(old)
    fsync_folder(run.path)


def latest(run: RunFolder) -> Checkpoint | None:
    """The newest checkpoint, every byte checked; None if no round was finished.

    Raises:
        FedspanError: if it is damaged: names the file, and the newest older checkpoint that is intact; or if it is of
            another version of fedspan.
    """
    rounds = _rounds(run)
    if not rounds:
        return None
    newest, *older = sorted(rounds, reverse=True)
    try:
        return load(rounds[newest])
    except DamagedFileError as error:
        way_on = "no older checkpoint is intact; start anew in another folder"
        for round in older:
            with suppress(FedspanError):
                load(rounds[round])
                way_on = f"round {round} is intact: delete {rounds[newest]} to go on from there"
                break
        raise FedspanError(error.field, error.value, way_on) from error


def truncate_logs(run: RunFolder, checkpoint: Checkpoint | None) -> None:
    """Cut metrics and ledger to the lengths that they had at a checkpoint (None: at the beginning).

    Raises:
        FedspanError: if one is shorter than that or was edited, or cannot be written.
    """
    for path in (run.metrics, run.ledger):
        length = checkpoint.positions.get(path.name, 0) if checkpoint else 0
        with disk_errors(run.path):
            found = path.stat().st_size if path.exists() else 0
            if found < length or not _ends_a_line(path, length):
                raise FedspanError(
                    str(path),
                    f"{found} bytes",
                    f"at the checkpoint a line of it ended at byte {length}; restore the file or start anew elsewhere",
                )
            if found > length:
                with path.open("r+b") as file:
                    file.truncate(length)
                    os.fsync(file.fileno())


def _ends_a_line(path: Path, length: int) -> bool:
    if length == 0:
        return True
    with path.open("rb") as file:
        file.seek(length - 1)
        return file.read(1) == b"\n"


def resume(run: RunFolder, keep: int = 2) -> Checkpoint | None:
    """Bring a run that was stopped at any moment back to its last finished round, and return that.

    Cuts the logs, mends ``best/``, prunes and clears away what was half-written, so that a run with interruptions ends
    with the same files as one without.

    Args:
        run: as ``RunFolder.resume`` or ``RunFolder.create`` gave it.
        keep: as in ``prune``.

    Raises:
        FedspanError: as ``latest`` and ``truncate_logs``.
    """
    checkpoint = latest(run)
    truncate_logs(run, checkpoint)
    with disk_errors(run.path):
        sweep(run.path)
        _show_best(run, checkpoint)
    prune(run, keep)
    with disk_errors(run.path):
        discard(run.clients, _needed(_rounds(run).values()))
    return checkpoint


def prune(run: RunFolder, keep: int = 2) -> None:
    """Delete all checkpoints but the newest ones and the best round's.

    Args:
        run: a run whose lock this process holds.
        keep: how many of the newest stay; at least 1.

    Raises:
        FedspanError: if the newest checkpoint is damaged (nothing is deleted then), or the disk refuses.
        ValueError: if ``keep`` is below 1.
    """
    if keep < 1:
        raise ValueError(f"keep at least 1 checkpoint, not {keep}")
    rounds = _rounds(run)
    best = read_index(rounds[max(rounds)])["best"] if rounds else None
    kept = {*sorted(rounds)[-keep:], *(best[:1] if best else ())}
    going = [folder for round, folder in rounds.items() if round not in kept]
    stale = _needed(going)
    with disk_errors(run.path):
        for folder in going:
            # Renamed first: what stands under a checkpoint's name is always whole.
            trash = temporary(folder)
            remove(trash)
            folder.rename(trash)
        sweep(run.checkpoints)
        if stale:
            discard(run.clients, _needed(rounds[round] for round in rounds if round in kept), stale)


def _needed(folders: Iterable[Path]) -> set[Version]:
    """The clients' files that checkpoints name; one that cannot be read is of no use, nor what it needs."""
    needed: set[Version] = set()
    for folder in folders:
        with suppress(FedspanError):
            needed |= read_versions(folder)
    return needed
