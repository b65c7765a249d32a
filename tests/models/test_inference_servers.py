"""A language model's adapter is one that inference servers take; where vLLM is installed, its own loader reads it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file

import fedspan
from helpers import tiny_decoders
from helpers.families import others_slow


@pytest.fixture(
    scope="module",
    params=others_slow(
        ["fedit", "flora", "fedex-lora", "flexlora", "fedloru", "rolora"], ["flora", "flexlora", "fedloru"]
    ),
)
def adapter(request: pytest.FixtureRequest, decoders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of rank 3, or of what the method makes of it, on all linear layers of a tiny Llama."""
    changes: dict[str, Any] = {
        "method": {"name": request.param, "r": 3},
        "federation": {"rounds": 2},
        "model": {"target_modules": "all-linear"},
    }
    if request.param in ("flora", "flexlora"):
        changes["federation"] |= {"ranks": [1, 3]}
    folder = tmp_path_factory.mktemp("served") / "run"
    fedspan.run(tiny_decoders.settings(decoders, "llama", **changes), folder)
    return folder / "adapter"


def test_an_adapter_is_plain_lora_of_one_rank(adapter: Path) -> None:
    """vLLM: one rank for all layers, which may be padded, plain LoRA, and no modules that are saved whole."""
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["peft_type"], config["bias"], config["use_dora"]) == ("LORA", "none", False)
    assert not config["modules_to_save"]
    assert not config["rank_pattern"]
    assert not config["alpha_pattern"]
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert all(".lora_A.weight" in name or ".lora_B.weight" in name for name in tensors)
    assert {value.shape[0] for name, value in tensors.items() if ".lora_A." in name} == {config["r"]}
    assert {value.shape[1] for name, value in tensors.items() if ".lora_B." in name} == {config["r"]}


def test_vllm_reads_of_an_adapter_what_peft_reads(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own reader of configs and tensors, as its server calls them: the same update of every layer as PEFT's."""
    pytest.importorskip("vllm", reason="vLLM is not installed; it pins a torch of its own")
    helper_of = importlib.import_module("vllm.lora.peft_helper").PEFTHelper
    config_of = importlib.import_module("vllm.config.lora").LoRAConfig
    module = importlib.import_module("vllm.lora.lora_model")
    monkeypatch.setattr(module, "PIN_MEMORY", False)  # which takes an accelerator
    helper = helper_of.from_local_dir(str(adapter), max_position_embeddings=128)
    helper.validate_legal(config_of(max_lora_rank=16))
    ours: Any = AutoPeftModelForCausalLM.from_pretrained(adapter)
    updates = {
        name.removeprefix("base_model.model."): layer.get_delta_weight("default")
        for name, layer in ours.named_modules()
        if hasattr(layer, "get_delta_weight")
    }
    expected = {name.rsplit(".", 1)[-1] for name in updates}
    read = module.LoRAModel.from_local_checkpoint(str(adapter), expected, helper, lora_model_id=1, device="cpu")
    assert read.loras.keys() == updates.keys()
    for name, lora in read.loras.items():
        lora.optimize()
        torch.testing.assert_close(lora.lora_b @ lora.lora_a, updates[name])
    assert any(update.abs().max() > 0 for update in updates.values())
