"""The papers' presets: every file fits the schema, and mistakes in one are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedspan import FedspanError
from fedspan.models.names import BUILTIN_MODELS, resolve_model
from fedspan.reproduction.presets import list_presets, load_preset, merge, read_architectures, read_preset
from helpers.changed_preset import changed


def test_the_architecture_of_minilm_is_its_package_s() -> None:
    from transformers import AutoConfig

    name = "builtin:all-minilm-l6-v2"
    assert name.removeprefix("builtin:") in BUILTIN_MODELS
    try:
        published = AutoConfig.from_pretrained(resolve_model(name)).to_dict()
    except FedspanError:
        pytest.skip("its package is not installed")
    assert {key: published[key] for key in read_architectures()[name]} == read_architectures()[name]


def test_merging_goes_into_sections() -> None:
    assert merge({"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"y": 4}, "c": 5}) == {"a": {"x": 1, "y": 4}, "b": 3, "c": 5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nots": ["n"]}, r"`x\.nots`: there is no such field. Did you mean 'notes'"),
        ({"methods": {"LoRA": {"key": "fedit-lora"}}}, "methods.LoRA.key 'fedit-lora' is not a method. Did you mean"),
        ({"claims": [{"statement": "s", "better": "LoRA", "worse": ["FFA"]}]}, "claims: 'FFA' is not one of LoRA"),
        (
            {"claims": [{"statement": "s", "better": "LoRA", "worse": ["LoRA"], "cells": {"task": ["two"]}}]},
            "'two' is not one",
        ),
        ({"small": {"axes": {"clients": {}}}}, "small.axes: 'clients' is not one of task"),
        ({"small": {"skip": [{"task": ["two"]}]}}, "small.skip.task: 'two' is not one of one"),
        (
            {"small": {"skip": [{}]}},
            r"`x\.small\.skip\.0`: {} is not accepted. Expected a dictionary with at least 1 item",
        ),
        (
            {"sweep": {"training.lr": [0.1]}, "small": {"matched": {"training.momentum": 0.9}}},
            r"small\.matched has training\.momentum, the sweep training\.lr",
        ),
        ({"seeds": []}, r"`x\.seeds`: \[\] is not accepted. Expected a list with at least 1 item"),
    ],
)
def test_mistakes_in_a_preset_are_named(changes: dict[str, Any], message: str) -> None:
    assert read_preset(changed(), "x").id == "x"
    with pytest.raises(FedspanError, match=message):
        read_preset(changed(**changes), "x")


def test_an_unknown_preset() -> None:
    with pytest.raises(FedspanError, match=r"^`ID`: no preset is named 'rolora-table99'\. Did you mean 'rolora-table"):
        load_preset("rolora-table99")


def test_the_page_lists_all_presets() -> None:
    """Written by ``python docs/generate_presets.py``."""
    path = Path(__file__).resolve().parents[2] / "docs" / "reproducing.md"
    text = path.read_text(encoding="utf-8")
    for preset in list_presets():
        assert f"| `{preset.id}` | {preset.item} | {preset.title} | {', '.join(preset.methods)} |" in text
    assert text.count("\n| `") == len(list_presets())
