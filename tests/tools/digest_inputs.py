"""The models, texts and images that the cases of ``digests.py`` share: the same random numbers every time."""

import csv
import json
import random
from pathlib import Path
from typing import Any

LABELS = ("admin", "billing", "lab", "symptom")
SITES = {"north": 19, "south": 32, "west": 58}
"""Clients by id, with their numbers of examples."""
_TAGGED = LABELS[:2]
TAGS = ("O", *(f"{place}-{label}" for label in _TAGGED for place in "BI"))
_SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
_WORDS = [f"{label}{number}" for label in LABELS for number in range(8)] + [f"word{number}" for number in range(12)]
_MASK = "<mask>"


def save_inputs(folder: Path) -> None:
    """Write models with random weights (an encoder, one for masked words, a decoder, and one of both) and the data."""
    import torch
    import transformers

    ids: dict[str, Any] = {"vocab_size": len(_SPECIAL) + len(_WORDS), "initializer_range": 0.3}
    encoder = {"pad_token_id": 0, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    encoder |= {"num_attention_heads": 2, "max_position_embeddings": 32}
    bert = transformers.BertConfig(**ids, **encoder)
    masked = transformers.BertConfig(**{**ids, "vocab_size": ids["vocab_size"] + 1}, **encoder)
    gpt2 = transformers.GPT2Config(
        **ids, n_embd=16, n_inner=24, n_layer=2, n_head=2, n_positions=32, bos_token_id=2, eos_token_id=3
    )
    t5 = transformers.T5Config(
        vocab_size=ids["vocab_size"],
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=2,
        pad_token_id=0,
        eos_token_id=3,
        decoder_start_token_id=0,
    )
    for name, make, single in (
        ("bert", lambda: transformers.BertModel(bert), "<s> $A </s>"),
        ("masked-bert", lambda: transformers.BertForMaskedLM(masked), "<s> $A </s>"),
        ("gpt2", lambda: transformers.GPT2LMHeadModel(gpt2), None),
        ("t5", lambda: transformers.T5ForConditionalGeneration(t5), "$A </s>"),
    ):
        torch.manual_seed(5)
        make().save_pretrained(folder / name)
        _make_tokenizer(single, has_mask=name == "masked-bert").save_pretrained(folder / name)
    _save_corpus(folder)
    _save_records(folder)
    _save_images(folder / "images")


def _make_tokenizer(single: str | None, *, has_mask: bool) -> Any:
    """Make a tokenizer of words; ``single`` says what stands around a text, None: nothing."""
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing

    words = [*_SPECIAL, *_WORDS, *([_MASK] if has_mask else [])]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    if single is not None:
        pair = f"{single} $B </s>"
        tokenizer.post_processor = TemplateProcessing(
            single=single, pair=pair, special_tokens=[("<s>", 2), ("</s>", 3)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="</s>",
        model_max_length=32,
        **({"mask_token": _MASK} if has_mask else {}),
    )


def _save_corpus(folder: Path) -> None:
    """Write texts with a label, a number and an answer each: a file for each site, and one with all."""
    rng = random.Random(0)
    rows: list[dict[str, Any]] = []
    for number, (site, size) in enumerate(SITES.items()):
        for _ in range(size):
            label = LABELS[number] if rng.random() < 2 / 3 else rng.choice(LABELS)
            words = [f"{label}{rng.randrange(8)}" for _ in range(rng.randint(1, 4))]
            words += [f"word{rng.randrange(12)}" for _ in range(rng.randint(1, 5))]
            rng.shuffle(words)
            row = {"text": " ".join(words), "label": label, "site": site, "answer": words[0]}
            rows.append({**row, "target": f"{len(words) / 4:.3f}"})
    for site in (*SITES, "all"):
        with (folder / f"{site}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(row for row in rows if site in (row["site"], "all"))


def _save_records(folder: Path) -> None:
    """Write records with what a table has no columns for: lists of words, tags and labels, and texts beside a text."""
    rng = random.Random(1)
    records: list[dict[str, Any]] = []
    for site, size in SITES.items():
        for _ in range(size):
            labels = rng.sample(LABELS, rng.choice([0, 1, 1, 2, 2, 3]))
            words = [f"{label}{rng.randrange(8)}" for label in labels for _ in range(rng.randint(1, 2))]
            words += [f"word{rng.randrange(12)}" for _ in range(rng.randint(1, 3))]
            rng.shuffle(words)
            kinds = [word.rstrip("0123456789") for word in words]
            before = [None, *kinds[:-1]]
            tags = [
                f"{'I' if last == kind else 'B'}-{kind}" if kind in _TAGGED else "O"
                for kind, last in zip(kinds, before, strict=True)
            ]
            near = [f"{kind}{rng.randrange(8)}" for kind in kinds]
            record = {"text": " ".join(words), "tokens": words, "tags": tags, "topics": labels, "site": site}
            rejected = f"{rng.choice(_WORDS)} {near[0]}"
            records.append({**record, "near": " ".join(near), "chosen": words[0], "rejected": rejected})
    for site in (*SITES, "all"):
        lines = [json.dumps(record) for record in records if site in (record["site"], "all")]
        (folder / f"{site}.jsonl").write_text("\n".join(lines) + "\n")


def _save_images(folder: Path) -> None:
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for label in ("dark", "light"):
        (folder / label).mkdir(parents=True)
        for number in range(24):
            pixels = rng.integers(0, 128, (12, 12), dtype=np.uint8) + (128 if label == "light" else 0)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / label / f"{number}.png")
