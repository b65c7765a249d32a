"""What a node removes of runs that ended long ago, and what it never removes."""

import os
import time
from pathlib import Path

import pytest

from fedspan.clients.secagg_store import DiskSessionStore, Session
from fedspan.deployment.node_folder import LAST_REPLY, SESSIONS, STATE, TRAINING, get_run_folder, remove_old_states

LASTING = {"invitation.json", "serial", "noise.key", "adapter/adapter_model.safetensors"}


def write_run(folder: Path, run: str, days: float) -> Path:
    path = get_run_folder(folder, run)
    for name in (f"{STATE}/a/state.safetensors", f"{TRAINING}/step.safetensors", LAST_REPLY, *LASTING):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"content")
    then = time.time() - days * 86400
    for entry in (*path.iterdir(), path):
        os.utime(entry, (then, then))
    return path


def list_files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_state_of_a_run_without_an_order_for_a_month_is_removed(tmp_path: Path) -> None:
    old, recent, other = write_run(tmp_path, "old", 31), write_run(tmp_path, "recent", 29), tmp_path / "bases" / STATE
    other.mkdir(parents=True)
    (tmp_path / "budget.json").write_text("{}")
    before = list_files(recent)
    assert remove_old_states(tmp_path) == 1
    assert list_files(old) == LASTING
    assert list_files(recent) == before
    assert other.is_dir()
    assert (tmp_path / "budget.json").is_file()
    assert remove_old_states(tmp_path) == 0


@pytest.mark.parametrize("name", ["serial", "invitation.json"])
def test_a_run_that_has_had_an_order_since_keeps_its_state(name: str, tmp_path: Path) -> None:
    path = write_run(tmp_path, "old", 90)
    os.utime(path / name)
    before = list_files(path)
    assert remove_old_states(tmp_path) == 0
    assert list_files(path) == before


@pytest.mark.parametrize("days", [29, 31])
def test_a_secure_session_without_a_phase_for_a_month_loses_its_secrets_and_keeps_its_number(
    days: int, tmp_path: Path
) -> None:
    folder = get_run_folder(tmp_path / SESSIONS, "run")
    store = DiskSessionStore(folder)
    session = Session(run="run", number=7, phase="masked", secret=b"secret", sealed={"b": b"x"}, trained=(2, "model"))
    store.store("a", session)
    (path,) = folder.glob("*/session.json")
    then = time.time() - days * 86400
    os.utime(path, (then, then))
    remove_old_states(tmp_path)
    ended = Session(run="run", number=7, phase="unmasked", secret=b"", trained=(2, "model"))
    assert store.load("a") == (ended if days > 30 else session)
    assert path.stat().st_mode & 0o777 == 0o600
