"""Bytes and accuracy of compressed transfer: FedIT and RoLoRA on Banking77 with each compressing wrapper.

    python benchmarks/compression.py --data PATH/banking77 --page docs/results/compression.md

Every variant trains the same clients from the same seeds. The runs of one seed take turns, so that a stopped script
has compared like with like. ``--work`` keeps the runs, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "float32": [],
    "bfloat16": [{"name": "low-precision"}],
    "float16": [{"name": "low-precision", "uplink": "float16", "downlink": "float16"}],
    "int8 up, bfloat16 down": [{"name": "low-precision", "uplink": "int8"}],
    "int8": [{"name": "low-precision", "uplink": "int8", "downlink": "int8"}],
    "int8, error feedback": [{"name": "low-precision", "uplink": "int8", "downlink": "int8", "error_feedback": True}],
    "FedPAQ, 8 bits up": [{"name": "fedpaq", "bits": 8}],
    "FedPAQ, 4 bits up": [{"name": "fedpaq", "bits": 4}],
}
METHODS = ("fedit", "rolora")


def config_of(method: str, variant: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """The config of a run, as a user would write it."""
    return {
        "seed": seed,
        "threads": 1,
        "model": {"name": args.model, "target_modules": ["query", "value"], "head_init": "random"},
        "data": {
            "train": str(args.data / "train.csv"),
            "test": str(args.data / "test.csv"),
            "label": "category",
            "first_labels": args.labels,
        },
        "partition": {"partitioner": "dirichlet", "alpha": 0.3, "clients": 10},
        "method": {"name": method, "r": 8, "lora_alpha": 16, "wrappers": VARIANTS[variant]},
        "federation": {"rounds": args.rounds, "early_stopping": None},
        "training": {"lr": 8e-3, "batch_size": 16},
    }


def run_variant(method: str, variant: str, seed: int, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Return the report of a run, which is done if it is not there yet."""
    from fedspan.config import parse_config
    from fedspan.runs.session import run

    folder = work / f"{method}-{variant.replace(' ', '-').replace(',', '')}-seed{seed}"
    if not (folder / "report.json").exists():
        began = time.monotonic()
        run(parse_config(config_of(method, variant, seed, args)), folder, resume=(folder / "config.yaml").exists())
        print(f"{folder.name}: {time.monotonic() - began:.0f} s", flush=True)
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def page(reports: dict[tuple[str, str, int], dict[str, Any]], args: argparse.Namespace) -> str:
    """The page, with the command, the machine and the date."""
    import torch

    seeds = " ".join(map(str, args.seeds))
    chosen = [variant for variant in VARIANTS if variant in args.variants]
    given = "" if len(chosen) == len(VARIANTS) else "".join(f' "{variant}"' for variant in chosen)
    lines = [
        "# What compressed transfer costs and saves",
        "",
        "This page reports how much accuracy compressed transfer costs and how many bytes it saves.",
        "",
        f"Command: `python benchmarks/compression.py --data PATH/banking77 --labels {args.labels} "
        f"--rounds {args.rounds} --seeds {seeds}{' --variants' + given if given else ''}`  ",
        f"Date: {time.strftime('%Y-%m-%d')}. Machine: {platform.machine()}, {args.cores} cores, "
        f"torch {torch.__version__}, 1 thread.",
        "",
        f"Banking77's first {args.labels} intents, ten clients, Dirichlet 0.3, {args.model.removeprefix('builtin:')}, "
        f"rank 8 on query and value, {args.rounds} rounds from a random head. Held-out accuracy of the round selected "
        "by validation: mean and standard deviation over seeds, and the mean difference from float32 with its standard "
        "error. Bytes are those of the bodies of all messages of all clients and rounds, with the headers of "
        "safetensors and without envelopes.",
        "",
        "| method | transfer | accuracy, % | against float32, points | MB down | MB up | smaller by |",
        "|---|---|---|---|---|---|---|",
    ]
    for method in METHODS:
        for variant in chosen:
            rows = [reports[method, variant, seed] for seed in args.seeds]
            plain = [reports[method, "float32", seed] for seed in args.seeds]
            accuracy, base = (
                np.array([100 * report["scores"]["test"]["accuracy"] for report in group]) for group in (rows, plain)
            )
            apart = accuracy - base
            error = apart.std(ddof=1) / len(apart) ** 0.5 if len(apart) > 1 else float("nan")
            down, up, total = (
                float(
                    np.mean([sum(report["bytes"].values()) if key is None else report["bytes"][key] for report in rows])
                )
                for key in ("down", "up", None)
            )
            plain_total = float(np.mean([sum(report["bytes"].values()) for report in plain]))
            difference = "" if variant == "float32" else f"{apart.mean():+.1f} ± {error:.1f}"
            lines.append(
                f"| {method} | {variant} | {accuracy.mean():.1f} ± {accuracy.std(ddof=1):.1f} | {difference} "
                f"| {down / 1e6:.2f} | {up / 1e6:.2f} | {plain_total / total:.2f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the variants and write the page."""
    import os

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with Banking77's train.csv and test.csv")
    parser.add_argument("--model", default="builtin:all-minilm-l6-v2")
    parser.add_argument("--labels", type=int, default=20, help="number of intents")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="float32 among them")
    parser.add_argument("--work", type=Path, help="folder for the runs; default: a temporary one")
    parser.add_argument("--page", type=Path, help="file for the page; default: the terminal")
    args = parser.parse_args()
    if "float32" not in args.variants:
        parser.error("--variants needs float32, with which the others are compared")
    args.cores = os.cpu_count()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        reports = {
            (method, variant, seed): run_variant(method, variant, seed, args, work)
            for seed in args.seeds
            for method in METHODS
            for variant in args.variants
        }
    text = page(reports, args)
    if args.page is None:
        print(text)
    else:
        args.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
