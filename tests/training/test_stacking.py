"""The stacking plan: the fastest that a budget allows, remembered by shape; and models that predict in one pass."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

import fedspan
from fedspan.assembly.engine import keep_stacking_plan, make_engine
from fedspan.assembly.run import Prepared, prepare
from fedspan.config import parse_config
from fedspan.core.values import Job
from fedspan.models.stacked import Unstackable
from fedspan.run_folder import RunFolder
from fedspan.runs.baselines import BASELINES
from fedspan.tasks.task import Examples
from fedspan.training import batching, stacking, worker
from fedspan.training.batched import BatchedEngine
from fedspan.training.config import EngineConfig
from fedspan.training.loop import LoopEngine
from fedspan.training.worker import Worker
from helpers import tiny, tiny_decoders, tiny_images
from helpers.families import others_slow


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[stacking.StackingPlan, float]:
    """Nanoseconds a token, by what is tried; whatever is missing takes 9. The cache is an empty folder."""
    seconds: dict[stacking.StackingPlan, float] = {}

    def taken(team: Sequence[Worker], together: Any, works: Any, clients_per_pass: int, *others: Any) -> float:
        return 1e-9 * seconds.get(stacking.StackingPlan(clients_per_pass, len(team)), 9.0)

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
    measured: dict[stacking.StackingPlan, float],
    tiny_folder: Path,
) -> None:
    measured.update({stacking.StackingPlan(*key): value for key, value in seconds.items()})
    prepared, engine = prepare_batched(tiny_folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        prepared.federation.run_round(prepared.federation.begin())
        assert engine.stacking == stacking.StackingPlan(*expected)
        measured.clear()  # remembered: nothing is measured again
        options = EngineConfig(prefix_cache=False)
        again = BatchedEngine(LoopEngine(engine.adapted, engine.task, engine.settings, engine.seed, options))
        tiny.use_engine(prepared.federation, again)
        prepared.federation.run_round(prepared.federation.begin())
        assert again.stacking == engine.stacking
    finally:
        torch.set_num_threads(threads)
    kept = stacking.get_cache_file()
    assert kept.parent == Path(os.environ["FEDSPAN_CACHE"])
    written = list(json.loads(kept.read_text()).values())
    assert written == [{"clients_per_pass": expected[0], "workers": expected[1]}]


def test_a_damaged_cache_is_no_cache(measured: dict[stacking.StackingPlan, float]) -> None:
    for text in ("", "[]", '{"a": 1}', '{"a": {"clients_per_pass": "x"}}'):
        stacking.get_cache_file().write_text(text)
        assert stacking.read_plans() == {}


def test_measuring_leaves_the_run_as_it_was(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measured or set, the same number at once gives the same bits."""
    monkeypatch.setattr(stacking, "_SHARE", 1e9)
    monkeypatch.setattr(stacking, "_MAX_CLIENTS", 1)
    monkeypatch.setenv("FEDSPAN_CACHE", str(tmp_path))
    federation = {"clients_per_round": None, "rounds": 2}
    prepared = prepare(tiny.config(tiny_folder, engine={"name": "batched"}, federation=federation))
    found = tiny.final_tensors(prepared)
    engine = prepared.engine
    plan = asdict(engine.stacking)
    options = EngineConfig(**plan, prefix_cache=False)
    loop = LoopEngine(engine.adapted, engine.task, engine.settings, engine.seed, options)
    tiny.use_engine(prepared.federation, BatchedEngine(loop))
    again = tiny.final_tensors(prepared)
    assert all(torch.equal(value, again[name]) for name, value in found.items())


def test_short_runs_are_not_worth_measuring(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacking, "_measure_token_seconds", None)
    prepared = prepare(tiny.config(tiny_folder, engine={"name": "batched"}))
    prepared.federation.run_round(prepared.federation.begin())
    workers = min(stacking.DEFAULT.workers, torch.get_num_threads())
    assert prepared.engine.stacking == stacking.StackingPlan(stacking.DEFAULT.clients_per_pass, workers)


