"""What the clients of a watched round were sent and sent back."""

from __future__ import annotations

from torch import Tensor

from fedspan.core.tensors import join_tensor_name, split_extras
from fedspan.core.values import Message
from helpers.watched_rounds import MethodRun, Round


def slots(message: Message) -> set[str]:
    """Which slots of target layers are transmitted in a message."""
    return {name.rpartition("/")[2] for name in split_extras(message.tensors)[0]}


def sent(round: Round) -> list[tuple[str, str, Message]]:
    """(client, direction, message) of a round."""
    pairs = zip(round.result.transfers, round.messages(), strict=True)
    return [(transfer.client, transfer.direction, message) for transfer, message in pairs]


def factors(run: MethodRun, tensors: dict[str, Tensor], layer: str) -> tuple[Tensor, Tensor]:
    """A layer's B and A, in float64."""
    return tensors[join_tensor_name(layer, "B")].double(), tensors[join_tensor_name(layer, "A")].double()
