"""Samples what a SuperLink's threads do; Python imports this file at its start if the folder is on its path.

Every process of a deployment does, but only ``fedspan.transports.flower.superlink`` is sampled, and only while the file
``measure`` is in the folder that ``FEDSPAN_BENCHMARK_SAMPLES`` names. Then ``stacks.json`` there has the stacks of
Python frames, the innermost first, with the processor time that their threads took up to each sample.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

PERIOD = 0.01
"""Mean seconds between two samples; they are random, so that they keep no step with what is sampled."""
SWITCH = 1e-4
"""Seconds after which a thread hands over the interpreter's lock. Within the 5 ms of the default, nearly every thread
hands it over by itself, to read or write: such calls would seem to be all that there is."""
DEPTH = 40


def read_processor_seconds(thread: int | None) -> float:
    """Seconds that a thread ran; 0 if it has ended."""
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return 0.0


def list_frames(frame: FrameType | None) -> tuple[tuple[str, str, int], ...]:
    """File, function and line of a frame and of those around it."""
    frames = list[tuple[str, str, int]]()
    while frame is not None and len(frames) < DEPTH:
        frames.append((frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno or 0))
        frame = frame.f_back
    return tuple(frames)


def sample(folder: Path) -> None:
    """Wait for the mark, sample until it is gone, and write the stacks."""
    mark, own = folder / "measure", threading.get_ident()
    while not mark.exists():
        time.sleep(PERIOD)
    sys.setswitchinterval(SWITCH)
    spent = {thread.ident: read_processor_seconds(thread.native_id) for thread in threading.enumerate()}
    stacks = Counter[tuple[tuple[str, str, int], ...]]()
    while mark.exists():
        time.sleep(PERIOD * random.uniform(0.5, 1.5))
        frames = {thread: list_frames(frame) for thread, frame in sys._current_frames().items() if thread != own}
        for thread in threading.enumerate():
            if thread.ident in frames:
                now = read_processor_seconds(thread.native_id)
                stacks[frames[thread.ident]] += max(0.0, now - spent.get(thread.ident, 0.0))  # type: ignore[assignment]
                spent[thread.ident] = now
    partial = folder / "stacks.part"
    partial.write_text(json.dumps([[seconds, stack] for stack, seconds in stacks.items() if seconds]))
    partial.rename(folder / "stacks.json")


if "fedspan.transports.flower.superlink" in sys.orig_argv and (place := os.environ.get("FEDSPAN_BENCHMARK_SAMPLES")):
    threading.Thread(target=sample, args=(Path(place),), daemon=True).start()
