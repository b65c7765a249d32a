"""Tiny models with an encoder and a decoder, and pairs of texts: the words of the target are those of the source."""

import csv
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from . import tiny

_SITES = {"east": 13, "north": 22, "west": 35}
_SOURCES, _TARGETS = ([f"{kind}{number}" for number in range(8)] for kind in ("der", "the"))
_VOCABULARY = ["<pad>", "<unk>", "</s>", "say:", *_SOURCES, *_TARGETS]
_IDS: dict[str, Any] = {
    **{"vocab_size": len(_VOCABULARY), "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
}
BART: dict[str, Any] = {
    **{**_IDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "max_position_embeddings": 24},
    **{"encoder_ffn_dim": 24, "decoder_ffn_dim": 20, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
    **{"init_std": 0.3, "forced_eos_token_id": None, "bos_token_id": None},
}
_T5: dict[str, Any] = {
    **{**_IDS, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 2}
}
FAMILIES: Mapping[str, Callable[..., Any]] = {
    "t5": lambda **ids: transformers.T5ForConditionalGeneration(transformers.T5Config(**{**_T5, **ids})),
    "bart": lambda **ids: transformers.BartForConditionalGeneration(transformers.BartConfig(**{**BART, **ids})),
    "marian": lambda **ids: transformers.MarianMTModel(transformers.MarianConfig(**{**BART, **ids})),
}
"""Models by family; arguments are token ids of another vocabulary."""
TARGETS: Mapping[str, list[str]] = {
    "t5": ["q", "v", "wo"],
    "bart": ["q_proj", "v_proj", "fc2"],
    "marian": ["q_proj", "v_proj", "fc2"],
}
"""Target modules by family; their shapes differ."""


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Make a tokenizer of words that ends every text with its end-of-text token."""
    made = Tokenizer(WordLevel({word: at for at, word in enumerate(_VOCABULARY)}, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    made.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=24, pad_token="<pad>", unk_token="<unk>", eos_token="</s>"
    )


def save_model(kind: str, folder: Path) -> Path:
    """Save a model of a family with its tokenizer; the same weights every time. It generates three tokens at least."""
    with torch.random.fork_rng():
        torch.manual_seed(9)
        model = FAMILIES[kind]()
    model.generation_config.min_new_tokens = 3
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def save_pairs(path: Path) -> Path:
    """Write pairs of three sites: the target has the words of the source with another article, shorter by one word."""
    rng = random.Random(8)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["de", "en", "site"])
        for site, size in _SITES.items():
            for _ in range(size):
                numbers = [rng.randrange(8) for _ in range(rng.randint(2, 7))]
                target = " ".join(_TARGETS[number] for number in numbers[:-1])
                writer.writerow([" ".join(_SOURCES[number] for number in numbers), target, site])
    return path


def settings(own: Path, kind: str = "t5", **changes: Mapping[str, Any]) -> dict[str, Any]:
    """A run of sequence to sequence as plain values; ``changes`` go into its sections."""
    values = tiny.settings(own) | {
        "task": "seq2seq",
        "task_options": {"prefix": "say: "},
        "data": {"train": str(save_pairs(own / "pairs.csv")), "text": "de", "answer": "en", "test_fraction": 0.2},
        "model": {"name": str(save_model(kind, own / kind)), "target_modules": TARGETS[kind], "max_length": 16},
    }
    evaluation = {"generate": True, "max_new_tokens": 9}
    return tiny.change_sections(values, {"evaluation": evaluation, **changes})