@pytest.mark.parametrize("tokens", [3600, 1e4, 1e5, 1e6])
def test_measuring_stays_within_its_tokens(tokens: float) -> None:
    budget, taken = stacking.MeasurementBudget(tokens, pass_tokens=100), 0.0

    def measure(plan: stacking.StackingPlan, passes: int) -> float:
        nonlocal taken
        assert 1 <= passes <= 4
        taken += 3 * passes * plan.clients_per_pass * plan.workers * 100
        return 1e-3 / plan.clients_per_pass

    found = stacking.search(EngineConfig(), 200, 2, measure, budget)
    assert taken <= tokens
    if tokens == 1e6:
        assert found == stacking.StackingPlan(64, 1)


@pytest.mark.parametrize("seconds", [0.005, 0.02])
def test_measuring_stops_after_ten_seconds(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(stacking.time, "perf_counter", lambda: now[0])
    budget = stacking.MeasurementBudget(float("inf"), pass_tokens=100)

    def measure(plan: stacking.StackingPlan, passes: int) -> float:
        pace = seconds / plan.clients_per_pass
        now[0] += pace * 3 * plan.clients_per_pass * plan.workers * 100
        return pace

    found = stacking.search(EngineConfig(), 200, 2, measure, budget)
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
    tried = list[stacking.StackingPlan]()

    def measure(plan: stacking.StackingPlan, passes: int) -> float:
        assert passes
        tried.append(plan)
        clients = plan.clients_per_pass * plan.workers
        return 1e-6 / plan.clients_per_pass if clients <= fitting else math.inf

    found = stacking.search(EngineConfig(), 50, threads, measure, stacking.MeasurementBudget(math.inf, pass_tokens=10))
    if expected is not None:
        assert found == stacking.StackingPlan(*expected)
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
        pytest.param({}, 0.0, stacking.DEFAULT.clients_per_pass, id="without time"),
        pytest.param(None, None, stacking.DEFAULT.clients_per_pass, id="a model that cannot be stacked"),
    ],
)
def test_a_plan_that_was_not_measured_to_the_end_is_not_remembered(
    paces: dict[int, float] | None,
    left: float | None,
    expected: int,
    tiny_folder: Path,
    measured: dict[stacking.StackingPlan, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stacking.torch, "get_num_threads", lambda: 1)
    if paces is None:
        refusal = Unstackable("it mixes examples")
        monkeypatch.setattr(stacking, "_measure_token_seconds", Mock(side_effect=refusal))
    measured.update({stacking.StackingPlan(size, 1): pace for size, pace in (paces or {}).items()})
    prepared, engine = prepare_batched(tiny_folder)
    if left is not None:
        engine.measuring.left = left
    prepared.federation.run_round(prepared.federation.begin())
    assert engine.stacking == stacking.StackingPlan(expected, 1)
    assert not stacking.get_cache_file().exists()


def test_engines_of_a_run_share_the_time_for_measuring(
    tiny_folder: Path, measured: dict[stacking.StackingPlan, float]
) -> None:
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
    assert variant.engine.stacking == stacking.StackingPlan(3, 1)


def test_a_run_takes_the_plan_of_its_own_size(
    tiny_folder: Path, measured: dict[stacking.StackingPlan, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short run has the same plan before and after a longer one has measured, and so the same bits."""
    prepared, engine = prepare_batched(tiny_folder)
    federation = prepared.federation
    measured.update({stacking.StackingPlan(4, 1): 5, stacking.StackingPlan(2, 1): 3, stacking.StackingPlan(1, 1): 2})
    monkeypatch.setattr(stacking.torch, "get_num_threads", lambda: 1)

    def chosen(share: float) -> stacking.StackingPlan | None:
        monkeypatch.setattr(stacking, "_SHARE", share)
        options = EngineConfig(prefix_cache=False)
        again = BatchedEngine(LoopEngine(engine.adapted, engine.task, engine.settings, engine.seed, options), rounds=1)
        tiny.use_engine(federation, again)
        federation.run_round(federation.begin())
        return again.stacking

    shares = [2.0**power for power in range(-8, 17, 8)]
    plans = [chosen(share) for share in shares]
    assert plans[0] == stacking.StackingPlan(4, 1)  # nothing can be measured
    assert plans[-1] == stacking.StackingPlan(1, 1)
    assert plans == [chosen(share) for share in shares]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many models shared each pass."""
    found: list[int] = []
    predict = worker.Worker.predict

    def counted(self: worker.Worker, models: Sequence[batching.ModelInputs], examples: Examples) -> list[Tensor]:
        predictions = predict(self, models, examples)
        found.append(len(models))
        return predictions

    monkeypatch.setattr(worker.Worker, "predict", counted)
    return found


def prepared_run(kind: str, tiny_folder: Path, decoders: Path, images: Path, **changes: Any) -> Prepared:
    """A run with personal models, stacked three at once in two threads."""
    personal: dict[str, Any] = {
        "federation": {"clients_per_round": None},
        "method": {"name": "local-only", "r": 2},
        "training": {"optimizer": "sgd", "lr": 0.05},
        "engine": {"name": "batched", "clients_per_pass": 3, "workers": 2},
    }
    if kind.endswith("-lm"):
        made = tiny_decoders.settings(decoders, kind.removesuffix("-lm"))
    elif kind in ("vit", "resnet"):
        made = tiny_images.settings(images, kind)
    else:
        made = tiny.settings(tiny_folder, kind)
    for section, change in (*personal.items(), *changes.items()):
        made[section] = {**made.get(section, {}), **change}
    return prepare(parse_config(made))


def personal_models(prepared: Prepared, sizes: Sequence[int]) -> list[batching.ModelInputs]:
    """The clients' models after a round, each with some of all examples, in turns."""
    federation, evaluator = prepared.federation, prepared.evaluator
    progress = federation.run_round(federation.begin()).progress
    jobs = [evaluator.build_job(progress, id) for id in federation.clients]
    rng = np.random.default_rng(0)
    return [
        (jobs[at % len(jobs)], rng.choice(len(prepared.train), size, replace=False)) for at, size in enumerate(sizes)
    ]


def largest_gap(prepared: Prepared, models: Sequence[batching.ModelInputs], batch_size: int) -> float:
    """The largest relative distance of predictions of stacked models from those of each alone."""
    engine = prepared.engine
    stacked = list(engine.predict_each(iter(models), prepared.train, batch_size))
    alone = [engine.predict(job, prepared.train, indices, batch_size) for job, indices in models]
    assert [one.shape for one in stacked] == [one.shape for one in alone]
    first, second = (engine.predict(job, prepared.train, models[0][1], batch_size) for job, _ in models[:2])
    assert float((first - second).norm() / first.norm()) > 1e-3, "the models are too similar to be told apart"
    return max(float((one - other).norm() / other.norm()) for one, other in zip(stacked, alone, strict=True))


@pytest.mark.parametrize("kind", others_slow(["bert", "gpt2", "llama-lm", "vit", "resnet"], ["bert", "resnet"]))
def test_models_predict_together_what_they_predict_alone(
    kind: str, tiny_folder: Path, decoders: Path, images: Path, passes: list[int]
) -> None:
    prepared = prepared_run(kind, tiny_folder, decoders, images)
    models = personal_models(prepared, [5, 3, 8, 1, 2, 7])
    assert largest_gap(prepared, models, 24) < 1e-5
    assert max(passes) == 3


@pytest.mark.parametrize("layers", [None, [1]], ids=["all-layers", "last-layer"])
def test_models_predict_the_same_examples_together_as_alone(
    layers: list[int] | None, tiny_folder: Path, decoders: Path, images: Path, passes: list[int]
) -> None:
    """Five models in stacks of three and two; a batch of 12 examples takes three passes of four, or two of six."""
    prepared = prepared_run("deep-bert", tiny_folder, decoders, images, model={"layers_to_transform": layers})
    models, engine = personal_models(prepared, [1] * 5), prepared.engine
    indices = np.random.default_rng(1).permutation(len(prepared.train))[:12]
    jobs = [job for job, _ in models]
    stacked = list(engine.predict_shared_examples(iter(jobs), prepared.train, indices, 12))
    assert sorted(passes) == [2, 2, 3, 3, 3]
    alone = [engine.predict(job, prepared.train, indices, 12) for job in jobs]
    assert float((alone[0] - alone[1]).norm() / alone[0].norm()) > 1e-3, "the models are too similar to be told apart"
    gaps = [float((one - other).norm() / other.norm()) for one, other in zip(stacked, alone, strict=True)]
    assert max(gaps) < 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"layers_to_transform": [1]}},
        pytest.param({"model": {"modules_to_save": ["LayerNorm", "pooler"]}}, marks=pytest.mark.slow),
        pytest.param({"training": {"lora_dropout": 0.4}}, marks=pytest.mark.slow),
        {"method": {"name": "fedsa-lora", "r": 3}},
        pytest.param({"method": {"name": "pfedlora", "r": 2}}, marks=pytest.mark.slow),
    ],
    ids=lambda changes: json.dumps(changes)[:60],
)
def test_what_trains_and_how(
    changes: dict[str, Any], tiny_folder: Path, decoders: Path, images: Path, passes: list[int]
) -> None:
    prepared = prepared_run("deep-bert", tiny_folder, decoders, images, **changes)
    assert largest_gap(prepared, personal_models(prepared, [4, 6, 3]), 18) < 1e-5
    assert passes == [3]


