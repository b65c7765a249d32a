"""How a cohort is cut into stacks, how workers share them, and evaluations on workers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ray", reason="the extra fedspan[cluster] is not installed")

import ray

from fedspan.errors import FedspanError
from fedspan.federation.progress import Progress
from fedspan.runs.cluster import connect_workers, get_resources
from fedspan.runs.setup import Prepared, prepare
from fedspan.training.stages import Stage, Stages
from fedspan.transports.ray.predictor import ClusterPredictor
from fedspan.transports.ray.team import Piece, Queues, Team, open_team
from fedspan.transports.ray.transport import cut_stacks
from helpers import tiny

WORK = st.dictionaries(st.text(max_size=3), st.integers(0, 10_000), max_size=60)


@given(work=WORK, most=st.integers(1, 40), workers=st.integers(1, 8))
def test_stacks_hold_every_client_once_and_the_largest_first(work: dict[str, int], most: int, workers: int) -> None:
    stacks = cut_stacks(work, most, workers)
    clients = [id for stack in stacks for id in stack]
    assert sorted(clients) == sorted(work)
    assert [work[id] for id in clients] == sorted(work.values(), reverse=True)
    assert all(1 <= len(stack) <= min(most, math.ceil(len(work) / workers)) for stack in stacks)
    assert cut_stacks(dict(reversed(work.items())), most, workers) == stacks  # from the data alone


@given(count=st.integers(1, 100), most=st.integers(1, 40), workers=st.integers(1, 8))
def test_equal_clients_occupy_all_workers_equally(count: int, most: int, workers: int) -> None:
    stacks = cut_stacks({f"{number:03}": 7 for number in range(count)}, most, workers)
    sizes = [len(stack) for stack in stacks]
    assert max(sizes) - min(sizes) <= 1
    assert len(stacks) % workers == 0 or max(sizes) == 1


def test_a_client_with_half_of_the_work_has_a_stack_of_its_own() -> None:
    work = {"large": 800, **{f"small-{number}": 100 for number in range(8)}}
    stacks = cut_stacks(work, 8, 2)
    assert stacks[0] == ["large"]
    assert {len(stack) for stack in stacks[1:]} <= {3, 4, 5}


def test_an_idle_worker_takes_the_last_piece_of_the_busiest() -> None:
    pieces = [Piece(str(number), load) for number, load in enumerate([9, 5, 4, 8, 1])]
    queues = Queues([pieces[:3], pieces[3:], []])
    assert queues.take(1) is pieces[3]
    assert queues.take(2) is pieces[2]  # nothing of its own
    queues.put_back(pieces[3])
    assert queues.take(0) is pieces[3]  # a lost piece goes first
    last = [queues.take(1) for _ in range(4)]
    assert [piece.content for piece in last if piece is not None] == ["4", "1", "0"]
    assert last[-1] is None
    assert not queues


def test_pieces_that_cannot_move_wait_for_their_worker() -> None:
    """As the hidden states that a worker computes for the clients that it will train."""
    pieces, lost = [Piece(number, 1) for number in range(3)], set[int]()
    queues = Queues([pieces[:1], pieces[1:], []], lost.__contains__)
    assert queues.take(2) is None
    assert queues.take(0) is pieces[0]
    assert queues.take(0) is None
    queues.put_back(pieces[0])
    assert queues.take(2) is pieces[0]  # its worker died
    lost.add(1)
    assert queues.take(2) is pieces[2]
    assert queues.take(1) is pieces[1]
    assert not queues


METHODS = ("fedit", "fedsa-lora", "fedgalore")
"""One model for all clients, one for each client, and a base that changes."""
ENGINES = ({"name": "loop"}, {"name": "batched", "clients_per_pass": 3, "workers": 1})


def config(folder: Path, method: str, engine: dict[str, Any], **changes: Any) -> Any:
    changes = {"federation": {"clients_per_round": None}, "evaluation": {"batch_size": 3}, **changes}
    cluster = {"workers": 2, "start_timeout": 60.0}
    return tiny.config(folder, method={"name": method, "r": 2}, engine=engine, cluster=cluster, **changes)


@pytest.fixture(scope="module")
def team(tiny_folder: Path) -> Iterator[Team]:
    with open_team(get_resources(config(tiny_folder, "fedit", {}))) as made:
        yield made


def evaluate(prepared: Prepared, progress: Progress) -> tuple[Any, ...]:
    evaluator = prepared.evaluator
    assert prepared.test is not None
    parts = [np.arange(len(prepared.test)), np.arange(2)]
    return *evaluator.evaluate_clients(progress), evaluator.evaluate_parts(progress, prepared.test, parts)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine["name"])
@pytest.mark.parametrize("method", METHODS)
def test_workers_evaluate_as_the_driver_does(
    method: str, engine: dict[str, Any], tiny_folder: Path, team: Team
) -> None:
    """Also after later rounds: an earlier base is set again."""
    prepared = prepare(config(tiny_folder, method, engine, model={"layers_to_transform": [0]}))
    connected = connect_workers(prepared, team)
    assert isinstance(connected.evaluator.predictor, ClusterPredictor)
    states = [connected.federation.begin()]
    for _ in range(2):
        states.append(connected.federation.run_round(states[-1]).progress)
    expected = [evaluate(prepared, progress) for progress in states]
    assert expected[0] != expected[2]
    for number in (2, 0, 1, 2):
        assert evaluate(connected, states[number]) == expected[number]


def test_progress_counts_each_example_once(tiny_folder: Path, team: Team) -> None:
    counts = list[tuple[int, int | None]]()

    def follow(stage: Stage | None) -> None:
        if stage is not None and stage.name == "evaluation":
            counts.append((stage.done, stage.total))

    connected = connect_workers(prepare(config(tiny_folder, "fedsa-lora", ENGINES[1]), stages=Stages(follow)), team)
    connected.evaluator.evaluate_clients(connected.federation.begin())
    assert counts[-1][0] == counts[-1][1]
    assert counts == sorted(counts)


def test_workers_cache_hidden_states_and_measure_as_steps_of_their_own(tiny_folder: Path, team: Team) -> None:
    seen = list[tuple[str, int, int | None]]()

    def follow(stage: Stage | None) -> None:
        if stage is not None:
            seen.append((stage.name, stage.done, stage.total))

    settings = config(tiny_folder, "fedit", {"name": "batched"}, kind="deep-bert", model={"layers_to_transform": [1]})
    federation = connect_workers(prepare(settings, stages=Stages(follow)), team).federation
    examples = sum(len(data.train) for data in federation.clients.values())
    first = federation.run_round(federation.begin())
    names = list(dict.fromkeys(name for name, _, _ in seen))
    assert names[-3:] == ["training", "stacking", "hidden states"]  # within the round, and before its first batch
    counts = [(done, total) for name, done, total in seen if name == "hidden states"]
    assert counts[0] == (0, examples)  # of the worker that measures
    assert (examples, examples) in counts
    ends = [total for done, total in counts if done == total]
    assert len(ends) == 2
    assert ends[1] is not None
    assert 0 < ends[1] < examples  # those of the other worker's clients, which it caches itself
    seen.clear()
    federation.run_round(first.progress)
    assert "hidden states" not in {name for name, _, _ in seen}


@pytest.mark.slow
def test_a_worker_that_dies_costs_its_piece_and_too_many_deaths_end_the_evaluation(
    tiny_folder: Path, team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare(config(tiny_folder, "fedit", ENGINES[0]))
    connected = connect_workers(prepared, team)
    progress, expected = connected.federation.begin(), evaluate(prepared, prepared.federation.begin())
    ray.kill(team.handles[0].actor)
    assert evaluate(connected, progress) == expected
    assert [handle.deaths for handle in team.handles] == [1, 0]
    get_base = team.get_base

    def kill(handle: Any) -> Any:
        ray.kill(handle.actor)
        return get_base(handle)

    monkeypatch.setattr(team, "get_base", kill)
    with pytest.raises(FedspanError, match="died"):
        evaluate(connected, progress)
