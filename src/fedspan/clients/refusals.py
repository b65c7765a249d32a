"""The replies of clients that failed to carry out an order: the reason, without data or paths."""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl

from fedspan.clients.store import LostStateError
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope, Order, Reply
from fedspan.federation.secagg.messages import Phase, refuse_phase

_SERVER_FIELDS = frozenset(
    {"client memory", "export", "federation", "limits", "message", "method", "node", "reply", "run", "serial"}
    | {"task", "task_options", "training", "version"}
)
"""Sections of error fields whose values the server already knows."""
_FIELD = re.compile(r"[a-z_]+(\.[a-z_]+)*")


def refuse(order: Order, error: Exception) -> Reply:
    """Build the reply of a client that failed to carry out an order."""
    return Reply(
        order.task,
        order.round,
        order.attempt,
        order.to,
        failed=describe_error(error),
        lost=isinstance(error, LostStateError),
    )


def refuse_any(order: Order | Phase, error: Exception) -> Envelope:
    """Refuse an order of any kind (``refuse``)."""
    if isinstance(order, Order):
        return refuse(order, error).to_envelope()
    return refuse_phase(order, describe_error(error)).to_envelope()


def describe_error(error: Exception) -> str:
    """Describe an error on a client for the server.

    Errors may quote data and paths. Errors about values that the server sent are transmitted in full; of all
    other errors, only the field, the class, or the system's message (no space left on device).
    """
    is_own = isinstance(error, FedspanError)
    if is_own and error.field.partition(".")[0] in _SERVER_FIELDS:
        return str(error)
    system_error = _get_system_error(error.__cause__ if is_own else error)
    if is_own and _FIELD.fullmatch(error.field):
        description = error.field
    elif system_error is not None:
        description = system_error
    else:
        description = "an error" if is_own else type(error).__name__
    return f"{description}; see the client's own log"


def _get_system_error(error: BaseException | None) -> str | None:
    """Return the operating system's name of an error; None for others, such as errors of TLS and of name lookup."""
    if not isinstance(error, OSError) or isinstance(error, socket.gaierror | socket.herror | ssl.SSLError):
        return None
    number = error.errno
    return os.strerror(number).lower() if number is not None and number in errno.errorcode else None
