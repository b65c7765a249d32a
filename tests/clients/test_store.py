"""States of clients in memory and on disk."""

import os
from pathlib import Path

import pytest
import torch

from fedspan.clients.mappings import LazyMapping, OverlayMapping, copy_on_write
from fedspan.clients.second_exchange import FirstExchange
from fedspan.clients.state_files import StateFolder
from fedspan.clients.store import DiskClientStore, LostStateError, OverlayClientStore
from fedspan.core.base import BaseUpdate, Increment
from fedspan.core.values import OptimizerState, ServerState
from fedspan.errors import FedspanError
from fedspan.federation.progress import ClientState, Progress
from fedspan.files import DamagedFileError
from fedspan.run_folder import RunFolder
from fedspan.runs.checkpoint import load_latest, prune, resume, save, store_clients
from fedspan.runs.checkpoint_format import Checkpoint, load
from fedspan.runs.selection import Best, Selection
from helpers.plain_data import plain


def memory(value: float) -> dict[str, torch.Tensor]:
    return {"l/B": torch.full((3, 2), value)}


def test_only_accepted_replies_change_what_is_stored() -> None:
    """Clients' ids may begin like others, and all phases of a state stay, also those without a job in the round."""
    old, new = (OptimizerState({}, {}), 2), (OptimizerState({}, {}), 3)
    before = {"a": ClientState(memory(1)), "a/b": ClientState(memory(2), {"probe": old, "train": old})}
    store, base = OverlayClientStore(before), BaseUpdate().add(Increment(0, {"l": torch.ones(2, 2)}))
    for client in ("a", "a/b", "c"):
        own = store.load(client, 0)
        store.store(client, 1, ClientState(own.memory, {**own.moments, "train": new}, base), frozenset())
        assert store.load(client, 0) is own or client == "c"  # until the reply is accepted
    states = store.accept(["a/b", "c"])
    assert set(states) == {"a", "a/b", "c"}
    assert states["a"] is before["a"]
    assert states["a/b"].moments == {"probe": old, "train": new}
    assert states["a/b"].memory is before["a/b"].memory
    assert states["c"] == ClientState({}, {"train": new})  # without the base, which the server's process has
    assert before["a/b"].moments["train"] is old


def test_an_empty_state_that_is_lost_is_noticed(tmp_path: Path) -> None:
    clients = DiskClientStore(tmp_path)
    clients.store("a", 0, ClientState(), frozenset())
    assert clients.load("a", 0) == ClientState()
    next(tmp_path.rglob("*.safetensors")).unlink()
    with pytest.raises(LostStateError, match="a has no state of round 1"):
        clients.load("a", 0)


