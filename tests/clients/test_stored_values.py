"""What clients keep, on disk: only what changed is written, what no checkpoint needs is deleted, damage is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedspan.clients.mappings import copy_on_write
from fedspan.clients.stored_values import MEMORY, MOMENTS
from fedspan.core.values import OptimizerState, ServerState
from fedspan.errors import FedspanError
from fedspan.federation.progress import Progress
from fedspan.files import DamagedFileError
from fedspan.runs.checkpoint import load_latest, prune, resume, save, store_clients
from fedspan.runs.checkpoint_format import Checkpoint, load
from fedspan.runs.folder import RunFolder
from fedspan.runs.selection import Best, Selection
from helpers.plain_data import plain

START = Progress(ServerState())


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def memory(value: float) -> dict[str, torch.Tensor]:
    return {"l/B": torch.full((3, 2), value)}


def moments(value: float) -> tuple[OptimizerState, int]:
    return OptimizerState({"exp_avg": memory(value)}, {"l/B": int(value)}), 1


def train_cohort(progress: Progress, *cohort: str) -> Progress:
    """The progress after a round in which these clients kept the round's number."""
    round = progress.state.round + 1
    memories, optimizers = copy_on_write(progress.memories), copy_on_write(progress.optimizers)
    for id in cohort:
        memories[id] = memory(round)
        optimizers[f"{id}/train"] = moments(round)
    held = {**progress.last_rounds, **dict.fromkeys(cohort, round - 1)}
    return Progress(ServerState(round), memories, held, optimizers)


def committed(run: RunFolder, progress: Progress, best: Best | None = None) -> Progress:
    after = store_clients(run, progress)
    save(run, Checkpoint(after.state, after.memories, after.last_rounds, after.optimizers, Selection(best)))
    prune(run)
    return after


def files(run: RunFolder) -> set[str]:
    return {str(path.relative_to(run.clients)) for path in run.clients.rglob("*") if path.is_file()}


def named(run: RunFolder, *wanted: tuple[str, int]) -> set[str]:
    """The names of clients' two files of a round."""
    paths = [
        path
        for id, round in wanted
        for path in (MEMORY.get_path(run.clients, id, round), MOMENTS.get_path(run.clients, f"{id}/train", round))
    ]
    return {str(path.relative_to(run.clients)) for path in paths}


def test_a_round_writes_its_cohort_and_nothing_else(run: RunFolder) -> None:
    first = committed(run, train_cohort(START, "a", "b", "c"))
    before = {path: path.stat().st_ino for path in run.clients.rglob("*.safetensors")}
    second = committed(run, train_cohort(first, "b"))
    assert {path: path.stat().st_ino for path in before} == before
    assert files(run) == named(run, ("a", 1), ("b", 1), ("c", 1), ("b", 2))
    assert plain(dict(second.memories)) == plain({"a": memory(1), "b": memory(2), "c": memory(1)})
    assert plain(dict(first.memories)) == plain({"a": memory(1), "b": memory(1), "c": memory(1)})
    assert plain(second.optimizers["b/train"]) == plain(moments(2))
    assert plain(second.optimizers["c/train"]) == plain(moments(1))
    found = load_latest(run)
    assert found is not None
    assert plain(found.progress) == plain(second)


def test_nothing_is_changed_in_place(run: RunFolder) -> None:
    """A round that comes to no end leaves what is on the disk, and what was read of it, as it was."""
    first = committed(run, train_cohort(START, "a", "b"))
    begun = train_cohort(first, "a", "z")
    again = copy_on_write(begun.memories)
    again["b"] = memory(9)
    assert list(begun.memories) == ["a", "b", "z"]
    assert len(begun.memories) == 3
    assert plain(begun.memories["b"]) == plain(memory(1))
    assert plain(dict(first.memories)) == plain({"a": memory(1), "b": memory(1)})
    assert "z" not in first.memories
    with pytest.raises(KeyError):
        first.memories["z"]


def test_a_memory_of_nothing_needs_no_file(run: RunFolder) -> None:
    after = committed(run, Progress(ServerState(1), {"a": {}, "b": {}}))
    assert files(run) == set()
    assert dict(after.memories) == {"a": {}, "b": {}}


