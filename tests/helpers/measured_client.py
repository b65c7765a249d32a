"""Rounds of a client in a process of its own, which prints how much more memory each took at its peak, in bytes.

The first one, of a tiny model, is left out: it brings the code of libraries into memory.

Run with MALLOC_MMAP_THRESHOLD_ in the environment, so that glibc gives memory back as soon as it is free: what counts
is what is held at a time, and not what an allocator keeps for later.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

from fedspan.assembly.run import prepare
from fedspan.config import parse_config

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident(what: str) -> int:
    """Bytes of a field of /proc: VmRSS, or VmHWM, its peak since it was reset."""
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return 1024 * int(lines[what].split()[0])


def run_rounds(values: dict[str, Any]) -> int:
    """A round; the number of training examples of its first client."""
    prepared = prepare(parse_config(values))
    federation = prepared.federation
    federation.run_round(federation.begin())
    return len(next(iter(federation.clients.values())).train)


def main() -> None:
    """Print, for each run after the first, which loads the libraries, its memory at the peak and its examples."""
    first, *others = json.loads(sys.argv[1])
    run_rounds(first)
    for values in others:
        gc.collect()
        before = resident("VmRSS")
        _RESET.write_text("5")
        examples = run_rounds(values)
        print(resident("VmHWM") - before, examples)


if __name__ == "__main__":
    main()
