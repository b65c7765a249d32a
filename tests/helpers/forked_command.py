"""Runs ``fedspan`` commands in processes of their own, to be stopped from outside.

As a script: for a JSON list on a line of stdin (a file for the output, the round after which a run waits for a signal,
or null, and then the arguments), forks a process that runs the command and prints ``started`` and its id; for an empty
line after that, waits for its end and prints ``ended`` and how. Until it is asked, the process is not waited for, so
its id stays its own and may be sent signals. Forking spares every command the seconds that its imports take: here are
those that ``fedspan run`` delays until it needs them.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

import datasets  # noqa: F401
import peft  # noqa: F401
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertForSequenceClassification  # noqa: F401

import fedspan.experiments.run_comparison
import fedspan.experiments.run_search
import fedspan.runs.start
import fedspan.runs.train
import fedspan.runs.trained_models  # noqa: F401
from fedspan.cli import app, run_summary  # noqa: F401
from fedspan.progress.view import RunView


def wait_after(round: int) -> None:
    """Have a run wait after a round, so that a signal finds it there however busy the machine is."""
    finished = RunView.on_round_finish

    def waiting(self: RunView, row: Mapping[str, Any]) -> None:
        finished(self, row)
        if row["round"] == round:
            time.sleep(600)

    RunView.on_round_finish = waiting


def command(output: str, waits: int | None, arguments: list[str]) -> None:
    """Be the process of a command."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if waits is not None:
        wait_after(waits)
    sys.argv = ["fedspan", *arguments]
    app()


def main() -> None:
    """Serve as the script."""
    torch.set_num_threads(1)
    # Whoever starts the tests in the background of a script has Ctrl-C ignored, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A killed process loses nothing that it wrote, flushed or not; so spend the time on being killed elsewhere.
    os.fsync = lambda fd: None
    pid = 0
    for line in sys.stdin:
        if not line.strip():
            print("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
            continue
        output, waits, *arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code: object = 99
            try:
                command(output, waits, arguments)
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code if isinstance(code, int) else 98)
        print("started", pid, flush=True)


if __name__ == "__main__":
    main()