def test_old_versions_go_when_no_checkpoint_needs_them(run: RunFolder) -> None:
    progress = committed(run, train_cohort(START, "a", "b"), Best(0.5, 0.0, 1))
    for cohort in ("a", "a", "c"):
        progress = committed(run, train_cohort(progress, cohort), Best(0.5, 0.0, 1))
    # Rounds 1 (the best), 3 and 4 are kept; the second version of a was needed by round 2 alone.
    assert files(run) == named(run, ("a", 1), ("b", 1), ("a", 3), ("c", 4))
    progress = committed(run, train_cohort(progress, "b"), Best(0.6, 0.0, 5))
    assert files(run) == named(run, ("b", 1), ("a", 3), ("c", 4), ("b", 5))
    assert plain(dict(load(run.best).memories)) == plain(dict(progress.memories))
    progress = committed(run, train_cohort(progress, "b"), Best(0.6, 0.0, 5))
    assert files(run) == named(run, ("a", 3), ("c", 4), ("b", 5), ("b", 6))
    assert sorted(folder.name for folder in run.clients.iterdir()) == [f"round-0000{n}" for n in (3, 4, 5, 6)]


def test_what_no_checkpoint_names_goes_on_resume(run: RunFolder) -> None:
    first = committed(run, train_cohort(START, "a"))
    whole = files(run)
    store_clients(run, train_cohort(first, "a", "b"))
    (run.clients / "round-00003.tmp-1").mkdir()
    (run.clients / "round-00003.tmp-1" / "memory-0.safetensors").write_bytes(b"half")
    assert files(run) > whole
    found = resume(run)
    assert found is not None
    assert files(run) == whole
    assert [folder.name for folder in run.clients.iterdir()] == ["round-00001"]


def test_a_round_that_was_stored_and_not_committed_is_stored_again(run: RunFolder) -> None:
    first = committed(run, train_cohort(START, "a"))
    store_clients(run, train_cohort(first, "a", "b"))
    committed(run, train_cohort(first, "b"))
    assert files(run) == named(run, ("a", 1), ("b", 2))


def test_every_damaged_byte_is_noticed(run: RunFolder) -> None:
    after = committed(run, train_cohort(START, "a"))
    for path, read in (
        (MEMORY.get_path(run.clients, "a", 1), lambda: after.memories["a"]),
        (MOMENTS.get_path(run.clients, "a/train", 1), lambda: after.optimizers["a/train"]),
    ):
        whole = path.read_bytes()
        for position in {*range(0, len(whole), 3), len(whole) - 1}:
            for bit in (1, 128):
                damaged = bytearray(whole)
                damaged[position] ^= bit
                path.write_bytes(damaged)
                with pytest.raises(DamagedFileError, match=path.name):
                    read()
        path.write_bytes(whole)
        read()


@pytest.mark.parametrize("damage", ["cut", "longer", "empty", "missing", "folder", "another's"])
def test_a_damaged_file_of_the_last_round_is_named_with_the_way_on(run: RunFolder, damage: str) -> None:
    progress = committed(run, train_cohort(START, "a", "b"))
    committed(run, train_cohort(progress, "a"))
    path = MEMORY.get_path(run.clients, "a", 2)
    data = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        other = MEMORY.get_path(run.clients, "a", 1).read_bytes()
        path.write_bytes({"cut": data[:-1], "longer": data + b"\n", "empty": b"", "another's": other}[damage])
    with pytest.raises(FedspanError) as caught:
        load_latest(run)
    assert str(caught.value).startswith(f"`{path}`: ")
    way_on = f"Round 1 is intact. Delete {run.checkpoints / 'round-00002'} to continue from there."
    assert str(caught.value).endswith(way_on)


def test_an_older_file_is_checked_when_it_is_read(run: RunFolder) -> None:
    committed(run, train_cohort(committed(run, train_cohort(START, "a", "b")), "a"))
    path = MEMORY.get_path(run.clients, "b", 1)
    path.write_bytes(path.read_bytes()[:-1])
    found = load_latest(run)
    assert found is not None
    with pytest.raises(FedspanError, match=path.name):
        found.memories["b"]


def test_what_cannot_be_stored_leaves_nothing(run: RunFolder) -> None:
    progress = Progress(ServerState(1), {"a": memory(1), "b": {"x": torch.ones(2, dtype=torch.complex128)}})
    with pytest.raises(ValueError, match="'x'"):
        store_clients(run, progress)
    assert files(run) == set()
