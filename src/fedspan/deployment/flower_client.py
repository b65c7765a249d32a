"""The client component of the Flower app that ``fedspan flower-app`` writes.

Flower starts a process for each message, so nothing that takes long to load is imported before it is needed. In a
deployment that process only passes bytes to the data owner's ``fedspan host``: the app's code and settings come from
whoever submits it, and the host's own limits hold whatever they do.
"""

from __future__ import annotations

from pathlib import Path

from fedspan.errors import FedspanError
from fedspan.transports.flower.client import Context, create_client_app
from fedspan.transports.flower.link import forward


def get_run_path(context: Context) -> Path:
    """Return the folder of a run: that of an earlier one which it resumes, or a new one that Flower's run id names."""
    values = context.run_config
    return Path(str(values["folder"])) / (str(values["resume"]) or str(context.run_id))


def _answer(context: Context, header: str, body: bytes) -> tuple[str, bytes]:
    """Return the reply of a data owner's host or, in Flower's simulation, of a client in this process."""
    socket = context.node_config.get("fedspan-host")
    if socket is not None:
        return forward(str(socket), header, body)
    if not context.run_config["simulated"]:
        expected = "--node-config 'fedspan-host=\"SOCKET\"' for the SuperNode, the socket of a running `fedspan host`"
        raise FedspanError("fedspan-host", None, expected)
    import torch

    from fedspan.deployment.flower_simulation import reply_as
    from fedspan.federation.protocol import Envelope

    reply = reply_as(str(get_run_path(context)), torch.get_num_threads(), Envelope(header, body))
    return reply.header, reply.body


app = create_client_app(_answer)
