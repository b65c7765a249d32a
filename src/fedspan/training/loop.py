"""The loop engine: one client after another, in simple code; the reference for the other engines.

Shapes: O output features, I input features, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from fedspan.core.tensors import to_device
from fedspan.core.values import Job, Trained
from fedspan.tasks.task import Examples
from fedspan.training.batching import draw_job_batches
from fedspan.training.dp_sgd import PrivateTraining
from fedspan.training.engine import FinishJob, OpenJob, train_one_by_one
from fedspan.training.jobs import (
    Assignment,
    TrainingProgress,
    TrainingTotals,
    build_not_finite_error,
    convert_out_of_memory,
)
from fedspan.training.optimizers import LocalOptimizer
from fedspan.training.projector_refresh import refresh_projectors
from fedspan.training.services import TrainingServices


class LoopEngine(TrainingServices):
    """Trains and evaluates jobs on one model, one at a time."""

    @cached_property
    def private(self) -> PrivateTraining | None:
        """Training by DP-SGD; None without it."""
        privacy = self.privacy
        return None if privacy is None or privacy.mechanism != "dp-sgd" else PrivateTraining(self, privacy)

    def train(self, assignment: Assignment, examples: Examples) -> Trained:
        """Run one job on one client's examples.

        Raises:
            FedspanError: If the loss stops being finite, or the device has too little memory for a batch.
        """
        remedy, size = ", or model.gradient_checkpointing", self.settings.batch_size
        with convert_out_of_memory(self.adapted.device, "training.batch_size", size, "examples in a batch", remedy):
            return self._train(assignment, examples)

    def _train(self, assignment: Assignment, examples: Examples) -> Trained:
        settings, adapted = self.settings, self.adapted
        if self.private is not None:
            return self.private.train(assignment, examples)
        job, indices = assignment.job, assignment.indices
        self.prepare_job(job, examples, indices)
        adapted.train_mode(job.buffers)
        totals, gradients_sum = TrainingTotals(), dict[str, Tensor]()
        checkpoint = None if job.steps == 0 else assignment.checkpoint
        stored = None if checkpoint is None else checkpoint.load()
        tensors = job.tensors if stored is None else stored.tensors
        live = adapted.install(job.parametrization, tensors, frozenset(job.trainable_names))
        optimizer, terms = self.make_optimizer(assignment, live), self.compute_class_terms(assignment, examples)
        if stored is not None:
            totals = replace(stored.totals)
            gradients_sum = {name: to_device(value, adapted.device) for name, value in stored.gradients.items()}
            optimizer.restore(stored.optimizer_state)
            self.set_frozen_decay(job, totals.decay)
            self.stages.advance("training", round(totals.examples))
        is_probe = job.steps == 0
        pending = 0  # passes since the last optimizer step

        def finish_step() -> None:
            self._step(job, live, optimizer, gradients_sum, totals.steps, is_probe)
            totals.steps += 1
            totals.decay *= self.decay_frozen(assignment, live)

        def store_progress() -> None:
            if checkpoint is not None:
                moved = {name: value.detach().to("cpu", copy=True) for name, value in live.items()}
                sums = {name: value.to("cpu", copy=True) for name, value in gradients_sum.items()}
                checkpoint.store(TrainingProgress(replace(totals), moved, optimizer.copy_state(), sums))

        batches = draw_job_batches(settings, self.seed, assignment, examples)
        for batch_indices in islice(batches, totals.passes, None):
            if job.refresh is not None and totals.passes % settings.gradient_accumulation_steps == 0:
                refresh_projectors(self, job, live, optimizer, totals.steps, examples, batch_indices)
            self.set_dropout(assignment, totals.passes)
            batch = self.make_batch(examples, [(assignment, totals.passes, batch_indices.tolist())])
            batch = {**batch, **{name: value.expand(len(batch_indices), -1) for name, value in terms.items()}}
            with (
                self.padding.remove_padding(batch, examples.lengths[batch_indices]),
                self.feed(job, examples, batch_indices.tolist()),
            ):
                loss = self.task.compute_loss(adapted.model, batch)
            value = float(loss.detach())
            if not math.isfinite(value):
                raise build_not_finite_error(assignment, value)
            totals.loss_sum += value * len(batch_indices)
            totals.examples += len(batch_indices)
            share = len(batch_indices) / len(indices) if is_probe else 1 / settings.gradient_accumulation_steps
            (loss * share).backward()
            totals.passes += 1
            pending += 1
            self.stages.advance("training", len(batch_indices))
            if is_probe or totals.passes % settings.gradient_accumulation_steps:
                continue
            finish_step()
            pending = 0
            if checkpoint is not None and checkpoint.is_due(totals.steps):
                store_progress()
        if is_probe or pending:  # the last, incomplete group of an epoch still counts
            finish_step()
        store_progress()  # the reply may still be lost, or the order's next job interrupted
        adapted.set_dropout(None)
        steps = totals.steps
        return Trained(
            tensors={name: value.detach().to("cpu", copy=True) for name, value in live.items()},
            optimizer_state=optimizer.copy_state(),
            steps=0 if is_probe else steps,
            lr_sum=0.0 if is_probe else assignment.lr * steps,
            gradient={name: (value / max(1, steps)).to("cpu") for name, value in gradients_sum.items()},
            decay=totals.decay,
            metrics={"loss": totals.loss_sum / max(1.0, totals.examples), "examples": totals.examples},
        )

    def train_all(self, examples: Examples, sizes: Mapping[str, int], open_job: OpenJob, finish_job: FinishJob) -> None:
        """Train one client after another (``Engine.train_all``)."""
        train_one_by_one(sizes, open_job, lambda assignment: self.train(assignment, examples), finish_job)

    def _step(
        self,
        job: Job,
        live: Mapping[str, Tensor],
        optimizer: LocalOptimizer,
        gradients_sum: dict[str, Tensor],
        step: int,
        is_probe: bool,
    ) -> None:
        names = optimizer.names
        gradients: dict[str, Tensor] = {}
        for name in names:
            tensor = live[name]
            gradients[name] = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            tensor.grad = None
        if job.want_gradient or is_probe:
            for name in names:
                gradients_sum[name] = gradients_sum.get(name, torch.zeros_like(gradients[name])) + gradients[name]
        if is_probe:
            return
        self.apply(job, live, optimizer, gradients, step)
