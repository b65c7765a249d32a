"""Every claim, one after another: ``python claims/all.py --data PATH --model PATH``.

``--data`` is a folder with the data sets, ``--model`` one with a small language model in Transformers' format,
``--image-model`` one with an image classifier; what lacks its own is left out, and said.

Each is a process of its own, whose page goes to ``--work`` first and to ``--out`` when it is finished. Stopped, the
same command continues: pages in ``--work`` are not made again, and runs that were started continue. ``--one-seed``
makes the short pages and those of headlines on one seed and at a smaller size, one on each core, to see that they can
be made; verdicts need more.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pages import name_page
from report import FOLDER

from fedspan.reproduction.cells import DATA, IMAGE_MODEL, MODEL, list_cells
from fedspan.reproduction.presets import list_presets

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Job:
    """A page to make.

    Args:
        page: Name of the page.
        words: Words of the command.
        data: Folders that it reads, relative to the folder of the data.
        model: Placeholder of the model that it needs; None: it needs none.
        quick: Words of the command for one seed; None: not run under ``--one-seed``.
    """

    page: str
    words: tuple[str, ...]
    data: tuple[str, ...] = ()
    model: str | None = None
    quick: tuple[str, ...] | None = None


FIRST = (
    *("rolora-table1", "fedloru-table1", "fedgalore-table3", "florg-table1", "florg-procrustes", "rolora-table12"),
    *("rolora-figure3", "fedloru-table10", "fedloru-table4", "fedgalore-table4", "florg-table2", "florg-table3"),
)
"""Presets that are run before the others."""
SHORT = (
    *("federation.rounds=2", "data.max_examples=600", "partition.min_examples=2"),  # Dirichlet draws have to succeed
    *("evaluation.every=2", "training.lr=0.01"),
)
"""Changes to the configs of presets under ``--one-seed``."""
QUICK = ("rolora-table1", "fedloru-table1", "fedgalore-table4", "florg-table1", "florg-procrustes")
"""Pages of headlines (``index.HEADLINES``), of each paper at least one, that ``--one-seed`` makes."""


def list_preset_jobs() -> tuple[Job, ...]:
    """A page for each preset of which something can be judged; their data and models are what their configs name."""
    jobs: list[Job] = []
    for preset in sorted(
        list_presets(), key=lambda one: (one.id not in FIRST, one.id in FIRST and FIRST.index(one.id))
    ):
        if all(claim.needs for claim in preset.claims):  # has a script of its own, or can't be measured here
            continue
        text = json.dumps([dict(cell.configs) for cell in list_cells(preset, "small")])
        data = tuple(sorted(set(re.findall(re.escape(DATA) + r"/([\w-]+)", text))))
        words = ("reproduced.py", preset.id, "--data", "{data}", "--runs", "{work}/runs")
        model = next((token for token in (MODEL, IMAGE_MODEL) if token in text), None)
        words = (*words, *(() if model is None else ("--model", model)))
        quick = ("--seeds", "0", "--set", *SHORT) if preset.id in QUICK else None
        jobs.append(Job(preset.id, words, data, model, quick))
        if preset.small.matched:
            jobs.append(Job(name_page(preset.id, "matched"), (*words, "--protocol", "matched"), data, model))
    return tuple(jobs)


JOBS = (
    Job("rolora_linear", ("rolora_linear.py",), quick=("--seeds", "1", "--draws", "2000")),
    Job("fedgalore_ajive", ("fedgalore_ajive.py",), quick=("--seeds", "0")),
    Job("fedgalore_trap", ("fedgalore_trap.py",), quick=("--seeds", "10", "--settings", "2", "--drawn", "1")),
    Job("fedloru_theory", ("fedloru_theory.py",), quick=("--seeds", "0")),
    Job("bytes", ("bytes.py",), quick=("--methods", "fedit", "rolora", "flora", "fedloru", "fedgalore", "florg")),
    Job("fedgalore_ajive_time", ("fedgalore_ajive_time.py",)),
    Job(
        "rolora_mnist",
        ("rolora_mnist.py", "--data", "{data}/mnist"),
        ("mnist",),
        quick=("--seeds", "0", "--rates", "0.3", "--rounds", "10"),
    ),
    Job("fedloru_stable_rank", ("fedloru_stable_rank.py", "--data", "{data}/fashion-mnist"), ("fashion-mnist",)),
    Job("membership_inference", ("membership_inference.py", "--data", "{data}/banking77"), ("banking77",)),
    Job(
        "hostile_clients",
        ("hostile_clients.py", "--data", "{data}/banking77", "--work", "{work}/runs"),
        ("banking77",),
        quick=("--seeds", "0", "--examples", "100", "--rounds", "2", "--steps", "2"),
    ),
    *list_preset_jobs(),
    Job(
        "reasons",  # after the pages that it examines, whose runs it copies
        ("reasons.py", "--data", "{data}", "--model", "{model}", "--runs", "{work}/runs"),
        ("alpaca", "banking77", "blitzer_sentiment", "commonsense", "fashion-mnist", "glue"),
        model=MODEL,
    ),
)


def build_command(job: Job, args: argparse.Namespace) -> list[str]:
    """What is called for a page."""
    places = {DATA: args.data, MODEL: args.model, IMAGE_MODEL: args.image_model, "{work}": args.work}
    words = list(job.words)
    for token, path in places.items():
        words = [word.replace(token, str(path)) for word in words]
    more = (job.quick or ()) if args.one_seed else ()
    return [sys.executable, str(HERE / words[0]), *words[1:], *more, "--out", str(args.work)]


def list_missing(job: Job, data: Path | None, models: Mapping[str, Path | None]) -> str | None:
    """What of a page's data or model is not there; ``models`` has the folder for each placeholder."""
    if job.model is not None and ((model := models[job.model]) is None or not model.is_dir()):
        return f"no --{job.model.strip('{}').replace('_', '-')}" if model is None else f"no folder {model}"
    if job.data and data is None:
        return "no --data"
    absent = [name for name in job.data if data is not None and not (data / name).is_dir()]
    return f"no {', '.join(absent)} in {data}" if absent else None


