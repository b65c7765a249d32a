"""Processes that belong together: a child that ends with its parent, and the one process that works in a folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

from filelock import FileLock, SoftFileLock, Timeout

from fedspan.errors import FedspanError

_ENDING = 10.0
"""Seconds for which the process that holds a folder may take to end."""


def end_with_parent(wait: Callable[[], object]) -> None:
    """End this process at once, whatever it does, when the process that started it is gone, even if that was killed."""

    def watch() -> None:
        wait()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


@contextmanager
def hold_folder(folder: Path, role: str, field: str) -> Generator[None]:
    """Hold a folder as the only process with a role in it, within this context.

    Args:
        role: The role; its lock is ``ROLE.lock`` in the folder.

    Raises:
        FedspanError: If another process has the role, and does not end within some seconds.
    """
    lock = FileLock(folder / f"{role}.lock", mode=0o600, thread_local=False)
    owner = acquire_lock(lock, _ENDING)
    if owner is not None:
        pid = owner.removeprefix("process ")
        end = f": kill {pid}" if pid.isdecimal() else ""
        problem = f"{owner} works in {folder} as its {role}. Wait until it has ended, or stop it{end}"
        raise FedspanError(field, str(folder), problem=problem)
    try:
        yield
    finally:
        lock.release()


def acquire_lock(lock: FileLock, seconds: float = 0) -> str | None:
    """Acquire a lock, and write the name of this process into its file.

    Args:
        seconds: Time limit for another process to release it.

    Returns:
        The process that holds the lock, in words; None: this one does.
    """
    path = Path(lock.lock_file)
    owner = _read_owner(path)  # read first: older filelocks empty the file when they try
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        return owner
    # A soft lock (on disks without real ones) names its process itself. Elsewhere the name only helps the process
    # that is refused, so a failure to write it is ignored.
    if not isinstance(lock, SoftFileLock):
        with suppress(OSError):
            lines = (os.getpid(), socket.gethostname(), read_process_start(os.getpid()) or "")
            path.write_text("".join(f"{line}\n" for line in lines))
    return None


def _read_owner(path: Path) -> str:
    try:
        pid, host = path.read_text().split("\n")[:2]
        int(pid)
    except (OSError, ValueError):
        return "another process"
    return f"process {pid}" if host == socket.gethostname() else f"process {pid} on {host}"


def read_process_start(pid: int) -> int | None:
    """Read when a process started, in clock ticks after the start of the machine.

    Returns:
        The ticks; None if there is no such process, or no ``/proc``.

    Process ids are used again, so that only id and start together name one (``man 5 proc_pid_stat``, field 22).
    """
    try:
        # The name of the process in parentheses before the other fields may have spaces and parentheses.
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
