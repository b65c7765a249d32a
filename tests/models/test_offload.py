"""Bases that wait on disk between calls: the same results, W0 as stored, and what cannot be combined with it."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedspan
from fedspan.config import parse_config
from fedspan.errors import FedspanError
from fedspan.models.offload import is_offloaded
from fedspan.runs.setup import Prepared, prepare
from helpers import tiny, tiny_decoders

ROOM = {"cpu": 4 / (1 << 20)}
"""4 KiB: less than the tiny models have."""


def offloaded(values: dict[str, Any]) -> dict[str, Any]:
    """The same run with most of its base on disk."""
    return {**values, "model": {**values["model"], "device_map": "auto", "max_memory": ROOM}}


def state(prepared: Prepared) -> Mapping[str, Tensor]:
    """The global tensors after two rounds."""
    progress = prepared.federation.begin()
    for _ in range(2):
        progress = prepared.federation.run_round(progress).progress
    return progress.state.tensors


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param("bert", {}, marks=pytest.mark.slow),
        pytest.param("bert", {"model": {"gradient_checkpointing": True}}, marks=pytest.mark.slow),
        pytest.param("deep-bert", {"model": {"layers_to_transform": [1]}}, marks=pytest.mark.slow),
        pytest.param("bert", {"model": {"pooling": "mean"}}, marks=pytest.mark.slow),
        pytest.param("bert", {"method": {"name": "fed-sb"}}, marks=pytest.mark.slow),
        ("bert", {"method": {"name": "flora"}}),  # moves the base
        pytest.param("gpt2", {}, marks=pytest.mark.slow),
        ("llama-lm", {}),
    ],
)
def test_training_ends_where_it_ends_with_the_base_in_memory(
    kind: str, changes: dict[str, Any], tiny_folder: Path, decoders: Path
) -> None:
    if kind == "llama-lm":
        values = tiny_decoders.settings(decoders, "llama", **changes)
    else:
        values = tiny.settings(tiny_folder, kind, **changes)
    plain, apart = prepare(parse_config(values)), prepare(parse_config(offloaded(values)))
    adapted = apart.engine.adapted
    assert all(is_offloaded(layer.module) for layer in adapted.layers.values())
    assert all(layer.stored_weight.is_meta for layer in adapted.layers.values())
    for name in adapted.layers:
        assert torch.equal(adapted.get_weight(name), plain.engine.adapted.get_weight(name))
    expected, found = state(plain), state(apart)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-5 * value.norm().clamp(min=1e-3), name


def test_a_run_from_config_to_predictions(tiny_folder: Path, tmp_path: Path) -> None:
    report = fedspan.run(offloaded(tiny.settings(tiny_folder)), tmp_path / "run")
    plain = fedspan.run(tiny.settings(tiny_folder), tmp_path / "plain")
    assert report.scores["test"] == plain.scores["test"]


def test_files_go_with_the_model(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = prepare(parse_config(offloaded(tiny.settings(tiny_folder))))
    assert list(tmp_path.iterdir())
    del made
    gc.collect()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"engine": {"name": "batched"}}, "the engine batched shares a base"),
        ({"privacy": {"mechanism": "dp-sgd", "noise": 1.0, "clip": 1.0}}, "privacy.mechanism: dp-sgd"),
        ({"model": {"quantization": "nf4"}}, "model.quantization"),
        ({"model": {"pretrained": False}}, "have to be on the device"),
    ],
)
def test_what_cannot_be_combined_with_it(changes: dict[str, Any], why: str, tiny_folder: Path) -> None:
    with pytest.raises(FedspanError) as caught:
        parse_config(offloaded(tiny.settings(tiny_folder, **changes)))
    assert caught.value.field == "model.device_map"
    assert why in str(caught.value)


def test_limits_of_memory_without_it(tiny_folder: Path) -> None:
    with pytest.raises(FedspanError, match="it needs model"):
        parse_config(tiny.settings(tiny_folder, model={"max_memory": ROOM}))


def test_what_trains_whole_is_not_offloaded(tiny_folder: Path) -> None:
    values = offloaded(tiny.settings(tiny_folder, model={"modules_to_save": ["LayerNorm"]}))
    with pytest.raises(FedspanError, match="trains whole, but it is offloaded"):
        prepare(parse_config(values))


def test_a_method_that_scales_the_base_is_refused(tiny_folder: Path) -> None:
    made = prepare(parse_config(offloaded(tiny.settings(tiny_folder))))
    base = made.federation.begin().state.base
    with pytest.raises(FedspanError, match="scales the base"):
        made.engine.adapted.set_base(type(base)(1, 0.5, {}))
