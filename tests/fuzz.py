"""Feed mutated messages, requests and configs to the functions that read what other machines send.

    python tests/fuzz.py                                  # 100,000 inputs for each target, seed 0
    python tests/fuzz.py --inputs 5000 --seed 3 --target codec
    python tests/fuzz.py --target codec --number 4711     # one input again, with its traceback
    python tests/fuzz.py --coverage 60                    # each target 60 s, guided by coverage (atheris)

Valid inputs are mutated with regard to their form (fields of headers, the structure in a payload) or
byte by byte. A finding is any exception but the documented one, an input that takes more than four seconds, or memory
that grows beyond a limit. It is printed with target, seed and number, and the exit code is 1. Input number n of a seed
is always the same. ``tests/helpers/fuzz_targets.py`` has the targets. Coverage needs fedspan[fuzz].
"""

import argparse
import os
import platform
import re
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

NAMES = ("codec", "orders", "answers", "messages", "requests", "configs")
SECONDS = 4.0
"""Processor time that an input may take."""
MEMORY = 512 * 2**20
"""Bytes by which the process may grow."""
SHOWN = 5
"""Findings of a target after which it ends."""


def fuzz(name: str, seed: int, numbers: Iterable[int]) -> tuple[int, int]:
    """Feed a target with inputs of these numbers; returns the number of inputs, and of findings, which are printed."""
    from helpers.fuzz_targets import TARGETS

    target = TARGETS[name]()
    for data in target.seeds:  # warm: imports and caches
        target.read(data)
    before, count, findings = _read_peak(), 0, 0
    for number in numbers:
        data = target.input(seed, number)
        began, reason = time.process_time(), ""
        try:
            target.read(data)
        except Exception:
            reason = traceback.format_exc()
        took, count = time.process_time() - began, count + 1
        if took > SECONDS:
            reason += f"{took:.1f} s of processor time\n"
        if _read_peak() - before > MEMORY:
            reason += f"{(_read_peak() - before) / 2**20:.0f} MiB more memory\n"
            before = _read_peak()
        if reason:
            findings += 1
            print(f"FINDING: --target {name} --seed {seed} --number {number} ({len(data)} bytes)\n{reason}", flush=True)
            if findings >= SHOWN:
                break
    return count, findings


def _read_peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def fuzz_with_guidance(name: str, seconds: int, seed: int) -> None:
    """Fuzz a target with atheris until the time is up, or to the first finding. Ends the process."""
    import atheris

    with atheris.instrument_imports(include=["fedspan"]):
        from helpers.fuzz_targets import TARGETS

        target = TARGETS[name]()
        for data in target.seeds:  # imports the rest
            target.read(data)
    import random
    import tempfile

    def mutate(data: bytes, limit: int, number: int) -> bytes:
        draws = random.Random(number)
        made = target.mutate(data, draws) if draws.random() < 0.7 else atheris.Mutate(data, limit)
        return made[:limit]

    with tempfile.TemporaryDirectory() as corpus:
        for index, data in enumerate(target.seeds):
            Path(corpus, str(index)).write_bytes(data)
        options = [
            f"-max_total_time={seconds}",
            f"-seed={seed + 1}",
            "-max_len=65536",
            "-timeout=10",
            "-rss_limit_mb=4096",
        ]
        atheris.Setup(["fuzz", *options, corpus], target.read, custom_mutator=mutate)
        atheris.Fuzz()


def main() -> None:
    """Serve as the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--target", choices=NAMES, help="only this target")
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, help="only this input")
    parser.add_argument("--coverage", type=int, metavar="SECONDS", help="fuzz by coverage instead, so long")
    parser.add_argument("--guided", action="store_true", help=argparse.SUPPRESS)  # in the process of one target
    arguments = parser.parse_args()
    names = [arguments.target] if arguments.target else NAMES
    if arguments.guided:
        fuzz_with_guidance(arguments.target, arguments.coverage, arguments.seed)
    print(f"Python {platform.python_version()} on {platform.machine()}, seed {arguments.seed}", flush=True)
    failed = 0
    for name in names:
        began = time.monotonic()
        if arguments.coverage:
            command = [sys.executable, __file__, "--guided", "--target", name, "--seed", str(arguments.seed)]
            completed = subprocess.run(
                [*command, "--coverage", str(arguments.coverage)], capture_output=True, text=True
            )
            failed += completed.returncode != 0
            # libFuzzer's states; the last one is the end's
            states = re.findall(r"^#\d+\s.*", completed.stderr, re.MULTILINE)
            print(f"{name}: {states[-1] if states else ''}, {time.monotonic() - began:.0f} s", flush=True)
            if completed.returncode:
                print(completed.stdout[-4000:], completed.stderr[-8000:], flush=True)
            continue
        numbers = range(arguments.inputs) if arguments.number is None else (arguments.number,)
        started = time.process_time()
        count, findings = fuzz(name, arguments.seed, numbers)
        failed += findings
        taken = f"{time.monotonic() - began:.0f} s ({time.process_time() - started:.0f} s of processor time)"
        print(f"{name}: {count} inputs, {findings} findings, {taken}", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
