"""Who owns the other end of a connection within this machine."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from fedspan.transports.flower.local_peer import get_peer_uid
from helpers.another_user import as_another_user

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="this system has no /proc/net/tcp")


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_connection_of_this_process_is_of_this_user(host: str) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as client,
    ):
        accepted, address = server.accept()
        with accepted:
            ends = address[:2], server.getsockname()[:2]
            assert client.getsockname()[:2] == ends[0]
            assert get_peer_uid(*ends) == os.getuid()
            if ":" not in host:
                assert get_peer_uid((f"::ffff:{host}", address[1]), ends[1]) == os.getuid()
            assert get_peer_uid(ends[0], (host, 1)) is None


def test_a_connection_of_another_user_is_that_user_s() -> None:
    code = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); s.recv(1)"
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = subprocess.Popen([*as_another_user(), "-c", code, str(server.getsockname()[1])])
        try:
            server.settimeout(30)
            accepted, address = server.accept()
            with accepted:
                assert get_peer_uid(address, server.getsockname()) == 65534
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("ends", [(None, None), (("", 1), ("", 2)), (("127.0.0.1", 1), ("127.0.0.1", 2))])
def test_no_connection_has_no_owner(ends: tuple[tuple[str, int] | None, tuple[str, int] | None]) -> None:
    assert get_peer_uid(*ends) is None
