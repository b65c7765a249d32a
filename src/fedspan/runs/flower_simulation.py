"""Runs on Flower's simulation engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from fedspan.federation.orders import Transport
from fedspan.runs.folder import RunFolder
from fedspan.runs.remote import connect, nodes_folder, reply_as
from fedspan.runs.session import RunReport
from fedspan.runs.setup import Prepared

__all__ = ["flower_simulation"]


def flower_simulation(place: RunFolder, prepared: Prepared, played: Callable[[Prepared], RunReport]) -> RunReport:
    """Run a federation with its clients in the processes of Flower's simulation engine (``runs.session.Host``).

    Raises:
        FedspanError: If nodes do not start; also any error that ``played`` raises.
    """
    from fedspan.transports.flower.simulation import simulate

    threads = torch.get_num_threads()
    actors = min(prepared.config.engine.workers or threads, len(prepared.federation.clients))
    cuda = prepared.engine.adapted.device.type == "cuda"
    answering = partial(reply_as, str(place.path.resolve()), max(1, threads // actors))

    def serving(transport: Transport) -> RunReport:
        rules = prepared.config.federation.reply_rules()
        return played(connect(prepared, transport, rules, nodes=nodes_folder(place.path)))

    return simulate(
        list(prepared.federation.clients), answering, serving, actors=actors, gpus=1 / actors if cuda else 0.0
    )
