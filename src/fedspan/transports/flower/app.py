"""The app that Flower requires for a run: names that Flower looks up. Other modules serve and answer runs."""

from __future__ import annotations

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedspan.errors import FedspanError

__all__ = ["client", "server"]

client = ClientApp()
"""Handles no messages: nodes started by ``fedspan join`` handle them without Flower's client app."""

server = ServerApp()


@server.main()
def refuse(grid: Grid, context: Context) -> None:
    """Refuse the start by a SuperExec.

    Raises:
        FedspanError: Always.
    """
    raise FedspanError(
        "ServerApp",
        "started by Flower",
        problem="Flower started this app, which only fedspan submit may serve. Stop the SuperExec",
    )
