"""Evaluation and predictions of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from peft import PeftModel

import fedspan
from helpers import tiny_images


@pytest.mark.parametrize("name", ["vit", "resnet", "scratch"])
def test_evaluate_gives_the_report_s_scores(name: str, images: Path, image_runs: Path) -> None:
    report = json.loads((image_runs / name / "report.json").read_text())
    found = fedspan.evaluate(image_runs / name)
    wanted = report["scores"]["test"]
    assert found == pytest.approx({**{key: wanted[key] for key in found if key in wanted}, "examples": 10}, abs=1e-4)
    assert {"accuracy", "loss"} <= set(found)
    everywhere = fedspan.evaluate(image_runs / name, data=images / "pictures")
    assert everywhere["examples"] == sum(tiny_images.SITES.values())


@pytest.mark.parametrize("name", ["vit", "resnet", "scratch"])
def test_predictions_on_files(name: str, images: Path, image_runs: Path) -> None:
    """The same as somebody without fedspan gets; paths as text or as paths."""
    folder = image_runs / name / "adapter"
    paths = sorted((images / "pictures").rglob("0[0-4].png"))
    if name == "scratch":
        model = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
        pixels = tiny_images.pixels(folder, paths)
    else:
        base = tiny_images.fresh_classifier(images / name)
        model = PeftModel.from_pretrained(base, str(folder)).eval()
        pixels = tiny_images.pixels(images / name, paths)
    with torch.no_grad():
        shares = model(pixel_values=pixels).logits.softmax(1)
    found = fedspan.predict(image_runs / name, [str(paths[0]), *paths[1:]])
    assert [label for label, _ in found] == [tiny_images.COLORS[index] for index in shares.argmax(1).tolist()]
    assert [share for _, share in found] == pytest.approx(shares.amax(1).tolist(), abs=1e-4)