def test_packed_examples_predict_alone(tiny_folder: Path, decoders: Path, images: Path, passes: list[int]) -> None:
    prepared = prepared_run("llama-lm", tiny_folder, decoders, images, data={"packing": True})
    assert largest_gap(prepared, personal_models(prepared, [4, 2, 3]), 24) == 0.0
    assert passes == []


def test_the_evaluation_of_personal_models_is_stacked(
    tiny_folder: Path, decoders: Path, images: Path, passes: list[int]
) -> None:
    """The scores of every client are those of the loop engine."""
    parts = {"partition": {"validation": 0.2, "test": 0.2}}
    prepared = prepared_run("bert", tiny_folder, decoders, images, **parts)
    progress = prepared.federation.run_round(prepared.federation.begin()).progress
    scores = prepared.evaluator.evaluate_clients(progress)
    assert max(passes) > 1
    loop = prepared_run("bert", tiny_folder, decoders, images, **parts, engine={"name": "loop"})
    for found, expected in zip(scores, loop.evaluator.evaluate_clients(progress), strict=True):
        assert list(found.by_client) == list(expected.by_client)
        for id, row in expected.by_client.items():
            assert found.by_client[id] == pytest.approx(row, rel=1e-5)


def test_personal_models_share_passes_over_a_held_out_set(
    tiny_folder: Path, decoders: Path, images: Path, passes: list[int]
) -> None:
    """The scores of every client are those of the loop engine."""
    scores: list[dict[str, Any]] = []
    for engine in ("batched", "loop"):
        prepared = prepared_run("bert", tiny_folder, decoders, images, engine={"name": engine})
        progress = prepared.federation.run_round(prepared.federation.begin()).progress
        passes.clear()
        scores.append(dict(prepared.evaluator.evaluate_heldout(progress, prepared.test)))
        assert max(passes, default=1) == (3 if engine == "batched" else 1)
    assert list(scores[0]) == list(scores[1])
    for id, row in scores[1].items():
        assert scores[0][id] == pytest.approx(row, rel=1e-5)