def test_what_a_round_trained_is_one_file_of_a_client_whatever_versions_stay(tmp_path: Path) -> None:
    clients = DiskClientStore(tmp_path)
    for round in (3, 4):
        clients.store("a", round, ClientState(memory(round)), frozenset({3}))
        clients.store_trained("a", round, FirstExchange(memory(round), 0.5))
    clients.store_trained("b", 4, FirstExchange(memory(9), 1.0, "digest"))
    assert torch.equal(clients.load("a", 3).memory["l/B"], memory(3)["l/B"])
    first = clients.load_trained("a", 4)
    assert (first.factor, first.order) == (0.5, "")
    assert torch.equal(first.tensors["l/B"], memory(4)["l/B"])
    with pytest.raises(LostStateError, match=r"a has no state of round 4 .*of 'a' in round 4"):
        clients.load_trained("a", 3)
    clients.store_trained("a", 4, None)
    clients.store_trained("a", 4, None)  # it need not exist
    with pytest.raises(LostStateError, match="a has no state of round 5"):
        clients.load_trained("a", 4)
    assert clients.load_trained("b", 4).order == "digest"
    path = next(tmp_path.glob("*/trained.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(LostStateError, match="SHA-256"):
        clients.load_trained("b", 4)


START = Progress(ServerState())


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def moments(value: float) -> tuple[OptimizerState, int]:
    return OptimizerState({"exp_avg": memory(value)}, {"l/B": int(value)}), 1


def state(value: float) -> ClientState:
    return ClientState(memory(value), {"train": moments(value)})


def train_cohort(progress: Progress, *cohort: str) -> Progress:
    """The progress after a round in which these clients kept the round's number."""
    round = progress.state.round + 1
    states = copy_on_write(progress.states)
    for id in cohort:
        states[id] = state(round)
    held = {**progress.last_rounds, **dict.fromkeys(cohort, round - 1)}
    return Progress(ServerState(round), states, held)


def committed(run: RunFolder, progress: Progress, best: Best | None = None) -> Progress:
    after = store_clients(run, progress)
    save(run, Checkpoint(after.state, after.states, after.last_rounds, Selection(best)))
    prune(run)
    return after


def files(run: RunFolder) -> set[str]:
    return {str(path.relative_to(run.clients)) for path in run.clients.rglob("*") if path.is_file()}


def named(run: RunFolder, *wanted: tuple[str, int]) -> set[str]:
    """The names of clients' files of rounds."""
    return {str(path_of(run, *version).relative_to(run.clients)) for version in wanted}


def path_of(run: RunFolder, id: str, round: int) -> Path:
    return StateFolder(run.clients).get_path(id, round)


def test_a_round_writes_its_cohort_and_nothing_else(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = list[int]()
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_ino))
    first = committed(run, train_cohort(START, "a", "b", "c"))
    assert {path.stat().st_ino for path in (run.clients, *run.clients.rglob("*"))} <= set(flushed)
    before = {path: path.stat().st_ino for path in run.clients.rglob("*.safetensors")}
    second = committed(run, train_cohort(first, "b"))
    assert {path: path.stat().st_ino for path in before} == before
    assert files(run) == named(run, ("a", 1), ("b", 1), ("c", 1), ("b", 2))
    assert plain(dict(second.states)) == plain({"a": state(1), "b": state(2), "c": state(1)})
    assert plain(dict(first.states)) == plain({"a": state(1), "b": state(1), "c": state(1)})
    found = load_latest(run)
    assert plain(found.progress) == plain(second)


def test_nothing_is_changed_in_place(run: RunFolder) -> None:
    """A round that comes to no end leaves what is on the disk, and what was read of it, as it was."""
    first = committed(run, train_cohort(START, "a", "b"))
    begun = train_cohort(first, "a", "z")
    again = copy_on_write(begun.states)
    again["b"] = state(9)
    assert list(begun.states) == ["a", "b", "z"]
    assert len(begun.states) == 3
    assert plain(begun.states["b"]) == plain(state(1))
    assert plain(dict(first.states)) == plain({"a": state(1), "b": state(1)})
    assert "z" not in first.states
    with pytest.raises(KeyError):
        first.states["z"]


def test_an_empty_state_needs_no_file(run: RunFolder) -> None:
    after = committed(run, Progress(ServerState(1), {"a": ClientState(), "b": ClientState()}))
    assert files(run) == set()
    assert dict(after.states) == {"a": ClientState(), "b": ClientState()}


def test_a_state_of_moments_alone_has_a_file(run: RunFolder) -> None:
    own = ClientState(moments={"train": (OptimizerState({}, {}), 3), "again": moments(2)})
    after = committed(run, Progress(ServerState(1), {"a": own}))
    assert files(run) == named(run, ("a", 1))
    assert plain(after.states["a"]) == plain(own)


def test_a_client_s_own_folder_has_its_base_and_empty_states(tmp_path: Path) -> None:
    """A version may be written again: a retried round replaces it in one step."""
    folder, base = StateFolder(tmp_path / "a"), BaseUpdate().add(Increment(0, {"l": torch.ones(2, 2)}))
    for round, written in ((1, ClientState()), (2, state(2)), (2, ClientState(memory(3), base=base))):
        folder.store("a", round, written)
        assert plain(folder.load("a", round)) == plain(written)
    (folder.get_path("a", 2).parent / "half.safetensors.tmp-1").write_bytes(b"another process is writing")
    folder.discard({("a", 1)})
    assert [path.name for path in folder.path.rglob("*") if path.is_file()].count("half.safetensors.tmp-1") == 1
    with pytest.raises(DamagedFileError, match=folder.get_path("a", 2).name):
        folder.load("a", 2)
    assert folder.load("a", 1) == ClientState()
    folder.discard(set(), [("a", 1), ("a", 9)])  # a version that another process has deleted
    assert not folder.get_path("a", 1).exists()


def test_old_versions_go_when_no_checkpoint_needs_them(run: RunFolder) -> None:
    progress = committed(run, train_cohort(START, "a", "b"), Best(0.5, 0.0, 1))
    for cohort in ("a", "a", "c"):
        progress = committed(run, train_cohort(progress, cohort), Best(0.5, 0.0, 1))
    # Rounds 1 (the best), 3 and 4 are kept; the second version of a was needed by round 2 alone.
    assert files(run) == named(run, ("a", 1), ("b", 1), ("a", 3), ("c", 4))
    progress = committed(run, train_cohort(progress, "b"), Best(0.6, 0.0, 5))
    # Round 1 remains: a run whose round 5 is damaged continues from round 4, of which it was the best.
    assert files(run) == named(run, ("a", 1), ("b", 1), ("a", 3), ("c", 4), ("b", 5))
    assert plain(dict(load(run.best).states)) == plain(dict(progress.states))
    progress = committed(run, train_cohort(progress, "b"), Best(0.6, 0.0, 5))
    assert files(run) == named(run, ("a", 3), ("c", 4), ("b", 5), ("b", 6))
    assert sorted(folder.name for folder in run.clients.iterdir()) == [f"round-0000{n}" for n in (3, 4, 5, 6)]


def test_what_no_checkpoint_names_goes_on_resume(run: RunFolder) -> None:
    first = committed(run, train_cohort(START, "a"))
    whole = files(run)
    store_clients(run, train_cohort(first, "a", "b"))
    (run.clients / "round-00003.tmp-1").mkdir()
    (run.clients / "round-00003.tmp-1" / "client-0.safetensors").write_bytes(b"half")
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
    path = path_of(run, "a", 1)
    whole = path.read_bytes()
    for position in {*range(0, len(whole), 3), len(whole) - 1}:
        for bit in (1, 128):
            damaged = bytearray(whole)
            damaged[position] ^= bit
            path.write_bytes(damaged)
            with pytest.raises(DamagedFileError, match=path.name):
                after.states["a"]
    path.write_bytes(whole)
    assert plain(after.states["a"]) == plain(state(1))


@pytest.mark.parametrize("damage", ["cut", "longer", "empty", "missing", "folder", "another's"])
def test_a_damaged_file_of_the_last_round_is_named_with_the_way_on(run: RunFolder, damage: str) -> None:
    progress = committed(run, train_cohort(START, "a", "b"))
    committed(run, train_cohort(progress, "a"))
    path = path_of(run, "a", 2)
    data = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        other = path_of(run, "a", 1).read_bytes()
        path.write_bytes({"cut": data[:-1], "longer": data + b"\n", "empty": b"", "another's": other}[damage])
    with pytest.raises(FedspanError) as caught:
        load_latest(run)
    assert str(caught.value).startswith(f"`{path}`: ")
    way_on = f"Round 1 is intact. Delete {run.checkpoints / 'round-00002'} to continue from there."
    assert str(caught.value).endswith(way_on)


def test_an_older_file_is_checked_when_it_is_read(run: RunFolder) -> None:
    committed(run, train_cohort(committed(run, train_cohort(START, "a", "b")), "a"))
    path = path_of(run, "b", 1)
    path.write_bytes(path.read_bytes()[:-1])
    found = load_latest(run)
    with pytest.raises(FedspanError, match=path.name):
        found.states["b"]


def test_what_cannot_be_stored_leaves_nothing(run: RunFolder) -> None:
    odd = ClientState({"x": torch.ones(2, dtype=torch.complex128)})
    progress = Progress(ServerState(1), {"a": state(1), "b": odd})
    with pytest.raises(ValueError, match="'x'"):
        store_clients(run, progress)
    assert files(run) == set()


def test_a_copy_of_stored_values_reads_and_changes_none_of_them() -> None:
    read: list[int] = []

    def make(index: int) -> int:
        read.append(index)
        return index

    stored = LazyMapping(["a", "b", "c"], make)
    first = copy_on_write(stored)
    first["b"] = 7
    second = copy_on_write(first)
    second["d"] = 8
    assert isinstance(second, OverlayMapping)
    assert second.base is stored  # no chain of overlays
    assert (list(first), list(second)) == (["a", "b", "c"], ["a", "b", "c", "d"])
    assert (len(first), len(second)) == (3, 4)
    assert read == []
    assert (dict(stored), dict(first)) == ({"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 7, "c": 2})
