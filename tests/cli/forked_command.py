"""Runs ``fedspan`` commands in processes of their own, to be stopped from outside.

As a script: reads a JSON list from each line of stdin, a file for the output and then the arguments; forks a process
that runs the command, prints its id, and once it is gone how it ended. Forking spares every command the seconds that
importing torch takes.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from fedspan import api  # noqa: F401  so that it is there when a command asks for it
from fedspan.cli import app, closing, live  # noqa: F401


def command(output: str, arguments: list[str]) -> None:
    """Be the process of a command."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = ["fedspan", *arguments]
    app()


def main() -> None:
    """Serve as the script."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        output, *arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code: object = 99
            try:
                command(output, arguments)
            except SystemExit as end:
                code = end.code or 0
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code if isinstance(code, int) else 98)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
