"""Several labels a sentence across owners with different shares of them: federated, local-only, centralized training.

    python benchmarks/multi_label.py --data PATH/ner --out OUT

The sentences are those of BC5CDR; the labels of a sentence are the entity types that it names: chemical, disease, both
or none. Three owners have different sentences: a pharmacy mostly names chemicals, a clinic mostly diseases, and an
archive has sentences as they come. The table has the metrics of every model on sentences of the corpus's test part.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ner import Sentence, kinds_of, read_sentences

TRAININGS = ("federated", "local", "centralized")
LABELS = ("Chemical", "Disease")
OTHERS = 0.1
"""Share of the pharmacy's and the clinic's sentences that are drawn from the rest."""


def rows_of(sentences: Iterable[Sentence]) -> list[dict[str, Any]]:
    return [{"text": " ".join(sentence[0]), "labels": sorted(kinds_of(sentence))} for sentence in sentences]


def divide(sentences: list[Sentence], size: int, seed: int) -> dict[str, list[Sentence]]:
    """Draw the same number of sentences for each owner."""
    rng = random.Random(seed)
    left = rng.sample(sentences, len(sentences))
    owners, left = {"archive": left[:size]}, left[size:]
    for owner, kinds in (("pharmacy", {"Chemical"}), ("clinic", {"Disease"})):
        own = [sentence for sentence in left if kinds_of(sentence) == kinds][: round((1 - OTHERS) * size)]
        taken = set(map(id, own))
        left = [sentence for sentence in left if id(sentence) not in taken]
        owners[owner], left = own + left[: size - len(own)], left[size - len(own) :]
    return owners


def make_config(args: argparse.Namespace, method: str) -> dict[str, Any]:
    """Return the config of a run by a method."""
    return {
        "task": "multi-label-classification",
        "seed": args.seed,
        "threads": args.threads,
        "model": {"name": args.model, "target_modules": ["query", "key", "value", "dense"], "max_length": 64},
        "data": {"train": "python:data"},
        "partition": {"validation": 0.1, "test": 0.0},
        "method": {"name": method, "r": 8, "lora_alpha": 16},
        "federation": {"rounds": args.rounds},
        "training": {"lr": args.lr, "local_epochs": 1, "batch_size": 16},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with bc5cdr")
    parser.add_argument("--out", type=Path, required=True, help="empty folder for the runs")
    parser.add_argument("--model", default="builtin:all-minilm-l6-v2")
    parser.add_argument("--method", default="fedit")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--examples", type=int, default=800, help="sentences of each owner")
    parser.add_argument("--heldout", type=int, default=1000, help="sentences of the test part")
    parser.add_argument("--trainings", nargs="+", choices=TRAININGS, default=TRAININGS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    import fedspan

    owners = divide(read_sentences(args.data / "bc5cdr" / "train.tsv.gz"), args.examples, args.seed)
    test = rows_of(read_sentences(args.data / "bc5cdr" / "test.tsv.gz")[: args.heldout])
    train = {owner: rows_of(sentences) for owner, sentences in owners.items()}
    print("| sentences | number | only chemicals | only diseases | both | none |\n|---|---|---|---|---|---|")
    for name, rows in {**train, "test": test}.items():
        kinds = [tuple(row["labels"]) for row in rows]
        counts = [kinds.count(kind) for kind in (LABELS[:1], LABELS[1:], LABELS, ())]
        print(f"| {name} | {len(rows)} | {' | '.join(map(str, counts))} |")
    print("\n| training | best round | micro-F1 | macro-F1 | all labels right |\n|---|---|---|---|---|")
    for training in args.trainings:
        folder, began = args.out / training, time.monotonic()
        method = "local-only" if training == "local" else args.method
        chosen = {"everyone": [row for rows in train.values() for row in rows]} if training == "centralized" else train
        report = fedspan.run(make_config(args, method), folder, data={"train": chosen, "test": test})
        for owner in owners if training == "local" else [None]:
            scores = fedspan.evaluate(folder, owner, data=test)
            values = [f"{100 * scores[metric]:.1f}" for metric in ("micro_f1", "macro_f1", "subset_accuracy")]
            title = training if owner is None else f"{owner} alone"
            print(f"| {title} | {report.best_round} | {' | '.join(values)} |", flush=True)
        print(f"{training}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
