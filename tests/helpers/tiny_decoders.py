"""Causal language models of five families, so small that a test can train them, and questions with answers for them.

Random weights, larger than usual; Llama with grouped-query attention, GPT-2 with ``Conv1D``, OPT with its shifted
positions, Gemma with scaled and tied embeddings.
"""

import json
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
from torch import nn
from transformers import PreTrainedTokenizerFast

from . import tiny

FAMILIES = ("llama", "qwen", "gpt2", "opt", "gemma")
TARGETS: Mapping[str, list[str]] = {
    "llama": ["q_proj", "k_proj", "down_proj"],
    "qwen": ["q_proj", "v_proj", "up_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "opt": ["q_proj", "fc1", "fc2"],
    "gemma": ["q_proj", "o_proj", "gate_proj"],
}
_SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]
WORDS = [f"{letter}{number}" for letter in "abcd" for number in range(6)] + ["Q:", "A:", "user", "assistant", "system"]
_VOCABULARY = {word: index for index, word in enumerate([*_SPECIAL, *WORDS])}
VOCABULARY_SIZE = len(_VOCABULARY)
_COMMON: dict[str, Any] = {
    "vocab_size": len(_VOCABULARY),
    "initializer_range": 0.3,
    **{"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3},
}
_SIZES: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64},
}
_MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_COMMON, **_SIZES)),
    "qwen": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_COMMON, **_SIZES)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**_COMMON, n_embd=16, n_inner=24, n_layer=2, n_head=2, n_positions=64)
    ),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(
            **{**_COMMON, "init_std": 0.3, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 24},
            **{"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64},
        )
    ),
    "gemma": lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**_COMMON, **_SIZES)),
}
CHAT = (
    "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def save_decoder(family: str, folder: Path) -> Path:
    """A model with its language model head, and its tokenizer, in a folder of its own."""
    path = folder / f"{family}-lm"
    with torch.random.fork_rng():
        torch.manual_seed(5)
        _MODELS[family]().save_pretrained(path)
    tokenizer(pads_left=family in ("gemma", "llama")).save_pretrained(path)
    return path


def tokenizer(*, pads_left: bool = False, pads: bool = False) -> PreTrainedTokenizerFast:
    """One id a word, <s> before every text; none for padding unless asked for. Many decoders pad on the left."""
    made = Tokenizer(WordLevel(_VOCABULARY, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    made.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=64,
        padding_side="left" if pads_left else "right",
        chat_template=CHAT,
        **({"pad_token": "<pad>"} if pads else {}),
    )


def save_questions(folder: Path) -> Path:
    """100 questions of 1 to 6 words; the answer is the question's words in capitals' stead: the next letter's."""
    rng = random.Random(0)
    after = dict(zip("abcd", "bcda", strict=True))
    path = folder / "questions.jsonl"
    with path.open("w") as file:
        for number in range(100):
            kind = rng.choice("abcd")
            words = [f"{kind}{rng.randrange(6)}" for _ in range(rng.randint(1, 6))]
            answer = " ".join(after[word[0]] + word[1] for word in words)
            row = {
                "question": " ".join(words),
                "answer": answer,
                "kind": kind,
                "site": ["east", "west", "north"][number % 3],
            }
            file.write(json.dumps(row) + "\n")
    return path


def settings(folder: Path, family: str = "llama", **changes: Mapping[str, Any]) -> dict[str, Any]:
    """A run of instruction tuning as plain values; ``changes`` go into its sections."""
    values = tiny.settings(folder)
    values |= {
        "task": "causal-lm",
        "model": {"name": str(folder / f"{family}-lm"), "target_modules": TARGETS[family], "max_length": 24},
        "data": {"train": str(folder / "questions.jsonl"), "prompt": "Q: {question} A:", "test_fraction": 0.2},
        "evaluation": {"batch_size": 7, "generate": True, "max_new_tokens": 6},
    }
    return tiny.change_sections(values, changes)
