"""The client half of the app: it passes each message on, and sends the reply back."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

__all__ = ["Context", "create_client_app", "from_records", "to_records"]

_HEADER, _BODY, _STYPE = "fedspan.header", "fedspan.body", "fedspan.bytes"


def to_records(header: str, body: bytes) -> RecordDict:
    """Convert an envelope to the content of a Flower message; Flower sends an array in pieces, and equal ones once."""
    array = Array(dtype="uint8", shape=(len(body),), stype=_STYPE, data=body)
    return RecordDict({_HEADER: ConfigRecord({"header": header}), _BODY: ArrayRecord({"body": array})})


def from_records(records: RecordDict) -> tuple[str, bytes]:
    """Convert the content of a Flower message to the header and the body of an envelope.

    Raises:
        ValueError: If it is not the output of ``to_records``.
    """
    header, body = records.get(_HEADER), records.get(_BODY)
    if len(records) != 2 or not isinstance(header, ConfigRecord) or not isinstance(body, ArrayRecord):
        raise ValueError("a message with other records than fedspan's")
    text, array = header.get("header"), body.get("body")
    if not isinstance(text, str) or array is None or array.stype != _STYPE or not isinstance(array.data, bytes):
        raise ValueError("a message without a header or a body of fedspan's")
    return text, array.data


def create_client_app(answer: Callable[[Context, str, bytes], tuple[str, bytes]]) -> ClientApp:
    """Create the client app.

    Args:
        answer: Returns the header and the body of the reply to those of a message.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:  # pyright: ignore[reportUnusedFunction]
        reply = answer(context, *from_records(message.content))
        return Message(to_records(*reply), reply_to=message)

    return app
