"""Named entities across owners with different types and sizes: federated, local-only and centralized training.

    python benchmarks/ner.py --data PATH/ner --out OUT

Four owners have abstracts of their own from NCBI-disease (diseases) and BC5CDR (chemicals and diseases): a large and a
small journal, a pharmacy whose sentences name chemicals only, and a small clinic that tags both. No owner's type is
left out of its sentences by this script, except that NCBI-disease has no tags for chemicals. The held-out sentences are
the two corpora's test parts, the same number of each. The table has the entity F1 of every model on all held-out
sentences and on those of each corpus.
"""

from __future__ import annotations

import argparse
import gzip
import random
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Sentence = tuple[list[str], list[str]]
OWNERS = {"journal-a": 200, "pharmacy": 140, "journal-b": 40, "clinic": 40}
"""Sentences of each owner, in units of --scale."""
TRAININGS = ("federated", "local", "centralized")


def read_sentences(path: Path) -> list[Sentence]:
    """Read a gzipped file in CoNLL form."""
    sentences: list[Sentence] = []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for block in file.read().split("\n\n"):
            pairs = [line.split("\t") for line in block.splitlines() if line.strip()]
            if pairs:
                sentences.append(([pair[0] for pair in pairs], [pair[-1] for pair in pairs]))
    return sentences


def kinds_of(sentence: Sentence) -> set[str]:
    """Return the entity types of a sentence."""
    return {tag[2:] for tag in sentence[1] if tag != "O"}


def divide(data: Path, scale: int, seed: int) -> dict[str, list[Sentence]]:
    """Draw each owner's sentences, of both corpora's training parts."""
    rng = random.Random(seed)
    ncbi, bc5cdr = (read_sentences(data / corpus / "train.tsv.gz") for corpus in ("ncbi-disease", "bc5cdr"))
    rng.shuffle(ncbi)
    rng.shuffle(bc5cdr)
    chemical = [sentence for sentence in bc5cdr if kinds_of(sentence) == {"Chemical"}]
    both = [sentence for sentence in bc5cdr if "Disease" in kinds_of(sentence)]
    sizes = {owner: scale * size for owner, size in OWNERS.items()}
    start = sizes["journal-a"]
    return {
        "journal-a": ncbi[:start],
        "journal-b": ncbi[start : start + sizes["journal-b"]],
        "pharmacy": chemical[: sizes["pharmacy"]],
        "clinic": both[: sizes["clinic"]],
    }


def rows_of(sentences: Iterable[Sentence]) -> list[dict[str, Any]]:
    return [{"tokens": tokens, "tags": tags} for tokens, tags in sentences]


def make_config(args: argparse.Namespace, method: str) -> dict[str, Any]:
    """Return the config of a run by a method."""
    return {
        "task": "token-classification",
        "seed": args.seed,
        "threads": args.threads,
        "model": {
            "name": args.model,
            "target_modules": ["query", "key", "value", "dense"],
            "layers_to_transform": args.layers,
            "max_length": 64,
        },
        "data": {"train": "python:data", "labels": ["O", "B-Chemical", "I-Chemical", "B-Disease", "I-Disease"]},
        "partition": {"validation": 0.1, "test": 0.0},
        "method": {"name": method, "r": 16, "lora_alpha": 32},
        "federation": {"rounds": args.rounds},
        "training": {"lr": args.lr, "local_epochs": 1, "batch_size": 8, "optimizer_state": args.optimizer_state},
        "evaluation": {"best_by": "loss"},
    }


def measure(folder: Path, client: str | None, parts: Mapping[str, Sequence[Sentence]]) -> list[str]:
    """Measure an exported model on each held-out part: entity F1, precision and recall of all, F1 of each corpus."""
    import fedspan

    cells: list[str] = []
    for name, part in parts.items():
        scores = fedspan.evaluate(folder, client, data=rows_of(part))
        metrics = ("entity_f1", "entity_precision", "entity_recall") if name == "all" else ("entity_f1",)
        cells += [f"{100 * scores[metric]:.1f}" for metric in metrics]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with ncbi-disease and bc5cdr")
    parser.add_argument("--out", type=Path, required=True, help="empty folder for the run")
    parser.add_argument("--model", default="builtin:all-minilm-l6-v2")
    parser.add_argument("--method", default="fedit")
    parser.add_argument("--scale", type=int, default=10, help="multiple of the owners' sentences; at most 20")
    parser.add_argument("--layers", type=int, nargs="*", help="blocks with adapters; left out: all")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--heldout", type=int, default=500, help="held-out sentences of each corpus")
    parser.add_argument("--trainings", nargs="+", choices=TRAININGS, default=TRAININGS)
    parser.add_argument("--optimizer-state", default="reset", help="keep: moments last over rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    import fedspan

    owners = divide(args.data, args.scale, args.seed)
    corpora = {
        corpus: read_sentences(args.data / corpus / "test.tsv.gz")[: args.heldout]
        for corpus in ("ncbi-disease", "bc5cdr")
    }
    parts = {"all": [sentence for sentences in corpora.values() for sentence in sentences], **corpora}
    data = {
        "train": {owner: rows_of(sentences) for owner, sentences in owners.items()},
        "test": rows_of(parts["all"]),
    }
    print("| owner | sentences | entity types |\n|---|---|---|")
    for owner, sentences in owners.items():
        kinds = sorted(set().union(*map(kinds_of, sentences)))
        print(f"| {owner} | {len(sentences)} | {', '.join(kinds)} |")
    print("\n| training | entity F1 | precision | recall | F1, NCBI-disease | F1, BC5CDR |\n|---|---|---|---|---|---|")
    for training in args.trainings:
        folder, began = args.out / training, time.monotonic()
        data_by_client = {"everyone": [row for rows in data["train"].values() for row in rows]}
        method = "local-only" if training == "local" else args.method
        chosen = {**data, "train": data_by_client} if training == "centralized" else data
        report = fedspan.run(make_config(args, method), folder, data=chosen)
        seconds = time.monotonic() - began
        for owner in owners if training == "local" else [None]:
            title = training if owner is None else f"{owner} alone"
            print(f"| {title} | {' | '.join(measure(folder, owner, parts))} |", flush=True)
        print(
            f"{training}: best round {report.best_round}; {report.bytes['up']:,} bytes up; {seconds:.0f} s",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
