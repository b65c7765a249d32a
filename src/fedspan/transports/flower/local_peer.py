"""The user that owns the other end of a connection within this machine, from the system's table of sockets."""

from __future__ import annotations

import ipaddress
import struct
from pathlib import Path

__all__ = ["Address", "get_peer_uid"]

_TABLES = Path("/proc/net/tcp"), Path("/proc/net/tcp6")
_ESTABLISHED = "01"

Address = tuple[str, int]


def get_peer_uid(client: Address | None, server: Address | None) -> int | None:
    """Return the user id of the process that opened a connection from this machine to this machine.

    Args:
        client: Address and port of the end that opened the connection.
        server: Address and port of the other end.

    Returns:
        The user id, or None if the system has no such connection or does not say (systems other than Linux).
    """
    if client is None or server is None:
        return None
    try:
        endpoints = _parse(*client), _parse(*server)
    except ValueError:
        return None
    port = f":{client[1]:04X}"  # decoding every line of a server with thousands of connections would take too long
    for table in _TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if not fields[1].endswith(port) or fields[3] != _ESTABLISHED:
                continue
            if (_decode(fields[1]), _decode(fields[2])) == endpoints:
                return int(fields[7])
    return None


def _parse(host: str, port: int) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    address = ipaddress.ip_address(host)
    return getattr(address, "ipv4_mapped", None) or address, port


def _decode(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """Decode an address of the table: words of four bytes in the machine's own order, in hexadecimal digits."""
    host, _, port = text.partition(":")
    words = [int(host[start : start + 8], 16) for start in range(0, len(host), 8)]
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    return getattr(address, "ipv4_mapped", None) or address, int(port, 16)
