"""Preferences across owners with different products: federated, local-only and centralized DPO on real reviews.

    python benchmarks/preference.py --data PATH/blitzer_sentiment --model PATH/stories260k --out OUT

Five owners have reviews of one kind of product each. A pair is made of two reviews of an owner: a favorable one is
preferred to an unfavorable one, as in the sentiment experiment of DPO's paper. The prompt names the kind of product. A
small pretrained Llama trains adapters by DPO. The table has the share of held-out pairs whose preferred review has the
higher reward: of all pairs, and of each owner's. An untrained adapter has no preference; the first line compares the
log-probabilities per token under the pretrained model instead.
"""

from __future__ import annotations

import argparse
import csv
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, str]
TRAININGS = ("federated", "centralized", "local")
WORST, BEST = "0", "1"


def read_pairs(folder: Path, part: str, count: int, seed: int) -> dict[str, list[Row]]:
    """Pair the reviews of each owner at random, each review once; at most ``count`` pairs of an owner."""
    owners: dict[str, list[Row]] = {}
    for path in sorted(folder.glob(f"*/{part}.tsv")):
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t"))
        rng, kind = random.Random(seed), path.parent.name
        texts = {
            label: [" ".join(row["sentence"].split()) for row in rows if row["label"] == label]
            for label in (WORST, BEST)
        }
        for own in texts.values():
            rng.shuffle(own)
        pairs = zip(texts[BEST], texts[WORST], strict=False)
        made = [{"prompt": f"{kind} review: ", "chosen": good, "rejected": bad} for good, bad in pairs if good != bad]
        owners[kind] = made[:count]
    return owners


def join(owners: Mapping[str, Sequence[Row]]) -> list[Row]:
    return [row for rows in owners.values() for row in rows]


def make_config(args: argparse.Namespace, method: str) -> dict[str, Any]:
    """Return the config of a run by a method."""
    return {
        "task": "preference",
        "task_options": {"loss": args.loss, "beta": args.beta},
        "seed": args.seed,
        "threads": args.threads,
        "model": {"name": str(args.model), "target_modules": "all-linear", "max_length": args.length},
        "data": {"train": "python:data", "test_fraction": 0.0},
        "partition": {"validation": 0.1, "test": 0.0},
        "method": {"name": method, "r": 8, "lora_alpha": 16},
        "federation": {"rounds": args.rounds},
        "training": {"lr": args.lr, "local_epochs": 1, "batch_size": 16},
        "evaluation": {"metric": "reward_accuracy", "best_by": "loss"},
    }


def measure_pretrained(args: argparse.Namespace, parts: Mapping[str, Sequence[Row]]) -> list[float]:
    """Compute the share of pairs whose preferred review has the higher log-probability per token, by Transformers."""
    import datasets
    import numpy as np
    import torch
    import transformers

    from fedspan.tasks.causal import CausalLM
    from fedspan.tasks.preference import PreferenceTuning

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model).eval()
    task = PreferenceTuning(CausalLM(tokenizer, args.length))
    right: list[np.ndarray] = []
    for rows in parts.values():
        examples = task.encode(datasets.Dataset.from_list([*rows]).rename_column("prompt", "text"))
        scores = torch.cat(
            [
                task.compute_reference(model, task.collate(examples, [at], torch.device("cpu")))
                for at in range(len(examples))
            ]
        ).numpy()
        tokens = [examples.answers[role].lengths - examples.answers[role].starts for role in ("chosen", "rejected")]
        means = scores / np.stack(tokens, 1)
        right.append(means[:, 0] > means[:, 1])
    return [float(np.concatenate(right).mean()), *(float(own.mean()) for own in right)]


def show(title: str, values: Sequence[float]) -> None:
    print(f"| {title} | {' | '.join(f'{100 * value:.1f}' for value in values)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with KIND/train.tsv and KIND/dev.tsv")
    parser.add_argument("--model", type=Path, required=True, help="folder of a causal language model")
    parser.add_argument("--out", type=Path, required=True, help="empty folder for the runs")
    parser.add_argument("--method", default="fedit")
    parser.add_argument("--loss", default="sigmoid")
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--length", type=int, default=128, help="most tokens of a prompt and a review")
    parser.add_argument("--pairs", type=int, default=300, help="most training pairs of an owner")
    parser.add_argument("--heldout", type=int, default=150, help="most held-out pairs of an owner")
    parser.add_argument("--trainings", nargs="+", choices=TRAININGS, default=TRAININGS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    import torch

    import fedspan

    torch.set_num_threads(args.threads)
    owners = read_pairs(args.data, "train", args.pairs, args.seed)
    parts = read_pairs(args.data, "dev", args.heldout, args.seed)
    counts = " | ".join(f"{name} ({len(rows)})" for name, rows in parts.items())
    print(f"| training | all ({len(join(parts))}) | {counts} |")
    print(f"|---|---{'|---' * len(parts)}|")
    show("none (pretrained, by log-probability)", measure_pretrained(args, parts))
    for training in args.trainings:
        folder, began = args.out / training, time.monotonic()
        train = {"everyone": join(owners)} if training == "centralized" else owners
        method = "local-only" if training == "local" else args.method
        report = fedspan.run(make_config(args, method), folder, data=train)
        for owner in owners if training == "local" else (None,):
            values = [fedspan.evaluate(folder, owner, data=rows)["reward_accuracy"] for rows in parts.values()]
            sizes = [len(rows) for rows in parts.values()]
            mean = sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)
            show(training if owner is None else f"{owner} alone", [mean, *values])
        seconds = time.monotonic() - began
        print(f"<!-- {training}: best round {report.best_round} of {report.rounds}, {seconds:.0f} s -->", flush=True)


if __name__ == "__main__":
    main()
