"""Drugs, diseases and body parts in the reports of four hospitals, none of which tags all three.

    python examples/named_entities.py

The reports are made up from templates. Every hospital has the same list of labels, but words of its own types only:
what it has never seen tagged, it learns from the others. The script compares federated training with that of each
hospital alone on reports with all three types, and marks the entities of a new report.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import fedspan

WORDS = {
    "Drug": ["aspirin", "metformin", "ibuprofen", "amoxicillin", "warfarin", "insulin glargine", "vitamin D"],
    "Disease": ["pneumonia", "type 2 diabetes", "asthma", "migraine", "atrial fibrillation", "acute bronchitis"],
    "Body": ["left knee", "chest", "lower back", "right shoulder", "abdomen", "neck"],
}
TEMPLATES = {
    "Drug": ["started on {} twice daily", "stop {} before surgery", "no allergy to {} known", "{} was increased"],
    "Disease": ["history of {}", "admitted with {} last night", "no sign of {}", "family members have {}"],
    "Body": ["pain in the {} for days", "x-ray of the {} was normal", "swelling of the {}", "scar on the {}"],
}
HOSPITALS: dict[str, tuple[tuple[str, ...], int]] = {
    "cardiology": (("Drug", "Disease"), 160),
    "pharmacy": (("Drug",), 120),
    "orthopaedics": (("Body",), 80),
    "village": (("Disease", "Body"), 24),
}
"""Types of entities and number of reports of each hospital."""
LABELS = ["O", *(f"{prefix}-{kind}" for kind in sorted(WORDS) for prefix in "BI")]


def make_report(kinds: tuple[str, ...], rng: random.Random) -> dict[str, Any]:
    """Make a report of two sentences about the given types, as words with their tags."""
    tokens: list[str] = []
    tags: list[str] = []
    for kind in rng.choices(kinds, k=2):
        before, after = (part.split() for part in rng.choice(TEMPLATES[kind]).split("{}"))
        entity = rng.choice(WORDS[kind]).split()
        tokens += [*before, *entity, *after, "."]
        tags += [*["O"] * len(before), f"B-{kind}", *[f"I-{kind}"] * (len(entity) - 1), *["O"] * (len(after) + 1)]
    return {"tokens": tokens, "tags": tags}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:all-minilm-l6-v2", help="an encoder: hub id or folder")
    parser.add_argument("--layer", type=int, default=5, help="the layer to adapt; MiniLM's last one is 5")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, help="left out: runs/named_entities, or runs/named_entities-smoke")
    parser.add_argument("--smoke", action="store_true", help="a few seconds: one round on an eighth of the reports")
    args = parser.parse_args()
    args.out = args.out or Path("runs/named_entities-smoke" if args.smoke else "runs/named_entities")

    rng = random.Random(0)
    share = 8 if args.smoke else 1
    reports = {
        hospital: [make_report(kinds, rng) for _ in range(max(3, count // share))]
        for hospital, (kinds, count) in HOSPITALS.items()
    }
    test = [make_report(tuple(WORDS), rng) for _ in range(80 // share)]
    config: dict[str, Any] = {
        "task": "token-classification",
        "model": {"name": args.model, "target_modules": ["query", "value"], "layers_to_transform": args.layer},
        "data": {"train": "python:data", "labels": LABELS},
        "partition": {"validation": 0.1, "test": 0.0},
        "federation": {"rounds": 1 if args.smoke else args.rounds},
        "training": {"lr": 3e-3, "local_epochs": 2, "batch_size": 8},
        "evaluation": {"best_by": "loss"},
        "baselines": ["local-only"],
    }
    report = fedspan.run(config, args.out, data={"train": reports, "test": test})
    alone = report.baselines["local-only"]["scores"]["test"]
    print(f"federated: entity F1 {report.scores['test']['entity_f1']:.1%}")
    print(f"each hospital alone: mean {alone['entity_f1']:.1%}, worst {alone['worst']['entity_f1']:.1%}")
    text = "scar on the left knee . started on warfarin twice daily . no sign of pneumonia ."
    found = fedspan.predict(args.out, [text])[0]
    print(f"{text}\n  " + (", ".join(f"{words}: {kind}" for words, kind in found) or "no entities"))


if __name__ == "__main__":
    main()
