"""Stages: what an observer sees of nested work, of several threads, and of a run from its start to its end."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

import fedspan
from fedspan.runs.callbacks import Listener
from fedspan.training.stages import Stage, Stages
from helpers import tiny


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
    assert inner is not None
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
    fedspan.run({**values, "baselines": ["local", "centralized"]}, tmp_path / "run", listener=seen)
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
