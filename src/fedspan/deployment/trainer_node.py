"""A data owner's node that trains with the owner's own trainer, in this process or in those of its DDP."""

from __future__ import annotations

import logging
from threading import Event
from typing import Any

import numpy as np

from fedspan.assembly.own_trainers import TrainerRuns, adopt_trainer
from fedspan.assembly.run import LocalRun
from fedspan.config import RunConfig
from fedspan.config.node import NodeConfig
from fedspan.core.base import BaseUpdate
from fedspan.data.files import FROM_TRAINERS
from fedspan.data.partition import Partition
from fedspan.deployment.node import NodeService
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope
from fedspan.models.sentence_encoders import read_pooling
from fedspan.tasks.trainer import TrainerExamples
from fedspan.training.jobs import Assignment
from fedspan.training.stages import Stages
from fedspan.training.trainers.local import LocalTrainer
from fedspan.training.trainers.processes import Processes, count_processes, read_job
from fedspan.training.trainers.trainer_engine import TrainerEngine
from fedspan.training.trainers.transformers import TransformersTrainer

log = logging.getLogger("fedspan.node")

_UNUSED = ("validation", "test", "split_seed", "device", "threads")
_UNUSED_LIMITS = (
    *("columns", "batch", "min_batch", "tokens", "image_size", "round_seconds"),
    *("head_statistics", "statistics_max_length", "statistics_examples", "class_examples"),
)
"""Fields of a node's file, and of its ``limits``, that do not bind a trainer: it reads its own examples, in its own
batches, on its own device and in this process."""


def adopt_node_trainer(node: NodeConfig, trainer: Any) -> LocalTrainer:
    """Return a user's trainer as a node uses it.

    Raises:
        FedspanError: If the file names data or accepts base models, or the trainer is one that a federation cannot
            honor.
    """
    if node.data:
        problem = "the examples of this node are its trainer's own; leave data out"
        raise FedspanError("data", sorted(node.data), problem=problem)
    if node.limits.accept_base:
        problem = "the base model of this node is its trainer's own; leave accept_base out"
        raise FedspanError("limits.accept_base", True, problem=problem)
    adopted = adopt_trainer(trainer)
    if (count := count_processes()) > 1 and not isinstance(adopted, TransformersTrainer):
        problem = (
            f"the script runs in {count} processes, and a plain loop trains in one: nothing averages its gradients. "
            "Start it without torchrun, or use a transformers.Trainer"
        )
        raise FedspanError("trainer", type(adopted).__name__, problem=problem)
    inner = {id(value) for value in adopted.model.state_dict(keep_vars=True).values()}
    outside = [name for name, value in adopted.root.state_dict(keep_vars=True).items() if id(value) not in inner]
    if outside:
        problem = f"{outside[0]} is outside of the Transformers model, and the server cannot compare it among nodes"
        raise FedspanError("trainer", type(adopted.root).__name__, problem=problem)
    if adopted.model is not adopted.root and (doubt := read_pooling(adopted.root.children()).doubt) is not None:
        problem = f"{doubt}, and the server of a federation pools hidden states by mean, cls, max or last"
        raise FedspanError("trainer", type(adopted.root).__name__, problem=problem)
    return adopted


class TrainerNode:
    """A node service whose runs train with a user's trainer.

    Args:
        processes: The processes in which it trains, of which this is rank 0; None: it trains in this one.
        stop: Event that ends the node, set when its processes can train no further order.
    """

    def __init__(
        self, node: NodeConfig, trainer: Any, processes: Processes | None = None, stop: Event | None = None
    ) -> None:
        self._processes, self._stop = processes, stop or Event()
        self._trainer = adopt_node_trainer(node, trainer)
        unused = [name for name in _UNUSED if name in node.model_fields_set]
        unused += [f"limits.{name}" for name in _UNUSED_LIMITS if name in node.limits.model_fields_set]
        if unused:
            log.warning("these fields of the node's file do not bind the trainer: %s", ", ".join(unused))
        self._runs = TrainerRuns({node.id: self._trainer}, processes)
        node_config = node.model_copy(update={"data": {"train": FROM_TRAINERS}})
        self.service = NodeService(node_config, self._load)

    def _load(
        self,
        config: RunConfig,
        existing_partition: Partition | None = None,
        key: bytes | None = None,
        stages: Stages | None = None,
    ) -> LocalRun:
        """Build what trains a run (``joined_run.Load``)."""
        if not config.task_definition.has_image_inputs and not hasattr(self._trainer.processor, "get_vocab"):
            problem = (
                "it has no tokenizer, whose vocabulary the server compares with its own. Pass processing_class= to the "
                "Trainer, or processor= to the TorchTrainer"
            )
            raise FedspanError("trainer", type(self._trainer.root).__name__, problem=problem)
        if config.training.checkpoint_steps is not None or config.training.checkpoint_minutes is not None:
            log.warning(
                "training.checkpoint_steps and checkpoint_minutes do not bind the trainer: if this node is killed "
                "within a round, the round starts over"
            )
        return self._runs.load(config, existing_partition, key, stages)

    def answer(self, envelope: Envelope) -> Envelope:
        try:
            return self.service.answer(envelope)
        finally:
            if self._processes is not None and (self._processes.failure is not None or self._processes.is_busy):
                self._stop.set()

    def close(self) -> None:
        """Give the trainer's model back as it was, and end the trainer's other processes."""
        self._runs.close()
        if self._processes is None:
            return
        if self._processes.failure is not None:
            problem = f"{self._processes.failure}; all processes of this client end. Start the script again"
            raise FedspanError("trainer", None, problem=problem)
        self._processes.close()


def follow(node: NodeConfig, trainer: LocalTrainer, processes: Processes) -> None:
    """Train, in a process other than rank 0, what rank 0 trains, until rank 0 ends.

    Raises:
        FedspanError: If this process or rank 0 fails.
    """
    runs, base = TrainerRuns({node.id: trainer}, processes), BaseUpdate()
    engine: TrainerEngine | None = None
    try:
        while True:
            announced = processes.receive()
            header = announced[0]
            if header["task"] == "end":
                return
            if header["task"] == "prepare":
                engine = _prepare(runs, header["config"])
                continue
            if engine is None:
                raise FedspanError("trainer", None, problem="this process could not build the run; see its log")
            job, base = read_job(announced, base)
            engine.adapted.set_base(base)
            nothing = np.empty(0, np.int64)
            if header["task"] == "evaluate":
                engine.evaluate(node.id, job, TrainerExamples(0), nothing, 1)
            else:
                engine.train(Assignment(node.id, header["round"], job, nothing, header["lr"]))
    finally:
        runs.close()


def _prepare(runs: TrainerRuns, config: str) -> TrainerEngine | None:
    """Build rank 0's run in this process; None: an error was logged, and rank 0 refuses the run."""
    try:
        engine = runs.load_announced(config).engine
    except FedspanError:
        log.exception("the run cannot be trained in this process")
        return None
    assert isinstance(engine, TrainerEngine)
    return engine
