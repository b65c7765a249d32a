"""Runs and evaluations on two workers of a local Ray against the same in one process, and how workers share them."""

import json
import math
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedspan
from fedspan.assembly.cluster import WorkerKit
from fedspan.assembly.run import prepare
from fedspan.config import parse_config
from fedspan.errors import FedspanError
from fedspan.federation.transport import Orders
from fedspan.run_folder import RunFolder
from fedspan.runs import checkpoint
from fedspan.runs.start import run
from fedspan.transports.ray.sharing import share_teams
from fedspan.transports.ray.worker import BaseVersion, ClusterWorker
from helpers import tiny, tiny_decoders, tiny_images, tiny_preferences, tiny_seq2seq
from helpers.conformance import UNLIKE_CASES, describe_case, list_cases
from helpers.families import others_slow
from helpers.listeners import Notes
from helpers.run_content import content

pytest.importorskip("ray", reason="the extra fedspan[cluster] is not installed")

import ray

from fedspan.assembly.cluster import connect_workers
from fedspan.assembly.run import Prepared
from fedspan.federation.progress import Progress
from fedspan.training.stages import Stage, Stages
from fedspan.transports.ray.team import Piece, Queues, Team, open_team
from fedspan.transports.ray.transport import ClusterPredictor, cut_stacks
from helpers import refusals

WORKERS = {"cluster": {"workers": 2}}


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[None]:
    """Two workers for all tests here: their processes take seconds to start."""
    with share_teams():
        yield


def files(folder: Path) -> dict[str, object]:
    """All that a run left, apart from its config, which names the cluster."""
    return {name: value for name, value in content(folder).items() if not name.endswith("config.yaml")}


def require_same(settings: dict[str, Any], folder: Path) -> None:
    """Run in this process and on the workers, with as many threads each, and compare every bit that is left."""
    settings = {**settings, "threads": 1}
    fedspan.run(settings, folder / "here", progress=False)
    fedspan.run({**settings, **WORKERS}, folder / "there", progress=False)
    assert files(folder / "there") == files(folder / "here")


@pytest.mark.parametrize("case", others_slow(list_cases(), UNLIKE_CASES))
def test_every_method_and_wrapper_has_the_bits_of_one_process(case: str, tiny_folder: Path, tmp_path: Path) -> None:
    require_same(tiny.settings(tiny_folder, **describe_case(case)), tmp_path)


