"""Clients that join late or leave: a round is that of the clients present, and a resumed run has the same bits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedspan
from fedspan.core.values import Job, Message, Reduced
from fedspan.errors import FedspanError
from fedspan.federation.presence import Presence
from fedspan.federation.serialization import encode_state
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


def test_a_killed_run_resumes_with_the_same_bits_and_its_log_names_who_came_and_left(
    tiny_folder: Path, tmp_path: Path
) -> None:
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
