"""A run that is killed, or whose disk fills, at any moment goes on to the same end; its checkpoints, bit by bit."""

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedspan.clients.mappings import copy_on_write
from fedspan.core.base import BaseUpdate, Increment
from fedspan.core.lowrank import LowRank
from fedspan.core.values import OptimizerState, ServerState
from fedspan.errors import FedspanError
from fedspan.federation.progress import ClientState, Progress
from fedspan.files import remove
from fedspan.logs import JsonLines, Position, encode_chain_line, find_position, read_lines
from fedspan.run_folder import RunFolder
from fedspan.runs.checkpoint import load_latest, prune, resume, save, store_clients, truncate_logs
from fedspan.runs.checkpoint_format import Checkpoint, load
from fedspan.runs.ledger import Ledger, read_totals
from fedspan.runs.selection import Best, ClientLoss, Selection
from helpers.plain_data import plain


def state_of(round: int) -> ServerState:
    """The server state after a round."""
    return ServerState(round, {"l/A": torch.full((50,), float(round))}, scalars={"rounds": round})


def memory_of(round: int) -> dict[str, torch.Tensor]:
    """What a client keeps whose last round this was."""
    return {"l/B": torch.arange(4) * round}


def begin(path: Path) -> RunFolder:
    """Open a run, whether it was started before or not."""
    return RunFolder.resume(path) if (path / "config.yaml").exists() else RunFolder.create(path, "seed: 1\n")


def go_on(run: RunFolder, stop: int) -> None:
    """From wherever the run stands up to a round."""
    checkpoint = resume(run)
    start, best = (checkpoint.state.round, checkpoint.selection.best) if checkpoint else (0, None)
    progress = checkpoint.progress if checkpoint else Progress(state_of(0))
    with JsonLines(run.metrics) as metrics, Ledger(run.ledger) as ledger:
        for round in range(start + 1, stop + 1):
            for client in ("a", "b"):
                ledger.record(round, client, "down", 100 + round, 80)
                ledger.record(round, client, "up", 50 + round, 40)
            score = round % 4 + round / 100
            metrics.append({"round": round, "score": score, "bytes": ledger.totals.run("up").bytes})
            best = max(filter(None, (best, Best(score, 0.0, round))))
            moments = OptimizerState({"exp_avg": {"l/A": torch.ones(3) * round}}, {"l/A": round})
            positions = {run.metrics.name: metrics.commit(), run.ledger.name: ledger.commit()}
            states = copy_on_write(progress.states)
            states["a"] = states[f"c{round % 5}"] = ClientState(memory_of(round))
            states["b"] = ClientState(moments={"train": (moments, 0)})
            progress = store_clients(run, Progress(state_of(round), states, {"a": round}))
            held = {"a": round, "b": None}
            save(run, Checkpoint(progress.state, progress.states, held, Selection(best), positions))
            prune(run)


CHANGES = ["write", "fsync", "mkdir", "rename", "replace", "link", "unlink", "rmdir", "ftruncate", "open"]
"""The functions of ``os`` through which the file system is changed."""


def tree(path: Path) -> dict[str, bytes]:
    """Every file of a run with its content, the lock aside."""
    files = (file for file in path.rglob("*") if file.is_file() and file.name != "run.lock")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def uninterrupted(path: Path, stop: int) -> dict[str, bytes]:
    with begin(path) as run:
        go_on(run, stop)
    return tree(path)


def assert_sound(path: Path) -> int:
    """Every checkpoint and what its clients keep is whole, the logs reach to the latest at least; returns its round."""
    run = RunFolder(path)
    for folder in run.checkpoints.glob("round-?????"):
        whole = load(folder)
        states = dict(whole.states)
        assert states.pop("b").moments["train"][0].steps == {"l/A": whole.state.round}
        for client, own in states.items():
            behind = 0 if client == "a" else (whole.state.round - int(client[1:])) % 5
            assert torch.equal(own.memory["l/B"], memory_of(whole.state.round - behind)["l/B"])
        assert len(states) == 1 + min(5, whole.state.round)
    checkpoint = load_latest(run)
    if checkpoint is None:
        return 0
    round = checkpoint.state.round
    assert torch.equal(checkpoint.state.tensors["l/A"], state_of(round).tensors["l/A"])
    assert checkpoint.last_rounds == {"a": round, "b": None}
    assert run.metrics.stat().st_size >= checkpoint.positions["metrics.jsonl"].length
    assert run.ledger.stat().st_size >= checkpoint.positions["ledger.jsonl"].length
    if run.best.exists():
        assert load(run.best).selection.best is not None
    return round


class Killed(BaseException):
    """Stands for the end of the process."""