def test_a_global_model_predicts_a_held_out_set_alone(
    tiny_folder: Path, decoders: Path, images: Path, passes: list[int]
) -> None:
    prepared = prepared_run("bert", tiny_folder, decoders, images, method={"name": "fedit", "r": 2})
    assert prepared.evaluator.evaluate_heldout(prepared.federation.begin(), prepared.test).keys() == {"global"}
    assert passes == []


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many models each refused pass had; all are refused."""
    calls: list[int] = []

    def refuse(self: worker.Worker, models: Sequence[batching.ModelInputs], examples: Examples) -> list[Tensor]:
        calls.append(len(models))
        raise Unstackable("it mixes its examples")

    monkeypatch.setattr(worker.Worker, "predict", refuse)
    return calls


def test_models_that_cannot_share_passes_over_the_same_examples_predict_alone(
    tiny_folder: Path, decoders: Path, images: Path, calls: list[int]
) -> None:
    prepared = prepared_run("bert", tiny_folder, decoders, images)
    jobs, engine = [job for job, _ in personal_models(prepared, [1, 1, 1])], prepared.engine
    indices = np.arange(7)
    predictions = list(engine.predict_shared_examples(iter(jobs), prepared.train, indices, 4))
    assert calls == [3, 3], "each thread tries one pass"
    for job, rows in zip(jobs, predictions, strict=True):
        assert torch.equal(rows, engine.predict(job, prepared.train, indices, 4))


def test_models_that_cannot_share_a_pass_predict_alone(
    tiny_folder: Path, decoders: Path, images: Path, calls: list[int]
) -> None:
    prepared = prepared_run("bert", tiny_folder, decoders, images)
    models = personal_models(prepared, [4, 2, 3])
    assert largest_gap(prepared, models, 12) == 0.0
    assert calls == [3]
    assert largest_gap(prepared, models, 12) == 0.0
    assert calls == [3], "it is tried once"


def test_a_model_that_mixes_examples_is_detected(
    tiny_folder: Path, decoders: Path, images: Path, passes: list[int]
) -> None:
    prepared = prepared_run("bert", tiny_folder, decoders, images)
    models = personal_models(prepared, [4, 2, 3])
    prepared.engine.adapted.model.get_submodule("bert.embeddings").register_forward_hook(
        lambda _, __, output: output - output.mean(0, keepdim=True)
    )
    assert largest_gap(prepared, models, 12) == 0.0
    assert passes == []


def test_only_the_models_of_a_window_are_in_memory() -> None:
    requested: list[int] = []

    def models() -> Any:
        for size in (3, 3, 2, 9, 1):
            requested.append(size)
            yield Job({}, {}, ()), np.arange(size)

    made = batching.split_windows(models(), 8)
    assert [len(indices) for _, indices in next(made)] == [3, 3, 2]
    assert requested == [3, 3, 2, 9], "one more shows that the window is full"
    assert [[len(indices) for _, indices in window] for window in made] == [[9], [1]]


def test_stacks_keep_the_batch_size_and_the_kinds_apart() -> None:
    def job(rank: int) -> Job:
        return Job({}, {"layer/A": torch.zeros(rank, 5)}, ())

    models = [(job(2), np.arange(3)), (job(4), np.arange(2)), (job(2), np.arange(6)), (job(2), np.arange(2))]
    assert batching.build_prediction_key(models[0][0]) != batching.build_prediction_key(models[1][0])
    assert batching.stack_models(models, 8, 12) == [[2, 0], [3], [1]]
    assert batching.stack_models(models, 1, 100) == [[2], [0], [3], [1]]
    assert batching.stack_models([(replace(one), rows[:0]) for one, rows in models[:1]], 4, 4) == [[0]]


def test_stacks_on_the_same_examples_are_of_one_kind_and_their_passes_have_the_batch_size() -> None:
    jobs = [Job({}, {"layer/A": torch.zeros(rank, 5)}, ()) for rank in (2, 4, 2, 2, 4)]
    assert [len(window) for window in batching.split_job_windows(iter(jobs), 2)] == [2, 2, 1]
    assert batching.stack_on_shared_examples(jobs, 2, 64) == [[0, 2], [3], [1, 4]]
    assert batching.stack_on_shared_examples(jobs, 8, 2) == [[0, 2], [3], [1, 4]], (
        "a model has at least one row of a batch"
    )
    batches = [np.arange(8), np.arange(8, 11)]
    parts = batching.split_into_passes(batches, 3, 8)
    assert np.concatenate(parts).tolist() == list(range(11))
    assert [len(part) for part in parts] == [2, 2, 2, 2, 2, 1]
    alone = [part.tolist() for batch in batches for part in batching.split_into_passes([batch], 3, 8)]
    assert alone == [part.tolist() for part in parts]
