"""A data owner's node that trains with the owner's own trainer, in this process."""

from __future__ import annotations

from typing import Any

from fedspan.config.node import NodeConfig
from fedspan.data.files import FROM_TRAINERS
from fedspan.deployment.node import NodeService
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope
from fedspan.runs.own_trainers import TrainerRuns, adopt_trainer

__all__ = ["TrainerNode"]


class TrainerNode:
    """A node service whose runs train with a user's trainer.

    Args:
        node: Config of the node, without data.
        trainer: The trainer (``own_trainers.adopt_trainer``).

    Raises:
        FedspanError: If the file names data, or the trainer is one that a federation cannot honour.
    """

    def __init__(self, node: NodeConfig, trainer: Any) -> None:
        if node.data:
            problem = "the examples of this node are its trainer's own; leave data out"
            raise FedspanError("data", sorted(node.data), problem=problem)
        adopted = adopt_trainer(trainer)
        inner = {id(value) for value in adopted.model.state_dict(keep_vars=True).values()}
        outside = [name for name, value in adopted.root.state_dict(keep_vars=True).items() if id(value) not in inner]
        if outside:
            problem = f"{outside[0]} is outside of the Transformers model, and the server cannot compare it among nodes"
            raise FedspanError("trainer", type(adopted.root).__name__, problem=problem)
        self._runs = TrainerRuns({node.id: adopted})
        own = node.model_copy(update={"data": {"train": FROM_TRAINERS}})
        self.service = NodeService(own, self._runs.prepare)

    def answer(self, envelope: Envelope) -> Envelope:
        """``NodeService.answer``."""
        return self.service.answer(envelope)

    def close(self) -> None:
        """Give the trainer's model back as it was."""
        self._runs.close()
