"""The loop engine: one client after another, obvious code, the oracle for the others.

Shapes: O output features, I input features, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from fedspan.core.parametrization import Projected
from fedspan.core.tensors import generator
from fedspan.core.values import Job, OptimizerState, Trained
from fedspan.engines.batching import evaluation_batches, job_batches
from fedspan.engines.optimizers import LocalOptimizer, clip, joined_state
from fedspan.engines.padding import Padding
from fedspan.engines.prefix_caches import PrefixCaches
from fedspan.engines.private_training import PrivateTraining
from fedspan.engines.refresh import refresh_projectors
from fedspan.engines.settings import PrefixSettings, TrainingSettings
from fedspan.engines.work import Assignment, not_finite, spec_of
from fedspan.models.adapted import AdaptedModel
from fedspan.tasks.task import Examples, Task

__all__ = ["LoopEngine", "dropout_mask"]


class LoopEngine:
    """Trains and evaluates jobs on one model, one at a time.

    Args:
        adapted: the model.
        task: the learning problem.
        settings: local training.
        seed: of every draw.
        prefix: where hidden states that leave the model's frozen prefix are kept, or the caches of another engine on
            this model and task; None: it is computed every time.
        padding_free: train without padding where the model can.
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
        private = settings.privacy is not None and settings.privacy.mechanism == "dp-sgd"
        self.private = PrivateTraining(self, settings.privacy) if private and settings.privacy is not None else None

    def train(
        self,
        job: Job,
        examples: Examples,
        indices: np.ndarray,
        *,
        client: str,
        round: int,
        lr: float,
        kept: OptimizerState | None = None,
        noise: float = 0.0,
    ) -> Trained:
        """Run one job on one client's examples.

        Args:
            job: what to train.
            examples: the data set that the client's indices point into.
            indices: the client's training examples, (examples,).
            client: id, for draws and errors.
            round: number, for draws and errors.
            lr: learning rate of the round.
            kept: moments of the client's earlier rounds, if the run keeps them.
            noise: of DP-SGD, over the clipping norm.

        Raises:
            FedspanError: if the loss stops being finite.
        """
        settings, adapted = self.settings, self.adapted
        work = Assignment(client, round, job, indices, lr, kept, noise)
        if self.private is not None:
            return self.private.train(work, examples)
        self.ready(examples, indices)
        adapted.train_mode(job.buffers)
        live = adapted.install(job.parametrization, job.tensors, frozenset(job.trainable_names))
        optimizer = self.optimizer_of(work, live)
        gradients_sum: dict[str, Tensor] = {}
        probing = job.steps == 0
        loss_sum = examples_seen = 0.0
        steps = micro = 0
        decay = 1.0
        for batch_indices in job_batches(settings, self.seed, work, examples):
            if job.refresh is not None and micro % settings.accumulate == 0:
                refresh_projectors(self, job, live, optimizer, steps, examples, batch_indices)
            self.set_dropout(work, micro)
            batch = self.task.batch(examples, batch_indices.tolist(), adapted.device)
            with self.padding.removed(batch), self.prefixes.fed(examples, batch_indices.tolist()):
                loss = self.task.loss(adapted.model, batch)
            value = float(loss.detach())
            if not math.isfinite(value):
                raise not_finite(work, value)
            loss_sum, examples_seen = loss_sum + value * len(batch_indices), examples_seen + len(batch_indices)
            share = len(batch_indices) / len(indices) if probing else 1 / settings.accumulate
            (loss * share).backward()
            micro += 1
            if probing or micro % settings.accumulate:
                continue
            self._step(job, live, optimizer, gradients_sum, probing)
            steps += 1
            decay *= self.decayed(work, live)
        if probing or micro % settings.accumulate:  # the last, incomplete group of an epoch still counts
            self._step(job, live, optimizer, gradients_sum, probing)
            steps += 1
            decay *= self.decayed(work, live)
        adapted.set_dropout(None)
        return Trained(
            tensors={name: value.detach().to("cpu", copy=True) for name, value in live.items()},
            optimizer_state=optimizer.state(),
            steps=0 if probing else steps,
            lr_sum=0.0 if probing else lr * steps,
            gradient={name: (value / max(1, steps)).to("cpu") for name, value in gradients_sum.items()},
            decay=decay,
            metrics={"loss": loss_sum / max(1.0, examples_seen), "examples": examples_seen},
        )

    def train_all(
        self,
        examples: Examples,
        sizes: Mapping[str, int],
        opened: Callable[[str], Assignment],
        finished: Callable[[Assignment, Trained], Assignment | None],
    ) -> None:
        """One client after another (``Engine.train_all``)."""
        for client in sizes:
            work: Assignment | None = opened(client)
            while work is not None:
                work = finished(work, self.take(work, examples))

    def ready(self, examples: Examples, indices: np.ndarray) -> None:
        """``Engine.ready``."""
        self.padding.ensure(examples)
        self.prefixes.ensure(examples, indices)

    def take(self, work: Assignment, examples: Examples) -> Trained:
        """``train``, of an assignment."""
        return self.train(
            work.job,
            examples,
            work.indices,
            client=work.client,
            round=work.round,
            lr=work.lr,
            kept=work.kept,
            noise=work.noise,
        )

    def optimizer_of(self, work: Assignment, live: Mapping[str, Tensor]) -> LocalOptimizer:
        """The optimizer of a job whose tensors are installed."""
        job = work.job
        return LocalOptimizer(
            spec_of(work, self.settings), job.trainable, live, joined_state(work.kept, job.optimizer_state), job.masks
        )

    @torch.no_grad()
    def decayed(self, work: Assignment, live: Mapping[str, Tensor]) -> float:
        """Decoupled decay of what does not train, where the job asks for it: the frozen base and finished segments."""
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

    def _step(
        self,
        job: Job,
        live: Mapping[str, Tensor],
        optimizer: LocalOptimizer,
        gradients_sum: dict[str, Tensor],
        probing: bool,
    ) -> None:
        names = optimizer.names
        gradients: dict[str, Tensor] = {}
        for name in names:
            tensor = live[name]
            gradients[name] = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            tensor.grad = None
        if job.want_gradient or probing:
            for name in names:
                gradients_sum[name] = gradients_sum.get(name, torch.zeros_like(gradients[name])) + gradients[name]
        if probing:
            return
        self.apply(job, live, optimizer, gradients)

    def apply(
        self,
        job: Job,
        live: Mapping[str, Tensor],
        optimizer: LocalOptimizer,
        gradients: dict[str, Tensor],
        clipping: bool = True,
    ) -> None:
        """An optimizer step: penalties, masks, clipping and offsets, then the update."""
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
        """The model's predictions for some examples, one row each, in the order of ``indices``, float32 on the CPU."""
        rows = self.rows(job, examples, evaluation_batches(indices, examples.lengths, batch_size), thorough=thorough)
        return torch.stack([rows[index] for index in indices.tolist()])

    @torch.no_grad()
    def rows(
        self, job: Job, examples: Examples, batches: Sequence[np.ndarray], *, thorough: bool = False
    ) -> dict[int, Tensor]:
        """Predictions by example for some batches, float32 on the CPU."""
        adapted = self.adapted
        if batches and not thorough:  # what is generated has other lengths
            self.prefixes.ensure(examples, np.concatenate(batches))
        adapted.model.eval()
        adapted.install(job.parametrization, job.tensors, frozenset())
        rows: dict[int, Tensor] = {}
        for indices in batches:
            batch = self.task.batch(examples, indices.tolist(), adapted.device)
            with nullcontext() if thorough else self.prefixes.fed(examples, indices.tolist()):
                predictions = self.task.predict(adapted.model, batch, thorough=thorough).float().cpu()
            rows.update(zip(indices.tolist(), predictions, strict=True))
        return rows


def dropout_mask(shape: Sequence[int], rate: float, *key: int | str) -> Tensor:
    """What of a layer's input is kept, true or false.

    Keyed by everything that names the draw (seed, round, client, phase, micro-batch, layer) and made on the CPU: any
    engine draws the same mask.
    """
    seed, *rest = key
    rng = generator(int(seed), "dropout", *rest)
    return torch.rand(tuple(shape), generator=rng) >= rate
