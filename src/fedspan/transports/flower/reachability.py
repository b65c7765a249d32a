"""A node's view of a server before it joins: whether it is reached, with a certificate of the expected authority."""

from __future__ import annotations

import socket
import ssl

from fedspan.errors import FedspanError

__all__ = ["check_server"]

_SECONDS = 10.0
"""Time limit for connecting, and for the TLS handshake."""


def check_server(address: str, authority: str | None) -> str:
    """Connect to a server, complete the TLS handshake and close the connection; no request is sent.

    Args:
        address: Address of the server, ``host:port``.
        authority: File with the certificate of the server's authority; None: an insecure connection.

    Returns:
        A line about the connection.

    Raises:
        FedspanError: If the server is not reached, or its certificate is not one of the authority for this address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise FedspanError("server", address, "the address of a server as host:port")
    host = host.strip("[]")
    context = None if authority is None else _load_authority(authority)
    try:
        with socket.create_connection((host, int(port)), _SECONDS) as connection:
            if context is None:
                return f"{address} is reached, without encryption"
            with context.wrap_socket(connection, server_hostname=host) as encrypted:
                return f"{address} is reached, with a certificate of {authority} ({encrypted.version()})"
    except ssl.SSLCertVerificationError as error:
        problem = f"the server's certificate is not one of {authority} for this address ({error.verify_message})"
        raise FedspanError("server", address, problem=problem) from error
    except (OSError, ValueError, OverflowError) as error:
        problem = f"no connection to {address} ({getattr(error, 'strerror', None) or error})"
        raise FedspanError("server", address, problem=problem) from error


def _load_authority(path: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FedspanError("authority", path, f"the ca.crt of the server's operator ({reason})") from error
