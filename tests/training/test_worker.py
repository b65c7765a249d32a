"""The work of one thread of the batched engine: its check of shared passes, too little memory, stored plans."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedspan
from fedspan.config import parse_config
from fedspan.errors import FedspanError
from fedspan.runs.setup import prepare
from fedspan.tasks.causal import CausalLM
from fedspan.tasks.masked_lm import MaskedLanguageModel
from fedspan.tasks.seq2seq import Seq2Seq
from fedspan.tasks.task import Examples
from fedspan.tasks.token_classification import TokenClassification
from fedspan.training import worker
from fedspan.training.batched import BatchedEngine
from fedspan.training.stacking import DEFAULT
from fedspan.training.worker import Worker
from helpers import tiny, tiny_decoders, tiny_masked, tiny_seq2seq, tiny_tags
from helpers.families import others_slow

TASKS: dict[type[Any], Callable[[Path, Path, Path], dict[str, Any]]] = {
    MaskedLanguageModel: lambda _, __, own: tiny_masked.settings(own),
    TokenClassification: lambda models, _, own: tiny_tags.settings(models, own),
    CausalLM: lambda _, decoders, __: tiny_decoders.settings(decoders, "llama"),
    Seq2Seq: lambda _, __, own: tiny_seq2seq.settings(own),
}


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


@pytest.mark.parametrize("is_continuous", [False, True])
@pytest.mark.parametrize("task", others_slow(list(TASKS), [MaskedLanguageModel, TokenClassification]))
def test_what_rounding_may_flip_refuses_no_shared_pass(
    task: type[Any],
    is_continuous: bool,
    tiny_folder: Path,
    decoders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ids of the largest score, and counts of right ones, differ between passes; of the losses, it is noticed."""
    predict, passes = task.predict, list[int]()

    def change(self: Any, model: Any, batch: Any, **options: Any) -> Tensor:
        predictions = predict(self, model, batch, **options)
        passes.append(len(predictions))
        columns = (
            predictions[:, : self.continuous_columns] if is_continuous else predictions[:, self.continuous_columns :]
        )
        columns += len(passes)
        return predictions

    monkeypatch.setattr(task, "predict", change)
    made = TASKS[task](tiny_folder, decoders, tmp_path)
    made["engine"] = {"name": "batched", "clients_per_pass": 3, "workers": 1}
    prepared = prepare(parse_config(made))
    prepared.federation.run_round(prepared.federation.begin())
    assert isinstance(prepared.engine, BatchedEngine)
    assert ("predictions differ" in str(prepared.engine.refusal)) == is_continuous
    assert len(passes) > 2
