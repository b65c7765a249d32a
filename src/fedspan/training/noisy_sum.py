"""Noisy sums of clipped gradients, step by step.

This module imports Opacus, which is an extra: call ``require_opacus`` and import it where it is used.

Shapes: K examples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from fedspan.core.noise import add_gaussian, compute_tensor_digest
from fedspan.training.config import Privacy
from fedspan.training.jobs import Assignment


class _Keyed(DPOptimizer):
    """Opacus' optimizer with noise from a key: torch's generators have too few streams to be secret."""

    label: tuple[int | str, ...] = ()
    names: tuple[str, ...] = ()
    key: bytes = b""
    secret: bool = False

    def add_noise(self) -> None:
        """``DPOptimizer.add_noise``."""
        sums: dict[str, Tensor] = dict(zip(self.names, (p.__dict__["summed_grad"] for p in self.params), strict=True))
        if self.secret:  # the same noise at two scales would cancel
            label = (*self.label, compute_tensor_digest(sums), repr(self.noise_multiplier * self.max_grad_norm))
        else:
            label = self.label
        for (name, total), p in zip(sums.items(), self.params, strict=True):
            noisy = add_gaussian(total, self.noise_multiplier * self.max_grad_norm, self.key, *label, name)
            p.grad = noisy.to(total).view_as(p)


def find_finite(gradients: Mapping[str, Tensor]) -> Tensor:
    """Return which examples' gradients, (K, ...) each, are finite, (K,) bool."""
    return torch.stack(
        [value.isfinite().reshape(len(value), math.prod(value.shape[1:])).all(1) for value in gradients.values()]
    ).all(0)


class NoisySum:
    """Clips, sums, and adds noise, step by step."""

    def __init__(self, privacy: Privacy, assignment: Assignment, tensors: Mapping[str, Tensor]) -> None:
        self._assignment, self._names = assignment, tuple(tensors)
        self._params = [nn.Parameter(torch.zeros_like(value)) for value in tensors.values()]
        # Its own step is never called: the run's optimizer uses what it leaves in ``grad``.
        self._optimizer = _Keyed(
            torch.optim.SGD(self._params, lr=0.0),
            noise_multiplier=assignment.noise,
            max_grad_norm=privacy.clip,
            expected_batch_size=1,
            loss_reduction="mean",
        )
        self._optimizer.names, self._optimizer.key, self._optimizer.secret = self._names, privacy.key, privacy.secret

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add examples' gradients, (K, ...) each, to the step's sum; each example may be added only once.

        A gradient that is not finite counts as zero: it has no norm to be clipped to, and the sum would tell of it.
        """
        is_finite = find_finite(gradients)
        for name, p in zip(self._names, self._params, strict=True):
            shape = (-1, *[1] * (gradients[name].ndim - 1))
            finite = torch.where(is_finite.view(shape), gradients[name], 0)
            p.grad_sample = finite  # pyright: ignore[reportAttributeAccessIssue]
        self._optimizer.clip_and_accumulate()

    def pop_mean(self, step: int, expected: int) -> dict[str, Tensor]:
        """Return the step's noisy sum over the expected number of examples, and reset the sum.

        Args:
            step: The step's number in the job, from 0.
        """
        assignment = self._assignment
        label = ("dp-sgd", assignment.round, assignment.client, assignment.job.phase, step)
        if (
            self._optimizer.secret
        ):  # two orders of a round may have equal sums, such as zero, and would have equal noise
            label = (*label, assignment.origin, compute_tensor_digest(assignment.job.tensors))
        self._optimizer.label = label
        self._optimizer.expected_batch_size = expected
        self._optimizer.add_noise()
        self._optimizer.scale_grad()
        gradients = {
            name: p.grad.detach() for name, p in zip(self._names, self._params, strict=True) if p.grad is not None
        }
        self._optimizer.zero_grad(set_to_none=True)
        return gradients
