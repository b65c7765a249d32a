"""Ten banks with unequal data train one text classifier, by three methods on the same partition; a table compares them.

    python examples/ten_banks.py                                           # the patients' messages, without a network
    python examples/ten_banks.py --dataset banking77                       # Banking77 from the Hugging Face hub
    python examples/ten_banks.py --dataset banking77 --data FOLDER         # FOLDER/train.csv and FOLDER/test.csv

What it shows: ``fedspan.compare``, ``fedspan.predict``, and that the result is an ordinary adapter, which PEFT loads
without fedspan. Stopped and started again, it continues where it was. Times: examples/README.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

import fedspan

METHODS = ["fedit", "rolora", "flora"]


class Progress(fedspan.Watcher):
    """Print one line for each round."""

    def on_run_start(self, step: Any) -> None:
        print(step.label, flush=True)

    def on_round_finish(self, row: Any) -> None:
        print(f"  round {row['round']}: held-out accuracy {row['test']['accuracy']:.1%}", flush=True)


def build_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of all runs: everything but the method's name."""
    data: dict[str, Any] = {"train": "builtin:patient-messages"}
    if args.dataset:
        data = {"dataset": args.dataset}
        if args.data:
            data |= {"train": str(args.data / "train.csv"), "test": str(args.data / "test.csv")}
    return {
        "model": {
            "name": args.model,
            "target_modules": ["query", "value"],
            # One layer alone: what lies below it never changes, and is computed once for every text.
            "layers_to_transform": args.layer,
            "pooling": "stock",  # Transformers' own classifier, so that PEFT alone loads the result
        },
        "data": {**data, "max_examples": 120 if args.smoke else args.examples},
        # The smaller alpha, the less the banks have in common: sizes differ, and so does what they are asked.
        "partition": {"partitioner": "dirichlet", "alpha": 0.5, "clients": 10},
        "method": {"r": 8, "lora_alpha": 16},
        "federation": {"rounds": 1 if args.smoke else args.rounds},
        # The default learning rate; the adjustment is what `fedspan init` writes, for clients with different classes.
        "training": {"logit_adjustment": 1},
    }


def predict_with_peft(adapter: Path, model: str, text: str) -> tuple[str, float]:
    """Compute label and probability without fedspan."""
    logging.set_verbosity_error()  # that the classification head is new is no news: the adapter brings it
    labels = json.loads((adapter / "fedspan.json").read_text(encoding="utf-8"))["labels"]
    base = AutoModelForSequenceClassification.from_pretrained(fedspan.resolve_model(model), num_labels=len(labels))
    classifier = PeftModel.from_pretrained(base, str(adapter)).eval()
    tokens = AutoTokenizer.from_pretrained(fedspan.resolve_model(model))(text, return_tensors="pt")
    with torch.inference_mode():
        probabilities = classifier(**tokens).logits.softmax(-1)[0]
    return labels[int(probabilities.argmax())], float(probabilities.max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", help="a data set that fedspan knows (fedspan data), such as banking77")
    parser.add_argument("--data", type=Path, help="folder with the data set's train.csv and test.csv")
    parser.add_argument("--examples", type=int, default=3000, help="of the training set at most")
    parser.add_argument(
        "--model", default="builtin:all-minilm-l6-v2", help="an encoder of BERT's kind: hub id or folder"
    )
    parser.add_argument("--layer", type=int, default=5, help="the layer to adapt; MiniLM's last one is 5")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--text", default="How much will I be charged?")
    parser.add_argument("--out", type=Path, help="left out: runs/ten_banks, or runs/ten_banks-smoke")
    parser.add_argument("--smoke", action="store_true", help="a few seconds: one round on 120 texts")
    args = parser.parse_args()
    args.out = args.out or Path("runs/ten_banks-smoke" if args.smoke else "runs/ten_banks")

    report = fedspan.compare(build_config(args), args.out, METHODS, seeds=[0], listener=Progress())

    shown = report.build_table()
    table = Table(*shown.head)
    for cells in shown.rows:
        table.add_row(*cells)
    Console().print(table)
    print(*shown.notes, sep="\n")

    methods = [row for row in report.rows if row.bytes_up]  # without the start
    best = max(methods, key=lambda row: row.mean or 0.0).name
    run = args.out / f"{best}-seed0"
    label, probability = fedspan.predict(run, [args.text])[0]
    print(f"{args.text}\n  {best}: {label} ({probability:.3f})")
    label, probability = predict_with_peft(run / "adapter", args.model, args.text)
    print(f"  by PEFT alone: {label} ({probability:.3f}), from {run / 'adapter'}")


if __name__ == "__main__":
    main()
