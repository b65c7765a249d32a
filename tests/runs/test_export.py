"""Merged exports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import fedspan
from helpers import tiny_images


@pytest.mark.parametrize("name", ["vit", "resnet", "scratch"])
def test_merged_exports(name: str, images: Path, image_runs: Path, tmp_path: Path) -> None:
    out = fedspan.export(image_runs / name, tmp_path / "merged", form="merged")
    paths = sorted((images / "pictures" / "west").rglob("*.png"))
    model = transformers.AutoModelForImageClassification.from_pretrained(out).eval()
    with torch.no_grad():
        shares = model(pixel_values=tiny_images.pixels(out, paths)).logits.softmax(1).amax(1)
    for folder in (image_runs / name, out):
        found = fedspan.predict(folder, paths)
        assert [share for _, share in found] == pytest.approx(shares.tolist(), abs=1e-4)
    again = fedspan.export(out, tmp_path / "again", form="merged")
    assert fedspan.predict(again, paths) == fedspan.predict(out, paths)
    if name == "scratch":
        with pytest.raises(Exception, match="holds a merged model"):
            fedspan.export(image_runs / name, tmp_path / "adapter")
