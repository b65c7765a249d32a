"""Engines, jobs and client slots: order, learning rates, batches, memory, and what observers see."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedspan
from fedspan.assembly.run import prepare
from fedspan.core.tensors import create_generator
from fedspan.core.values import Job, Trained
from fedspan.progress.listener import Listener
from fedspan.training.batching import draw_epoch_batches, draw_training_batches, split_evaluation_batches
from fedspan.training.client_slot import SharedTensors
from fedspan.training.engine import train_one_by_one
from fedspan.training.jobs import Assignment, TrainingSettings, convert_out_of_memory
from fedspan.training.stages import Stage, Stages
from helpers import tiny
from helpers.refusals import refused


def test_clients_train_one_by_one_until_no_assignment_follows() -> None:
    """A client's first job is opened when the one before it has finished."""
    events: list[tuple[str, ...]] = []
    phases = {"b": ["first", "second", "third"], "a": ["first"], "c": ["first", "second"]}

    def open_job(client: str) -> Assignment:
        events.append(("open", client))
        return Assignment(client, 0, Job({}, {}, (), phase="first"), np.arange(3), 0.1)

    def train(assignment: Assignment) -> Trained:
        events.append(("train", assignment.client, assignment.job.phase))
        return Trained({}, 3.0, 0.5)

    def finish_job(assignment: Assignment, trained: Trained) -> Assignment | None:
        assert trained == Trained({}, 3.0, 0.5)
        events.append(("finish", assignment.client, assignment.job.phase))
        following = phases[assignment.client][phases[assignment.client].index(assignment.job.phase) + 1 :]
        return replace(assignment, job=replace(assignment.job, phase=following[0])) if following else None

    train_one_by_one({id: 3 for id in phases}, open_job, train, finish_job)
    expected: list[tuple[str, ...]] = []
    for id, names in phases.items():
        expected.append(("open", id))
        for name in names:
            expected += [("train", id, name), ("finish", id, name)]
    assert events == expected


def test_a_schedule_may_start_again_and_end_above_zero() -> None:
    settings = TrainingSettings(lr=0.3, schedule="cosine", min_lr=0.1, cycle_rounds=2)
    assert [settings.compute_lr(round, 5) for round in range(5)] == pytest.approx([0.3, 0.2, 0.3, 0.2, 0.3])
    linear = settings.model_copy(update={"schedule": "linear", "cycle_rounds": 4, "warmup_rounds": 1})
    assert [linear.compute_lr(round, 6) for round in range(6)] == pytest.approx([0.15, 0.3, 0.25, 0.2, 0.15, 0.3])
    assert linear.model_copy(update={"schedule": "constant"}).compute_lr(3, 6) == 0.3


CPU = torch.device("cpu")


def test_equal_tensors_of_clients_are_one_copy() -> None:
    shared, value = SharedTensors(), torch.randn(3, 2)
    first = shared.get("layer/A", value, CPU)
    assert torch.equal(first, value)
    assert shared.get("layer/A", value.clone(), CPU) is first
    value.add_(1)  # a client's own tensor may change, the copy does not
    assert not torch.equal(first, value)


def test_other_tensors_are_copies_of_their_own() -> None:
    shared, value = SharedTensors(), torch.randn(3, 2)
    first = shared.get("layer/A", value, CPU)
    for other in (value + 1, value.double(), value.reshape(2, 3)):
        copied = shared.get("layer/A", other, CPU)
        assert copied is not first
        assert copied is not other
        assert torch.equal(copied, other)
    assert shared.get("other/A", value, CPU) is not first
    assert shared.get("layer/A", value, CPU) is first
    shared.clear()
    assert shared.get("layer/A", value, CPU) is not first


LENGTHS = np.random.default_rng(0).integers(2, 60, 1000)


def job(indices: np.ndarray, **changes: Any) -> list[list[int]]:
    options: dict[str, Any] = {"batch_size": 4, "epochs": 2, "batches": None, "seed": 1, "key": (0, "a", "train")}
    options = {**options, "group_by_length": True, **changes}
    return [batch.tolist() for batch in draw_training_batches(indices, LENGTHS, **options)]


