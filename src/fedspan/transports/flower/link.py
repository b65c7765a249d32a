"""Envelopes on the socket between Flower's client app and a data owner's host: two lengths, header, body.

Flower starts a new process for each message, so this module imports nothing that takes long to load.
"""

from __future__ import annotations

import socket
import struct
from io import BufferedIOBase

from fedspan.errors import FedspanError

LONGEST_HEADER = 1 << 22
"""Maximum size of a header in bytes: the longest that a server may send, in UTF-8."""

_LENGTHS = struct.Struct(">IQ")


def write_envelope(file: BufferedIOBase, header: str, body: bytes) -> None:
    """Write an envelope."""
    encoded = header.encode(errors="surrogatepass")
    file.write(_LENGTHS.pack(len(encoded), len(body)) + encoded)
    if body:  # else the reader may be gone by now
        file.write(body)
    file.flush()


def read_envelope(file: BufferedIOBase, longest_body: int) -> tuple[str, bytes]:
    """Read an envelope, whose lengths are checked before it is read.

    Args:
        longest_body: Maximum size of the body in bytes.

    Raises:
        ValueError: If it is too long, cut off, or its header is not text.
    """
    header, body = _LENGTHS.unpack(_read(file, _LENGTHS.size))
    if header > LONGEST_HEADER or body > longest_body:
        raise ValueError(f"an envelope of {header} and {body} bytes, of {LONGEST_HEADER} and {longest_body} at most")
    return _read(file, header).decode(errors="surrogatepass"), _read(file, body)


def _read(file: BufferedIOBase, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise ValueError(f"an envelope that ends after {len(data)} of {size} bytes")
    return data


def forward(path: str, header: str, body: bytes) -> tuple[str, bytes]:
    """Pass an envelope to the host behind a socket, and return the header and the body of its reply.

    Raises:
        FedspanError: If no host listens there, or it sends no reply.
    """
    with socket.socket(socket.AF_UNIX) as line:
        try:
            line.connect(path)
            with line.makefile("rwb") as file:
                write_envelope(file, header, body)
                return read_envelope(file, 1 << 40)  # the host is the owner's own
        except (OSError, ValueError) as error:
            expected = "the socket of a running `fedspan host`, which serves the user of the SuperNode (--user)"
            raise FedspanError("fedspan-host", path, expected, problem=f"the host does not reply ({error})") from error
