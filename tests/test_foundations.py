"""Logs, private files, writes in parts, safe cells, processes that belong together, and packages' entry points."""

import csv
import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedspan import processes
from fedspan.errors import FedspanError
from fedspan.experiments.tables import Table, write_tables
from fedspan.files import make_private_folder, neutralize_formula, write_atomic
from fedspan.logs import EMPTY, AuditLog, JsonLines, LogFollower, Position, find_position, read_lines, require_position
from fedspan.packages import load_installed
from fedspan.processes import hold_folder, read_process_start
from fedspan.tasks.settings import TaskSettings
from helpers.command_line import done
from helpers.refusals import refused

ROWS = [{"round": number, "loss": number / 10, "who": "näme"} for number in range(1, 5)]


def written(path: Path) -> list[Position]:
    """A log of four lines, and its end after each."""
    positions: list[Position] = []
    with JsonLines(path) as lines:
        for row in ROWS:
            lines.append(row)
            positions.append(lines.commit())
    return positions


def test_rows_come_back_and_the_chain_continues(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    positions = written(path)
    assert list(read_lines(path)) == ROWS
    assert find_position(path) == positions[-1]
    with JsonLines(path) as lines:
        lines.append({"round": 5})
        last = lines.commit()
    for position in (EMPTY, *positions, last):
        require_position(path, position)
    heads = [json.loads(line)["chain"] for line in path.read_text().splitlines()]
    assert heads == [position.head for position in (*positions, last)]


@settings(deadline=None, max_examples=75, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.integers(0, 7))
def test_every_turned_bit_is_noticed_and_its_line_named(tmp_path: Path, at: int, bit: int) -> None:
    path = tmp_path / "log.jsonl"
    path.unlink(missing_ok=True)
    end = written(path)[-1]
    content = bytearray(path.read_bytes())
    at %= len(content)
    number = content[:at].count(b"\n") + 1
    content[at] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(FedspanError) as caught:
        require_position(path, end)
    assert f"log.jsonl, line {number}" in str(caught.value)
    with pytest.raises(FedspanError, match=f"line {number}`"):
        list(read_lines(path))
    with pytest.raises(FedspanError, match=f"line {number}`"):  # which would cut a line that was written in part
        JsonLines(path)


@pytest.mark.parametrize("change", ["removed", "twice", "swapped", "added"])
def test_lines_that_were_moved_are_named(tmp_path: Path, change: str) -> None:
    path = tmp_path / "log.jsonl"
    end = written(path)[-1]
    one, two, three, four = path.read_bytes().splitlines(keepends=True)
    made = {
        "removed": [one, three, four],
        "twice": [one, one, two, three, four],
        "swapped": [one, three, two, four],
        "added": [one, b'{"round": 9}\n', two, three, four],
    }
    path.write_bytes(b"".join(made[change]))
    with pytest.raises(FedspanError, match="line 2`: the line was changed after it was written, or a line before it"):
        require_position(path, end)


def test_a_log_that_was_shortened_or_rewritten_is_not_that_of_a_checkpoint(tmp_path: Path) -> None:
    path, other = tmp_path / "log.jsonl", tmp_path / "other.jsonl"
    positions = written(path)
    with JsonLines(other) as lines:
        for row in ROWS:
            lines.append({**row, "loss": 0.9})
        lines.commit()
    whole, forged = path.read_bytes(), other.read_bytes()
    assert len(whole) == len(forged)
    path.write_bytes(forged)
    assert len(list(read_lines(path))) == 4, "its own chain holds"
    with pytest.raises(FedspanError, match=r"a log of another run, or was rewritten as a whole"):
        require_position(path, positions[-1])
    path.write_bytes(whole[: positions[2].length])
    require_position(path, positions[2])
    with pytest.raises(FedspanError, match=f"ended at byte {positions[3].length}, and the file has"):
        require_position(path, positions[3])


def test_a_line_that_was_written_in_part_is_skipped_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    end = written(path)[-1]
    with path.open("ab") as file:
        file.write(b'{"round": 5, "lo')
    assert list(read_lines(path)) == ROWS
    with JsonLines(path) as lines:
        assert path.stat().st_size == end.length
        lines.append({"round": 5})
        lines.commit()
    assert list(read_lines(path)) == [*ROWS, {"round": 5}]


def test_an_audit_log_takes_entries_of_several_processes_and_continues_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "audit.jsonl"
    code = "import sys; from pathlib import Path; from fedspan.logs import AuditLog\n"
    code += "for n in range(25): AuditLog(Path(sys.argv[1])).write('asked', who=sys.argv[2], n=n)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), who], env=environment) for who in "ab"]
    assert [one.wait(120) for one in writers] == [0, 0]
    rows = AuditLog(path).read()
    assert sorted((str(row["who"]), int(str(row["n"]))) for row in rows) == [(w, n) for w in "ab" for n in range(25)]
    with path.open("ab") as file:
        file.write(b'{"time": "2026-')  # a process was killed while it wrote
    AuditLog(path).write("answered", text="ü" * 100_000)  # a line longer than what is read of the end at once
    AuditLog(path).write("answered")
    assert [row["event"] for row in AuditLog(path).read()][-3:] == ["asked", "answered", "answered"]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("change", ["edited", "removed"])
def test_a_changed_audit_log_is_noticed(tmp_path: Path, change: str) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    for node in ("a", "b", "c"):
        log.write("admitted", node=node)
    one, two, three = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(one + (two.replace(b'"b"', b'"x"') if change == "edited" else b"") + three)
    with pytest.raises(FedspanError, match="line 2`: the line was changed"):
        log.read()


@pytest.mark.parametrize("entries", [1, 2])
def test_a_turned_bit_of_the_last_newline_loses_no_entry(tmp_path: Path, entries: int) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    for number in range(entries):
        log.write("admitted", node=str(number))
    content = log.path.read_bytes()
    log.path.write_bytes(content[:-1] + b"\x0b")
    for use in (log.read, lambda: log.write("revoked", node="0")):
        with pytest.raises(FedspanError, match="the last line was changed"):
            use()
    assert log.path.read_bytes()[:-1] == content[:-1]


def test_nothing_is_appended_to_what_is_no_audit_log(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text("notes\n")
    with pytest.raises(FedspanError, match="the last line is not one of an audit log"):
        AuditLog(path).write("asked")
    assert path.read_text() == "notes\n"


def write_rows(path: Path, *numbers: int) -> None:
    with JsonLines(path) as lines:
        for number in numbers:
            lines.append({"round": number, "text": "x" * number})
        lines.commit()


def test_a_follower_reads_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = LogFollower(path)
    assert follower.read() == ([], True)
    write_rows(path, 1, 2)
    rows, is_restarted = follower.read()
    assert ([row["round"] for row in rows], is_restarted) == ([1, 2], True)
    assert follower.read() == ([], False)
    whole = path.read_bytes()
    write_rows(path, 3)
    longer = path.read_bytes()
    path.write_bytes(longer[:-4])  # a line that is being written
    assert follower.read() == ([], False)
    path.write_bytes(longer)
    rows, is_restarted = follower.read()
    assert ([row["round"] for row in rows], is_restarted) == ([3], False)
    path.write_bytes(whole)  # truncated, by a run that resumes
    rows, is_restarted = follower.read()
    assert ([row["round"] for row in rows], is_restarted) == ([1, 2], True)


def test_a_follower_begins_again_where_lines_were_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = LogFollower(path)
    write_rows(path, 1, 2)
    follower.read()
    path.unlink()
    write_rows(path, 1, 5, 6)  # longer than before
    rows, is_restarted = follower.read()
    assert ([row["round"] for row in rows], is_restarted) == ([1, 5, 6], True)
    path.unlink()
    assert follower.read() == ([], True)


def test_a_follower_names_a_changed_line_and_reads_no_more_than_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, 1, 2, 3, 4)
    follower, read = LogFollower(path, limit=250), list[object]()
    for _ in range(4):
        rows, _ = follower.read()
        assert len(rows) < 4
        read += [row["round"] for row in rows]
    assert read == [1, 2, 3, 4]
    write_rows(path, 300)
    with pytest.raises(FedspanError, match=r"line 5.*a line of at most 250 bytes"):
        [follower.read() for _ in range(9)]
    changed = tmp_path / "changed.jsonl"
    changed.write_bytes(path.read_bytes().replace(b'"round": 2', b'"round": 9'))
    with pytest.raises(FedspanError, match="line 2"):
        LogFollower(changed).read()


@pytest.mark.skipif(os.name != "posix", reason="only POSIX has modes")
def test_a_private_folder_is_new_empty_or_private_already(tmp_path: Path) -> None:
    new, empty, own, shared = (tmp_path / name for name in ("a/new", "empty", "own", "a shared one"))
    for path, mode in ((empty, 0o755), (own, 0o700), (shared, 0o750)):
        path.mkdir()
        path.chmod(mode)
    for path in (own, shared):
        (path / "server.db").touch()
    for path in (new, empty, own):
        make_private_folder(path, "--folder")
        assert path.stat().st_mode & 0o777 == 0o700
    with refused("--folder"):
        make_private_folder(shared, "--folder")
    assert shared.stat().st_mode & 0o777 == 0o750  # whoever shares it decides
    with refused("folder"):
        make_private_folder(own / "server.db", "folder")


def test_a_write_that_takes_only_part_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    write_atomic(tmp_path / "file", b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"


FORMULA = '=HYPERLINK("http://192.0.2.1","look")'


@pytest.mark.parametrize("cell", [FORMULA, "+1+cmd|' /C calc'!A0", "-a", "@SUM(A1)", "\t=1", "\r=1", "-1-1"])
def test_formulas_become_text(cell: str) -> None:
    assert neutralize_formula(cell) == f"'{cell}"


@pytest.mark.parametrize("cell", ["", "-0.25", "+3", "-1e-5", "a=b", "label", "'=1"])
def test_numbers_and_other_texts_stay_as_they_are(cell: str) -> None:
    assert neutralize_formula(cell) == cell


def test_predictions_in_a_table_are_no_formulas(
    call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import fedspan

    monkeypatch.setattr(fedspan, "predict", lambda *_: [("=1+1", 0.5), ("lab", 0.25)])
    settings = TaskSettings("sequence-classification", ("lab", "admin"), 8, "accuracy")
    notes = {**asdict(settings), "base_model": "base", "client": None, "kept": []}
    (tmp_path / "fedspan.json").write_text(json.dumps(notes))
    (tmp_path / "texts.txt").write_text(f"{FORMULA}\n-2\n")
    lines = done(call("predict", tmp_path, "--file", tmp_path / "texts.txt")).splitlines()
    assert lines == [f"'=1+1\t0.5000\t'{FORMULA}", "lab\t0.2500\t-2"]


def test_the_table_of_a_comparison_has_no_formulas(tmp_path: Path) -> None:
    table = Table(("method",), (("fedit",),), None, ())
    write_tables(tmp_path, "title", table, [{"method": FORMULA, "score": -0.5, "note": None}], ["fedspan"], [])
    with (tmp_path / "table.csv").open(newline=os.linesep) as file:
        assert list(csv.DictReader(file)) == [{"method": f"'{FORMULA}", "score": "-0.5", "note": ""}]


CHILD = """
    import os, sys, time
    from functools import partial
    from fedspan.processes import end_with_parent
    end_with_parent(partial(os.read, 0, 1))
    print("started", flush=True)
    time.sleep(600)
"""
WORKER = """
    import sys, time
    from pathlib import Path
    from fedspan.processes import hold_folder, read_process_start
    with hold_folder(Path(sys.argv[1]), "worker", "folder"):
        print("started", flush=True)
        time.sleep(600)
"""


@contextmanager
def start(code: str, *arguments: str) -> Generator[subprocess.Popen[bytes]]:
    """Run a process until the end of the context."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"started\n"
            yield process
        finally:
            process.kill()


def test_a_child_ends_when_the_other_end_of_its_input_is_gone() -> None:
    with start(CHILD) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(30) == 1


def test_a_second_process_is_refused_with_the_first_one_s_id_and_let_in_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_ENDING", 0.2)
    with start(WORKER, str(tmp_path)) as other:
        with (
            pytest.raises(FedspanError, match=rf"process {other.pid} works in .* or stop it: kill {other.pid}"),
            hold_folder(tmp_path, "worker", "folder"),
        ):
            pass
        with hold_folder(tmp_path, "node", "folder"):  # another role
            pass
        other.kill()
    with hold_folder(tmp_path, "worker", "folder"):
        assert (tmp_path / "worker.lock").read_text().startswith(f"{os.getpid()}\n")


def test_a_process_that_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    with start(WORKER, str(tmp_path)) as other:
        os.kill(other.pid, signal.SIGKILL)
        with hold_folder(tmp_path, "worker", "folder"):
            pass


def test_what_a_lock_file_says_is_only_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_ENDING", 0.1)
    for content, name in {"rubbish": "another process", "12\nelsewhere\n": "process 12 on elsewhere"}.items():
        with start(WORKER, str(tmp_path)) as other:
            (tmp_path / "worker.lock").write_text(content)
            with (
                pytest.raises(FedspanError, match=rf"{name} works in .*, or stop it\.?$"),
                hold_folder(tmp_path, "worker", "folder"),
            ):
                pass
            other.kill()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc on this machine")
def test_the_start_of_a_process_is_its_own() -> None:
    start = read_process_start(os.getpid())
    assert start is not None
    process = subprocess.Popen(["sleep", "60"])
    try:
        child = read_process_start(process.pid)
        assert child is not None
        assert start < child <= time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")
    finally:
        process.kill()
        process.wait()
    assert read_process_start(process.pid) is None


def test_an_object_is_loaded_by_its_group_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "declared_package.py").write_text("VALUE = ['declared']\n")
    (tmp_path / "broken_package.py").write_text("raise RuntimeError('half installed')\n")
    info = tmp_path / "declared_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: declared-package\nVersion: 1.0\n")
    lines = ["[fedspan.methods]", "mine = declared_package:VALUE", "broken = broken_package:VALUE"]
    (info / "entry_points.txt").write_text("\n".join([*lines, "lost = declared_package:NOTHING", ""]))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert load_installed("fedspan.methods", "mine", "method.name") == ("declared_package:VALUE", ["declared"])
    assert load_installed("fedspan.tasks", "mine", "task") is None
    assert load_installed("fedspan.methods", "yours", "method.name") is None
    for name, reason in (
        ("broken", r"broken_package:VALUE cannot be imported \(RuntimeError: half installed\)"),
        ("lost", r"declared_package:NOTHING cannot be imported \(AttributeError: .*NOTHING"),
    ):
        with pytest.raises(FedspanError, match=reason) as caught:
            load_installed("fedspan.methods", name, "method.name")
        assert (caught.value.field, caught.value.value) == ("method.name", name)
