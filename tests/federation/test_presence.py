"""Clients that join late, leave, or are not waited for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fedspan
from fedspan.core.values import Job, Message, Reduced
from fedspan.errors import FedspanError
from fedspan.federation import out_of_round
from fedspan.federation.absences import Absences, Awaited
from fedspan.federation.conditions import Conditions
from fedspan.federation.presence import Presence
from fedspan.federation.progress import RoundResult
from fedspan.federation.reported_evaluation import RemoteEvaluator
from fedspan.federation.serialization import encode_state
from fedspan.federation.transport import Orders, Transport
from fedspan.runs.setup import Prepared, prepare
from fedspan.training.jobs import Assignment
from helpers import tiny

PRESENT = {"north": [2, None], "south": [1, 2], "west": [2, 3]}
"""East is there all the time."""
BY_ROUND = [["east", "south"], ["east", "north", "south", "west"], ["east", "north", "west"], ["east", "north"]]


def build(folder: Path, **changes: Any) -> Prepared:
    federation = {"clients_per_round": None, "rounds": 4, "clip_ratio": None, **changes.pop("federation", {})}
    changes = {"simulation": {"present": PRESENT}, "training": {"local_steps": 1}, **changes}
    return prepare(tiny.config(folder, federation=federation, **changes))


def test_clients_are_present_between_their_first_and_last_round() -> None:
    presence = Presence({"a": ((1, 3), (5, None)), "b": ((0, 2),)})
    assert [presence.is_present("a", round) for round in range(7)] == [False, True, True, False, False, True, True]
    assert [presence.select_present("cba", round) for round in (0, 1, 2, 5)] == [
        ["c", "b"], ["c", "b", "a"], ["c", "a"], ["c", "a"]
    ]  # fmt: skip
    assert [presence.list_changes(round) for round in (0, 1, 2, 3, 4, 5)] == [
        ((), ()), (("a",), ()), ((), ("b",)), ((), ("a",)), ((), ()), (("a",), ())
    ]  # fmt: skip
    changed = Presence({"b": ()}).change(1, {"a", "b"}, {"c"}).change(3, (), {"a", "b"}).change(5, {"a"}, ())
    assert changed.spans == {"a": ((1, 3), (5, None)), "b": ((1, 3),), "c": ((0, 1),)}
    presence.require_enough(3, 0, 2)
    with pytest.raises(FedspanError, match=r"1 of 3 clients are present in round 4\. Expected at least 2 \(federation"):
        presence.require_enough(3, 3, 2)


@pytest.mark.parametrize("key", [pytest.param("fedit", marks=pytest.mark.slow), "fedsa-lora"])
def test_a_round_is_a_plain_loop_over_the_clients_present(key: str, tiny_folder: Path) -> None:
    """The oracle trains the present clients one by one and averages by examples; FedSA-LoRA keeps B on the client."""
    prepared = build(tiny_folder, method={"name": key, "r": 2}, engine={"name": "loop"})
    federation, engine = prepared.federation, prepared.engine
    method, progress = federation.method, federation.begin()
    memories: dict[str, Any] = {}
    state, last_rounds = progress.state, dict[str, int]()
    for round, ids in enumerate(BY_ROUND):
        result = federation.run_round(progress)
        progress = result.progress
        assert list(result.cohort) == ids
        assert not result.failures
        assert not result.late
        replies = dict[str, Message]()
        engine.adapted.set_base(state.base)
        for id in ids:
            data = federation.clients[id]
            client = replace(data.client, last_round=last_rounds.get(id))
            job = method.start(method.sync(state, client), client, memories.get(id, {}), round)
            lr = federation.training.compute_lr(round, 4)
            trained = engine.train(Assignment(id, round, job, data.train, lr), federation.examples)
            reply, memories[id] = method.finish(job, trained, client, memories.get(id, {}), round)
            assert not isinstance(reply, Job)
            replies[id], last_rounds[id] = reply, round
        total = sum(tiny_examples := [len(federation.clients[id].train) for id in ids])
        names = replies[ids[0]].tensors
        mean = {
            name: sum(
                (count / total) * replies[id].tensors[name].double()
                for id, count in zip(ids, tiny_examples, strict=True)
            )
            for name in names
        }
        mean = {name: torch.as_tensor(value).to(names[name].dtype) for name, value in mean.items()}
        state = method.update(state, Reduced(mean=mean, count=len(ids)))
        for name, value in state.tensors.items():
            torch.testing.assert_close(progress.state.tensors[name], value, rtol=1e-5, atol=1e-7)
        assert progress.last_rounds == last_rounds
    assert set(progress.states) == set(memories)


@pytest.mark.parametrize("cohort", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_cohorts_and_metrics_are_of_the_clients_present(cohort: int | None, tiny_folder: Path) -> None:
    prepared = build(tiny_folder, federation={"clients_per_round": cohort})
    progress = prepared.federation.begin()
    for ids in BY_ROUND:
        result = prepared.federation.run_round(progress)
        assert len(result.cohort) == min(cohort or 4, len(ids))
        assert set(result.cohort) <= set(ids)
        progress = result.progress
        validation, _ = prepared.evaluator.evaluate_clients(progress)
        assert set(validation.by_client) <= set(ids)


def test_a_secure_sum_has_the_clients_present(tiny_folder: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra fedspan[secagg] is not installed")
    simulation = {"present": {"north": [2, None]}}
    plain = build(tiny_folder, simulation=simulation, federation={"rounds": 2})
    secure = build(tiny_folder, simulation=simulation, federation={"rounds": 2, "secure": {"bits": 64}})
    mine, theirs = plain.federation.begin(), secure.federation.begin()
    for count in (3, 4):
        result = secure.federation.run_round(theirs)
        mine, theirs = plain.federation.run_round(mine).progress, result.progress
        assert len(result.cohort) == count
        for name, value in mine.state.tensors.items():
            torch.testing.assert_close(theirs.state.tensors[name], value, rtol=1e-4, atol=1e-5)


def test_a_killed_run_resumes_to_the_bit_and_logs_who_came_and_left(tiny_folder: Path, tmp_path: Path) -> None:
    class Stop(fedspan.Listener):
        def on_round_finish(self, row: Any) -> None:
            if row["round"] == 2:
                raise KeyboardInterrupt

    federation = {"clients_per_round": None, "rounds": 4}
    config = tiny.config(tiny_folder, federation=federation, simulation={"present": PRESENT})
    fedspan.run(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(config, tmp_path / "killed", listener=Stop())
    fedspan.resume(tmp_path / "killed")
    rows = [json.loads(line) for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["round"]]
    assert [row["cohort"] for row in rows] == BY_ROUND
    assert [row.get("joined") for row in rows] == [None, ["north", "west"], None, None]
    assert [row.get("left") for row in rows] == [None, None, ["south"], ["west"]]
    weights = [(tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1]


def test_a_federation_without_late_clients_is_what_it_was(tiny_folder: Path) -> None:
    every = build(tiny_folder, simulation={"present": {"north": [1, None]}})
    usual = build(tiny_folder, simulation={})
    one = every.federation.run_round(every.federation.begin())
    other = usual.federation.run_round(usual.federation.begin())
    assert encode_state(one.progress.state) == encode_state(other.progress.state)
    assert one.transfers == other.transfers


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


def test_a_client_that_is_back_and_slow_counts_again(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_outlier_replaces_no_reply_of_a_client_that_is_back(
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
