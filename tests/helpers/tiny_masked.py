"""A tiny masked language model with a mask in its vocabulary, and texts in which neighboring words are related."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from . import tiny

_SITES = {"east": 17, "north": 26, "west": 41}
_WORDS = [f"{kind}{number}" for kind in ("red", "blue") for number in range(6)]
_VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS]


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Make a tokenizer of words."""
    made = Tokenizer(WordLevel({word: at for at, word in enumerate(_VOCABULARY)}, unk_token="[UNK]"))
    made.pre_tokenizer = WhitespaceSplit()
    made.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=32, **{f"{name}_token": token for name, token in names.items()}
    )


def save_masked(folder: Path) -> Path:
    """Save a BERT with its head for masked words, with weights larger than usual, and its tokenizer."""
    config = transformers.BertConfig(
        vocab_size=len(_VOCABULARY),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.3,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        transformers.BertForMaskedLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def save_texts(path: Path) -> Path:
    """Write texts of three sites; the words of a text are all of one kind."""

    def draw(rng: random.Random) -> dict[str, Any]:
        kind = rng.choice(["red", "blue"])
        return {"text": " ".join(f"{kind}{rng.randrange(6)}" for _ in range(rng.randint(3, 9)))}

    return tiny.save_rows(path, _SITES, 8, draw)


def settings(own: Path, **changes: Mapping[str, Any]) -> dict[str, Any]:
    """A run of masked language modeling as plain values; ``changes`` go into its sections."""
    values = tiny.settings(own) | {
        "task": "masked-lm",
        "task_options": {"mask_share": 0.3},
        "data": {"train": str(save_texts(own / "texts.jsonl")), "test_fraction": 0.2},
    }
    model = {"name": str(save_masked(own / "masked")), "head_init": "auto"}
    return tiny.change_sections(values, {"model": model, **changes})
