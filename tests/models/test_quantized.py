"""Bases in 4 and 8 bits: the numbers that they stand for, training beside them, and that nobody writes to them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

import fedspan
from fedspan.assembly.run import Prepared, prepare
from fedspan.config import parse_config
from fedspan.core.base import to_dense
from fedspan.errors import FedspanError
from fedspan.models import quantized
from fedspan.models.adapted import AdaptedModel
from helpers import tiny_decoders
from helpers.captured_log import CapturedLog
from helpers.families import others_slow

pytest.importorskip("bitsandbytes", reason="the extra fedspan[quantization] is not installed")
from bitsandbytes.nn import Linear4bit

kinds = pytest.mark.parametrize("kind", ["nf4", "int8"])


def settings(decoders: Path, kind: str, family: str = "llama", **changes: Any) -> dict[str, Any]:
    model = {"quantization": kind, **changes.pop("model", {})}
    return tiny_decoders.settings(decoders, family, model=model, **changes)


def stored(prepared: Prepared) -> dict[str, Tensor]:
    """Every quantized weight of the model, bit by bit."""
    named = prepared.engine.adapted.model.named_parameters()
    return {path: value.detach().clone() for path, value in named if not value.is_floating_point()}


def rounded(weight_OI: Tensor, kind: str) -> Tensor:
    """What a weight becomes: blocks of 64 in 4 bits, or every row in 8 bits by its largest element."""
    if kind == "nf4":
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        packed, state = quantize_4bit(weight_OI.contiguous(), quant_type="nf4", compress_statistics=True)
        return dequantize_4bit(packed, state)
    largest_O1 = weight_OI.half().float().abs().amax(1, keepdim=True)
    return (weight_OI.half().float() * 127 / largest_O1).round() * largest_O1 / 127


@kinds
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_are_the_numbers_that_the_layer_computes_with(kind: str, family: str, decoders: Path) -> None:
    """(O, I), also where the original stored (I, O): bitsandbytes' own numbers, or those of LLM.int8()'s definition."""
    made = prepare(parse_config(settings(decoders, kind, family))).engine.adapted
    plain = prepare(parse_config(tiny_decoders.settings(decoders, family))).engine.adapted
    assert made.spec == plain.spec
    for name, layer in made.layers.items():
        weight, x = made.get_weight(name), torch.randn(5, made.get_weight(name).shape[1])
        assert torch.allclose(weight, rounded(plain.get_weight(name), kind), atol=1e-6)
        bias = 0 if layer.module.bias is None else layer.module.bias
        with torch.no_grad():
            y = layer.module(x) - bias
        error = 1e-5 if kind == "nf4" else 0.02  # LLM.int8() rounds its inputs to 8 bits as well
        assert (y - x @ weight.T).norm() <= error * y.norm()


@kinds
@pytest.mark.parametrize("method", others_slow(["fedit", "flora", "fedloru", "fedavg"], ["flora"]))
def test_nothing_is_written_to_a_quantized_base(kind: str, method: str, decoders: Path) -> None:
    """Neither by training nor by methods that move the base; what trains is float32, and the loss falls."""
    options = {"tau": 1} if method == "fedloru" else {}
    changes = {"method": {"name": method, **options}, "training": {"local_steps": 6}, "federation": {"rounds": 3}}
    made = prepare(parse_config(settings(decoders, kind, **changes)))
    before, progress, losses = stored(made), made.federation.begin(), list[float]()
    assert len(before) == 14  # all linear layers of both blocks, none of the embeddings and the head
    for _ in range(3):
        result = made.federation.run_round(progress)
        progress = result.progress
        losses.append(result.loss)
        made.evaluator.evaluate_clients(progress)
    assert losses[-1] < losses[0]
    after = stored(made)
    assert all(torch.equal(after[path], value) for path, value in before.items())
    assert all(value.dtype == torch.float32 for value in progress.state.tensors.values())
    moved = [to_dense(delta) for delta in progress.state.base.total.values()]
    assert all(delta.dtype == torch.float32 for delta in moved)
    assert bool(moved) == (method in ("flora", "fedloru"))


@kinds
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_format_beside_a_quantized_base(kind: str, dtype: str, decoders: Path) -> None:
    made = prepare(parse_config(settings(decoders, kind, model={"dtype": dtype})))
    result = made.federation.run_round(made.federation.begin())
    assert result.loss == pytest.approx(result.loss)  # not NaN
    assert all(value.dtype == torch.float32 for value in result.progress.state.tensors.values())


@pytest.mark.parametrize("kind", ["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_run_and_its_export(kind: str, decoders: Path, tmp_path: Path) -> None:
    """PEFT on the same quantized base gives the report's numbers; merged, it is a plain model."""
    report = fedspan.run(settings(decoders, kind, federation={"rounds": 1}), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "adapter" / "fedspan.json").read_text())["quantization"] == kind
    measured = fedspan.evaluate(tmp_path / "run", generate=False)
    assert measured["loss"] == pytest.approx(report.scores["test"]["loss"], rel=1e-3)
    merged = fedspan.export(tmp_path / "run", tmp_path / "merged", "merged")
    whole = fedspan.evaluate(merged, data=decoders / "questions.jsonl", generate=False)
    assert whole["loss"] == pytest.approx(report.scores["test"]["loss"], rel=0.2)  # other weights: not rounded
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())


def test_int8_layers_log_nothing(tiny_folder: Path, caplog: CapturedLog) -> None:
    """bitsandbytes would log a warning for every layer and pass that is given float32 on a CPU."""
    from helpers import tiny

    made = prepare(tiny.config(tiny_folder, model={"quantization": "int8"}))
    progress = made.federation.run_round(made.federation.begin()).progress

    def logged() -> bool:
        caplog.clear()
        made.evaluator.evaluate_heldout(progress, made.test)
        return any("MatMul8bitLt" in record.getMessage() for record in caplog.records)

    assert not logged()
    with caplog.at_level("WARNING", logger="bitsandbytes.autograd._functions"):
        assert logged()


@kinds
def test_a_classifier_s_head_is_not_quantized(kind: str, tiny_folder: Path) -> None:
    from helpers import tiny

    made = prepare(tiny.config(tiny_folder, model={"quantization": kind, "modules_to_save": ["pooler"]}))
    adapted = made.engine.adapted
    assert {value.dtype for value in adapted.extras.values()} == {torch.float32}
    assert {path.rpartition(".")[0] for path in adapted.extras} == {"classifier", "bert.pooler.dense"}
    assert quantized.is_quantized(adapted.model.get_submodule("bert.encoder.layer.0.attention.self.key"))
    made.federation.run_round(made.federation.begin())


def load_four_bit(decoders: Path) -> PreTrainedModel:
    """A model of a user's own, whose layers believe that the CPU has AVX512-BF16."""
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(decoders / "llama-lm", quantization_config=config).eval()
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = True
    return model


def test_a_model_of_a_users_own_is_not_repacked(decoders: Path) -> None:
    model = load_four_bit(decoders)
    AdaptedModel(model, {}, {})
    before = {name: value.clone() for name, value in model.named_parameters() if not value.is_floating_point()}
    with torch.no_grad():
        model(input_ids=torch.arange(3, 12).reshape(3, 3))
    after = dict(model.named_parameters())
    assert before
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_repacked_model_is_refused(decoders: Path) -> None:
    model = load_four_bit(decoders)
    name, layer = next((name, module) for name, module in model.named_modules() if name.endswith("q_proj"))
    layer.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(FedspanError, match=rf"repacked the 4-bit weights of {name}"):
        AdaptedModel(model, {}, {})
