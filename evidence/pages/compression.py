"""Bytes and accuracy of compressed transfer: bytes of every method whose replies sum, accuracy of six on Banking77.

    python -m evidence.pages.compression --data PATH/banking77 --page docs/results/compression.md

The page has three sections; ``--sections`` writes some of them again and leaves the others. ``bytes`` counts messages
on shapes, as plans do. ``new-values`` trains FedIT and RoLoRA with each compressing wrapper, and ``other-replies`` the
methods whose replies hold something else than new values. Every variant trains the same clients from the same seeds.
The runs of one seed take turns, so that a stopped script has compared like with like. ``--work`` keeps the runs, and
what is there is not run again.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evidence.claims.report import describe_machine, format_table
from fedspan.assembly.run import prepare
from fedspan.config import parse_config
from fedspan.core.method import Traffic
from fedspan.core.values import LayerSpec, Spec
from fedspan.experiments.intervals import compare_pairs
from fedspan.methods.registry import METHODS as REGISTERED
from fedspan.planning.shape_inference import count_traffic
from fedspan.runs.start import run
from fedspan.wrappers.low_precision import Format, LowPrecision

Reports = dict[tuple[str, str, int], dict[str, Any]]
"""Reports of runs, by method, variant and seed."""
Counted = dict[str, dict[str, Traffic]]
"""Bytes by method and format."""

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
FORMATS: dict[str, Format] = {"float32": "float32", "16 bits": "bfloat16", "int8": "int8"}
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "new-values": {"fedit": {"name": "fedit"}, "rolora": {"name": "rolora"}},
    "other-replies": {
        "fed-sb": {"name": "fed-sb"},
        "fedask": {"name": "fedask"},
        "lora-a2": {"name": "lora-a2"},
        "florg, Gram sums": {"name": "florg", "gram_sums": True},
    },
}
"""Methods that a section trains, with their options."""
ROUNDED = ("float32", "int8")
"""Variants of ``other-replies``, which FedPAQ refuses; int8 is the coarsest format."""
TITLES = {
    "bytes": "Bytes by method and format",
    "new-values": "Accuracy of methods whose replies hold new values",
    "other-replies": "Accuracy of methods whose replies hold something else",
}
"""Headings of the sections, in their order."""
COUNTED: dict[str, dict[str, Any]] = {"slora": {"sparse_rounds": 1}, "florg": {"gram_sums": True}}
"""Options with which bytes are counted: SLoRA's second stage, and FLoRG's replies as a sum."""
RANK, CLIENTS, LATER = 8, 10, (3, 4)  # both halves of an alternation


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
        "partition": {"partitioner": "dirichlet", "alpha": 0.3, "clients": CLIENTS},
        "method": {**_get_options(method), "r": RANK, "lora_alpha": 16, "wrappers": VARIANTS[variant]},
        "federation": {"rounds": args.rounds, "early_stopping": None},
        "training": {"lr": 8e-3, "batch_size": 16},
    }


def run_variant(method: str, variant: str, seed: int, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Return the report of a run, which is done if it is not there yet."""
    folder = work / f"{method}-{variant}-seed{seed}".replace(" ", "-").replace(",", "")
    if not (folder / "report.json").exists():
        began = time.monotonic()
        run(parse_config(config_of(method, variant, seed, args)), folder, resume=(folder / "config.yaml").exists())
        print(f"{folder.name}: {time.monotonic() - began:.0f} s", flush=True)
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def _get_options(method: str) -> dict[str, Any]:
    return next(methods[method] for methods in METHODS.values() if method in methods)


def count_bytes(layers: Sequence[LayerSpec]) -> Counted:
    """Count the bytes of tensors of one client and round, by method whose replies sum and format of both directions."""
    counted: Counted = {}
    for key, cls in sorted(REGISTERED.items()):
        options = COUNTED.get(key, {})
        claims = cls(spec=Spec(layers=()), **options).declare_claims()
        if claims.reduction != "sum" or claims.sends == "nothing":
            continue
        name = "florg, Gram sums" if key == "florg" else key
        counted[name] = {}
        for title, format in FORMATS.items():
            down = up = 0.0
            for layer in layers:
                bare = cls(spec=Spec((layer,), clients=CLIENTS), r=RANK, **options)
                method = LowPrecision(inner=bare, uplink=format, downlink=format)
                rows = count_traffic(method, [RANK], [[RANK] * CLIENTS] * max(LATER))
                down += sum(rows[number - 1][RANK].down for number in LATER) / len(LATER)
                up += sum(rows[number - 1][RANK].up for number in LATER) / len(LATER)
            counted[name][title] = Traffic(round(down), round(up))
    return counted


