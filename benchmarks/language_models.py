"""Instruction tuning of a small language model with every method, on two data sets: held-out loss before and after.

    python benchmarks/language_models.py --model PATH/stories260k --alpaca PATH/alpaca_5000.json --gsm8k PATH/gsm8k

The learning rate of each method and data set is the one of ``--rates`` with the lowest validation loss after one round.
Every run is a folder under ``--out``; what is finished is not run again. ``--page`` writes the tables.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import fedspan
from fedspan.config import parse_config
from fedspan.errors import FedspanError
from fedspan.methods.registry import METHODS
from fedspan.runs.setup import prepare


def build_config(data: str, method: str, lr: float, rounds: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run, as a user would write it."""
    sources: dict[str, dict[str, Any]] = {
        "alpaca": {"train": str(args.alpaca), "prompt": "alpaca", "answer": "output", "invalid": "skip"},
        "gsm8k": {
            "train": str(args.gsm8k / "train.jsonl"),
            "test": str(args.gsm8k / "test.jsonl"),
            "prompt": "question",
        },
    }
    return {
        "task": "causal-lm",
        "seed": args.seed,
        "threads": 1,
        "model": {"name": str(args.model), "target_modules": "all-linear", "max_length": args.max_length},
        "data": {**sources[data], "max_examples": args.examples},
        "partition": {"partitioner": "quantity", "clients": 10, "validation": 0.1, "test": 0.1},
        "method": {"name": method, "r": 8, "lora_alpha": 16} | ({"tau": 2} if method == "fedloru" else {}),
        "federation": {"rounds": rounds},
        "training": {"lr": lr, "batch_size": args.batch},
        "evaluation": {"generate": True, "max_new_tokens": args.max_new_tokens},
    }


def train(data: str, method: str, lr: float, rounds: int, args: argparse.Namespace) -> dict[str, Any] | None:
    """A run's report; None if the loss was lost at this learning rate."""
    folder = args.out / f"{data}-{method}-lr{lr:g}-rounds{rounds}"
    lost = folder.with_suffix(".lost")
    if lost.exists():
        return None
    began = time.monotonic()
    try:
        fedspan.run(build_config(data, method, lr, rounds, args), folder, resume=True)
    except FedspanError as error:
        if error.field != "training.lr":
            raise
        lost.write_text(str(error))
        return None
    print(f"{folder.name} {time.monotonic() - began:.0f} s", flush=True)
    return json.loads((folder / "report.json").read_text())


def select_rate(data: str, method: str, args: argparse.Namespace) -> float:
    """The learning rate with the lowest validation loss after one round."""

    def loss(lr: float) -> float:
        report = train(data, method, lr, 1, args)
        return float("inf") if report is None else report["scores"]["validation"]["loss"]

    return args.rates[0] if len(args.rates) == 1 else min(args.rates, key=loss)


def measure_before(data: str, args: argparse.Namespace) -> dict[str, float]:
    """What the pretrained model gives on the held-out set."""
    prepared = prepare(parse_config(build_config(data, "fedit", args.rates[0], 1, args)))
    job = prepared.evaluator.build_job(prepared.federation.begin(), None)
    assert prepared.test is not None
    indices = np.arange(len(prepared.test))
    return prepared.task.compute_metrics(
        prepared.engine.predict(job, prepared.test, indices, 64), prepared.test, indices
    )


def format_table(data: str, args: argparse.Namespace) -> str:
    """Held-out loss, perplexity and token accuracy of each method, and what was transmitted."""
    start = measure_before(data, args)
    lines = [
        "| method | lr | held-out loss | perplexity | token accuracy % | exact match % "
        "| own tests: worst client's loss | MB in all |",
        "|---|---|---|---|---|---|---|---|",
        f"| *pretrained* | - | {start['loss']:.3f} | {start['perplexity']:.1f} | {100 * start['token_accuracy']:.1f} "
        "| - | - | - |",
    ]
    for method in args.methods:
        lr = select_rate(data, method, args)
        report = train(data, method, lr, args.rounds, args)
        assert report is not None
        test, worst = report["scores"]["test"], report["scores"]["clients"]["worst"]
        lines.append(
            f"| {method} | {lr:g} | {test['loss']:.3f} | {test['perplexity']:.1f} | {100 * test['token_accuracy']:.1f} "
            f"| {100 * test['exact_match']:.1f} | {worst['loss']:.3f} | {sum(report['bytes'].values()) / 1e6:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Both tables, with the command, the machine and the date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a causal language model")
    parser.add_argument("--alpaca", type=Path, required=True, help="Alpaca's json file")
    parser.add_argument("--gsm8k", type=Path, required=True, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--out", type=Path, default=Path("runs/language-models"))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-3, 1e-2, 3e-2])
    parser.add_argument("--examples", type=int, default=300, help="of the training set, and of the test set")
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", type=Path, help="write the tables to this file")
    args = parser.parse_args()
    rates = " ".join(f"{rate:g}" for rate in args.rates)
    page = (
        f"Command: `python benchmarks/language_models.py --model PATH/{args.model.name} "
        f"--alpaca PATH/{args.alpaca.name} --gsm8k PATH/{args.gsm8k.name} "
        f"--rates {rates} --examples {args.examples} --max-length {args.max_length} --batch {args.batch} "
        f"--rounds {args.rounds} --max-new-tokens {args.max_new_tokens} --seed {args.seed}`  \n"
        f"Date: {time.strftime('%Y-%m-%d')}. Machine: {platform.machine()}, {multiprocessing.cpu_count()} cores (one "
        f"thread), torch {torch.__version__}, transformers {transformers.__version__}.\n"
    )
    for data in ("alpaca", "gsm8k"):
        page += f"\n## {data}\n\n{format_table(data, args)}"
    print(page)
    if args.page:
        args.page.write_text(page)


if __name__ == "__main__":
    main()
