"""The SuperLink of a deployment: Flower's behind the door, and its supervision as a process.

Run as a module by ``supervise``, this is ``flower-superlink`` with the same arguments, and with the door (``door``) and
the bounds on connections (``connections``) in front.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event

from starlette.middleware import Middleware

from fedspan.errors import FedspanError
from fedspan.processes import end_with_parent, hold_folder
from fedspan.transports.flower.adapter import run_superlink
from fedspan.transports.flower.admissions import end_admissions
from fedspan.transports.flower.connections import BoundedProtocol, BoundedSocket
from fedspan.transports.flower.door import Door
from fedspan.transports.flower.exchange import ExchangeLimits
from fedspan.transports.flower.keys import CERTIFICATE, KEY
from fedspan.transports.flower.server import DATABASE, WORK, ServerLink

__all__ = ["main", "supervise"]


def main() -> None:
    """Run ``flower-superlink`` with the door in front, as long as ``supervise`` has the other end of standard input."""
    end_with_parent(partial(os.read, 0, 1))
    _allow_connections()
    _log_progress()
    folder, limits = Path(os.environ[_FOLDER]), ExchangeLimits(reconnect=float(os.environ[_RECONNECT]))
    offers, work = folder / "bases", folder / WORK
    door = Middleware(Door, exchange_limits=limits, offers=offers, work=work)  # pyright: ignore[reportArgumentType]
    with hold_folder(folder, _SUPERLINK, "--folder"):
        run_superlink([door], BoundedProtocol, BoundedSocket.take_over)  # pyright: ignore[reportArgumentType]


def _log_progress() -> None:
    """Write this package's lines to standard error, beside Flower's."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


_FILES = 65536
"""Number of files that the SuperLink may open, if the system allows it."""


def _allow_connections() -> None:
    """Raise the limit on open files: every node that waits for an order has two connections."""
    if sys.platform != "win32":
        import resource

        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = _FILES if most == resource.RLIM_INFINITY else min(_FILES, most)
        if limit != resource.RLIM_INFINITY and limit < files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))


_FOLDER = "FEDSPAN_SERVER"
"""Variable of the SuperLink's environment with the server's folder."""
_RECONNECT = "FEDSPAN_RECONNECT_SECONDS"
"""Variable of the SuperLink's environment with the seconds for which orders wait for nodes that are offline."""
_SUPERLINK = "superlink"
"""The role in a server's folder of the SuperLink's process; the one that supervises it has the role ``server``."""
_LOG = "superlink.log"
_LOG_BYTES = 1 << 24
"""Size of the log in bytes above which it becomes ``superlink.log.1``, in place of the one before."""
_CHECK = 60.0
"""Seconds between two checks for admissions that have ended."""
_STARTING = 60.0
"""Time limit for the start of a SuperLink, in seconds."""

log = logging.getLogger("fedspan.server")


def supervise(
    folder: Path,
    link: ServerLink,
    host: str,
    stop: Event,
    on_ready: Callable[[], None],
    reconnect: float = ExchangeLimits.reconnect,
) -> None:
    """Run a SuperLink until ``stop`` is set, and restart it when it ends by itself.

    Args:
        folder: The server's folder.
        link: Connection data of the SuperLink.
        host: Address to listen on.
        stop: Event that ends the function when set.
        on_ready: Called once, when the SuperLink is reachable for the first time.
        reconnect: Seconds for which an order waits for a node that is offline, unless the node was stopped.

    Raises:
        FedspanError: If the SuperLink does not start, another server works in the folder, or another process listens on
            its port.
    """
    with hold_folder(folder, "server", "--folder"):
        with hold_folder(folder, _SUPERLINK, "--folder"):  # the SuperLink that a killed server left has ended
            _require_free(host, int(link.address.rpartition(":")[2]))
        _supervise(folder, link, host, stop, on_ready, reconnect)


def _supervise(
    folder: Path, link: ServerLink, host: str, stop: Event, on_ready: Callable[[], None], reconnect: float
) -> None:
    command = [sys.executable, "-m", "fedspan.transports.flower.superlink", "--isolation", "process", "--host", host]
    command += ["--port", link.address.rpartition(":")[2], "--database", str(folder / DATABASE)]
    command += ["--superexec-auth-secret-file", str(link.secret), "--disable-runtime-dependency-installation"]
    if link.authority is None:
        command.append("--insecure")
    else:
        command += ["--ssl-ca-certfile", str(link.authority), "--ssl-certfile", str(folder / CERTIFICATE)]
        command += ["--ssl-keyfile", str(folder / KEY), "--enable-supernode-auth"]
    environment = {**os.environ, "FLWR_HOME": str(folder / "flower")}
    environment |= {_FOLDER: str(folder), _RECONNECT: str(reconnect)}
    first = True
    while not stop.is_set():
        with (
            os.fdopen(os.open(folder / _LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment, umask=0o077
            ) as process,
        ):
            try:
                _wait_for_start(link, process, folder)
                if first:
                    on_ready()
                    first = False
                else:
                    log.warning("the SuperLink had ended, or its certificate was renewed; it runs again")
                certificate, checked = _read_certificate(folder), time.monotonic()
                while process.poll() is None and not stop.is_set() and _read_certificate(folder) == certificate:
                    if link.authority is not None and time.monotonic() - checked >= _CHECK:
                        checked = time.monotonic()
                        _end_admissions(link)
                    _rotate_log(folder / _LOG)
                    stop.wait(0.5)
            finally:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()


def _read_certificate(folder: Path) -> int | None:
    """Return what changes when the server's certificate is renewed; None: there is none."""
    try:
        return (folder / CERTIFICATE).stat().st_mtime_ns
    except OSError:
        return None


def _rotate_log(path: Path) -> None:
    """Move the content of a log that is too large, since strangers' refused requests are entries, too.

    The SuperLink has the file open and appends to it, so it stays in place; lines that are written meanwhile are lost.
    """
    with suppress(FileNotFoundError):  # the operator removed it
        if path.stat().st_size > _LOG_BYTES:
            with suppress(OSError):  # on a full disk, the old lines are given up
                shutil.copy(path, path.with_name(f"{path.name}.1"))
            os.truncate(path, 0)


def _end_admissions(link: ServerLink) -> None:
    try:
        for node in end_admissions(link):
            log.warning("the admission of node %d has ended; its key is revoked", node)
    except FedspanError as error:  # the server continues, and the next check tries again
        log.warning("ended admissions could not be revoked: %s", error)


def _require_free(host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise FedspanError("--host", host, f"an address of this machine ({error.strerror})") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise FedspanError("--port", port, "a port that is not in use") from error
        raise FedspanError("--host", host, f"an address and a port to listen on ({error.strerror})") from error


def _wait_for_start(link: ServerLink, process: subprocess.Popen[bytes], folder: Path) -> None:
    host, _, port = link.address.rpartition(":")
    deadline = time.monotonic() + _STARTING
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with socket.create_connection((host, int(port)), 1) as plain:
                if link.authority is not None:
                    ssl.create_default_context(cafile=str(link.authority)).wrap_socket(
                        plain, server_hostname=host
                    ).close()
                return
        except ssl.SSLError as error:
            raise FedspanError("port", int(port), f"a port that is not in use ({error})") from error
        except OSError:
            time.sleep(0.2)
    lines = (folder / _LOG).read_text(errors="replace").strip().splitlines()
    raise FedspanError(
        "server", link.address, problem=f"the SuperLink did not start. See {folder / _LOG} ({lines[-1:]})"
    )


if __name__ == "__main__":
    sys.exit(main())
