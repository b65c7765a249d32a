"""What a client's refusal tells its server."""

from __future__ import annotations

import errno
import socket
import ssl

import pytest

from fedspan.clients.refusals import describe_error
from fedspan.errors import FedspanError

FULL = OSError(errno.ENOSPC, "full", "/home/a patient's name")


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FULL, "no space left on device"),
        (
            caused(FedspanError("run folder", "/patients", "free"), OSError(errno.ENOSPC, "full")),
            "no space left on device",
        ),
        (caused(FedspanError("data.train", "/patients", "a file"), OSError(errno.ENOENT, "none")), "data.train"),
        (FedspanError("/patients", "secret", "nothing"), "an error"),
        (OSError("a patient's name"), "OSError"),
        (OSError("a patient's", "name"), "OSError"),
        (ssl.SSLCertVerificationError(1, "a patient's name"), "SSLCertVerificationError"),
        (socket.gaierror(-2, "a patient's name"), "gaierror"),
        (FedspanError("serial", 3, "more than 3"), "`serial`: 3 is not accepted. Expected more than 3."),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_server_is_told_what_but_nothing_of_data_or_paths(error: Exception, said: str) -> None:
    assert describe_error(error).removesuffix("; see the client's own log") == said
