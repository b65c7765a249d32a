"""Extras of a narrow base train in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedspan.runs.setup import Prepared, prepare
from fedspan.training.jobs import Assignment
from helpers import tiny
from helpers.first_jobs import first_job


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_extras_of_a_narrow_base_train_in_float32(dtype: str, tiny_folder: Path, prepared: Prepared) -> None:
    """A step of 1e-5 moves every weight of the head, which a narrow format rounds away; frozen weights stay narrow.

    Embeddings (tied to nothing here), a normalization in the middle and the head: integer inputs, inner and outer ones.
    """
    saved = ["word_embeddings", "LayerNorm"]
    model = {"dtype": dtype, "modules_to_save": saved}
    narrow = prepare(tiny.config(tiny_folder, model=model), prepared.partition)
    adapted = narrow.engine.adapted
    assert {path.rpartition(".")[0].rpartition(".")[2] for path in adapted.extras} >= {*saved, "classifier"}
    for path, parameter in adapted.model.named_parameters():
        assert parameter.dtype == (torch.float32 if path in adapted.extras else getattr(torch, dtype))
    job = first_job(narrow)
    start = {name: value.clone() for name, value in job.tensors.items()}
    indices = narrow.federation.clients["north"].train
    trained = narrow.engine.train(Assignment("north", 0, job, indices, 1e-5), narrow.train)
    head = "extras/classifier.weight"
    moved = trained.tensors[head] != start[head]
    assert trained.tensors[head].dtype == torch.float32
    assert moved.all()
    rounded = getattr(torch, dtype)
    assert (trained.tensors[head].to(rounded) != start[head].to(rounded)).double().mean() < 0.5
