"""The ledger's sums, and logs that reach the disk round by round."""

import errno
import json
import math
import os
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedspan.errors import FedspanError
from fedspan.logs import EMPTY, JsonLines, encode_chain_line, read_lines
from fedspan.runs.ledger import Ledger, Totals, TrafficCount, read_totals

DIRECTIONS: tuple[Literal["down", "up"], ...] = ("down", "up")
ENTRIES = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.text(max_size=4) | st.sampled_from(["NaN", "a/b", "\n", "\u2028", "\udc80"]),
        st.sampled_from(DIRECTIONS),
        st.integers(0, 10**12),
        st.integers(0, 10**12),
    ),
    max_size=20,
)


def everything(totals: Totals) -> dict[str, object]:
    return {
        direction: (
            totals.run(direction),
            [totals.count_round(direction, round) for round in totals.rounds],
            [totals.count_client(direction, client) for client in totals.clients],
        )
        for direction in DIRECTIONS
    }


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ENTRIES)
def test_sums_are_rebuilt_from_a_file(tmp_path: Path, entries: list[tuple[int, str, Literal["up"], int, int]]) -> None:
    path = tmp_path / "ledger.jsonl"
    path.unlink(missing_ok=True)
    with Ledger(path) as ledger:
        for entry in entries:
            ledger.record(*entry)
        assert ledger.commit().length == path.stat().st_size
        assert everything(read_totals(path)) == everything(ledger.totals)
        assert read_totals(path).clients == tuple(sorted({entry[1] for entry in entries}))
        for direction in DIRECTIONS:
            of_direction = [entry for entry in entries if entry[2] == direction]
            assert ledger.totals.run(direction) == TrafficCount(
                len(of_direction), sum(entry[3] for entry in of_direction), sum(entry[4] for entry in of_direction)
            )
    with Ledger(path) as again:
        assert everything(again.totals) == everything(ledger.totals)
    assert len(path.read_bytes().splitlines()) == len(entries)


def test_by_round_and_client(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.record(1, "a", "down", 10, 8)
        ledger.record(1, "b", "down", 20, 16)
        ledger.record(2, "a", "up", 5, 4)
        ledger.record(2, "a", "down", 1, 0)
        totals = ledger.totals
    assert totals.run("down") == TrafficCount(3, 31, 24)
    assert totals.count_round("down", 1) == TrafficCount(2, 30, 24)
    assert totals.count_round("up", 1) == TrafficCount()
    assert totals.count_client("down", "a") == TrafficCount(2, 11, 8)
    assert (totals.rounds, totals.clients) == ((1, 2), ("a", "b"))


def test_what_is_not_for_training_is_counted_apart(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.record(1, "a", "down", 10, 8)
        ledger.record(1, "b", "down", 30, 16, "evaluate")
        ledger.record(1, "b", "down", 5, 4, "export")
        ledger.commit()
    for totals in (ledger.totals, read_totals(path)):
        assert totals.run("down") == totals.count_purpose("down", "train") == TrafficCount(1, 10, 8)
        assert totals.clients == ("a",)
        assert totals.out_of_round == {"evaluate": {"down": 30, "up": 0}, "export": {"down": 5, "up": 0}}


def test_lines_reach_the_file_at_the_commit_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        lines.append({"round": 1})
        assert path.read_bytes() == b""
        end = lines.commit()
        assert end.length == path.stat().st_size > 0
        assert lines.commit() == end
        lines.append({"round": 2})
    assert list(read_lines(path)) == [{"round": 1}], "a round that was not committed is dropped"
    with JsonLines(path) as lines:
        lines.append({"round": 2})
        assert lines.commit().length == path.stat().st_size == 2 * end.length


def test_metrics_are_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    row = {"loss": math.nan, "bound": -math.inf, "exact": 0.1, "name": "NaN", "clients": {"a": math.inf}, "seen": 3}
    with JsonLines(path) as lines:
        lines.append(row)
        with pytest.raises(TypeError):
            lines.append({"loss": torch.ones(())})
        lines.commit()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    strict = json.loads(path.read_text(), parse_constant=refuse)
    assert len(strict.pop("chain")) == 64
    assert strict == {"loss": None, "bound": None, "exact": 0.1, "name": "NaN", "clients": {"a": None}, "seen": 3}
    assert list(read_lines(path)) == [strict]


@pytest.mark.parametrize("step", ["write", "fsync"])
def test_a_full_disk_adds_no_line_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "metrics.jsonl"
    real = getattr(os, step)
    with JsonLines(path) as lines:
        lines.append({"round": 1})
        lines.commit()
        lines.append({"round": 2})

        def half(descriptor: int, *data: memoryview) -> None:
            real(descriptor, *(part[:5] for part in data))
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, step, half)
            with pytest.raises(FedspanError, match=r"the disk is full\. The last finished round is intact"):
                lines.commit()
        assert list(read_lines(path)) == [{"round": 1}]
        lines.commit()
    assert list(read_lines(path)) == [{"round": 1}, {"round": 2}]


def test_no_file_is_no_rows(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "none.jsonl")) == []
    assert read_totals(tmp_path / "none.jsonl").run("up") == TrafficCount()


@pytest.mark.parametrize("line", [b"\xff\xfe", b"{", b"[1]", b"null", b"", b"[" * 100_000])
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    head, first = encode_chain_line(EMPTY.head, {"round": 1})
    path.write_bytes(first + line + b"\n" + encode_chain_line(head, {"round": 3})[1])
    with pytest.raises(FedspanError, match=r"metrics\.jsonl, line 2"):
        list(read_lines(path))


@pytest.mark.parametrize(
    "change",
    [
        {"direction": "sideways"},
        {"bytes": "many"},
        {"client": None},
        {"round": 1.5},
        {"purpose": "fun"},
        {"purpose": []},
    ],
)
def test_an_entry_of_another_kind_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "ledger.jsonl"
    entry = {"round": 1, "client": "a", "direction": "up", "bytes": 3, "payload": 2}
    with JsonLines(path) as lines:
        lines.append(entry)
        lines.append({**entry, **change})
        lines.commit()
    with pytest.raises(FedspanError, match=r"ledger\.jsonl, line 2"):
        Ledger(path)
