"""Clients that a round does not wait for: counted from the rounds' draws, and waited for now and then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedspan.federation import out_of_round
from fedspan.federation.absences import Absences, Awaited
from fedspan.federation.conditions import Conditions
from fedspan.federation.progress import RoundResult
from fedspan.federation.reported_evaluation import RemoteEvaluator
from fedspan.federation.serialization import encode_state
from fedspan.federation.transport import Orders, Transport
from fedspan.runs.setup import Prepared, prepare
from helpers import tiny

IDS = tuple(sorted(tiny.SITES))
GONE = IDS[0]


def test_an_absent_client_is_waited_for_after_two_four_eight_times_the_limit() -> None:
    absences = Absences(lambda number: ["a", "b"])
    absent = [round for round in range(20) if absences.find(round, ["a", "b"], {"b": round - 1}, 2)]
    assert absent == [2, 3, 5, 6, 7, *range(9, 16), 17, 18, 19]
    assert absences.find(5, ["a", "b"], {"a": 3, "b": 4}, 2) == frozenset()
    assert absences.find(5, ["a", "b"], {"a": 2, "b": 4}, 2) == {"a"}
    assert absences.find(5, ["a", "b"], {"b": 4}, None) == frozenset()


def test_only_rounds_in_which_a_client_was_selected_count() -> None:
    absences = Absences(lambda number: ["a", "b"] if number % 3 == 0 else ["b"])
    assert [round for round in range(10) if absences.find(round, ["a", "b"], {"b": round - 1}, 2)] == [4, 5, 6, 7, 8, 9]


def test_a_cohort_of_absent_clients_is_waited_for() -> None:
    absences = Absences(lambda number: ["a", "b"])
    assert absences.find(3, ["a", "b"], {}, 2) == frozenset()


def test_an_exchange_continues_when_the_others_have_replied_and_suffice() -> None:
    awaited = Awaited(["a", "b", "c"], ["c"])
    assert not awaited.is_over("a", lambda: ["a"], 2)
    assert awaited.is_over("b", lambda: ["a", "b"], 2)
    few = Awaited(["a", "b", "c"], ["c"])
    assert not few.is_over("a", lambda: ["a"], 2)
    assert not few.is_over("b", lambda: ["a"], 2)  # it failed: the absent one is needed
    assert few.is_over("c", lambda: ["a", "c"], 2)
    everyone = Awaited(["a", "b"], [])
    assert not any(everyone.is_over(id, lambda: ["a", "b"], 1) for id in "ab")


def built(folder: Path, simulation: Mapping[str, Any] | None = None, **federation: Any) -> Prepared:
    speed = {"distribution": "constant", "median": 1e6}
    changes: Mapping[str, Any] = {"simulation": {"speed": speed, **(simulation or {})}}
    given = {"clients_per_round": None, "deadline": 50.0, "rounds": 6, **federation}
    return prepare(tiny.config(folder, federation=given, **changes))


def rounds(prepared: Prepared, count: int) -> list[RoundResult]:
    progress, results = prepared.federation.begin(), list[RoundResult]()
    for _ in range(count):
        results.append(prepared.federation.run_round(progress))
        progress = results[-1].progress
    return results


@pytest.mark.parametrize("secure", [None, pytest.param({}, marks=pytest.mark.slow)], ids=["plaintext", "secure"])
def test_a_silent_client_costs_two_deadlines_and_not_every_round_s(
    secure: dict[str, Any] | None, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if secure is not None:
        pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")
        pytest.importorskip("cryptography", reason="the extra fedspan[secagg] is not installed")
    phase = "train" if secure is None else "keys"
    monkeypatch.setattr(Conditions, "draw_silence", lambda self, client, *rest: phase if client == GONE else None)
    results = rounds(built(tiny_folder, secure=secure), 5)
    seconds = [result.simulated_seconds or 0.0 for result in results]
    assert [number for number, spent in enumerate(seconds) if spent >= 50] == [0, 1, 4]
    assert max(seconds[2:4]) < 1
    assert all(GONE in result.cohort and GONE not in result.progress.last_rounds for result in results)
    assert all({one.client for one in result.transfers if one.direction == "down"} == set(IDS) for result in results)
    again = built(tiny_folder, secure=secure)  # as a run that was stopped and resumed
    resumed = again.federation.run_round(results[1].progress)
    assert resumed.simulated_seconds == seconds[2]
    assert encode_state(resumed.progress.state) == encode_state(results[2].progress.state)
    everybody = rounds(built(tiny_folder, secure=secure, max_missed_rounds=None), 3)
    assert all((result.simulated_seconds or 0) >= 50 for result in everybody)


def test_a_client_that_is_back_and_slower_than_all_others_counts_again(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Conditions,
        "draw_silence",
        lambda self, client, round, *rest: "train" if client == GONE and round < 2 else None,
    )
    monkeypatch.setattr(Conditions, "compute_seconds", lambda self, client, examples: 9.0 if client == GONE else 1.0)
    results = rounds(built(tiny_folder), 6)
    assert [result.progress.last_rounds.get(GONE) for result in results] == [None, None, None, None, 4, 5]
    assert [result.simulated_seconds for result in results] == [50.0, 50.0, 1.0, 1.0, 9.0, 9.0]
    assert [result.late for result in results] == [(), (), (GONE,), (GONE,), (), ()]


def test_an_outlier_does_not_replace_the_reply_of_a_client_that_is_back_and_slow(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile, began = IDS[1], [False]
    monkeypatch.setattr(
        Conditions,
        "draw_silence",
        lambda self, client, round, *rest: "train" if client == GONE and round < 2 else None,
    )
    monkeypatch.setattr(Conditions, "compute_seconds", lambda self, client, examples: 9.0 if client == GONE else 1.0)
    monkeypatch.setattr(Conditions, "draw_faulty", lambda self, ids: frozenset({hostile} if began[0] else ()))
    scaled = {"faults": {"share": 0.25, "kind": "scale", "factor": 1000.0}}
    last = rounds(built(tiny_folder, scaled, min_replies=3), 2)[-1]
    began[0] = True
    result = built(tiny_folder, scaled, min_replies=3).federation.run_round(last.progress)
    assert result.progress.last_rounds[GONE] == 2
    assert [(one.client, one.attempt) for one in result.failures] == [(hostile, 0)]
    assert result.simulated_seconds == 9.0


def test_an_evaluation_does_not_wait_for_an_absent_client(tiny_folder: Path) -> None:
    federation = built(tiny_folder).federation
    asked, ended, replies = list[str](), list[str](), dict[str, str]()

    class Silent(Transport):
        def begin(self, *args: object) -> None: ...

        def exchange(self, orders: Orders, on_reply: Callable[[str, str], bool], *args: object) -> None:
            asked.extend(orders)
            ended.extend(id for id in IDS[1:] if on_reply(id, replies.get(id, "it failed")))

    start = federation.begin()
    progress = replace(start, state=replace(start.state, round=3), last_rounds={id: 2 for id in IDS if id != GONE})
    evaluator = RemoteEvaluator(federation.replace_transport(Silent()), 8)
    evaluator.evaluate_clients(progress)
    assert tuple(asked) == IDS
    assert not ended  # nobody was measured yet: the absent one is needed
    with pytest.MonkeyPatch.context() as patch:
        scores = SimpleNamespace(task="evaluate", round=3, scores={})
        patch.setattr(out_of_round, "open_reply", lambda id: SimpleNamespace(**vars(scores), id=id))
        replies.update({id: id for id in IDS})
        evaluator.evaluate_clients(progress)
        assert ended == [IDS[-1]]
        evaluator.evaluate_clients(replace(progress, last_rounds=dict.fromkeys(IDS, 2)))
        assert ended == [IDS[-1]]  # of nobody absent, everyone is waited for
