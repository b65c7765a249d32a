"""Torch's transformer layers call their linear layers also in eval mode, and adapters of them have their effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

import fedspan
from fedspan.models.adapted import AdaptedModel
from fedspan.models.fast_paths import BlockedFastPaths
from helpers import tiny

TARGETS = ["linear1", "linear2"]


def test_layers_within_are_called_until_the_fast_paths_are_allowed_again() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval().requires_grad_(False)
    calls: list[str] = []
    inner = model.layers[0].linear1
    forward = inner.forward
    inner.forward = lambda x: [calls.append("linear1"), forward(x)][1]
    x, mask = torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)
    mask[1, 3:] = True

    def compute() -> Tensor:
        calls.clear()
        return model(x, src_key_padding_mask=mask)[~mask]

    expected = compute()
    assert not calls
    blocked = BlockedFastPaths(model)
    assert compute().allclose(expected, atol=1e-5)
    assert calls == ["linear1"]
    blocked.restore()
    assert compute().allclose(expected, atol=1e-5)
    assert not calls


class SmallConfig(PretrainedConfig):
    model_type = "small-encoder"


class SmallEncoder(PreTrainedModel):
    """A user's own classifier around torch's encoder layer."""

    config_class = SmallConfig
    base_model_prefix = "encoder"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(tiny.VOCABULARY_SIZE, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        self.classifier = nn.Linear(16, config.num_labels)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None, **_: Any) -> Any:
        mask = None if attention_mask is None else attention_mask == 0
        logits = self.classifier(self.block(self.embed(input_ids), src_key_padding_mask=mask)[:, 0])
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def make_model() -> SmallEncoder:
    torch.manual_seed(8)
    return SmallEncoder(SmallConfig(num_labels=len(tiny.LABELS))).eval()


def merge(folder: Path) -> Any:
    """A run's model, with its adapter merged by PEFT."""
    return PeftModel.from_pretrained(make_model(), str(folder / "adapter")).merge_and_unload().eval()


def test_a_model_predicts_as_its_adapter_merged_by_peft(tiny_folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder / "bert")
    changes = {"model": {"target_modules": TARGETS}, "training": {"lr": 0.1, "local_steps": 4, "batch_size": 4}}
    config = tiny.settings(tiny_folder, **changes)
    del config["model"]["name"]
    fedspan.run(config, tmp_path / "run", model=make_model(), tokenizer=tokenizer)
    texts = ["admin1 word2 word3", "lab4 lab5", "symptom6 word1 word2 word7", "billing2"]
    predictions = fedspan.predict(tmp_path / "run", texts, model=make_model(), tokenizer=tokenizer)
    with torch.no_grad():
        logits = merge(tmp_path / "run")(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    expected = logits.softmax(1).max(1)
    assert [label for label, _ in predictions] == [tiny.LABELS[at] for at in expected.indices.tolist()]
    assert [score for _, score in predictions] == pytest.approx(expected.values.tolist(), abs=1e-5)


def test_a_trainer_s_evaluation_has_the_adapter(tmp_path: Path) -> None:
    model, ids, labels = make_model(), torch.arange(4, 36).reshape(8, 4), torch.arange(8) % 4

    def train(round: fedspan.TrainingRound) -> None:
        for rows in round.batches(torch.arange(8).split(4)):
            loss = model(ids[rows], labels=labels[rows]).loss
            loss.backward()
            round.step(loss, len(rows))

    def evaluate() -> dict[str, float]:
        return {"loss": float(model(ids, labels=labels).loss)}

    trainer = fedspan.TorchTrainer(model, train, 8, evaluate=evaluate, validation_examples=8)
    config = {"model": {"target_modules": TARGETS}, "training": {"lr": 0.1, "local_epochs": 2}}
    report = fedspan.simulate(config, tmp_path / "run", trainers={"a": trainer})
    with torch.no_grad():
        expected = float(merge(tmp_path / "run")(ids, labels=labels).loss)
        body = make_model()
        body.classifier.load_state_dict(merge(tmp_path / "run").classifier.state_dict())
        assert expected != pytest.approx(float(body(ids, labels=labels).loss), rel=1e-2)
    assert report.scores["validation"]["loss"] == pytest.approx(expected, rel=1e-5)


def test_replicas_block_the_fast_paths_too() -> None:
    model = make_model()
    adapted = AdaptedModel(model, {"block.linear1": model.block.linear1}, {})
    replica = adapted.create_replica()
    assert replica.model.block._forward_pre_hooks
    adapted.restore()
    assert not model.block._forward_pre_hooks