@settings(deadline=None)
@given(st.integers(0, 100), st.integers(1, 20), st.booleans(), st.integers(0, 5))
def test_an_epoch_is_every_example_once(count: int, size: int, grouped: bool, seed: int) -> None:
    indices = np.arange(3, 3 + count)
    batches = draw_epoch_batches(indices, LENGTHS, size, create_generator(seed, "x"), grouped)
    assert sorted(np.concatenate([*batches, np.array([], dtype=int)]).tolist()) == indices.tolist()
    assert len(batches) == -(-count // size)
    assert all(0 < len(batch) <= size for batch in batches)
    assert sum(len(batch) < size for batch in batches) <= 1


def test_grouping_by_length_saves_padding_and_still_shuffles() -> None:
    """Padded tokens fall by more than half of what can be saved; batches differ from epoch to epoch."""

    def padding(batches: list[list[int]]) -> int:
        return sum(len(batch) * LENGTHS[batch].max() for batch in batches) - int(LENGTHS.sum())

    plain, grouped = (job(np.arange(1000), epochs=1, group_by_length=on) for on in (False, True))
    assert padding(grouped) < 0.5 * padding(plain)
    two = job(np.arange(1000), epochs=2)
    assert two[:250] == grouped
    assert {frozenset(batch) for batch in two[:250]}.isdisjoint({frozenset(batch) for batch in two[250:]})
    means = [LENGTHS[batch].mean() for batch in grouped]
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.3  # batches of like length do not follow each other


def test_a_number_of_batches_takes_as_many_epochs_as_that_needs() -> None:
    """Ten examples in batches of four are three batches an epoch."""
    indices = np.arange(10)
    assert job(indices, batches=7) == job(indices, epochs=3)[:7]
    assert job(indices, batches=2, epochs=50) == job(indices, epochs=1)[:2]
    assert [len(batch) for batch in job(indices, epochs=1, group_by_length=False)] == [4, 4, 2]


@pytest.mark.parametrize("change", [{"seed": 2}, {"key": (1, "a", "train")}, {"key": (0, "b", "train")}])
def test_every_part_of_the_key_counts_and_nothing_else(change: dict[str, Any]) -> None:
    indices = np.arange(40)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = job(indices)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert job(indices) == first
    assert job(indices, **change) != first


@pytest.mark.parametrize("options", [{"epochs": 3}, {"batches": 5}])
def test_no_examples_are_no_batches(options: dict[str, int]) -> None:
    assert job(np.array([], dtype=np.int64), **options) == []


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(1, 20))
def test_evaluation_sees_all_by_length(count: int, size: int) -> None:
    indices = np.arange(7, 7 + count)
    batches = split_evaluation_batches(indices, LENGTHS, size)
    ordered = np.concatenate([*batches, np.array([], dtype=int)])
    assert sorted(ordered.tolist()) == indices.tolist()
    assert (np.diff(LENGTHS[ordered.astype(int)]) >= 0).all()
    assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)


ENGINES = {"loop": {"name": "loop"}, "batched": {"name": "batched", "clients_per_pass": 1, "workers": 1}}


def fail(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="another"), convert_out_of_memory(torch.device("cpu"), "a", 3, "rows"):
        raise RuntimeError("another")


