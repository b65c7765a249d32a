"""Runs of one client whose memory is planned and measured: models of some 45 MB, and texts longer than they take."""

import csv
from pathlib import Path
from typing import Any

from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from . import tiny

TOLERANCE = 0.15
EXAMPLES = 48
_WORDS = 60  # beyond the greatest length
CASES: dict[str, dict[str, Any]] = {
    "lora": {},
    "recomputed": {"model": {"gradient_checkpointing": True}, "engine": {"name": "loop"}},
    "upper-layers": {"model": {"layers_to_transform": [4, 5]}},
    "whole-weights": {"method": {"name": "fedavg"}},
    "decoder": {"task": "causal-lm", "data": {"prompt": "{text}", "answer": "text"}, "model": {"name": "llama"}},
}
"""Changes to ``settings``, by the kind of training."""


def save_models(place: Path) -> None:
    """Save ``small``, ``bert`` and ``llama`` without trained values, with tokenizers, and ``texts.csv``."""
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    small = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    words = {"vocab_size": 2000, "max_position_embeddings": 64}
    BertModel(BertConfig(**words, **small)).save_pretrained(place / "small")
    BertModel(BertConfig(**words, **shape)).save_pretrained(place / "bert")
    LlamaForCausalLM(LlamaConfig(**words, **shape)).save_pretrained(place / "llama")
    for name in ("small", "bert", "llama"):
        tiny.save_tokenizer(place / name, pairs=name != "llama")
    with (place / "texts.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows([" ".join(["word1"] * _WORDS), "ab"[number % 2]] for number in range(EXAMPLES))


def settings(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """A run of one client on the texts, as plain values; sections of ``changes`` are merged into its own."""
    values: dict[str, Any] = {
        "device": "cpu",
        "threads": 1,
        "data": {"train": str(folder / "texts.csv"), "test_fraction": 0},
        "model": {"name": "bert", "max_length": 32},
        "partition": {"partitioner": "iid", "clients": 1, "validation": 0, "test": 0},
        "training": {"batch_size": EXAMPLES, "local_steps": 2},
        "federation": {"rounds": 1},
    }
    for section, change in changes.items():
        values[section] = {**values.get(section, {}), **change} if isinstance(change, dict) else change
    values["model"]["name"] = str(folder / values["model"]["name"])
    return values
