"""DP-SGD: each example's gradient is clipped, and noise is added to their sum.

Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, arXiv 1607.00133, algorithm 1:

    g = ( sum over a Poisson sample of clip(grad loss(x), C) + N(0, (z C)^2) ) / (expected sample size)

Opacus clips and scales. Per-example gradients come from the layers that stack clients: every example is
treated as a client with its own copy of the factors. The first two examples that share a pass verify that the model
keeps examples apart. Masks of dropout are drawn by example: clipping bounds what an example adds to the sum, but not
how it would change the masks of others.

Shapes: K examples in a pass.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedspan.core.noise import compute_tensor_digest, derive_seed_key, draw_gaussian, draw_poisson_sample
from fedspan.core.tensors import Tensors, compute_norm, subtract, to_device
from fedspan.core.values import Job, Trained
from fedspan.errors import FedspanError
from fedspan.models.precision import compute_tolerance
from fedspan.models.stacked import StackedModel, Unstackable
from fedspan.tasks.task import Examples, Task
from fedspan.training.accounting import Mechanism, calibrate_noise, require_opacus
from fedspan.training.config import Privacy, TrainingSettings
from fedspan.training.jobs import Assignment, is_explained
from fedspan.training.services import TrainingServices, draw_dropout_mask

log = logging.getLogger("fedspan.node")


def compute_expected_batch(settings: TrainingSettings, count: int) -> int:
    """Compute the average number of examples of an optimizer step for a client with ``count`` examples."""
    return min(count, settings.batch_size * settings.gradient_accumulation_steps)


def compute_private_steps(settings: TrainingSettings, job: Job, count: int) -> int:
    """Compute the optimizer steps of a job over ``count`` examples: as many as without privacy."""
    if not count:
        return 0
    steps = settings.local_steps if job.steps is None and job.epochs is None else job.steps
    if steps:
        return steps
    epochs = settings.local_epochs if job.epochs is None else job.epochs
    return math.ceil(math.ceil(count / settings.batch_size) * epochs / settings.gradient_accumulation_steps)


def compute_noise(privacy: Privacy, settings: TrainingSettings, jobs: Sequence[Job], count: int) -> float:
    """Compute a client's noise over the clipping norm: the run's, or the smallest noise that its budget allows."""
    if privacy.noise is not None:
        return privacy.noise
    assert privacy.epsilon is not None  # the config has noise or epsilon
    steps = privacy.rounds * sum(compute_private_steps(settings, job, count) for job in jobs)
    if not steps:
        return 0.0
    rate = compute_expected_batch(settings, count) / count
    return calibrate_noise(rate, steps, privacy.epsilon, privacy.delta, privacy.accountant)


def release_of(privacy: Privacy, settings: TrainingSettings, jobs: Sequence[Job], count: int) -> tuple[Mechanism, int]:
    """Return what a round's jobs release about a client with ``count`` examples: the mechanism and how often."""
    rate = compute_expected_batch(settings, count) / max(1, count)
    steps = sum(compute_private_steps(settings, job, count) for job in jobs)
    return Mechanism(rate, compute_noise(privacy, settings, jobs, count)), steps


def draw_poisson_batches(privacy: Privacy, settings: TrainingSettings, assignment: Assignment) -> Iterator[np.ndarray]:
    """Yield the samples of a job, drawing each example independently; a sample may be empty.

    With a secret key they depend on everything that a server can choose as well, as the noise does on its scale: a
    server that repeats an order with another model, base or learning rate, or from another stored state, does not learn
    two sums over one sample, which no accountant allows.
    """
    count = assignment.count
    label = ("poisson", assignment.round, assignment.client, assignment.job.phase)
    rate = compute_expected_batch(settings, count) / max(1, count)
    if privacy.secret:
        label = (*label, assignment.origin, compute_tensor_digest(assignment.job.tensors), repr(rate))
    for step in range(compute_private_steps(settings, assignment.job, count)):
        yield assignment.indices[draw_poisson_sample(privacy.key, rate, len(assignment.indices), *label, step).numpy()]


@dataclass(frozen=True)
class _Step:
    """An optimizer step of a job: the installed tensors, the names of those that train in it, and its number."""

    assignment: Assignment
    live: Tensors
    names: Sequence[str]
    examples: Examples
    number: int