@pytest.mark.parametrize("engine", ENGINES)
def test_training_names_its_batch_size(engine: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(tiny.config(tiny_folder, engine=ENGINES[engine]))
    monkeypatch.setattr(type(prepared.task), "compute_loss", fail)
    size, expected = prepared.config.training.batch_size, "a smaller number, or model.gradient_checkpointing"
    with refused("training.batch_size", f"cpu has too little memory for {size} examples .*{expected}"):
        prepared.federation.run_round(prepared.federation.begin())


@pytest.mark.parametrize("engine", ENGINES)
def test_evaluation_names_its_batch_size(engine: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(tiny.config(tiny_folder, engine=ENGINES[engine]))
    progress = prepared.federation.run_round(prepared.federation.begin()).progress
    monkeypatch.setattr(type(prepared.task), "predict", fail)
    size = min(prepared.config.evaluation.batch_size, len(prepared.test))
    with refused("evaluation.batch_size", f"{size} examples in a batch .*Expected a smaller number"):
        prepared.evaluator.evaluate_heldout(progress, prepared.test)


def test_an_observer_sees_the_innermost_stage_and_returns_to_the_outer_one() -> None:
    seen: list[Stage | None] = []
    stages = Stages(seen.append)
    with stages.stage("training", 10):
        stages.advance("training", 4)
        with stages.stage("hidden states", 2):
            stages.advance("hidden states", 2)
            stages.advance("training", 1)  # counts, though another stage is shown
        stages.reach("training", 3)  # more are done already
        stages.reach("training", 8)
        stages.advance("evaluation", 1)  # not open
    reported = [None if one is None else (one.name, one.done, one.total) for one in seen]
    assert reported == [
        ("training", 0, 10), ("training", 4, 10), ("hidden states", 0, 2), ("hidden states", 2, 2),
        ("hidden states", 2, 2), ("training", 5, 10), ("training", 8, 10), None,
    ]  # fmt: skip
    inner = seen[3]
    assert inner.is_within("training")
    assert not inner.is_within("evaluation")


def test_a_stage_that_an_error_ends_is_closed() -> None:
    seen: list[Stage | None] = []
    stages = Stages(seen.append)
    with pytest.raises(ValueError, match="lost"), stages.stage("export"):
        raise ValueError("lost")
    assert seen[-1] is None


def test_threads_in_one_stage_count_together() -> None:
    seen: list[Stage | None] = []
    stages, both = Stages(seen.append), Barrier(2)

    def work(count: int) -> None:
        with stages.stage("hidden states", count):
            both.wait()
            for _ in range(count):
                stages.advance("hidden states")
            both.wait()

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(work, 300), pool.submit(work, 200)]:
            future.result()
    counts = [one.done for one in seen if one is not None]
    assert counts == sorted(counts)
    assert [(one.done, one.total) for one in seen if one is not None][-1] == (500, 500)
    assert seen[-1] is None


class Recorder(Listener):
    """The stages of a run in the order in which they end, each with all that was done in it."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self._open: dict[str, Stage] = {}

    def on_stage_change(self, stage: Stage | None) -> None:
        if stage is None:
            self.stages += self._open.values()
            self._open.clear()
            return
        before = self._open.get(stage.name)
        if before is not None and before.done > stage.done:  # the next one
            self.stages.append(before)
        self._open[stage.name] = stage

    def counts(self, name: str) -> list[tuple[int, int | None]]:
        return [(one.done, one.total) for one in self.stages if one.name == name]


@pytest.mark.parametrize("engine", ["loop", pytest.param("batched", marks=pytest.mark.slow)])
def test_the_long_work_of_a_run_is_counted_to_its_end(engine: str, tiny_folder: Path, tmp_path: Path) -> None:
    """Prefix cache, statistics, training, evaluation and baselines: every example that is announced is counted."""
    model: dict[str, Any] = {"target_modules": ["query"], "layers_to_transform": [1], "head_init": "lda"}
    training = {"local_steps": None, "local_epochs": 2, "batch_size": 16}
    values = tiny.settings(
        tiny_folder, "deep-bert", model=model, training=training, engine={"name": engine, "workers": 2}
    )
    values["federation"] = {"rounds": 2}
    seen = Recorder()
    fedspan.run({**values, "baselines": ["local-only", "centralized"]}, tmp_path / "run", listener=seen)
    order = list(dict.fromkeys(stage.name for stage in seen.stages))
    assert order[:3] == ["data", "model", "encoding"]
    assert order.index("hidden states") < order.index("training")
    assert "export" in order
    parts = json.loads((tmp_path / "run" / "partition.json").read_text())
    examples = dict(zip(parts["clients"], parts["train"], strict=True))
    rounds = [json.loads(line)["cohort"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1:]]
    expected = [2 * sum(map(examples.__getitem__, cohort)) for cohort in rounds]
    baselines = [2 * sum(examples.values())] * 4
    assert seen.counts("training") == [(count, count) for count in (*expected, *baselines)]
    for name in ("training", "evaluation", "statistics", "hidden states"):
        ends = seen.counts(name)
        assert (total := sum(total or 0 for _, total in ends))
        assert sum(done for done, _ in ends) >= total, name
    inside = [stage for stage in seen.stages if stage.name == "hidden states" and stage.is_within("training")]
    assert not inside, "the head's statistics need them before"
