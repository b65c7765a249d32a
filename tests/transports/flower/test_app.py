"""The app that Flower looks up: neither side does anything when Flower starts it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra fedspan[deploy] is not installed")

from flwr.app import Context, Message, RecordDict

from fedspan.errors import FedspanError
from fedspan.transports.flower import app
from fedspan.transports.flower.adapter import set_identity

CONTEXT = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})
GRID: Any = None


def test_a_superexec_is_told_to_stop() -> None:
    with pytest.raises(FedspanError, match=r"only fedspan submit may serve\. Stop the SuperExec"):
        app.server(GRID, CONTEXT)


def test_the_client_app_handles_no_message() -> None:
    set_identity(1, 1, 1)
    message = Message(RecordDict(), dst_node_id=2, message_type="train")
    with pytest.raises(ValueError, match="No train function registered"):
        app.client(message, CONTEXT)
