"""Search for similar messages across three service desks, each of which sees other subjects.

    python examples/embedding_search.py

The desks share the built-in patients' messages: each has pairs of its own subjects, marked 1 if both messages are
about one subject and 0 if not. The script trains one embedding model of all desks, compares it with those of single
desks, and finds the messages of the test part that are nearest to a new one. All desks are simulated on one machine.
"""

from __future__ import annotations

import argparse
import csv
import io
import random
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

import fedspan

CORPUS = files("fedspan.data") / "corpus" / "patient_messages"
DESKS = {
    "appointments": "book cancel confirm reschedule waiting visiting directions",
    "medicine": "test symptom side prescription medication referral",
    "office": "update records payment insurance feedback billing",
}
"""The first words of the subjects of each desk."""
QUERY = "I would like to move my visit on Monday to another day"


def load_messages(part: str) -> list[tuple[str, str]]:
    """Load the messages of a part of the corpus with their subjects."""
    text = (CORPUS / f"{part}.csv").read_text(encoding="utf-8")
    return [(row["text"], row["label"]) for row in csv.DictReader(io.StringIO(text))]


def make_pairs(messages: Sequence[tuple[str, str]], count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Draw pairs of messages, half of them about one subject."""
    by_subject: dict[str, list[str]] = {}
    for text, subject in messages:
        by_subject.setdefault(subject, []).append(text)
    subjects = [subject for subject, texts in by_subject.items() if len(texts) > 1]
    pairs: list[dict[str, Any]] = []
    for number in range(count):
        if number % 2:
            first, second = rng.sample(by_subject[rng.choice(subjects)], 2)
        else:
            first, second = (rng.choice(by_subject[subject]) for subject in rng.sample(subjects, 2))
        pairs.append({"message": first, "other": second, "same": number % 2})
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:all-minilm-l6-v2", help="an encoder: hub id or folder")
    parser.add_argument("--layer", type=int, default=5, help="the layer to adapt; MiniLM's last one is 5")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=150, help="of each desk")
    parser.add_argument("--out", type=Path, help="left out: runs/embedding_search, or runs/embedding_search-smoke")
    parser.add_argument("--smoke", action="store_true", help="a few seconds: one round of a tenth of the pairs")
    args = parser.parse_args()
    args.out = args.out or Path("runs/embedding_search-smoke" if args.smoke else "runs/embedding_search")

    rng = random.Random(0)
    count = args.pairs // 10 if args.smoke else args.pairs
    messages, test = load_messages("train"), load_messages("test")
    desks = {
        desk: make_pairs([message for message in messages if message[1].split("_")[0] in words.split()], count, rng)
        for desk, words in DESKS.items()
    }
    config: dict[str, Any] = {
        "task": "text-embedding",
        "task_options": {"loss": "cosent"},
        "model": {"name": args.model, "target_modules": ["query", "value"], "layers_to_transform": args.layer},
        "data": {"train": "python:data", "text": "message", "text_pair": "other", "label": "same"},
        "partition": {"validation": 0.1, "test": 0.0},
        "federation": {"rounds": 1 if args.smoke else args.rounds},
        "training": {"lr": 5e-3, "batch_size": 16},
        "evaluation": {"best_by": "loss"},
        "baselines": ["local-only"],
    }
    report = fedspan.run(config, args.out, data={"train": desks, "test": make_pairs(test, count, rng)})
    alone = report.baselines["local-only"]["scores"]["test"]["spearman"]
    print(f"pairs of all subjects: Spearman {report.scores['test']['spearman']:.3f}, one desk alone {alone:.3f}")

    texts = [text for text, _ in test]
    vectors = np.array(fedspan.predict(args.out, [QUERY, *texts]))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    similarities = vectors[1:] @ vectors[0]
    print(f"nearest to: {QUERY}")
    for position in np.argsort(-similarities)[:3]:
        print(f"  {similarities[position]:.2f} {texts[position]}")


if __name__ == "__main__":
    main()