def run_job(job: Job, args: argparse.Namespace) -> bool:
    """Make a page unless it exists, and return whether nothing failed."""
    if (args.work / f"{job.page}.json").is_file():
        print(f"{job.page}: done before", flush=True)
    elif reason := list_missing(job, args.data, {MODEL: args.model, IMAGE_MODEL: args.image_model}):
        print(f"{job.page}: left out, {reason}", flush=True)
        return True
    else:
        began = time.monotonic()
        completed = subprocess.run(build_command(job, args), check=False)
        outcome = f"ended with {completed.returncode}" if completed.returncode else "done"
        print(f"{job.page}: {outcome}, {time.monotonic() - began:.0f} s", flush=True)
        if completed.returncode:
            return False
    if args.out is not None:  # of those done before, too: it may have been stopped before they were copied
        for path in args.work.glob(f"{job.page}.*"):
            shutil.copy(path, args.out / path.name)
    return True


def run_jobs(jobs: Sequence[Job], args: argparse.Namespace) -> list[str]:
    """Make the pages that are missing, and return the names of those that failed.

    On one seed, no page needs another and none compares times, so as many are made at a time as there are cores.
    """
    if not args.one_seed:
        return [job.page for job in jobs if not run_job(job, args)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # its threads wait for processes
        passed = list(pool.map(lambda job: run_job(job, args), jobs))
    return [job.page for job, good in zip(jobs, passed, strict=True) if not good]


def main() -> None:
    """Those that are wanted, then the index."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help=f"of {', '.join(job.page for job in JOBS)}; left out: all")
    parser.add_argument("--data", type=Path, help="folder with the data sets; what it lacks is left out")
    parser.add_argument("--model", type=Path, help="folder with a language model; without, what needs one is left out")
    parser.add_argument("--image-model", type=Path, help="folder with an image classifier, likewise")
    parser.add_argument("--work", type=Path, help="what is made so far; left out: runs/claims, or runs/claims-one-seed")
    parser.add_argument("--out", type=Path, help=f"for finished pages; left out: {FOLDER}, or none with --one-seed")
    parser.add_argument("--one-seed", action="store_true", help="short pages and headlines, on one seed")
    args = parser.parse_args()
    if unknown := set(args.pages) - {job.page for job in JOBS}:
        parser.error(f"no such claim: {', '.join(sorted(unknown))}")
    # not one folder for both: a page of one seed would be taken for the verdict
    args.work = args.work or Path("runs/claims-one-seed" if args.one_seed else "runs/claims")
    args.work.mkdir(parents=True, exist_ok=True)
    args.out = args.out or (None if args.one_seed else FOLDER)
    slow = [job.page for job in JOBS if job.page in args.pages and job.quick is None]
    if args.one_seed and slow:
        parser.error(f"--one-seed: not of {', '.join(slow)}")
    selected = [job for job in JOBS if not args.pages or job.page in args.pages]
    failed = run_jobs([job for job in selected if job.quick is not None or not args.one_seed], args)
    if args.out is not None:
        subprocess.run([sys.executable, str(HERE / "index.py"), "--folder", str(args.out)], check=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
