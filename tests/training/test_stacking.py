"""The stacking plan: the fastest that a budget allows to measure, remembered by shape, kept by a run."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fedspan
from fedspan.assembly.engine import keep_stacking_plan, make_engine
from fedspan.assembly.run import Prepared, prepare
from fedspan.config import parse_config
from fedspan.models.stacked import Unstackable
from fedspan.run_folder import RunFolder
from fedspan.runs.baselines import BASELINES
from fedspan.training import stacking
from fedspan.training.batched import BatchedEngine
from fedspan.training.stacking import (
    DEFAULT,
    MeasurementBudget,
    StackingPlan,
    StackingRequest,
    get_cache_file,
    read_plans,
    search,
)
from fedspan.training.worker import Worker
from helpers import tiny


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[StackingPlan, float]:
    """Nanoseconds a token, by what is tried; whatever is missing takes 9. The cache is an empty folder."""
    seconds: dict[StackingPlan, float] = {}

    def taken(team: Sequence[Worker], together: Any, works: Any, clients_per_pass: int, *others: Any) -> float:
        return 1e-9 * seconds.get(StackingPlan(clients_per_pass, len(team)), 9.0)

    monkeypatch.setattr(stacking, "_measure_token_seconds", taken)
    monkeypatch.setattr(stacking, "_SHARE", 1e9)
    monkeypatch.setenv("FEDSPAN_CACHE", str(tmp_path))
    return seconds


def prepare_batched(folder: Path) -> tuple[Prepared, BatchedEngine]:
    """A run with all clients in every round, and its engine."""
    prepared = prepare(tiny.config(folder, engine={"name": "batched"}, federation={"clients_per_round": None}))
    return prepared, prepared.engine


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        # larger batches than the processor needs
        pytest.param({(4, 1): 5, (1, 1): 4, (2, 1): 4.5}, (1, 1), marks=pytest.mark.slow),
        ({(4, 1): 5, (4, 2): 3, (2, 2): 2.99}, (4, 2)),  # hardly faster is not faster
        ({(4, 1): 5, (4, 2): 3, (2, 2): 2.5, (1, 2): 2}, (1, 2)),
        pytest.param({(4, 1): 5}, (4, 1), marks=pytest.mark.slow),
    ],
)
def test_as_many_at_once_as_is_fastest(
    seconds: dict[tuple[int, int], float],
    expected: tuple[int, int],
    measured: dict[StackingPlan, float],
    tiny_folder: Path,
) -> None:
    measured.update({StackingPlan(*key): value for key, value in seconds.items()})
    prepared, engine = prepare_batched(tiny_folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        prepared.federation.run_round(prepared.federation.begin())
        assert engine.stacking == StackingPlan(*expected)
        measured.clear()  # remembered: nothing is measured again
        again = BatchedEngine(engine.adapted, engine.task, engine.settings, engine.seed)
        tiny.use_engine(prepared.federation, again)
        prepared.federation.run_round(prepared.federation.begin())
        assert again.stacking == engine.stacking
    finally:
        torch.set_num_threads(threads)
    kept = get_cache_file()
    assert kept.parent == Path(os.environ["FEDSPAN_CACHE"])
    written = list(json.loads(kept.read_text()).values())
    assert written == [{"clients_per_pass": expected[0], "workers": expected[1]}]


def test_a_damaged_cache_is_no_cache(measured: dict[StackingPlan, float]) -> None:
    for text in ("", "[]", '{"a": 1}', '{"a": {"clients_per_pass": "x"}}'):
        get_cache_file().write_text(text)
        assert read_plans() == {}


def test_measuring_leaves_the_run_as_it_was(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measured or set, the same number at once gives the same bits."""
    monkeypatch.setattr(stacking, "_SHARE", 1e9)
    monkeypatch.setattr(stacking, "_MAX_CLIENTS", 1)
    monkeypatch.setenv("FEDSPAN_CACHE", str(tmp_path))
    federation = {"clients_per_round": None, "rounds": 2}
    prepared = prepare(tiny.config(tiny_folder, engine={"name": "batched"}, federation=federation))
    found = tiny.final_tensors(prepared)
    engine = prepared.engine
    stacking_request = StackingRequest(engine.stacking.clients_per_pass, engine.stacking.workers)
    tiny.use_engine(
        prepared.federation, BatchedEngine(engine.adapted, engine.task, engine.settings, engine.seed, stacking_request)
    )
    again = tiny.final_tensors(prepared)
    assert all(torch.equal(value, again[name]) for name, value in found.items())


def test_short_runs_are_not_worth_measuring(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacking, "_measure_token_seconds", None)
    prepared = prepare(tiny.config(tiny_folder, engine={"name": "batched"}))
    prepared.federation.run_round(prepared.federation.begin())
    workers = min(DEFAULT.workers, torch.get_num_threads())
    assert prepared.engine.stacking == StackingPlan(DEFAULT.clients_per_pass, workers)


