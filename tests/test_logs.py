"""Logs of JSON lines: every change of a line is noticed and named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedspan.errors import FedspanError
from fedspan.logs import EMPTY, AuditLog, JsonLines, LogFollower, Position, find_position, read_lines, require_position

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
