"""The engine of a run: when its plan applies, and what users are told when clients do not train as requested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedspan
from fedspan.config import parse_config
from fedspan.errors import FedspanError
from fedspan.federation.evaluation import Evaluator
from fedspan.federation.progress import Progress
from fedspan.runs.engine_setup import describe_refusal, keep_stacking_plan
from fedspan.runs.folder import RunFolder
from fedspan.runs.setup import prepare
from fedspan.training.batched import BatchedEngine
from fedspan.training.loop import LoopEngine
from fedspan.training.stacking import StackingPlan
from fedspan.training.worker import Worker
from helpers import tiny

REASON = "its layers cannot be stacked"


class Refusing(BatchedEngine):
    """An engine that trains its clients one by one."""

    def __init__(self) -> None:
        pass

    @property
    def refusal(self) -> str | None:
        return REASON


def test_a_refusal_is_reported() -> None:
    note = describe_refusal(Refusing())
    assert note is not None
    assert note.endswith(REASON)
    assert describe_refusal(LoopEngine.__new__(LoopEngine)) is None


def test_the_start_of_a_run_is_evaluated_as_before_a_plan_is_known(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a run that was stopped in its first round, whose folder has a plan."""
    values = tiny.settings(tiny_folder, engine={"name": "batched", "clients_per_pass": 2, "workers": 2})
    values["partition"] = {**values["partition"], "validation": 0.2}
    plans, evaluate = list[StackingPlan | None](), Evaluator.evaluate_clients

    def record(evaluator: Evaluator, progress: Progress) -> Any:
        engine = evaluator.federation.engine
        assert isinstance(engine, BatchedEngine)
        plans.append(engine.stacking)
        return evaluate(evaluator, progress)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Worker, "run", stop)
        with pytest.raises(KeyboardInterrupt):
            fedspan.run(values, tmp_path / "run", progress=False)
    assert (tmp_path / "run" / "engine.json").exists()
    monkeypatch.setattr(Evaluator, "evaluate_clients", record)
    fedspan.resume(tmp_path / "run", progress=False)
    assert plans[0] is None
    assert plans[1:] == [StackingPlan(2, 2)] * (len(plans) - 1)
    assert len(plans) > 1


def test_a_plan_is_restored_and_numbers_of_the_config_replace_its_own(tiny_folder: Path, tmp_path: Path) -> None:
    """As after an error for too little memory: the next resume has them, too."""
    run_folder = RunFolder(tmp_path)
    run_folder.write_json(run_folder.engine, {"clients_per_pass": 8, "workers": 2})
    for options, expected in (({}, (8, 2)), ({"clients_per_pass": 3}, (3, 2)), ({}, (3, 2)), ({"workers": 1}, (3, 1))):
        engine = prepare(parse_config(tiny.settings(tiny_folder, engine={"name": "batched", **options}))).engine
        keep_stacking_plan(run_folder, engine)
        assert isinstance(engine, BatchedEngine)
        assert engine.stacking == StackingPlan(*expected)
    assert run_folder.read_json(run_folder.engine) == {"clients_per_pass": 3, "workers": 1}
    run_folder.write_json(run_folder.engine, {"clients_per_pass": None})
    with pytest.raises(FedspanError, match="two numbers, clients_per_pass and workers"):
        keep_stacking_plan(run_folder, engine)
