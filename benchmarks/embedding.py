"""Text embedding across owners with different texts: federated, local-only and centralized training on STS-B.

    python benchmarks/embedding.py --data PATH/glue/STS-B --out OUT

Three owners have the scored pairs of one genre of STS-B each, a part of its training set: captions, forums and news.
They train all-MiniLM-L6-v2 by CoSENT. The table has Spearman's correlation of cosines and scores for pairs of the
development set, whose scores are public: of all drawn pairs, and of each genre's. The pretrained model is measured with
sentence-transformers, the others with fedspan.predict on the exported adapters.
"""

from __future__ import annotations

import argparse
import csv
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
GENRES = {"main-captions": "captions", "main-forum": "forums", "main-forums": "forums", "main-news": "news"}
TRAININGS = ("federated", "centralized", "local")


def read_pairs(path: Path) -> dict[str, list[Row]]:
    """Read the scored pairs of each genre of a part of STS-B."""
    owners: dict[str, list[Row]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            pair = {"first": row["sentence1"], "second": row["sentence2"], "score": float(row["score"])}
            owners.setdefault(GENRES[row["genre"]], []).append(pair)
    return owners


def join(owners: Mapping[str, Sequence[Row]]) -> list[Row]:
    return [row for rows in owners.values() for row in rows]


def make_config(args: argparse.Namespace, method: str) -> dict[str, Any]:
    """Return the config of a run by a method."""
    return {
        "task": "text-embedding",
        "seed": args.seed,
        "threads": args.threads,
        "model": {
            "name": args.model,
            "target_modules": ["query", "key", "value", "dense"],
            "layers_to_transform": [4, 5],
            "max_length": 64,
        },
        "data": {
            "train": "python:data",
            "text": "first",
            "text_pair": "second",
            "label": "score",
            "test_fraction": 0.0,
        },
        "partition": {"validation": 0.1, "test": 0.0},
        "method": {"name": method, "r": 8, "lora_alpha": 16},
        "federation": {"rounds": args.rounds},
        "training": {"lr": args.lr, "local_epochs": 1, "batch_size": 16},
        "evaluation": {"metric": "spearman"},
    }


def measure(cosines: Sequence[float], parts: Mapping[str, Sequence[Row]]) -> list[float]:
    """Compute Spearman's correlation of all held-out pairs, and of each genre's, from their cosines in order."""
    from scipy.stats import spearmanr

    scores, start = [row["score"] for row in join(parts)], 0
    values = [float(spearmanr(cosines, scores)[0])]
    for rows in parts.values():
        stop = start + len(rows)
        values.append(float(spearmanr(cosines[start:stop], scores[start:stop])[0]))
        start = stop
    return values


def compute_pretrained(model: str, pairs: Sequence[Row]) -> list[float]:
    """Compute the cosines of the pretrained model."""
    from sentence_transformers import SentenceTransformer

    from fedspan.models.names import resolve_model

    encoder = SentenceTransformer(resolve_model(model), device="cpu")
    first, second = (encoder.encode([pair[key] for pair in pairs]) for key in ("first", "second"))
    return encoder.similarity_pairwise(first, second).tolist()


def show(title: str, values: Sequence[float]) -> None:
    print(f"| {title} | {' | '.join(f'{100 * value:.1f}' for value in values)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.tsv and dev.tsv")
    parser.add_argument("--out", type=Path, required=True, help="empty folder for the runs")
    parser.add_argument("--model", default="builtin:all-minilm-l6-v2")
    parser.add_argument("--method", default="fedit")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--examples", type=int, default=200, help="most training pairs of an owner")
    parser.add_argument("--heldout", type=int, default=120, help="held-out pairs of each genre")
    parser.add_argument("--trainings", nargs="+", choices=TRAININGS, default=TRAININGS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    import fedspan

    def draw(name: str, count: int) -> dict[str, list[Row]]:
        rng = random.Random(args.seed)
        return {owner: rng.sample(rows, min(count, len(rows))) for owner, rows in read_pairs(args.data / name).items()}

    owners, parts = draw("train.tsv", args.examples), draw("dev.tsv", args.heldout)
    pairs = join(parts)
    print(f"| training | all ({len(pairs)}) | {' | '.join(f'{name} ({len(rows)})' for name, rows in parts.items())} |")
    print(f"|---|---{'|---' * len(parts)}|")
    show("none (pretrained)", measure(compute_pretrained(args.model, pairs), parts))
    for training in args.trainings:
        folder, began = args.out / training, time.monotonic()
        train = {"everyone": join(owners)} if training == "centralized" else owners
        report = fedspan.run(
            make_config(args, "local-only" if training == "local" else args.method), folder, data=train
        )
        for owner in owners if training == "local" else (None,):
            cosines = fedspan.predict(folder, [(pair["first"], pair["second"]) for pair in pairs], owner)
            show(training if owner is None else f"{owner} alone", measure(cosines, parts))
        seconds = time.monotonic() - began
        print(f"<!-- {training}: best round {report.best_round} of {report.rounds}, {seconds:.0f} s -->", flush=True)


if __name__ == "__main__":
    main()