SAME: dict[str, dict[str, Any]] = {
    "moments-stay": {"training": {"optimizer_state": "keep"}},
    "ranks-differ": {"method": {"name": "hetlora"}, "federation": {"ranks": [1, 2]}},
    "head-from-statistics": {"model": {"head_init": "lda"}},
    "head-alone-first": {"model": {"head_rounds": 1}},
    "dp-sgd": {"privacy": {"mechanism": "dp-sgd", "clip": 1.0, "noise": 1.0}},
    "local-privacy": {"privacy": {"mechanism": "local", "clip": 1.0, "noise": 1.0}},
    "dropout-and-faults": {
        "federation": {"clients_per_round": None},
        "simulation": {"dropout": 0.3, "faults": {"share": 0.3, "kind": "noise"}},
    },
    "flipped-labels": {"simulation": {"faults": {"share": 0.5, "kind": "label-flip"}, "validation": False}},
    "speeds-and-deadline": {
        "federation": {"clients_per_round": 2, "over_select": 1, "deadline": 60.0},
        "simulation": {"speed": {"median": 1.0, "spread": 4.0}},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_the_loop_engine_has_the_same_bits_on_workers(name: str, tiny_folder: Path, tmp_path: Path) -> None:
    require_same(tiny.settings(tiny_folder, **SAME[name]), tmp_path)


@pytest.mark.slow
def test_central_privacy_and_its_empty_cohorts(tiny_folder: Path, tmp_path: Path) -> None:
    change = {
        "privacy": {"mechanism": "central", "clip": 1.0, "noise": 1.0},
        "federation": {"clients_per_round": 1, "weights": "uniform"},
    }
    settings = tiny.settings(tiny_folder, **change)
    require_same({**settings, "federation": {**settings["federation"], "rounds": 6}}, tmp_path)
    rows = map(json.loads, (tmp_path / "there" / "metrics.jsonl").read_text().splitlines())
    assert [] in [row["cohort"] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["language", "image", "preference", "seq2seq"])
def test_other_models_and_tasks(kind: str, decoders: Path, images: Path, tmp_path: Path) -> None:
    settings = {
        "language": lambda: tiny_decoders.settings(decoders),
        "image": lambda: tiny_images.settings(images, "vit"),
        "preference": lambda: tiny_preferences.settings(decoders, tmp_path),
        "seq2seq": lambda: tiny_seq2seq.settings(tmp_path),
    }[kind]()
    require_same({**settings, "engine": {"name": "loop"}}, tmp_path)


@pytest.mark.slow
def test_a_worker_needs_neither_datasets_nor_peft(tiny_folder: Path, tmp_path: Path) -> None:
    """They would take 100 MB of each worker's own memory."""
    prepared = prepare(parse_config({**tiny.settings(tiny_folder), **WORKERS}))
    assert prepared.partition is not None
    targets = tuple(prepared.engine.adapted.layers)
    kit = WorkerKit(prepared.config, prepared.labels, targets, prepared.partition, prepared.train, None)
    (tmp_path / "kit").write_bytes(pickle.dumps(kit))
    script = """
import pickle, sys
import fedspan.transports.ray.worker
from fedspan.assembly.cluster import build_host
host = build_host(pickle.load(open(sys.argv[1], "rb")))
print(*host.engine.adapted.layers)
print(*sorted({"datasets", "peft"} & set(sys.modules)))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", script, str(tmp_path / "kit")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == [" ".join(targets), ""]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found = checkpoint.resume(RunFolder(folder))
    return dict(found.progress.state.tensors)


@pytest.mark.slow
def test_the_batched_engine_repeats_to_the_bit_and_agrees_to_rounding(tiny_folder: Path, tmp_path: Path) -> None:
    engine = {"name": "batched", "clients_per_pass": 2, "workers": 1}
    settings = tiny.settings(tiny_folder, engine=engine, federation={"clients_per_round": None})
    for name, more in (("here", {}), ("there", WORKERS), ("again", WORKERS)):
        fedspan.run({**settings, **more}, tmp_path / name, progress=False)
    assert files(tmp_path / "again") == files(tmp_path / "there")
    here, there = tensors_of(tmp_path / "here"), tensors_of(tmp_path / "there")
    assert here.keys() == there.keys()
    for name, value in here.items():
        torch.testing.assert_close(there[name], value, rtol=1e-3, atol=1e-5)


def test_a_stacking_plan_is_measured_by_a_worker_and_stored(tiny_folder: Path, tmp_path: Path) -> None:
    settings = tiny.settings(tiny_folder, engine={"name": "batched"}, federation={"rounds": 1})
    fedspan.run({**settings, **WORKERS}, tmp_path / "run", progress=False)
    plan = json.loads((tmp_path / "run" / "engine.json").read_text())
    assert plan["workers"] == 1  # a worker has one thread
    assert plan["clients_per_pass"] >= 1


def test_hidden_states_are_stored_before_a_plan_is_measured(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    host = prepare(tiny.config(tiny_folder, engine={"name": "batched"})).federation.transport.host
    monkeypatch.setattr(host, "prepare", lambda ids: calls.append(f"prepare {[*ids]}"))
    monkeypatch.setattr(host.engine, "choose_plan", lambda *arguments: calls.append("choose_plan"))
    monkeypatch.setattr(host, "make_first_assignments", lambda orders: [])
    worker = ClusterWorker(torch.get_num_threads())
    worker.build(lambda kit: host, None)
    worker.choose_plan(BaseVersion(1, None), None, [], [], clients=1)
    assert calls == ["prepare []", "choose_plan"]


def test_data_may_be_passed_and_a_model_may_not(tiny_folder: Path, tmp_path: Path) -> None:
    rows = [{"text": f"lab{number % 8} word{number % 12}", "label": tiny.LABELS[number % 4]} for number in range(60)]
    settings = {**tiny.settings(tiny_folder), "data": {}, "partition": {"clients": 3}, **WORKERS}
    report = fedspan.run(settings, tmp_path / "run", data=rows, progress=False)
    assert report.rounds == 2
    model = tiny.fresh_classifier(tiny_folder / "bert")
    with refusals.refused("model", "workers load the model themselves"):
        fedspan.run({**settings, "model": {"target_modules": tiny.BERT}}, tmp_path / "refused", data=rows, model=model)


@pytest.mark.parametrize("ranks", [[2], [1, 2]], ids=["one-rank", "two-ranks"])
def test_a_message_is_stored_once(
    ranks: list[int], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, made, orders = ray.put, Counter[bytes](), Counter[str]()

    def count(value: Any) -> Any:
        if isinstance(value, bytes):
            made[value] += 1
        return put(value)

    get = Orders.__getitem__

    def count_order(self: Orders, id: str) -> Any:
        orders[id] += 1
        return get(self, id)

    monkeypatch.setattr(ray, "put", count)
    monkeypatch.setattr(Orders, "__getitem__", count_order)
    federation = {"clients_per_round": None, "rounds": 2, "ranks": ranks}
    settings = tiny.settings(tiny_folder, method={"name": "hetlora", "gamma": 1.0}, federation=federation)
    fedspan.run({**settings, **WORKERS}, tmp_path / "run", progress=False)
    assert sum(made.values()) == len(made) == 2 * len(ranks)  # one of each round and rank
    assert sum(orders.values()) == 2 * len(tiny.SITES)


def test_an_error_in_training_ends_the_run_as_it_does_here(tiny_folder: Path, tmp_path: Path) -> None:
    settings = tiny.settings(tiny_folder, training={"lr": 1e30, "optimizer": "sgd", "max_grad_norm": 0.0})
    errors: list[str] = []
    for name, more in (("here", {}), ("there", WORKERS)):
        with pytest.raises(FedspanError) as refused:
            fedspan.run({**settings, **more}, tmp_path / name, progress=False)
        assert refused.value.field == "training.lr"
        errors.append(str(refused.value).replace("client", "").split("became")[1])
    assert errors[0] == errors[1]


def test_a_user_is_told_why_a_worker_s_clients_train_one_by_one(tiny_folder: Path, tmp_path: Path) -> None:
    """A reason that shows in a job, which no engine in the driver opens."""
    settings = tiny.settings(
        tiny_folder,
        method={"name": "fedgalore"},
        training={"weight_decay": 0.1},
        engine={"name": "batched", "clients_per_pass": 2, "workers": 1},
        federation={"rounds": 1},
    )
    notes = Notes()
    run(parse_config({**settings, **WORKERS}), tmp_path / "run", listener=notes)
    assert any("because its weight decay shrinks the base" in note for note in notes.notes)


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
ENGINES = {"loop": {"name": "loop"}, "batched": {"name": "batched", "clients_per_pass": 3, "workers": 1}}
EVALUATED = [f"{method} {engine}" for method in METHODS for engine in ENGINES]


def config(folder: Path, method: str, engine: dict[str, Any], **changes: Any) -> Any:
    changes = {"federation": {"clients_per_round": None}, "evaluation": {"batch_size": 3}, **changes}
    return tiny.config(folder, method={"name": method, "r": 2}, engine=engine, **WORKERS, **changes)


@pytest.fixture(scope="module")
def team(tiny_folder: Path) -> Iterator[Team]:
    with open_team(config(tiny_folder, "fedit", {}).cluster) as made:
        yield made


def evaluate(prepared: Prepared, progress: Progress) -> tuple[Any, ...]:
    evaluator = prepared.evaluator
    assert prepared.test is not None
    parts = [np.arange(len(prepared.test)), np.arange(2)]
    return *evaluator.evaluate_clients(progress), evaluator.evaluate_parts(progress, prepared.test, parts)


@pytest.mark.parametrize("case", others_slow(EVALUATED, ["fedsa-lora loop", "fedgalore batched"]))
def test_workers_evaluate_like_the_driver(case: str, tiny_folder: Path, team: Team) -> None:
    """Also after later rounds: an earlier base is set again."""
    method, engine = case.split()
    prepared = prepare(config(tiny_folder, method, ENGINES[engine], model={"layers_to_transform": [0]}))
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

    connected = connect_workers(
        prepare(config(tiny_folder, "fedsa-lora", ENGINES["batched"]), stages=Stages(follow)), team
    )
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
    prepared = prepare(config(tiny_folder, "fedit", ENGINES["loop"]))
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
