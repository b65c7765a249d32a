"""The process that serves nodes and the operator, run as a module by ``supervise``, and its supervision."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from fedspan.errors import FedspanError
from fedspan.processes import end_with_parent, hold_folder
from fedspan.transports.http.admissions import end_admissions, read_admissions
from fedspan.transports.http.app import Server
from fedspan.transports.http.connections import CONNECTIONS, BoundedProtocol, BoundedSocket, ConnectionLimits, bind
from fedspan.transports.http.keys import CERTIFICATE, KEY, fingerprint_order_key, load_order_key
from fedspan.transports.http.requests import RequestLimits
from fedspan.transports.http.server import ServerLink, read_link, read_secret, write_link
from fedspan.transports.http.store import Store

if TYPE_CHECKING:
    import uvicorn


def main() -> None:
    """Serve nodes and the operator, as long as ``supervise`` has the other end of standard input."""
    end_with_parent(partial(os.read, 0, 1))
    folder, host = Path(sys.argv[1]), sys.argv[2]
    link, limits = read_link(folder), RequestLimits(reconnect=float(sys.argv[3]))
    CONNECTIONS.limits = ConnectionLimits(proxies=tuple(sys.argv[4:]))
    _allow_connections()
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    with hold_folder(folder, _SERVING, "--folder"), closing(Store(folder)) as store:
        server = create_server(link, store, limits)
        server.run([BoundedSocket.take_over(bind(host, int(link.address.rpartition(":")[2])))])


def create_server(
    link: ServerLink, store: Store, limits: RequestLimits, protocol: type[BoundedProtocol] = BoundedProtocol
) -> uvicorn.Server:
    """Return a server that is not started.

    Raises:
        FedspanError: If its secret is damaged, or its order key is missing.
    """
    import uvicorn

    has_keys, folder = link.authority is not None, link.folder
    read_keys = (lambda: {id: one.key for id, one in read_admissions(link).items()}) if has_keys else None
    identity = fingerprint_order_key(load_order_key(folder).public_key()) if has_keys else b""
    config = uvicorn.Config(
        Server(store, read_secret(link), read_keys, identity, limits, folder / "bases", protocol.bounds),
        proxy_headers=False,  # nodes are told apart by their keys, and connections by their real address
        loop="asyncio",
        http=protocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,  # longer than proxies keep theirs
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=1 << 14,
        backlog=4096,
        ssl_certfile=folder / CERTIFICATE if has_keys else None,
        ssl_keyfile=folder / KEY if has_keys else None,
    )
    return uvicorn.Server(config)


_FILES = 65536
"""Number of files that the serving process may open, if the system allows it."""


def _allow_connections() -> None:
    """Raise the limit on open files: every node that waits for an order has two connections."""
    if sys.platform != "win32":
        import resource

        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = _FILES if most == resource.RLIM_INFINITY else min(_FILES, most)
        if limit != resource.RLIM_INFINITY and limit < files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))


_SERVING = "serving"
"""The role in a server's folder of the process that serves; the one that supervises it has the role ``server``."""
_LOG = "server.log"
_LOG_BYTES = 1 << 24
"""Size of the log in bytes above which it becomes ``server.log.1``, in place of the one before."""
_CHECK = 60.0
"""Seconds between two checks for admissions that have ended."""
_STARTING = 60.0
"""Time limit for the start of a serving process, in seconds."""

log = logging.getLogger("fedspan.server")


def supervise(
    folder: Path,
    link: ServerLink,
    host: str,
    stop: Event,
    on_ready: Callable[[], None],
    reconnect: float = RequestLimits.reconnect,
    proxies: Sequence[str] = (),
) -> None:
    """Run a serving process until ``stop`` is set, and restart it when it ends by itself.

    Args:
        on_ready: Called once, when the serving process is reachable for the first time.
        reconnect: Seconds for which an order waits for a node that is offline, unless the node was stopped.
        proxies: Addresses of reverse proxies in front of the server.

    Raises:
        FedspanError: If an address is none, the server does not start, another server works in the folder, or another
            process listens on its port.
    """
    for address in proxies:
        try:
            ipaddress.ip_address(address)
        except ValueError:
            raise FedspanError("--proxy", address, "an IP address") from None
    with hold_folder(folder, "server", "--folder"):
        with hold_folder(folder, _SERVING, "--folder"):  # the serving process that a killed server left has ended
            _require_free(host, int(link.address.rpartition(":")[2]))
        write_link(link)  # a start that was refused may have written its own since the folder was prepared
        command = [sys.executable, "-m", "fedspan.transports.http.supervision", str(folder), host, str(reconnect)]
        _supervise(folder, link, [*command, *proxies], stop, on_ready)


def _supervise(
    folder: Path, link: ServerLink, command: Sequence[str], stop: Event, on_ready: Callable[[], None]
) -> None:
    first = True
    while not stop.is_set():
        with (
            os.fdopen(os.open(folder / _LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output,
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, umask=0o077) as process,
        ):
            try:
                _wait_for_start(link, process, folder)
                if first:
                    on_ready()
                    first = False
                else:
                    log.warning("the serving process had ended, or its certificate was renewed; it runs again")
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
    """Move the content of a log that is too large.

    The serving process has the file open, so it stays in place; lines that are written meanwhile are lost.
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
        bind(host, port).close()
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
    raise FedspanError("server", link.address, problem=f"the server did not start. See {folder / _LOG} ({lines[-1:]})")


if __name__ == "__main__":
    sys.exit(main())
