"""An encoder learns a domain's words across owners: federated, local-only and centralized masked language modeling.

    python benchmarks/masked_words.py --data PATH --out OUT

all-MiniLM-L6-v2 has no head for masked words. It gets one that trains, with the encoder's linear layers, on public
texts: instructions and answers of Alpaca. Then two owners adapt the result to biomedical abstracts by low-rank
updates: a large one with sentences of BC5CDR, a small one with sentences of NCBI-disease. The table has each model's
loss on masked words of both corpora's test parts; what is masked is the same for all models.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from ner import read_sentences

SIZES = {"bc5cdr": 3000, "ncbi-disease": 1000}
"""Sentences of each owner, who is named after the corpus."""
TRAININGS = ("federated", "local", "centralized")
Row = dict[str, str]


def read_texts(path: Path) -> list[Row]:
    """Read the sentences of a gzipped file in CoNLL form."""
    return [{"text": " ".join(tokens)} for tokens, _ in read_sentences(path)]


def make_config(
    args: argparse.Namespace, model: Path, method: dict[str, Any], rounds: int, lr: float
) -> dict[str, Any]:
    """Return the config of a run."""
    return {
        "task": "masked-lm",
        "seed": args.seed,
        "threads": args.threads,
        "model": {"name": str(model), "target_modules": ["query", "key", "value", "dense"], "max_length": 64},
        "data": {"train": "python:data"},
        "partition": {"validation": 0.1, "test": 0.0},
        "method": method,
        "federation": {"rounds": rounds},
        "training": {"lr": lr, "local_epochs": 1, "batch_size": 16},
    }


def save_public_model(args: argparse.Namespace, folder: Path) -> Path:
    """Save the encoder with a head for masked words that is trained on public texts."""
    import transformers

    import fedspan

    name = fedspan.resolve_model("builtin:all-minilm-l6-v2")
    transformers.set_seed(args.seed)
    model = transformers.BertForMaskedLM.from_pretrained(name)
    model.save_pretrained(folder / "untrained")
    transformers.AutoTokenizer.from_pretrained(name).save_pretrained(folder / "untrained")
    rows = json.loads((args.data / "alpaca" / "alpaca_5000.json").read_text())
    texts = [{"text": f"{row['instruction']} {row['output']}"} for row in rows]
    config = make_config(args, folder / "untrained", {"name": "fedavg"}, args.public_rounds, args.public_lr)
    fedspan.run(config, folder / "public", data={"everyone": texts})
    return fedspan.export(folder / "public", folder / "model", "merged")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with alpaca and ner")
    parser.add_argument("--out", type=Path, required=True, help="empty folder for the runs")
    parser.add_argument("--method", default="fedit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--public-rounds", type=int, default=3, help="epochs on public texts")
    parser.add_argument("--public-lr", type=float, default=3e-4)
    parser.add_argument("--heldout", type=int, default=500, help="held-out sentences of each corpus")
    parser.add_argument("--trainings", nargs="+", choices=TRAININGS, default=TRAININGS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    import fedspan

    owners: dict[str, list[Row]] = {}
    parts: dict[str, list[Row]] = {}
    for corpus, size in SIZES.items():
        owners[corpus] = random.Random(args.seed).sample(read_texts(args.data / "ner" / corpus / "train.tsv.gz"), size)
        parts[corpus] = read_texts(args.data / "ner" / corpus / "test.tsv.gz")[: args.heldout]
    model = save_public_model(args, args.out)
    parts = {"all": [row for rows in parts.values() for row in rows], **parts}
    print("| training | best round | loss | pseudo-perplexity | right, % | loss, BC5CDR | loss, NCBI-disease |")
    print("|---|---|---|---|---|---|---|")

    def show(title: str, best: int | None, folder: Path, owner: str | None) -> None:
        scores = {name: fedspan.evaluate(folder, owner, data=rows) for name, rows in parts.items()}
        cells = [f"{scores['all']['loss']:.3f}", f"{scores['all']['pseudo_perplexity']:.1f}"]
        cells += [f"{100 * scores['all']['masked_accuracy']:.1f}"]
        cells += [f"{scores[corpus]['loss']:.3f}" for corpus in SIZES]
        print(f"| {title} | {'' if best is None else best} | {' | '.join(cells)} |", flush=True)

    show("none (public texts only)", None, args.out / "public", None)
    for training in args.trainings:
        folder, began = args.out / training, time.monotonic()
        name = "local-only" if training == "local" else args.method
        train = {"everyone": [row for rows in owners.values() for row in rows]} if training == "centralized" else owners
        method = {"name": name, "r": 8, "lora_alpha": 16}
        report = fedspan.run(make_config(args, model, method, args.rounds, args.lr), folder, data=train)
        for owner in owners if training == "local" else [None]:
            show(training if owner is None else f"{owner} alone", report.best_round, folder, owner)
        print(f"{training}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
