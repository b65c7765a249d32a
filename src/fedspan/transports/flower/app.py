"""What Flower calls the app of a run of ours: names for it to find. Runs are served and answered elsewhere."""

from __future__ import annotations

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedspan.errors import FedspanError

__all__ = ["client", "server"]

client = ClientApp()
"""Answers nothing: nodes that are started by ``fedspan join`` answer by themselves."""

server = ServerApp()


@server.main()
def refuse(grid: Grid, context: Context) -> None:
    """Refuse to be started by a SuperExec.

    Raises:
        FedspanError: always.
    """
    raise FedspanError("ServerApp", "started by Flower", "a run that fedspan submit serves; stop the SuperExec")
