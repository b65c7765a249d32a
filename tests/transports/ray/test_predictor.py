"""Evaluations on workers have the bits of the driver's, whatever their number is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray", reason="the extra fedspan[cluster] is not installed")

import ray

from fedspan.errors import FedspanError
from fedspan.federation.progress import Progress
from fedspan.runs.cluster import connect_workers, get_resources
from fedspan.runs.setup import Prepared, prepare
from fedspan.training.stages import Stage, Stages
from fedspan.transports.ray.predictor import ClusterPredictor
from fedspan.transports.ray.team import Team, open_team
from helpers import tiny

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
