"""The basis of every way of training a job: the model, hidden-state caches, optimizers, dropout and predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from fedspan.core.parametrization import Projected
from fedspan.core.tensors import generator
from fedspan.core.values import Job
from fedspan.models.adapted import AdaptedModel
from fedspan.tasks.task import Examples, Task
from fedspan.training.batching import evaluation_batches
from fedspan.training.jobs import Assignment, spec_of
from fedspan.training.optimizers import LocalOptimizer, clip, join_states
from fedspan.training.padding_free import Padding
from fedspan.training.prefix_caches import PrefixCaches
from fedspan.training.settings import PrefixSettings, TrainingSettings

__all__ = ["Trainer", "dropout_mask"]


class Trainer:
    """A model with everything that an engine needs to train a job on it.

    Args:
        adapted: The model.
        task: The learning problem.
        settings: Settings of local training.
        seed: Seed of every random draw (batches, dropout).
        prefix: Storage of the hidden states that leave the model's frozen prefix, or the caches of another engine on
            this model and task; None: they are computed every time.
        padding_free: Train without padding where the model can.
    """

    def __init__(
        self,
        adapted: AdaptedModel,
        task: Task,
        settings: TrainingSettings,
        seed: int,
        prefix: PrefixSettings | PrefixCaches | None = None,
        padding_free: bool = False,
    ) -> None:
        self.adapted = adapted
        self.task = task
        self.settings = settings
        self.seed = seed
        self.prefixes = prefix if isinstance(prefix, PrefixCaches) else PrefixCaches(adapted, task, prefix)
        refusals = {
            "it was not asked for": not padding_free,
            "dropout masks have the shape of padded batches": settings.dropout > 0,
            "packed batches have none": getattr(task, "packing", False),
        }
        self.padding = Padding(adapted, task, next((why for why, holds in refusals.items() if holds), None))

    def ready(self, examples: Examples, indices: np.ndarray) -> None:
        """``Engine.ready``."""
        self.padding.ensure(examples)
        self.prefixes.ensure(examples, indices)

    def make_optimizer(self, work: Assignment, live: Mapping[str, Tensor]) -> LocalOptimizer:
        """Make the optimizer of a job whose tensors are installed."""
        job = work.job
        return LocalOptimizer(
            spec_of(work, self.settings), job.trainable, live, join_states(work.kept, job.optimizer_state), job.masks
        )

    @torch.no_grad()
    def decay_frozen(self, work: Assignment, live: Mapping[str, Tensor]) -> float:
        """Apply the job's decoupled weight decay to what does not train: the frozen base and finished segments."""
        job, spec = work.job, spec_of(work, self.settings)
        if not job.decay_base or job.steps == 0:
            return 1.0
        factor = 1 - spec.lr * spec.weight_decay
        for layer in self.adapted.layers.values():
            layer.shrink *= factor
        for layer, parametrization in job.parametrization.items():
            if isinstance(parametrization, Projected) and (name := f"{layer}/{parametrization.finished[0]}") in live:
                live[name].mul_(factor)
        return factor

    def set_dropout(self, work: Assignment, step: int | str) -> None:
        """Draw the adapters' dropout of a forward pass."""
        rate, client, round, phase = self.settings.dropout, work.client, work.round, work.job.phase
        if not rate:
            return

        def dropout(x: Tensor, layer: str) -> Tensor:
            kept = dropout_mask(x.shape, rate, self.seed, round, client, phase, step, layer)
            return x * kept.to(x.device, x.dtype) / (1 - rate)

        self.adapted.set_dropout(dropout)

    def apply(
        self,
        job: Job,
        live: Mapping[str, Tensor],
        optimizer: LocalOptimizer,
        gradients: dict[str, Tensor],
        clipping: bool = True,
    ) -> None:
        """Take an optimizer step: penalties, masks, clipping and offsets, then the update."""
        names = optimizer.names
        if job.penalties:
            penalty = torch.stack([penalty.value(live) for penalty in job.penalties]).sum()
            added = torch.autograd.grad(penalty, [live[name] for name in names], allow_unused=True)
            for name, extra in zip(names, added, strict=True):
                gradients[name] = gradients[name] if extra is None else gradients[name] + extra
        for name, mask in job.masks.items():
            gradients[name] = gradients[name] * mask.to(gradients[name])
        if self.settings.max_grad_norm and clipping:
            clip(gradients, self.settings.max_grad_norm)
        for name in names:
            if name in job.gradient_offset:
                gradients[name] = gradients[name] + job.gradient_offset[name].to(gradients[name].device)
        optimizer.step(gradients)

    def predict(
        self, job: Job, examples: Examples, indices: np.ndarray, batch_size: int, *, thorough: bool = False
    ) -> Tensor:
        """Predict some examples: one row each, in the order of ``indices``, float32 on the CPU."""
        rows = self.rows(job, examples, evaluation_batches(indices, examples.lengths, batch_size), thorough=thorough)
        return torch.stack([rows[index] for index in indices.tolist()])

    @torch.no_grad()
    def rows(
        self, job: Job, examples: Examples, batches: Sequence[np.ndarray], *, thorough: bool = False
    ) -> dict[int, Tensor]:
        """Predict some batches and return the rows by example, float32 on the CPU."""
        adapted = self.adapted
        if batches and not thorough:  # generated answers have other lengths
            self.prefixes.ensure(examples, np.concatenate(batches))
        adapted.model.eval()
        adapted.install(job.parametrization, job.tensors, frozenset())
        rows: dict[int, Tensor] = {}
        for indices in batches:
            batch = self.task.batch(examples, indices.tolist(), adapted.device)
            with nullcontext() if thorough else self.prefixes.feed(examples, indices.tolist()):
                predictions = self.task.predict(adapted.model, batch, thorough=thorough).float().cpu()
            rows.update(zip(indices.tolist(), predictions, strict=True))
        return rows


def dropout_mask(shape: Sequence[int], rate: float, *key: int | str) -> Tensor:
    """Draw the dropout mask of a layer's input; true: the entry is kept.

    The key identifies the draw (seed, round, client, phase, micro-batch, layer), and the mask is drawn on the CPU, so
    every engine draws the same mask.
    """
    seed, *rest = key
    rng = generator(int(seed), "dropout", *rest)
    return torch.rand(tuple(shape), generator=rng) >= rate
