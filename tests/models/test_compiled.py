"""Blocks that torch.compile compiled give what they give otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedspan.errors import FedspanError
from fedspan.federation.progress import RoundResult
from fedspan.models.compiled import CompiledBlocks
from fedspan.models.layout import TokenLayout
from fedspan.runs.setup import prepare
from fedspan.training.batched import BatchedEngine
from helpers import tiny


def rounds(folder: Path, kind: str, **engine: Any) -> list[RoundResult]:
    """Two rounds of four clients, of whom three share a pass."""
    made = {"training": {"optimizer": "sgd", "lr": 0.02}, "federation": {"clients_per_round": 4}}
    prepared = prepare(tiny.config(folder, kind, engine={"name": "batched", **engine}, **made))
    assert isinstance(prepared.engine, BatchedEngine)
    first = prepared.federation.run_round(prepared.federation.begin())
    assert prepared.engine.refusal is None
    return [first, prepared.federation.run_round(first.progress)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deep-bert", "gpt2"])
def test_rounds_are_those_of_blocks_that_are_not_compiled(
    kind: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_options = {"clients_per_pass": 3, "workers": 1}
    expected = rounds(tiny_folder, kind, **engine_options)
    frames: list[object] = []
    compiled = torch.compile

    def watched(function: Any, **options: Any) -> Any:
        frames.append(function)
        return compiled(function, **options)

    monkeypatch.setattr(torch, "compile", watched)
    monkeypatch.setattr(TokenLayout, "pack", None)  # nothing goes without padding
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = rounds(tiny_folder, kind, compile=True, **engine_options)
    assert len(frames) == 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2
    assert not torch._dynamo.utils.counters["graph_break"]
    for one, other in zip(found, expected, strict=True):
        assert abs(one.loss - other.loss) < 1e-5
        for name, value in other.progress.state.tensors.items():
            assert (one.progress.state.tensors[name] - value).norm() <= 1e-4 * value.norm().clamp(min=1e-3), name


@pytest.mark.slow
def test_a_second_model_of_the_process_is_compiled(tiny_folder: Path) -> None:
    """PyTorch counts the variants of all Transformers' blocks together, and runs those beyond its limit uncompiled."""
    torch._dynamo.reset()
    stats = torch._dynamo.utils.counters["stats"]
    graphs: list[int] = []
    for kind in ("deep-bert", "roberta"):
        stats.clear()
        rounds(tiny_folder, kind, compile=True, clients_per_pass=3, workers=1)
        graphs.append(stats["unique_graphs"])
    assert graphs[1] == graphs[0] > 4


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"engine": {"name": "loop", "compile": True}}, "loop does not compile, only batched does"),
        ({"engine": {"name": "batched", "compile": True}, "training": {"lora_dropout": 0.1}}, "training.lora_dropout"),
    ],
)
def test_what_can_t_be_compiled_is_refused(changes: dict[str, Any], why: str, tiny_folder: Path) -> None:
    with pytest.raises(FedspanError, match=why) as refused:
        prepare(tiny.config(tiny_folder, **changes))
    assert refused.value.field == "engine.compile"


@pytest.mark.slow
def test_a_compiler_that_fails_is_named(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("/nowhere/c++",))
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    with pytest.raises(FedspanError, match=r"torch\.compile failed on this machine") as refused:
        rounds(tiny_folder, "bert", compile=True, clients_per_pass=3, workers=1)
    assert refused.value.field == "engine.compile"


@pytest.mark.parametrize("compiled", [True, False])
def test_failed_checks_of_compiled_code_are_told_from_other_assertions(compiled: bool, tiny_folder: Path) -> None:
    """Inductor's modules assert the strides of their inputs with a function that they import."""
    blocks = CompiledBlocks(prepare(tiny.config(tiny_folder)).engine.adapted)
    names: dict[str, Any] = {"assert_size_stride": None} if compiled else {}
    exec("def fail():\n    raise AssertionError('expected size 2==2, stride 96==112 at dim=0')", names)
    with pytest.raises(FedspanError if compiled else AssertionError, match="stride 96==112"), blocks.within():
        names["fail"]()