@pytest.mark.parametrize("tokens", [3600, 1e4, 1e5, 1e6])
def test_measuring_stays_within_its_tokens(tokens: float) -> None:
    budget, taken = MeasurementBudget(tokens, pass_tokens=100), 0.0

    def measure(plan: StackingPlan, passes: int) -> float:
        nonlocal taken
        assert 1 <= passes <= 4
        taken += 3 * passes * plan.clients_per_pass * plan.workers * 100
        return 1e-3 / plan.clients_per_pass

    found = search(StackingRequest(), 200, 2, measure, budget)
    assert taken <= tokens
    if tokens == 1e6:
        assert found == StackingPlan(64, 1)


@pytest.mark.parametrize("seconds", [0.005, 0.02])
def test_measuring_stops_after_ten_seconds(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(stacking.time, "perf_counter", lambda: now[0])
    budget = MeasurementBudget(float("inf"), pass_tokens=100)

    def measure(plan: StackingPlan, passes: int) -> float:
        pace = seconds / plan.clients_per_pass
        now[0] += pace * 3 * plan.clients_per_pass * plan.workers * 100
        return pace

    found = search(StackingRequest(), 200, 2, measure, budget)
    assert now[0] <= 10
    assert budget.exhausted
    assert (found is None) == (seconds == 0.02)  # one plan takes 6 s, and its neighbor twice as long


@pytest.mark.parametrize(("seconds", "passes"), [(100.0, 1), (2.5, 1), (1.9, 3), (0.9, 3), (0.2, 6)])
def test_measuring_takes_its_allowance_and_the_first_pass_of_a_trial_at_most(
    seconds: float, passes: int, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass cannot be stopped: a trial of a slow one is that pass alone, and no other trial starts after the limit."""
    monkeypatch.setattr(stacking, "_SHARE", 1e9)
    monkeypatch.setattr(stacking.torch, "get_num_threads", lambda: 1)
    monkeypatch.setenv("FEDSPAN_CACHE", str(tmp_path))
    now, by_trial = [0.0], list[int]()
    monkeypatch.setattr(stacking.time, "perf_counter", lambda: now[0])
    advance, measure = Worker.advance, vars(stacking)["_measure_token_seconds"]

    def train(worker: Worker, *arguments: Any) -> None:
        now[0] += seconds
        advance(worker, *arguments)

    def try_plan(*arguments: Any) -> float:
        before = now[0]
        pace = measure(*arguments)
        by_trial.append(round((now[0] - before) / seconds))
        return pace

    monkeypatch.setattr(Worker, "advance", train)
    monkeypatch.setattr(stacking, "_measure_token_seconds", try_plan)
    prepared, engine = prepare_batched(tiny_folder)
    ended = list[float]()
    engine.on_plan = lambda _: ended.append(now[0])
    prepared.federation.run_round(prepared.federation.begin())
    assert by_trial[0] == passes
    assert len(by_trial) == 1 or seconds < 10.0
    assert ended[0] <= 10.0 + max(seconds, 0.4)  # passes of less than 0.3 s are measured together


@pytest.mark.parametrize(
    ("fitting", "threads", "expected"),
    [(2, 1, (2, 1)), (2, 2, (2, 1)), (1, 1, (1, 1)), (8, 1, (8, 1)), (0, 1, None), (0, 2, None)],
)
def test_passes_that_do_not_fit_into_memory_are_not_chosen(
    fitting: int, threads: int, expected: tuple[int, int] | None
) -> None:
    """``fitting`` clients fit, over all workers; without any, nothing is chosen and few plans are tried."""
    tried = list[StackingPlan]()

    def measure(plan: StackingPlan, passes: int) -> float:
        assert passes
        tried.append(plan)
        clients = plan.clients_per_pass * plan.workers
        return 1e-6 / plan.clients_per_pass if clients <= fitting else math.inf

    found = search(StackingRequest(), 50, threads, measure, MeasurementBudget(math.inf, pass_tokens=10))
    if expected is not None:
        assert found == StackingPlan(*expected)
    assert max(plan.clients_per_pass for plan in tried) <= max(4, 4 * fitting)
    assert len(tried) <= 7


def test_clients_that_do_not_fit_into_memory_beside_each_other_are_no_plan(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tensors alone, before any pass: a trial opens two jobs for each client of a pass."""
    monkeypatch.setattr(stacking, "_SHARE", 1e9)
    monkeypatch.setattr(stacking.torch, "get_num_threads", lambda: 1)
    monkeypatch.setenv("FEDSPAN_CACHE", str(tmp_path))
    opened, open_slots = list[int](), vars(stacking)["_open_slots"]

    def open_few(worker: Worker, assignments: Any, number: int, clients_per_pass: int, examples: Any) -> Any:
        opened.append(clients_per_pass)
        if clients_per_pass > 2:
            raise torch.OutOfMemoryError
        return open_slots(worker, assignments, number, clients_per_pass, examples)

    monkeypatch.setattr(stacking, "_open_slots", open_few)
    prepared, engine = prepare_batched(tiny_folder)
    prepared.federation.run_round(prepared.federation.begin())
    assert engine.stacking.clients_per_pass in (1, 2)
    assert opened == [4, 2, 1]


@pytest.mark.parametrize(
    ("paces", "left", "expected"),
    [
        pytest.param(dict.fromkeys((1, 2, 4, 8), math.inf), None, 1, id="memory forbids every plan"),
        pytest.param({4: 9e6, 2: 1e7, 1: 1e7}, 1.0, 4, id="cut short after the first plans"),
        pytest.param({}, 0.0, DEFAULT.clients_per_pass, id="without time"),
        pytest.param(None, None, DEFAULT.clients_per_pass, id="a model that cannot be stacked"),
    ],
)
def test_a_plan_that_was_not_measured_to_the_end_is_not_remembered(
    paces: dict[int, float] | None,
    left: float | None,
    expected: int,
    tiny_folder: Path,
    measured: dict[StackingPlan, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> float:
        raise Unstackable("it mixes examples")

    monkeypatch.setattr(stacking.torch, "get_num_threads", lambda: 1)
    if paces is None:
        monkeypatch.setattr(stacking, "_measure_token_seconds", refuse)
    measured.update({StackingPlan(size, 1): pace for size, pace in (paces or {}).items()})
    prepared, engine = prepare_batched(tiny_folder)
    if left is not None:
        engine.measuring.left = left
    prepared.federation.run_round(prepared.federation.begin())
    assert engine.stacking == StackingPlan(expected, 1)
    assert not get_cache_file().exists()


def test_engines_of_a_run_share_the_time_for_measuring(tiny_folder: Path, measured: dict[StackingPlan, float]) -> None:
    prepared = prepare(tiny.config(tiny_folder, engine={"name": "batched"}, federation={"rounds": 1000}))
    main, settings = prepared.engine, prepared.federation.training
    other = make_engine(prepared.config, main.adapted, prepared.task, settings, None, shared_with=main)
    assert other.measuring is main.measuring
    before = main.measuring.left
    prepared.federation.run_round(prepared.federation.begin())
    assert main.stacking is not None
    assert other.measuring.left < before


def test_a_range_test_and_baselines_store_their_plans_before_they_use_them(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = tiny.settings(
        tiny_folder, engine={"name": "batched"}, training={"lr": "auto"}, federation={"rounds": 1}
    ) | {"baselines": ["local-only"]}
    run = tmp_path / "run"
    plans = (run / "engine.json", run / "baselines" / "local-only" / "engine.json")
    seen = list[tuple[bool, ...]]()
    train_all = BatchedEngine.train_all

    def train(engine: BatchedEngine, *arguments: Any) -> None:
        train_all(engine, *arguments)
        seen.append(tuple(path.is_file() for path in plans))

    monkeypatch.setattr(BatchedEngine, "train_all", train)
    fedspan.run(values, run, progress=False)
    assert seen[0] == (True, False)  # the first trial of the range test
    assert seen[-1] == (True, True)
    assert (run / "learning_rate.json").is_file()
    plans[1].write_text('{"clients_per_pass": 3, "workers": 1}')
    prepared = prepare(parse_config(values))
    variant = BASELINES["local-only"](prepared)
    keep_stacking_plan(RunFolder(plans[1].parent), variant.engine)
    assert variant.engine.stacking == StackingPlan(3, 1)


def test_a_run_takes_the_plan_of_its_own_size(
    tiny_folder: Path, measured: dict[StackingPlan, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short run has the same plan before and after a longer one has measured, and so the same bits."""
    prepared, engine = prepare_batched(tiny_folder)
    federation = prepared.federation
    measured.update({StackingPlan(4, 1): 5, StackingPlan(2, 1): 3, StackingPlan(1, 1): 2})
    monkeypatch.setattr(stacking.torch, "get_num_threads", lambda: 1)

    def chosen(share: float) -> StackingPlan | None:
        monkeypatch.setattr(stacking, "_SHARE", share)
        again = BatchedEngine(engine.adapted, engine.task, engine.settings, engine.seed, rounds=1)
        tiny.use_engine(federation, again)
        federation.run_round(federation.begin())
        return again.stacking

    shares = [2.0**power for power in range(-8, 17, 8)]
    plans = [chosen(share) for share in shares]
    assert plans[0] == StackingPlan(4, 1)  # nothing can be measured
    assert plans[-1] == StackingPlan(1, 1)
    assert plans == [chosen(share) for share in shares]
