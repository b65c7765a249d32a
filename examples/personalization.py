"""Ten clinics whose patients ask for different things: one model for all, a model for each, or something in between.

    python examples/personalization.py

Every clinic sees only some of the twenty kinds of messages. What it shows: methods that leave each client with a model
of its own (FedSA-LoRA shares A and keeps B, pFedLoRU adds a personal pair to a shared one), beside one global model
(FedIT) and no federation at all; the accuracy of every client; and where its own adapter is found. Times:
examples/README.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import fedspan

METHODS = ("local-only", "fedit", "fedsa-lora", "pfedloru")


class Progress(fedspan.Watcher):
    """Print one line for each run."""

    def on_run_finish(self, step: Any, metric: str, value: float | None, seconds: float, is_new: bool) -> None:
        print(f"{step.label}: mean {metric} {value or 0.0:.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="builtin:all-minilm-l6-v2", help="an encoder of BERT's kind: hub id or folder"
    )
    parser.add_argument("--layer", type=int, default=5, help="the layer to adapt; MiniLM's last one is 5")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--text", default="Can I come in on Tuesday instead?")
    parser.add_argument("--out", type=Path, help="left out: runs/personalization, or runs/personalization-smoke")
    parser.add_argument("--smoke", action="store_true", help="a few seconds: one round on 200 texts")
    args = parser.parse_args()
    args.out = args.out or Path("runs/personalization-smoke" if args.smoke else "runs/personalization")

    config: dict[str, Any] = {
        "model": {
            "name": args.model,
            "target_modules": ["query", "value"],
            "layers_to_transform": args.layer,
        },
        # No common test set: each client is measured on a part of its own texts.
        "data": {
            "train": "builtin:patient-messages",
            "test_split": None,
            "test_fraction": 0,
            **({"max_examples": 200} if args.smoke else {}),
        },
        "partition": {"partitioner": "dirichlet", "alpha": 0.2, "clients": 10, "test": 0.3, "min_examples": 8},
        "method": {"r": 8, "lora_alpha": 16},
        "federation": {"rounds": 1 if args.smoke else args.rounds},
    }
    # Every method gets the same division, and is an ordinary run in a folder of its own.
    fedspan.compare(config, args.out, METHODS, seeds=[0], listener=Progress())
    runs = {method: args.out / f"{method}-seed0" for method in METHODS}
    reports = {method: fedspan.resume(run) for method, run in runs.items()}  # of finished runs: their reports

    table = Table("client", *METHODS, title="accuracy on each client's own test part, %")
    for client in reports["fedit"].by_client:
        table.add_row(client, *(f"{100 * reports[one].by_client[client]['accuracy']:.1f}" for one in METHODS))
    summaries = [reports[method].scores["clients"] for method in METHODS]
    table.add_section()
    table.add_row("mean", *(f"{100 * scores['accuracy']:.1f}" for scores in summaries))
    table.add_row("worst", *(f"{100 * scores['worst']['accuracy']:.1f}" for scores in summaries))
    table.add_row("MB sent", *(f"{sum(reports[method].bytes.values()) / 1e6:.1f}" for method in METHODS))
    Console().print(table)

    # A global model has one adapter; here there is one for each client, in report.adapters under its id.
    print(args.text)
    for client, folder in list(reports["fedsa-lora"].adapters.items())[:3]:
        label, probability = fedspan.predict(runs["fedsa-lora"], [args.text], client=client)[0]
        print(f"  {client}: {label} ({probability:.2f}), by {runs['fedsa-lora'] / folder}")


if __name__ == "__main__":
    main()
