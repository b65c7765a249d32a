"""Frozen bases in 4 or 8 bits, by bitsandbytes: loading, and conversion of their weights back to numbers."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedspan.errors import FedspanError, build_install_command

Quantization = Literal["nf4", "int8"]
_HEADS = (".*classifier", ".*score", "lm_head", "embed_out")  # regexes of what trains or is tied to the embeddings


def list_unquantized_modules(keep: Sequence[str]) -> list[str]:
    """Return regexes of the paths of modules that are not quantized: heads and the modules in ``keep``."""
    return [*_HEADS, *(rf"(?:.*\.)?{re.escape(name)}" for name in keep)]


def get_quantization_options(
    quantization: Quantization, dtype: torch.dtype, keep: Sequence[str], device: torch.device | None
) -> dict[str, Any]:
    """Return the keyword arguments of ``from_pretrained`` for a quantized model.

    Args:
        quantization: ``nf4`` (with double quantization, as in QLoRA) or ``int8`` (LLM.int8()).
        dtype: Number format that 4-bit layers compute in.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        problem = f"{quantization} needs bitsandbytes. Run: {build_install_command('quantization')}"
        raise FedspanError("model.quantization", quantization, problem=problem)
    from transformers import BitsAndBytesConfig  # here, because reading a config imports this module

    skipped = list_unquantized_modules(keep)
    config = (
        BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped)
        if quantization == "int8"
        else BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=skipped,
        )
    )
    return {"quantization_config": config, "device_map": {"": device or torch.device("cpu")}}


def prevent_repacking(model: nn.Module) -> None:
    """Prevent forward passes from rewriting 4-bit weights.

    On CPUs with AVX512-BF16 bitsandbytes repacks them, in place, at the first pass in eval mode without gradients of
    the input, and fails on layers whose outputs are not a multiple of 32. Repacked layers compute in bfloat16 and give
    no gradients to what comes before them.

    Raises:
        FedspanError: If an earlier pass has repacked a layer.
    """
    for name, module in model.named_modules():
        if not hasattr(module, "support_avx512bf16_for_cpu"):
            continue
        if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
            problem = (
                f"bitsandbytes has repacked the 4-bit weights of {name} for inference, which gives no gradients. "
                "Load the model again, and run no forward pass in eval mode before fedspan takes it"
            )
            raise FedspanError("model", name, problem=problem)
        module.support_avx512bf16_for_cpu = False  # pyright: ignore[reportArgumentType]


def is_quantized(module: nn.Module) -> bool:
    """Check whether a layer's weight is stored in 4 or 8 bits."""
    weight = module.weight
    return isinstance(weight, Tensor) and not weight.is_floating_point()


def dequantize(module: nn.Module) -> Tensor:
    """Return the numbers that a quantized layer computes with: its weight, (O, I), float32, detached."""
    from peft.utils.integrations import dequantize_module_weight

    return dequantize_module_weight(module).detach().float()
