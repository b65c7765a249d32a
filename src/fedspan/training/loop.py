"""The loop engine: one client after another, in simple code; the reference for the other engines.

Shapes: O output features, I input features, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from torch import Tensor

from fedspan.core.values import Job, Trained
from fedspan.tasks.single_label import OFFSETS
from fedspan.tasks.task import Examples
from fedspan.training.batching import draw_job_batches
from fedspan.training.dp_sgd import PrivateTraining
from fedspan.training.engine import Trainer, train_one_by_one
from fedspan.training.jobs import Assignment, build_not_finite_error
from fedspan.training.optimizers import LocalOptimizer
from fedspan.training.projector_refresh import refresh_projectors

__all__ = ["LoopEngine"]


class LoopEngine(Trainer):
    """Trains and evaluates jobs on one model, one at a time."""

    @cached_property
    def private(self) -> PrivateTraining | None:
        """Training by DP-SGD; None without it."""
        privacy = self.settings.privacy
        return None if privacy is None or privacy.mechanism != "dp-sgd" else PrivateTraining(self, privacy)

    def train(self, assignment: Assignment, examples: Examples) -> Trained:
        """Run one job on one client's examples.

        Args:
            assignment: The assignment.
            examples: The data set that the client's indices point into.

        Raises:
            FedspanError: If the loss stops being finite.
        """
        settings, adapted = self.settings, self.adapted
        if self.private is not None:
            return self.private.train(assignment, examples)
        assignment = self.restrict_head(assignment, examples)
        job, indices = assignment.job, assignment.indices
        self.prepare(examples, [indices])
        adapted.train_mode(job.buffers)
        live = adapted.install(job.parametrization, job.tensors, frozenset(job.trainable_names))
        optimizer, offsets = self.make_optimizer(assignment, live), self.compute_logit_offsets(assignment, examples)
        gradients_sum: dict[str, Tensor] = {}
        probing = job.steps == 0
        loss_sum = examples_seen = 0.0
        steps = micro = 0
        decay = 1.0
        for batch_indices in draw_job_batches(settings, self.seed, assignment, examples):
            if job.refresh is not None and micro % settings.accumulate == 0:
                refresh_projectors(self, job, live, optimizer, steps, examples, batch_indices)
            self.set_dropout(assignment, micro)
            batch = self.make_batch(examples, [(assignment, micro, batch_indices.tolist())])
            if offsets is not None:
                batch = {**batch, OFFSETS: offsets.expand(len(batch_indices), -1)}
            with (
                self.padding.remove_padding(batch, examples.lengths[batch_indices]),
                self.prefixes.feed(examples, batch_indices.tolist()),
            ):
                loss = self.task.compute_loss(adapted.model, batch)
            value = float(loss.detach())
            if not math.isfinite(value):
                raise build_not_finite_error(assignment, value)
            loss_sum, examples_seen = loss_sum + value * len(batch_indices), examples_seen + len(batch_indices)
            share = len(batch_indices) / len(indices) if probing else 1 / settings.accumulate
            (loss * share).backward()
            micro += 1
            self.stages.advance("training", len(batch_indices))
            if probing or micro % settings.accumulate:
                continue
            self._step(job, live, optimizer, gradients_sum, probing)
            steps += 1
            decay *= self.decay_frozen(assignment, live)
        if probing or micro % settings.accumulate:  # the last, incomplete group of an epoch still counts
            self._step(job, live, optimizer, gradients_sum, probing)
            steps += 1
            decay *= self.decay_frozen(assignment, live)
        adapted.set_dropout(None)
        return Trained(
            tensors={name: value.detach().to("cpu", copy=True) for name, value in live.items()},
            optimizer_state=optimizer.copy_state(),
            steps=0 if probing else steps,
            lr_sum=0.0 if probing else assignment.lr * steps,
            gradient={name: (value / max(1, steps)).to("cpu") for name, value in gradients_sum.items()},
            decay=decay,
            metrics={"loss": loss_sum / max(1.0, examples_seen), "examples": examples_seen},
        )

    def train_all(
        self,
        examples: Examples,
        sizes: Mapping[str, int],
        open_job: Callable[[str], Assignment],
        finish_job: Callable[[Assignment, Trained], Assignment | None],
    ) -> None:
        """Train one client after another (``Engine.train_all``)."""
        train_one_by_one(sizes, open_job, lambda assignment: self.train(assignment, examples), finish_job)

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