class PrivateTraining:
    """Trains jobs with DP-SGD, one at a time."""

    def __init__(self, trainer: TrainingServices, privacy: Privacy) -> None:
        self.trainer, self.privacy = trainer, privacy
        self.stacked = StackedModel(trainer.adapted)
        self.refusal = self.stacked.explain_refusal()
        """The reason why examples go through the model one by one, if they must."""
        self._verified = False

    def train(self, assignment: Assignment, examples: Examples) -> Trained:
        """Run one job on one client's examples (``LoopEngine.train``).

        Losses and gradients that are not finite do not count, nor on a node examples on which the model fails: an error
        would tell the server, which chooses the model, that there is such an example.

        Raises:
            FedspanError: If the job would release more than the noisy sums.
        """
        require_opacus()
        from fedspan.training.noisy_sum import NoisySum

        trainer, job, adapted, settings = self.trainer, assignment.job, self.trainer.adapted, self.trainer.settings
        _require_private(job, trainer.task)
        trainer.prepare(examples, [assignment.indices])
        adapted.train_mode(job.buffers)
        live = adapted.install(job.parametrization, job.tensors, frozenset(job.trainable_names))
        optimizer = trainer.make_optimizer(assignment, live)
        sums: dict[tuple[str, ...], NoisySum] = {}  # one for each set of tensors that train in the same steps
        expected = compute_expected_batch(settings, assignment.count)
        loss_sum, decay, examples_seen, steps = 0.0, 1.0, 0, 0
        for sample in draw_poisson_batches(self.privacy, settings, assignment):
            names = job.list_active_names(steps)
            if names not in sums:
                sums[names] = NoisySum(self.privacy, assignment, {name: live[name] for name in names})
            noisy, step = sums[names], _Step(assignment, live, names, examples, steps)
            for indices in self._split_passes(examples, sample):
                losses, gradients = self._compute_own_gradients(step, indices)
                losses = losses[losses.isfinite()]
                loss_sum, examples_seen = loss_sum + float(losses.double().sum()), examples_seen + len(losses)
                trainer.stages.advance("training", len(indices))
                noisy.add({name: self._mask_gradients(job, name, value) for name, value in gradients.items()})
            trainer.apply(job, live, optimizer, noisy.pop_mean(steps, expected), steps, clipping=False)
            steps += 1
            decay *= trainer.decay_frozen(assignment, live)
        adapted.set_dropout(None)
        return Trained(
            tensors={name: value.detach().to("cpu", copy=True) for name, value in live.items()},
            optimizer_state=optimizer.copy_state(),
            steps=steps,
            lr_sum=assignment.lr * steps,
            decay=decay,
            metrics={"loss": loss_sum / max(1, examples_seen), "examples": float(examples_seen)},
        )

    def _split_passes(self, examples: Examples, sample: np.ndarray) -> list[np.ndarray]:
        """Split a step's sample into passes; an empty sample has one."""
        trainer, size = self.trainer, self.trainer.settings.batch_size
        parts = trainer.alike.split(examples, sample) if trainer.splits_alike and len(sample) else [sample]
        return [part[start : start + size] for part in parts for start in range(0, max(1, len(part)), size)]

    def _compute_own_gradients(self, step: _Step, indices: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute losses and gradients of examples (``_compute_gradients``), none of which spoils those of others."""
        from fedspan.training.noisy_sum import find_finite

        try:
            losses, gradients = self._compute_gradients(step, indices)
            if bool(find_finite(gradients).all()):
                return losses, gradients
        except Exception as error:
            if is_explained(error) or not self.trainer.splits_alike:
                raise
        return self._compute_single_gradients(step, indices)

    def _compute_gradients(self, step: _Step, indices: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute losses (K,) and gradients (K, ...) of examples in an optimizer step."""
        if not len(indices):
            empty = {name: step.live[name].new_zeros(0, *step.live[name].shape) for name in step.names}
            return torch.zeros(0), empty
        if self.refusal is None and not self._verified and len(indices) > 1:
            self._verify(replace(step, names=step.assignment.job.trainable_names), indices[:2])
        # One example verifies nothing: until a sample has two for a pass, each is processed in a pass of its own.
        if self.refusal is None and self._verified:
            return self._compute_stacked_gradients(step, indices)
        return self._compute_single_gradients(step, indices)

    def _set_dropout(self, step: _Step, batch: Mapping[str, Tensor], indices: np.ndarray) -> None:
        """Draw the adapters' dropout of examples (K,) that share a batch: each has the masks of a pass of its own.

        Raises:
            Unstackable: If several examples share a batch that takes several passes of the model.
        """
        trainer, count = self.trainer, len(indices)
        rate = trainer.settings.lora_dropout
        if not rate:
            return
        if count > 1 and getattr(trainer.task, "has_several_passes", False):
            raise Unstackable("dropout masks are drawn for one pass of a batch, and each of an example's texts has one")
        tokens = batch["input_ids"].shape[1] if "input_ids" in batch else None
        assignment, lengths = step.assignment, step.examples.lengths[indices]
        key = (trainer.seed, assignment.round, assignment.client, assignment.job.phase, step.number)

        def dropout(x: Tensor, layer: str) -> Tensor:
            if count > 1 and x.shape[0] != count:
                raise Unstackable(f"dropout before {layer}, which is given the tokens of all examples in one row")
            mask = torch.ones(x.shape, dtype=torch.bool)
            for number, (index, length) in enumerate(zip(indices.tolist(), lengths.tolist(), strict=True)):
                own = mask if count == 1 else mask[number : number + 1]
                if x.ndim > 2 and x.shape[1] == tokens:
                    own = own[:, :length]  # without the padding of the pass
                own.copy_(draw_dropout_mask(own.shape, rate, *key, index, layer))
            return x * to_device(mask, x.device).to(x.dtype) / (1 - rate)

        trainer.adapted.set_dropout(dropout)

    def _mask_gradients(self, job: Job, name: str, gradients: Tensor) -> Tensor:
        """Zero the gradients of masked entries, which then do not count in the norm."""
        return gradients * job.masks[name].to(gradients) if name in job.masks else gradients

    def _compute_stacked_gradients(self, step: _Step, indices: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
        trainer, count, live = self.trainer, len(indices), step.live
        leaves = {
            name: live[name].detach().expand(count, *live[name].shape).contiguous().requires_grad_()
            for name in step.names
        }
        frozen = {
            name: value.detach().expand(count, *value.shape) for name, value in live.items() if name not in leaves
        }
        rows = indices.tolist()
        batch = trainer.task.collate(step.examples, rows, trainer.adapted.device)
        self._set_dropout(step, batch, indices)
        stacked = self.stacked.hold_tensors(step.assignment.job.parametrization, {**frozen, **leaves}, count, count)
        unpadded = trainer.padding.remove_padding(batch, step.examples.lengths[indices], count)
        with stacked, unpadded, trainer.prefixes.feed(step.examples, rows):
            losses = trainer.task.compute_client_losses(
                trainer.adapted.model, batch, torch.eye(count, device=trainer.adapted.device)
            )
            losses.sum().backward()
        gradients = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
        return losses.detach(), gradients

    def _compute_single_gradients(self, step: _Step, indices: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
        trainer, live, examples = self.trainer, step.live, step.examples
        losses: list[Tensor] = []
        gradients: dict[str, list[Tensor]] = {name: [] for name in step.names}
        for index in indices.tolist():
            try:
                batch = trainer.task.collate(examples, [index], trainer.adapted.device)
                self._set_dropout(step, batch, np.array([index]))
                unpadded = trainer.padding.remove_padding(batch, examples.lengths[[index]])
                with unpadded, trainer.prefixes.feed(examples, [index]):
                    loss = trainer.task.compute_loss(trainer.adapted.model, batch)
                own_gradients = torch.autograd.grad(loss, [live[name] for name in step.names], allow_unused=True)
            except Exception as error:
                if is_explained(error) or not trainer.splits_alike:
                    raise
                log.warning("an example on which the model fails does not count: %s", error)
                loss, own_gradients = torch.tensor(math.nan, device=trainer.adapted.device), [None] * len(step.names)
            losses.append(loss.detach())
            for name, gradient in zip(step.names, own_gradients, strict=True):
                gradients[name].append(torch.zeros_like(live[name]) if gradient is None else gradient)
        return torch.stack(losses), {name: torch.stack(values) for name, values in gradients.items()}

    def _verify(self, step: _Step, indices: np.ndarray) -> None:
        """Check that two examples in a shared pass have the gradients of single passes, with the same dropout.

        The clipping bound relies on it.
        """
        live = step.live
        before = {name: live[name].detach().clone() for name in step.names}
        with torch.no_grad():  # where B is 0, A has a zero gradient, which would hide errors
            for name in step.names:
                noise = draw_gaussian(derive_seed_key(0), live[name].shape, "verify", name) * 0.02
                live[name].add_(noise.to(live[name]))
        try:
            _, shared = self._compute_stacked_gradients(step, indices)
            _, single_gradients = self._compute_single_gradients(step, indices)
            error_norm = compute_norm(subtract(shared, single_gradients)) / max(compute_norm(single_gradients), 1e-30)
            if not error_norm < compute_tolerance(self.trainer.adapted.model):
                self.refusal = f"gradients differ by {error_norm:.1e} when two examples share a pass"
        except Unstackable as error:
            self.refusal = str(error)
        finally:
            with torch.no_grad():
                for name in step.names:
                    live[name].copy_(before[name])
        self._verified = True


def _require_private(job: Job, task: Task) -> None:
    """Refuse a job that would release more than the noisy sums."""
    reasons = {
        "it asks for raw gradients": job.want_gradient or job.steps == 0,
        "its projectors are made of raw gradients": job.refresh is not None,
        "its norms keep statistics of raw examples": bool(job.buffers),
        "packed batches have no examples of their own (training.packing)": getattr(task, "packing", False),
        "its loss compares the examples of a batch (task_options.loss)": getattr(
            task, "has_batch_dependent_loss", False
        ),
        "its inputs are drawn anew for each step (masks, changed images)": hasattr(task, "collate_for_training"),
    }
    if reason := next((reason for reason, is_given in reasons.items() if is_given), None):
        raise FedspanError("privacy.mechanism", "dp-sgd", problem=f"dp-sgd cannot train this method or model: {reason}")
