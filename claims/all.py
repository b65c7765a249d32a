"""Every claim, one after another: ``python claims/all.py --data PATH`` (a folder with the data sets).

Each is a process of its own, whose page goes to ``--work`` first and to ``--out`` when it is finished. Stopped, the
same command goes on: pages that are in ``--work`` are not made again, and runs that were begun go on. ``--one-seed``
plays the first ones on one seed, to see that they run; verdicts need more.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from report import FOLDER

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Job:
    """A page to make.

    Args:
        page: its name.
        words: the command's.
        data: folders that it reads, within the data's.
        quick: the words for one seed; None: not among those of ``--one-seed``.
    """

    page: str
    words: tuple[str, ...]
    data: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = None


PRESETS = (
    *("rolora-table1", "rolora-table12", "rolora-figure3", "fedloru-table1", "fedloru-table10", "fedloru-table4"),
    *("fedgalore-table3", "fedgalore-table4", "florg-table1", "florg-table2", "florg-table3", "florg-procrustes"),
)
JOBS = (
    Job("rolora_linear", ("rolora_linear.py",), quick=("--seeds", "1", "--draws", "2000")),
    Job("fedgalore_ajive", ("fedgalore_ajive.py",), quick=("--seeds", "0")),
    Job("fedgalore_trap", ("fedgalore_trap.py",), quick=("--seeds", "10", "--settings", "2", "--drawn", "1")),
    Job("fedloru_theory", ("fedloru_theory.py",), quick=("--seeds", "0")),
    Job("fedgalore_ajive_time", ("fedgalore_ajive_time.py",)),
    Job(
        "rolora_mnist",
        ("rolora_mnist.py", "--data", "{data}/mnist"),
        ("mnist",),
        ("--seeds", "0", "--rates", "0.3", "--rounds", "10"),
    ),
    Job("fedloru_stable_rank", ("fedloru_stable_rank.py", "--data", "{data}/fashion-mnist"), ("fashion-mnist",)),
    Job("membership_inference", ("membership_inference.py", "--data", "{data}/banking77"), ("banking77",)),
    *(Job(id, ("reproduced.py", id, "--data", "{data}", "--runs", "{work}/runs"), ("glue",)) for id in PRESETS),
)


def command(job: Job, data: Path | None, work: Path, quick: bool) -> list[str]:
    """What is called for a page."""
    words = [word.replace("{data}", str(data)).replace("{work}", str(work)) for word in job.words]
    more = (job.quick or ()) if quick else ()
    return [sys.executable, str(HERE / words[0]), *words[1:], *more, "--out", str(work)]


def missing(job: Job, data: Path | None) -> str | None:
    """What of a page's data is not there."""
    if job.data and data is None:
        return "no --data"
    absent = [name for name in job.data if data is not None and not (data / name).is_dir()]
    return f"no {', '.join(absent)} in {data}" if absent else None


def play(jobs: Sequence[Job], args: argparse.Namespace) -> list[str]:
    """Make what is not there yet; the names of those that failed."""
    failed: list[str] = []
    for job in jobs:
        if (args.work / f"{job.page}.json").is_file():
            print(f"{job.page}: done before", flush=True)
        elif why := missing(job, args.data):
            print(f"{job.page}: left out, {why}", flush=True)
            continue
        else:
            began = time.monotonic()
            done = subprocess.run(command(job, args.data, args.work, args.one_seed), check=False)
            said = f"ended with {done.returncode}" if done.returncode else "done"
            print(f"{job.page}: {said}, {time.monotonic() - began:.0f} s", flush=True)
            if done.returncode:
                failed.append(job.page)
                continue
        if args.out is not None:  # of those done before, too: it may have been stopped before they were copied
            for path in args.work.glob(f"{job.page}.*"):
                shutil.copy(path, args.out / path.name)
    return failed


def main() -> None:
    """Those that are wanted, then the index."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help=f"of {', '.join(job.page for job in JOBS)}; left out: all")
    parser.add_argument("--data", type=Path, help="folder with the data sets; what it lacks is left out")
    parser.add_argument("--work", type=Path, default=Path("runs/claims"), help="what is made so far")
    parser.add_argument("--out", type=Path, help=f"for finished pages; left out: {FOLDER}, or none with --one-seed")
    parser.add_argument("--one-seed", action="store_true", help="the first ones, on one seed")
    args = parser.parse_args()
    if unknown := set(args.pages) - {job.page for job in JOBS}:
        parser.error(f"no such claim: {', '.join(sorted(unknown))}")
    args.work.mkdir(parents=True, exist_ok=True)
    args.out = args.out or (None if args.one_seed else FOLDER)
    wanted = [job for job in JOBS if not args.pages or job.page in args.pages]
    failed = play([job for job in wanted if job.quick is not None or not args.one_seed], args)
    if args.out is not None:
        subprocess.run([sys.executable, str(HERE / "index.py"), "--folder", str(args.out)], check=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
