"""The same runs on the CPU and on the pretend device, in a process of its own: ``python -m helpers.pretend_runs FILE``.

Writes one JSON object: under ``tasks``, the tasks of the runs; under ``runs``,
for every run that was asked for, the largest relative distance between the two results, or the error on the device;
under ``refusals``, what the device answers to mistakes; under ``waits``, how often the host waits for it in the inner
loop; under ``passes``, what passes cost by client and step.
"""

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from fedspan.config import parse_config
from fedspan.training.stacking import wait_for

from . import pretend_device
from .device_runs import ENGINES, RUNS, WAITS, compare, inner_waits, save_models
from .pass_counts import PASSES, count_pass, fit_counts


def refusals() -> dict[str, str | None]:
    """The messages of operations that an accelerator refuses; None where the pretend device carries one out."""
    here, away = torch.ones(2, 2, device=pretend_device.DEVICE), torch.ones(2, 2)
    attempts: dict[str, Callable[[], object]] = {
        "sum": lambda: here + away,
        "product": lambda: away @ here,
        "indices on the device": lambda: away[here[0].long()],
        "numpy": lambda: here.numpy(),
    }
    messages: dict[str, str | None] = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            messages[name] = None
        except (RuntimeError, TypeError) as error:
            messages[name] = str(error)
    return messages


def compare_or_explain(settings: dict[str, Any], engine: str) -> float | str:
    """The distance between a run's results on the two devices, or the error."""
    try:
        return compare(settings, engine, str(pretend_device.DEVICE))
    except Exception:
        return traceback.format_exc()


def clock_waits() -> dict[str, int]:
    """How often a clock waits for the device, and for the CPU."""
    with pretend_device.count_synchronizations() as counter:
        wait_for(pretend_device.DEVICE)
        wait_for(torch.device("cpu"))
    return dict(counter)


def count_passes(settings: Callable[[], dict[str, Any]]) -> dict[str, dict[str, float]]:
    """What passes of a run cost by client and step."""
    sizes = [(clients, steps) for clients in (2, 8) for steps in (2, 4)]
    device, count = str(pretend_device.DEVICE), pretend_device.count_work
    return fit_counts({size: count_pass(settings(), device, *size, count) for size in sizes})


def main(target: Path, names: list[str]) -> None:
    """Run the named runs (``NAME/ENGINE``; without names all, with each engine) on both devices."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["FEDSPAN_CACHE"] = str(folder / "cache")
        save_models(folder)
        for name in names or [f"{run}/{engine}" for run in RUNS for engine in ENGINES]:
            run, _, engine = name.partition("/")
            start = time.perf_counter()
            results[name] = {
                "gap": compare_or_explain(RUNS[run](folder), engine),
                "seconds": time.perf_counter() - start,
            }
        waits = {
            name: inner_waits(RUNS[name](folder), str(pretend_device.DEVICE), pretend_device.count_synchronizations)
            for name in WAITS
        }
        waits["clock"] = clock_waits()
        passes = {name: count_passes(lambda name=name: RUNS[name](folder)) for name in PASSES}
        tasks = {parse_config(run(folder)).task for run in RUNS.values()}
    found = {"tasks": sorted(tasks), "runs": results, "refusals": refusals(), "waits": waits, "passes": passes}
    target.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
