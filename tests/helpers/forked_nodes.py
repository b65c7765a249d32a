"""Nodes of a deployment, forked from the tests' process: each would take seconds of imports to start."""

import multiprocessing
import os
import signal
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from fedspan.deployment.console import log_to_console
from fedspan.deployment.deploy import join


@contextmanager
def fork_nodes(files: Sequence[Path], log: Path) -> Generator[None]:
    """Run what ``fedspan join`` calls for each node's file, in processes that end with this context.

    The process in which a node trains is forked, too, and not spawned.

    Args:
        files: The nodes' files.
        log: File for the nodes' output.
    """
    group = multiprocessing.get_context("fork").Process(target=_run_group, args=[files, log, os.getpid()])
    group.start()
    try:
        yield
    finally:
        if group.pid is not None and group.is_alive():
            os.killpg(group.pid, signal.SIGKILL)
        group.join()


def _run_group(files: Sequence[Path], log: Path, tests: int) -> None:
    """Be the leader of the nodes' process group, which ends them if the tests are killed."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork
    for path in files:
        fork.Process(target=_run_node, args=[path]).start()
    while os.getppid() == tests:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def _run_node(path: Path) -> None:
    log_to_console()
    join(path)
