"""Exported models: an adapter's folder alone suffices for PEFT and Transformers if the base model is local."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoImageProcessor, AutoTokenizer

import fedspan
from helpers import tiny


@pytest.fixture(scope="module")
def adapter(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    fedspan.run(tiny.settings(tiny_folder, federation={"rounds": 1}), folder)
    return folder / "adapter"


def test_an_adapter_s_folder_holds_its_tokenizer(adapter: Path) -> None:
    texts = ["word1 admin1", "word7"]
    tokenizer: Any = AutoTokenizer.from_pretrained(adapter)
    labels = json.loads((adapter / "fedspan.json").read_text())["labels"]
    model: Any = AutoPeftModelForSequenceClassification.from_pretrained(adapter, num_labels=len(labels))
    with torch.no_grad():
        probabilities = model.eval()(**tokenizer(texts, padding=True, return_tensors="pt")).logits.softmax(1)
    for (label, probability), row in zip(fedspan.predict(adapter, texts), probabilities, strict=True):
        assert label == labels[int(row.argmax())]
        assert probability == pytest.approx(float(row.max()), abs=1e-6)


def test_an_adapter_s_folder_holds_its_image_processor(image_runs: Path) -> None:
    processor: Any = AutoImageProcessor.from_pretrained(image_runs / "vit" / "adapter", backend="pil")
    assert type(processor).__name__ == "ViTImageProcessorPil"
