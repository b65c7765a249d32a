"""Trained models, loaded for predictions."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

from fedspan.runs.load import _load_adapter


def test_a_model_that_reads_its_convolutions_attributes(tmp_path: Path) -> None:
    """MobileNet's padding reads the stride of a convolution, which PEFT's wrapper does not have."""
    torch.manual_seed(0)
    sizes = {"image_size": 32, "depth_multiplier": 0.25, "depth_divisible_by": 4, "min_depth": 4, "num_labels": 3}
    config = MobileNetV2Config(**sizes, initializer_range=0.5)
    model = MobileNetV2ForImageClassification(config).eval()
    model.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(
        model, LoraConfig(r=2, target_modules=r".*\.conv_1x1\.convolution", init_lora_weights=False)
    )
    adapted.save_pretrained(str(tmp_path / "adapter"))
    base = MobileNetV2ForImageClassification.from_pretrained(tmp_path / "base").eval()
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = adapted.merge_and_unload()(pixel_values=pixels).logits
        assert not torch.allclose(base(pixel_values=pixels).logits, expected, rtol=0.01)
        found = _load_adapter(base, tmp_path / "adapter")(pixel_values=pixels).logits
    assert torch.allclose(found, expected, rtol=1e-4)
