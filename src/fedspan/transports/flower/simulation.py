"""Flower's simulation engine: clients in Ray actors, the server in a thread of this process."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedspan.federation.protocol import Envelope
from fedspan.federation.transport import Transport
from fedspan.transports.flower.messages import draw_salt, from_records, to_records
from fedspan.transports.flower.signing import UnsignedSigner
from fedspan.transports.flower.transport import GridTransport, roll_call
from fedspan.transports.ray.adapter import own_token

__all__ = ["create_client_app", "simulate"]

R = TypeVar("R")

_START = 300.0
"""Time limit for the start of Ray and the first actors, in seconds."""

Answer = Callable[[Envelope], Envelope]
"""Processes an envelope as the client that it names; sent to other processes, so it must be a module-level function."""


def create_client_app(answer: Answer) -> ClientApp:
    """Create a client app that forwards envelopes to ``answer``."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:  # pyright: ignore[reportUnusedFunction]
        number = int(context.node_config["partition-id"])
        return Message(RecordDict({"fedspan.node": ConfigRecord({"partition": number})}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:  # pyright: ignore[reportUnusedFunction]
        reply = answer(from_records(message.content).envelope)
        return Message(to_records(UnsignedSigner().seal(reply, 0), draw_salt()), reply_to=message)

    return app


def simulate(
    ids: Sequence[str],
    answer: Answer,
    run_server: Callable[[Transport], R],
    *,
    actors: int,
    gpus: float = 0.0,
) -> R:
    """Run a server against simulated nodes.

    Args:
        ids: Ids of the clients; the node with number ``i`` is the client at position ``i``.
        answer: The client half of the run.
        run_server: The server half of the run, called with the transport to the clients.
        actors: Number of processes that train clients in parallel.
        gpus: Fraction of a GPU for each actor.

    Returns:
        The result of ``run_server``.

    Raises:
        Exception: If ``run_server`` raises it.
    """
    results: list[R] = []
    errors: list[BaseException] = []
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:  # pyright: ignore[reportUnusedFunction]
        try:
            nodes = roll_call(grid, len(ids), _START)
            results.append(run_server(GridTransport(grid, {id: nodes[number] for number, id in enumerate(ids)})))
        except BaseException as error:  # Flower would log it and raise a different error
            errors.append(error)

    backend: Mapping[str, Mapping[str, object]] = {
        # "local": without an address, Ray joins a cluster that runs on the machine, and refuses the number of CPUs.
        "init_args": {"address": "local", "num_cpus": actors, "log_to_driver": False},
        "client_resources": {"num_cpus": 1, "num_gpus": gpus},
    }
    logging.getLogger("flwr").setLevel(logging.ERROR)
    # Ray listens on all addresses of the machine and runs any code that it receives.
    with own_token(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Flower recommends ``flwr run``
        run_simulation(server, create_client_app(answer), len(ids), backend_config=backend)  # pyright: ignore
    if errors:
        raise errors[0]
    return results[0]
