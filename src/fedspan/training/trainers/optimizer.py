"""The optimizer that a user's trainer steps: an engine's whole step, as a ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedspan.core.values import OptimizerState
from fedspan.errors import FedspanError
from fedspan.training.jobs import Assignment
from fedspan.training.optimizers import build_optimizer_spec
from fedspan.training.services import TrainingServices
from fedspan.training.trainers.processes import Processes


class JobOptimizer(torch.optim.Optimizer):
    """Steps the tensors of a job as the loop engine does (``TrainingServices.apply``).

    So what a method adds to local training reaches any trainer that computes gradients and calls ``step``. Parameter
    groups show each group's learning rate and weight decay; they are not read, because a job fixes both.

    Args:
        live: The job's tensors, installed in the model; those that train are leaves.
        processes: The processes that train this job; rank 0 steps, the others take its values. None: only this one.
        averages: Whether gradients differ among the processes and a step averages them; else the trainer did (DDP).
    """

    def __init__(
        self,
        services: TrainingServices,
        assignment: Assignment,
        live: Mapping[str, Tensor],
        processes: Processes | None = None,
        averages: bool = False,
    ) -> None:
        self._services, self._assignment, self._live, self._processes = services, assignment, live, processes
        self._averages = averages
        self._local = services.make_optimizer(assignment, live)
        self._sums: dict[str, Tensor] = {}
        self._pending = 0
        self.steps = 0
        """Number of steps so far."""
        self.examples = 0
        """Number of examples that the steps so far were computed from, counting repeated uses."""
        self.decay = 1.0
        """Factor on the frozen base (``Job.decay_base``)."""
        spec = build_optimizer_spec(assignment, services.settings)
        groups: list[dict[str, Any]] = [
            {
                "params": [live[name] for name in group.names],
                "lr": spec.lr * group.lr_scale,
                "weight_decay": spec.weight_decay if group.weight_decay is None else group.weight_decay,
            }
            for group in assignment.job.trainable
            if group.names
        ]
        super().__init__(groups, {"lr": spec.lr, "weight_decay": spec.weight_decay})

    @property
    def is_probe(self) -> bool:
        """Whether the job only measures its gradient."""
        return self._assignment.job.steps == 0

    def count_examples(self, examples: int) -> None:
        """Count examples of this process whose gradients the next step uses."""
        if self._processes is not None:
            examples = round(self._processes.sum(examples, "examples of a step"))
        self._pending += examples

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step once from the gradients of the job's tensors.

        Raises:
            FedspanError: If no tensor has a gradient, or a closure is passed.
        """
        if closure is not None:
            raise FedspanError("trainer", "step(closure)", problem="the optimizer of a round takes no closure")
        job, names = self._assignment.job, self._local.names
        if all(self._live[name].grad is None for name in names):
            problem = (
                "no gradient reached the tensors that train in this round. The loss must depend on the model's "
                "target layers; reentrant gradient checkpointing needs model.enable_input_require_grads()"
            )
            raise FedspanError("trainer", None, problem=problem)
        gradients: dict[str, Tensor] = {}
        for name in names:
            tensor = self._live[name]
            gradients[name] = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            tensor.grad = None
        if self._averages and self._processes is not None:
            self._processes.average(gradients.values())
        if job.want_gradient or self.is_probe:
            share = self._pending if self.is_probe else 1
            for name, gradient in gradients.items():
                self._sums[name] = self._sums.get(name, torch.zeros_like(gradient)) + gradient * share
        self.steps, self.examples, self._pending = self.steps + 1, self.examples + self._pending, 0
        if self.is_probe:
            return
        if self._processes is None or self._processes.is_leader:
            with torch.enable_grad():  # penalties are differentiated
                self._services.apply(job, self._live, self._local, gradients, self.steps - 1)
            self.decay *= self._services.decay_frozen(self._assignment, self._live)
        if self._processes is not None:
            self._processes.share(self._live[name] for name in names)

    def compute_mean_gradient(self) -> dict[str, Tensor]:
        """Return the mean raw gradient: over examples for a probe, else over steps; empty unless the job wants it."""
        total = self.examples if self.is_probe else self.steps
        return {name: (value / max(1, total)).to("cpu") for name, value in self._sums.items()}

    def copy_moments(self) -> OptimizerState:
        """Return moments and step counts, copied to the CPU."""
        return self._local.copy_state()
