"""A model that is passed from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from fedspan.config import parse_config
from fedspan.runs.model_setup import ModelObjects
from fedspan.runs.setup import Objects, Prepared, prepare
from helpers import tiny


def test_an_untrained_head_that_was_passed_from_python_starts_from_statistics(tiny_folder: Path) -> None:
    def prepared(model: object, **changes: Any) -> Prepared:
        values = tiny.settings(tiny_folder, model={"head_init": "auto", **changes})
        objects = Objects(model=ModelObjects(model, AutoTokenizer.from_pretrained(tiny_folder / "bert")))
        values["model"]["name"] = "python:bert"
        return prepare(parse_config(values), objects=objects)

    model: Any = tiny.fresh_classifier(tiny_folder / "bert")
    run = prepared(model)
    assert run.head is not None
    assert run.head.kind == "lda"
    with torch.no_grad():
        model.classifier.bias.fill_(0.01)  # as after a step of training
    trained = prepared(model)
    assert trained.head is None
    assert any("starts with the weights of the model that was passed" in note for note in trained.notes)
    assert prepared(model, head_init="lda").head is not None
