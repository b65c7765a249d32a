"""Translation from German to English with a small model from scratch: federated, local-only and centralized training.

    python benchmarks/translation.py --data PATH/multi30k --out OUT

Three owners have captions of Multi30k of different lengths: short, middle and long ones, the thirds of the German
captions that the script draws, by their number of words. The model is a T5 of two layers on each side whose weights
are drawn at random; its tokenizer (byte-pair encoding) is trained on Multi30k's validation part, which nobody trains
the model on. All weights train by FedAvg; an owner alone and centralized training are runs with one client and as many
epochs. The table has the scores of each model on the first captions of the test part of 2016.
"""

from __future__ import annotations

import argparse
import gzip
import random
import sys
import time
from pathlib import Path
from typing import Any

OWNERS = ("short", "middle", "long")
TRAININGS = ("federated", "centralized", *(f"{owner} alone" for owner in OWNERS))
VOCABULARY = 2000
Pair = dict[str, str]


def read_pairs(data: Path, part: str) -> list[Pair]:
    """Read the aligned captions of a part."""
    columns = []
    for language in ("de", "en"):
        with gzip.open(data / f"{part}.{language}.gz", "rt", encoding="utf-8") as file:
            columns.append([line.strip() for line in file])
    return [{"de": german, "en": english} for german, english in zip(*columns, strict=True) if german and english]


def divide(pairs: list[Pair], size: int, seed: int) -> dict[str, list[Pair]]:
    """Draw pairs for all owners, and divide them into thirds by the number of German words."""
    drawn = random.Random(seed).sample(pairs, size * len(OWNERS))
    drawn.sort(key=lambda pair: len(pair["de"].split()))
    return {owner: drawn[at * size : (at + 1) * size] for at, owner in enumerate(OWNERS)}


def save_model(folder: Path, texts: list[str]) -> Path:
    """Save the architecture and a tokenizer that is trained on texts."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    special = ["<pad>", "</s>", "<unk>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64
    ).save_pretrained(folder)
    transformers.T5Config(
        vocab_size=tokenizer.get_vocab_size(),
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        architectures=["T5ForConditionalGeneration"],
    ).save_pretrained(folder)
    return folder


def make_config(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Return the config of a run."""
    return {
        "task": "seq2seq",
        "task_options": {"num_beams": 1},
        "seed": args.seed,
        "threads": args.threads,
        "model": {
            "name": str(model),
            "pretrained": False,
            "target_modules": ["q", "k", "v", "o", "wi", "wo"],
            "max_length": 48,
        },
        "data": {"train": "python:data", "text": "de", "answer": "en"},
        "partition": {"validation": 0.1, "test": 0.0},
        "method": {"name": "fedavg"},
        "federation": {"rounds": args.rounds},
        "training": {"lr": args.lr, "warmup_rounds": 1, "local_epochs": 1, "batch_size": 32, "group_by_length": True},
        "evaluation": {"generate": True, "max_new_tokens": 40},
        "engine": {"name": "loop"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of Multi30k")
    parser.add_argument("--out", type=Path, required=True, help="empty folder for the runs")
    parser.add_argument("--pairs", type=int, default=9660, help="pairs of each owner")
    parser.add_argument("--heldout", type=int, default=1000, help="captions of the test part")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--trainings", nargs="+", choices=TRAININGS, default=TRAININGS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    import fedspan

    public = read_pairs(args.data, "val")
    model = save_model(args.out / "model", [text for pair in public for text in pair.values()])
    owners = divide(read_pairs(args.data, "train"), args.pairs, args.seed)
    test = read_pairs(args.data, "test_2016_flickr")[: args.heldout]
    print("| owner | pairs | German words |\n|---|---|---|")
    for owner, pairs in owners.items():
        lengths = [len(pair["de"].split()) for pair in pairs]
        print(f"| {owner} | {len(pairs)} | {min(lengths)} to {max(lengths)} |")
    everyone = {"everyone": [pair for pairs in owners.values() for pair in pairs]}
    trainings = {"federated": owners, "centralized": everyone}
    trainings |= {f"{owner} alone": {owner: pairs} for owner, pairs in owners.items()}
    print("\n| training | best round | loss | token accuracy | BLEU | chrF | ROUGE-L |\n|---|---|---|---|---|---|---|")
    for title in args.trainings:
        began = time.monotonic()
        data = {"train": trainings[title], "test": test}
        report = fedspan.run(make_config(args, model), args.out / title.replace(" ", "-"), data=data)
        scores: dict[str, float] = report.scores["test"]
        cells = [f"{scores['loss']:.2f}", f"{100 * scores['token_accuracy']:.1f}", f"{scores['bleu']:.1f}"]
        cells += [f"{scores['chrf']:.1f}", f"{100 * scores['rouge_l']:.1f}"]
        print(f"| {title} | {report.best_round} | {' | '.join(cells)} |", flush=True)
        print(f"{title}: {time.monotonic() - began:.0f} s; {report.examples[0]}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