class Interruption:
    """Lets a number of file system changes happen, then fails: once with an ``OSError``, or for ever as if killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failure: BaseException) -> None:
        self.left = 10**9
        self.struck = False
        self._failure = failure
        for name in CHANGES:
            monkeypatch.setattr(os, name, self._counting(name, getattr(os, name)))

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR):
                return function(*args, **kwargs)
            self.left -= 1
            if self.left < 0 and (isinstance(self._failure, Killed) or not self.struck):
                if name == "write" and not self.struck:
                    function(args[0], args[1][: len(args[1]) // 2])
                self.struck = True
                raise self._failure
            return function(*args, **kwargs)

        return counted


@pytest.mark.parametrize(("finished", "least"), [(6, 25), pytest.param(5, 50, marks=pytest.mark.slow)])
def test_killed_at_every_change_of_the_file_system(
    finished: int, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = uninterrupted(tmp_path / "reference", 7)
    uninterrupted(tmp_path / "begun", finished)
    for changes in count():
        path = shutil.copytree(tmp_path / "begun", tmp_path / str(changes))
        with monkeypatch.context() as patch:
            interruption = Interruption(patch, Killed())
            run = begin(path)
            interruption.left = changes
            with suppress(Killed):
                go_on(run, 7)
            interruption.left = 10**9
            run.close()
        assert assert_sound(path) >= finished
        with begin(path) as run:
            go_on(run, 7)
        assert tree(path) == end, f"killed after {changes} changes"
        if not interruption.struck:  # it got through before the strike
            break
    assert changes > least


@pytest.mark.parametrize("code", [errno.ENOSPC, pytest.param(errno.EIO, marks=pytest.mark.slow)])
def test_disk_refuses_at_every_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    end = uninterrupted(tmp_path / "reference", 3)
    uninterrupted(tmp_path / "begun", 2)
    for changes in count():
        path = shutil.copytree(tmp_path / "begun", tmp_path / str(changes))
        with begin(path) as run:
            said = ""
            with monkeypatch.context() as patch:
                interruption = Interruption(patch, OSError(code, os.strerror(code)))
                interruption.left = changes
                try:
                    go_on(run, 3)
                except FedspanError as error:
                    said = str(error)
            if said:
                assert said.startswith(f"`run folder`: '{path}' cannot be used: ")
                assert "The last finished round is intact" in said
                assert ("the disk is full" in said) == (code == errno.ENOSPC)
            assert assert_sound(path) >= 2
            go_on(run, 3)
        assert tree(path) == end, f"refused after {changes} changes"
        if not interruption.struck:  # it got through before the strike
            break
    assert changes > 15


def test_a_round_that_was_not_committed_leaves_no_trace(tmp_path: Path) -> None:
    end = uninterrupted(tmp_path / "run", 3)
    run = RunFolder(tmp_path / "run")
    with run.metrics.open("ab") as metrics, run.ledger.open("ab") as ledger:
        _, line = encode_chain_line(find_position(run.metrics).head, {"round": 4})
        metrics.write(line + b'{"rou')
        ledger.write(b'{"round": 4, "client": "a", "dir')
    assert [row["round"] for row in read_lines(run.metrics)] == [1, 2, 3, 4]
    assert read_totals(run.ledger).rounds == (1, 2, 3)
    with begin(run.path) as run:
        go_on(run, 3)
    assert tree(run.path) == end


def test_stopped_before_the_first_checkpoint(tmp_path: Path) -> None:
    with begin(tmp_path / "run") as run:
        run.metrics.write_text('{"round": 1}\n')
        assert resume(run) is None
        assert run.metrics.read_bytes() == b""


@pytest.mark.parametrize("change", ["shortened", "edited"])
def test_logs_that_do_not_fit_the_checkpoint_are_named(tmp_path: Path, change: str) -> None:
    uninterrupted(tmp_path / "run", 3)
    run = RunFolder(tmp_path / "run")
    data = run.ledger.read_bytes()
    run.ledger.write_bytes(data[:-1] if change == "shortened" else b"x" + data)
    with pytest.raises(FedspanError, match=r"ledger\.jsonl"):
        truncate_logs(run, load_latest(run))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def checkpoint_of(round: int, best: Best | None = None) -> Checkpoint:
    return Checkpoint(
        ServerState(round, {"l/A": torch.full((3,), float(round))}),
        {"a": ClientState({"l/B": torch.ones(2)})},
        selection=Selection(best),
    )


def rounds_of(run: RunFolder) -> list[str]:
    return sorted(folder.name for folder in run.checkpoints.iterdir())


def test_no_checkpoint_yet(run: RunFolder) -> None:
    assert load_latest(run) is None
    prune(run)


def test_the_newest_by_number(run: RunFolder) -> None:
    for round in (99_999, 100_000, 2):
        save(run, checkpoint_of(round))
    (run.checkpoints / "round-200000.tmp-1").mkdir()
    (run.checkpoints / "notes").mkdir()
    found = load_latest(run)
    assert found.state.round == 100_000


def test_a_round_is_saved_once(run: RunFolder) -> None:
    save(run, checkpoint_of(1))
    with pytest.raises(ValueError, match="has a checkpoint already"):
        save(run, checkpoint_of(1))


@pytest.mark.parametrize("name", ["state.safetensors", "clients.json", "checkpoint.json"])
def test_every_damaged_byte_is_noticed(run: RunFolder, name: str) -> None:
    save(run, checkpoint_of(4))
    folder = save(run, checkpoint_of(5, best=Best(0.5, 0.0, 4)))
    whole = (folder / name).read_bytes()
    for position in {*range(0, len(whole), 3), len(whole) - 1}:
        for bit in (1, 128):
            damaged = bytearray(whole)
            damaged[position] ^= bit
            (folder / name).write_bytes(damaged)
            with pytest.raises(FedspanError) as caught:
                load(folder)
            assert name in str(caught.value)
    (folder / name).write_bytes(whole)
    load(folder)


@pytest.mark.parametrize("name", ["state.safetensors", "clients.json", "checkpoint.json"])
@pytest.mark.parametrize("damage", ["cut", "longer", "empty", "missing", "folder"])
def test_a_damaged_file_is_named_with_the_way_on(run: RunFolder, name: str, damage: str) -> None:
    for round in (3, 4, 5):
        folder = save(run, checkpoint_of(round))
    file = folder / name
    data = file.read_bytes()
    file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage != "missing":
        file.write_bytes({"cut": data[:-1], "longer": data + b"\n", "empty": b""}[damage])
    (run.checkpoints / "round-00004" / "state.safetensors").write_bytes(b"damaged too")
    with pytest.raises(FedspanError) as caught:
        load_latest(run)
    message = str(caught.value)
    assert message.startswith(f"`{file}`: ")
    assert f"Round 3 is intact. Delete {folder} " in message
    assert rounds_of(run) == ["round-00003", "round-00004", "round-00005"]


def test_nothing_intact_says_so(run: RunFolder) -> None:
    (save(run, checkpoint_of(1)) / "state.safetensors").write_bytes(b"")
    with pytest.raises(FedspanError, match="No older checkpoint is intact"):
        load_latest(run)


def test_going_on_from_an_older_one(run: RunFolder) -> None:
    save(run, checkpoint_of(1, best=Best(0.1, 0.0, 1)))
    folder = save(run, checkpoint_of(2, best=Best(0.2, 0.0, 2)))
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    found = resume(run)
    assert found.selection == Selection(Best(0.1, 0.0, 1))
    assert load(run.best).state.round == 1, "best/ goes back as well"
    save(run, checkpoint_of(2, best=Best(0.2, 0.0, 2)))
    assert load(run.best).state.round == 2


def test_an_older_one_keeps_what_was_the_best_round_then(run: RunFolder) -> None:
    for round, best in ((3, 3), (4, 3), (5, 5)):
        save(run, checkpoint_of(round, best=Best(best / 10, 0.0, best)))
        prune(run)
    assert rounds_of(run) == ["round-00003", "round-00004", "round-00005"]
    (run.checkpoints / "round-00005" / "state.safetensors").write_bytes(b"damaged")
    with pytest.raises(FedspanError, match=r"Round 4 is intact. Delete .*round-00005"):
        resume(run)
    remove(run.checkpoints / "round-00005")
    found = resume(run)
    assert found.selection == Selection(Best(0.3, 0.0, 3))
    assert load(run.best).state.round == 3
    for round in (5, 6):
        save(run, checkpoint_of(round, best=Best(0.5, 0.0, 5)))
        prune(run)
    assert rounds_of(run) == ["round-00005", "round-00006"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("runs.checkpoint_format.FORMAT", 8, "reads format 7"), ("federation.serialization.FORMAT", 2, "format 2")],
)
def test_a_format_of_the_future_is_refused(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, name: str, value: int, words: str
) -> None:
    monkeypatch.setattr(f"fedspan.{name}", value)
    save(run, checkpoint_of(1))
    monkeypatch.undo()
    with pytest.raises(FedspanError, match=words):
        load_latest(run)


def test_pruning_keeps_the_last_and_the_best(run: RunFolder) -> None:
    for round in range(1, 8):
        save(run, checkpoint_of(round, best=Best(0.5, 0.0, min(round, 3))))
        prune(run)
    assert rounds_of(run) == ["round-00003", "round-00006", "round-00007"]
    assert load(run.best).state.round == 3
    prune(run, keep=1)
    assert rounds_of(run) == ["round-00003", "round-00007"]
    with pytest.raises(ValueError, match="at least 1"):
        prune(run, keep=0)


def test_best_is_linked_where_the_disk_has_links_or_copied(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(run, checkpoint_of(1, best=Best(0.5, 0.0, 1)))
    assert (run.best / "state.safetensors").samefile(folder / "state.safetensors")
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "Operation not permitted")))
    folder = save(run, checkpoint_of(2, best=Best(0.6, 0.0, 2)))
    assert not (run.best / "state.safetensors").samefile(folder / "state.safetensors")
    assert load(run.best).state.round == 2
    save(run, replace(checkpoint_of(3), selection=Selection()))
    assert not run.best.exists()


def test_what_cannot_be_stored_leaves_nothing(run: RunFolder) -> None:
    save(run, checkpoint_of(1))
    with pytest.raises(ValueError, match="'x'"):
        save(run, Checkpoint(ServerState(2, {"x": torch.ones(2, dtype=torch.complex128)})))
    assert rounds_of(run) == ["round-00001"]


IDS = st.text(max_size=6) | st.sampled_from(["../../etc/passwd", "a/b", "", "станция 3", "\udc80", "__metadata__"])
SLOTS = st.dictionaries(
    st.sampled_from(["l/A", "l/B", "extras/head.weight", "x"]), st.integers(-9, 9).map(torch.tensor)
)
SCALARS = st.dictionaries(IDS, st.booleans() | st.integers() | st.floats() | st.text(max_size=3), max_size=3)
BESTS = st.none() | st.builds(Best, st.floats(), st.floats(), st.integers(0, 9))
SELECTIONS = st.builds(
    Selection,
    BESTS,
    BESTS,
    st.dictionaries(IDS, st.builds(ClientLoss, st.floats(), st.floats()), max_size=3),
    st.booleans(),
)
MOMENTS = st.builds(
    OptimizerState,
    st.dictionaries(st.sampled_from(["exp_avg", "exp_avg_sq"]), SLOTS),
    st.dictionaries(st.sampled_from(["l/A", "l/B"]), st.integers(0, 99)),
)
STATES = st.builds(ClientState, SLOTS, st.dictionaries(IDS, st.tuples(MOMENTS, st.integers(0, 5)), max_size=2))
CHECKPOINTS = st.builds(
    Checkpoint,
    st.builds(ServerState, st.integers(0, 10**6), SLOTS, scalars=SCALARS),
    st.dictionaries(IDS, STATES, max_size=3),
    st.dictionaries(IDS, st.none() | st.integers(0, 9), max_size=3),
    SELECTIONS,
    st.dictionaries(
        st.sampled_from(["metrics.jsonl", "ledger.jsonl"]),
        st.builds(Position, st.integers(0, 10**12), st.text("0123456789abcdef", min_size=64, max_size=64)),
    ),
    st.dictionaries(st.sampled_from(["partition.json"]), st.text(max_size=8)),
    SCALARS,
    st.dictionaries(IDS, st.integers(0, 9), max_size=3),
)


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CHECKPOINTS)
def test_everything_comes_back(tmp_path_factory: pytest.TempPathFactory, checkpoint: Checkpoint) -> None:
    run = RunFolder(tmp_path_factory.mktemp("run"))
    folder = save(run, checkpoint)
    assert plain(load(folder)) == plain(checkpoint)
    assert plain(load_latest(run)) == plain(checkpoint)


def test_dtypes_base_and_order_come_back(run: RunFolder) -> None:
    pair = LowRank(torch.randn(4, 2), torch.randn(2, 4), 0.5)
    base = BaseUpdate().add(Increment(1, {"z": pair, "a": torch.randn(4, 4)})).add(Increment(2, {"z": pair}, 0.9))
    tensors = {
        "z/A": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "a/A": torch.empty(0),
        "b": torch.tensor(True),
    }
    checkpoint = Checkpoint(ServerState(2, tensors, base, {"m": torch.tensor(7, dtype=torch.int64)}, {"c": 1.0}, 3))
    save(run, checkpoint)
    back = load_latest(run)
    assert plain(back) == plain(checkpoint)
    assert list(back.state.tensors) == ["z/A", "a/A", "b"]
    assert list(back.state.base.total) == ["z", "a"]


def test_a_tensor_that_a_client_keeps_twice_is_stored_once(run: RunFolder) -> None:
    shared = torch.ones(10_000)
    folder = save(run, Checkpoint(ServerState(1), {"7": ClientState({"l/B": shared, "l/A": shared})}))
    (file,) = run.clients.rglob("*.safetensors")
    assert file.stat().st_size < 1.2 * shared.nbytes
    assert plain(load(folder).states["7"].memory["l/A"]) == plain(shared)
