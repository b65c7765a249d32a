"""The reference: the pretrained model before the federation, whatever a method makes of the base."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import transformers

from fedspan import FedspanError
from fedspan.config import parse_config
from fedspan.runs.setup import prepare
from fedspan.tasks.causal import CausalLM
from fedspan.tasks.preference import PreferenceTuning
from fedspan.training.references import References, fill_reference, has_reference
from fedspan.training.stages import Stages
from helpers import tiny, tiny_decoders, tiny_preferences
from helpers.families import others_slow

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "method",
    others_slow(["flora", "fedloru", "fedit", "fedavg"], ["flora"]),
)
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_the_reference_is_the_start_of_the_federation(method: str, engine: str, decoders: Path, tmp_path: Path) -> None:
    values = tiny_preferences.settings(decoders, tmp_path, method={"name": method}, engine={"name": engine})
    prepared = prepare(parse_config(values))
    examples, test = prepared.train, prepared.test
    assert test is not None
    assert np.isnan(examples.reference).all()  # pyright: ignore
    progress = prepared.federation.begin()
    for _ in range(2):
        progress = prepared.federation.run_round(progress).progress
    prepared.evaluator.evaluate_heldout(progress, test)  # for the first time now
    assert prepared.engine.adapted.base is progress.state.base
    pretrained = transformers.AutoModelForCausalLM.from_pretrained(decoders / "llama-lm").eval()
    for own in (examples, test):
        filled = ~np.isnan(own.reference).any(1)  # pyright: ignore
        assert filled.any()
        batch = prepared.task.collate(own, np.flatnonzero(filled).tolist(), CPU)
        expected = prepared.task.compute_reference(pretrained, batch)  # pyright: ignore
        np.testing.assert_allclose(own.reference[filled], expected.numpy(), rtol=1e-5, atol=1e-5)  # pyright: ignore


def test_examples_are_computed_once_and_in_parts(decoders: Path, tmp_path: Path) -> None:
    prepared = prepare(parse_config(tiny_preferences.settings(decoders, tmp_path)))
    task, examples = prepared.task, prepared.train
    seen: list[tuple[int, int | None]] = []
    stages = Stages(lambda stage: seen.append((stage.done, stage.total)) if stage and stage.done else None)
    references = References(prepared.engine.adapted, task, stages, 4)
    references.ensure(examples, [np.arange(5), np.arange(5, 9)])
    assert seen[-1] == (9, 9)
    before = examples.reference.copy()  # pyright: ignore
    references.ensure(examples, [np.arange(9), np.arange(3, 11)])
    assert seen[-1] == (2, 2)
    np.testing.assert_array_equal(examples.reference[:9], before[:9])  # pyright: ignore


def test_other_tasks_have_no_reference(tiny_folder: Path) -> None:
    prepared = prepare(tiny.config(tiny_folder))
    assert not has_reference(prepared.task)
    References(prepared.engine.adapted, prepared.task, Stages(), 4).ensure(prepared.train, [np.arange(3)])


def test_a_model_that_computes_nan_is_named(decoders: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(decoders / "llama-lm")
    model.lm_head.weight.data[:] = float("nan")
    task = PreferenceTuning(CausalLM(tiny_decoders.tokenizer(pads=True), 16))
    rows = tiny_preferences.make_rows()[:3]
    examples = task.encode(datasets.Dataset.from_list(rows).rename_column("prompt", "text"))
    with pytest.raises(FedspanError, match="the pretrained model computes NaN"):
        fill_reference(task, model, examples, np.arange(3), CPU, 2)
