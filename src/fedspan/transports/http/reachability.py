"""A node's view of a server before it joins: whether it is reached, with a certificate of the expected authority."""

from __future__ import annotations

import ssl

import httpx

from fedspan.errors import FedspanError
from fedspan.transports.http.client import Link, open_client, read_short

_SECONDS = 10.0


def check_server(link: Link) -> str:
    """Request a server's health, as the node will send its requests, through the same proxy.

    Returns:
        A line about the connection.

    Raises:
        FedspanError: If the server is not reached, or its certificate is not one of the authority for this address.
    """
    host, _, port = link.address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise FedspanError("server", link.address, "the address of a server as host:port")
    try:
        with open_client(link) as client:
            with client.stream("GET", "health", timeout=_SECONDS) as response:
                answer = read_short(response)
            if answer != b"ok":
                raise FedspanError("server", link.address, problem=f"no fedspan server answers at {link.address}")
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        problem = explain_certificate(error, link) or f"no connection to {link.address} ({error})"
        raise FedspanError("server", link.address, problem=problem) from error
    how = (
        "without encryption"
        if link.authority is None
        else f"with a certificate of {link.tls_authority or link.authority}"
    )
    return f"{link.address} is reached, {how}"


def explain_certificate(error: BaseException, link: Link) -> str | None:
    """Explain an error by the server's certificate; None: it is another one."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    if cause.verify_code not in _FOREIGN:
        return f"the server's certificate is not valid for {link.address} ({cause.verify_message})"
    return (
        f"the certificate of {link.address} is not signed by the authority in {link.tls_authority or link.authority} "
        f"({cause.verify_message}). If a proxy of your network inspects TLS, ask for an exception for this address, or "
        "name its authority in tls_authority: messages stay sealed to the server and its nodes"
    )


_FOREIGN = 18, 19, 20, 21
"""OpenSSL's codes of a certificate whose authority is another one."""
