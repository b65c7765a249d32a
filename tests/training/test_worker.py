"""The work of one process of the batched engine: memory that is too little, and plans that outlive a kill."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fedspan
from fedspan.errors import FedspanError
from fedspan.runs.setup import prepare
from fedspan.tasks.task import Examples
from fedspan.training import worker
from fedspan.training.stacking import DEFAULT
from fedspan.training.worker import Worker
from helpers import tiny


def test_the_plan_is_written_before_it_is_used(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.settings(tiny_folder, federation={"rounds": 1})
    config["engine"] = {"name": "batched"}
    place = tmp_path / "run" / "engine.json"

    def killed(*_: object) -> None:
        assert place.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(config, tmp_path / "run")
    assert json.loads(place.read_text())["clients_per_pass"] == DEFAULT.clients_per_pass


def test_too_little_memory_for_a_pass_names_the_setting(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def advance(self: worker.Worker, group: Sequence[Any], examples: Examples) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(worker.Worker, "advance", advance)
    prepared = prepare(tiny.config(tiny_folder, engine={"name": "batched", "clients_per_pass": 3, "workers": 1}))
    with pytest.raises(FedspanError, match="cpu has too little memory for 3 clients in a pass") as caught:
        prepared.federation.run_round(prepared.federation.begin())
    assert caught.value.field == "engine.clients_per_pass"
