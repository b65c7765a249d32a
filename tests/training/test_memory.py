"""Errors that name the setting where a device has too little memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedspan.errors import FedspanError
from fedspan.runs.setup import prepare
from fedspan.training.memory import convert_out_of_memory
from helpers import tiny

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
    with pytest.raises(FedspanError, match=f"cpu has too little memory for {size} examples .*{expected}") as caught:
        prepared.federation.run_round(prepared.federation.begin())
    assert caught.value.field == "training.batch_size"


@pytest.mark.parametrize("engine", ENGINES)
def test_evaluation_names_its_batch_size(engine: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(tiny.config(tiny_folder, engine=ENGINES[engine]))
    progress = prepared.federation.run_round(prepared.federation.begin()).progress
    assert prepared.test is not None
    monkeypatch.setattr(type(prepared.task), "predict", fail)
    size = min(prepared.config.evaluation.batch_size, len(prepared.test))
    with pytest.raises(FedspanError, match=f"{size} examples in a batch .*Expected a smaller number") as caught:
        prepared.evaluator.evaluate_heldout(progress, prepared.test)
    assert caught.value.field == "evaluation.batch_size"
