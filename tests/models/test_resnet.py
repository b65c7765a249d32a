"""Small residual networks by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedspan.errors import FedspanError
from fedspan.models.loading import load_pretrained, load_scratch

LABELS = ("cat", "dog", "owl")


def test_three_architectures_by_name() -> None:
    """Stages and blocks as the names say: 2 or 4 times the blocks, and the stem and the head."""
    for name, convolutions, width in (("resnet-8", 7, 64), ("resnet-10", 9, 512), ("resnet-18", 17, 512)):
        model = load_scratch(f"builtin:{name}", "image-classification", LABELS).model
        wide = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
        assert (len(wide), model.fc.in_features, model.fc.out_features) == (convolutions, width, 3)
        if name == "resnet-8":
            assert model(pixel_values=torch.zeros(2, 3, 13, 10)).logits.shape == (2, 3)
    with pytest.raises(FedspanError, match="an architecture without weights"):
        load_pretrained("builtin:resnet-8", "image-classification", LABELS)