def write_bytes(counted: Counted, args: argparse.Namespace) -> list[str]:
    """Write the section of bytes by method and format."""
    columns = ("method", *(f"{title}: down + up, kB" for title in FORMATS), "int8: smaller by")
    lines = [
        "Bytes of the tensors of one client and round where `low-precision` transmits both directions in a format: "
        f"query and value of all blocks of {args.model.removeprefix('builtin:')}, rank {RANK}, {CLIENTS} clients that "
        f"all participate, mean of rounds {LATER[0]} and {LATER[1]}, without the head. They are counted on shapes, as "
        "`fedspan plan` counts them. 16 bits are bfloat16 or float16. A change of the base stays in float32. Methods "
        "that stack replies are refused; FLoRG is one of them without `gram_sums`. Fed-SB's first reply, a gradient as "
        "large as the layers, is of round 1.",
        "",
        "![Dots: int8 sends about a quarter of float32's bytes with most methods; Fed-SB and Ravan send the least]"
        "(compression.svg)",
        "",
    ]
    rows: list[list[str]] = []
    for method, traffic in counted.items():
        cells = [f"{one.down / 1e3:.1f} + {one.up / 1e3:.1f}" for one in traffic.values()]
        plain, small = (traffic[title].down + traffic[title].up for title in ("float32", "int8"))
        rows.append([method, *cells, f"{plain / small:.2f}"])
    return [*lines, format_table(columns, rows)]


def write_accuracies(reports: Reports, args: argparse.Namespace) -> list[str]:
    """Write a section of accuracies and of the bytes of whole runs."""
    lines = [
        f"Banking77's first {args.labels} intents, ten clients, Dirichlet 0.3, {args.model.removeprefix('builtin:')}, "
        f"rank {RANK} on query and value, {args.rounds} rounds from a random head. Held-out accuracy of the round "
        "selected by validation: mean over seeds, and the mean difference from float32 with its 95 % interval. Bytes "
        "are those of the bodies of all messages of all clients and rounds, with the headers of safetensors, without "
        "envelopes.",
        "",
    ]
    head = ("method", "transfer", "accuracy, %", "against float32, points", "MB down", "MB up", "smaller by")
    table: list[list[str]] = []
    for method, variant in dict.fromkeys((method, variant) for method, variant, _ in reports):
        rows = [reports[method, variant, seed] for seed in args.seeds]
        plain = [reports[method, "float32", seed] for seed in args.seeds]
        accuracy, base = (
            np.array([100 * report["scores"]["test"]["accuracy"] for report in group]) for group in (rows, plain)
        )
        down, up = (float(np.mean([report["bytes"][key] for report in rows])) for key in ("down", "up"))
        total, plain_total = (
            float(np.mean([sum(report["bytes"].values()) for report in group])) for group in (rows, plain)
        )
        difference = "" if variant == "float32" else str(compare_pairs(accuracy.tolist(), base.tolist()))
        megabytes = (f"{b / 1e6:.2f}" for b in (down, up))
        table.append([method, variant, f"{accuracy.mean():.1f}", difference, *megabytes, f"{plain_total / total:.2f}"])
    return [*lines, format_table(head, table)]


def write_section(name: str, lines: Sequence[str], args: argparse.Namespace) -> str:
    """Write a section with its heading, command, date and machine."""
    options = f"--sections {name} --data PATH/banking77"
    if name in METHODS:
        options += f" --labels {args.labels} --rounds {args.rounds} --seeds {' '.join(map(str, args.seeds))}"
    head = [
        f"## {TITLES[name]}",
        "",
        f"Command: `python -m evidence.pages.compression {options}`  ",
        describe_machine(),
        "",
    ]
    return "\n".join([*head, *lines]) + "\n"


def join_page(sections: Mapping[str, str], before: str) -> str:
    """Join the page from new sections and those of the page before."""
    parts = {part.partition("\n")[0]: f"## {part.rstrip()}\n" for part in before.split("\n## ")[1:]}
    parts |= {TITLES[name]: text for name, text in sections.items()}
    head = (
        "# Bytes and accuracy of compressed transfer\n\n"
        "This page reports how many bytes compressed transfer saves, by method, and how its accuracy can be measured.\n"
    )
    return "\n".join([head, *parts.values()])


def main() -> None:
    """Run the variants and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with Banking77's train.csv and test.csv")
    parser.add_argument("--sections", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--model", default="builtin:all-minilm-l6-v2")
    parser.add_argument("--labels", type=int, default=20, help="number of intents")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="two or more")
    parser.add_argument("--work", type=Path, help="folder for the runs; default: a temporary one")
    parser.add_argument("--page", type=Path, help="file for the page; default: the terminal")
    args = parser.parse_args()
    if len(args.seeds) < 2:
        parser.error("--seeds needs two seeds, whose differences have an interval")
    sections: dict[str, str] = {}
    for name in args.sections:
        if name == "bytes":
            layers = prepare(parse_config(config_of("fedit", "float32", 0, args))).engine.adapted.spec.layers
            lines = write_bytes(count_bytes(layers), args)
        else:
            with tempfile.TemporaryDirectory() as temporary:
                reports = {
                    (method, variant, seed): run_variant(method, variant, seed, args, args.work or Path(temporary))
                    for seed in args.seeds
                    for method in METHODS[name]
                    for variant in (VARIANTS if name == "new-values" else ROUNDED)
                }
            lines = write_accuracies(reports, args)
        sections[name] = write_section(name, lines, args)
    before = args.page.read_text(encoding="utf-8") if args.page is not None and args.page.exists() else ""
    text = join_page(sections, before)
    if args.page is None:
        print(text, end="")
    else:
        args.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
