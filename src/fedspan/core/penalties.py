"""Penalties on the loss as data: an engine adds them without knowing the method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from fedspan.core.lowrank import LowRank, compute_inner_product
from fedspan.core.parametrization import Projected
from fedspan.core.tensors import Tensors, join_tensor_name, to_device


class Penalty(Protocol):
    """A differentiable term of the loss, a function of the job's tensors."""

    def compute_value(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Compute the term, a scalar tensor."""
        ...

    def to(self, device: torch.device) -> Penalty:
        """Return the penalty with its own tensors on a device."""
        ...


@dataclass(frozen=True)
class Proximal:
    """``mu / 2 * sum ||x - reference||^2`` over the reference's tensors (FedProx, arXiv:1812.06127).

    A projected layer's x is the sum of its segments, ``done_B done_A + acc P``. As P is orthonormal,
    ``||x||^2 = ||acc||^2 + 2 <acc P, done_B done_A> + ||done_B done_A||^2``, and acc starts a round at 0.
    """

    mu: float
    """Coefficient of the penalty."""
    reference: Tensors = field(default_factory=dict)
    """Values that tensors are pulled towards, by name."""
    projected: Mapping[str, Projected] = field(default_factory=dict)
    """Layers whose projector is renewed during training, each with its parametrization."""

    def compute_value(self, tensors: Mapping[str, Tensor]) -> Tensor:
        terms = [(tensors[name] - value.to(tensors[name])).square().sum() for name, value in self.reference.items()]
        for layer, parametrization in self.projected.items():
            if join_tensor_name(layer, "done_B") not in tensors:
                continue  # no segment is finished
            finished = LowRank(tensors[join_tensor_name(layer, "done_B")], tensors[join_tensor_name(layer, "done_A")])
            current = parametrization.pair(
                tensors[join_tensor_name(layer, "acc")], tensors[join_tensor_name(layer, "P")]
            )
            terms.append(
                (2 * compute_inner_product(current, finished) + compute_inner_product(finished, finished)).to(
                    finished.B
                )
            )
        return 0.5 * self.mu * torch.stack(terms).sum()

    def to(self, device: torch.device) -> Proximal:
        return replace(self, reference={name: to_device(value, device) for name, value in self.reference.items()})


@dataclass(frozen=True)
class SlotProduct:
    """``strength * sum over layers of ||B[:, first:]||_F ||A[first:, :]||_F``, the weight of the last slots of LoRA.

    HetLoRA, arXiv:2401.06432. Where one of the two norms is 0, the gradient of its factor is 0.
    """

    strength: float
    """Coefficient lambda."""
    first: int
    """Index of the first slot that counts."""
    layers: tuple[str, ...]
    """Names of the layers; each has an A (R, I) and a B (O, R)."""

    def compute_value(self, tensors: Mapping[str, Tensor]) -> Tensor:
        products = [
            torch.linalg.norm(tensors[join_tensor_name(layer, "B")][:, self.first :])
            * torch.linalg.norm(tensors[join_tensor_name(layer, "A")][self.first :])
            for layer in self.layers
        ]
        return self.strength * torch.stack(products).sum()

    def to(self, device: torch.device) -> SlotProduct:
        return self


@dataclass(frozen=True)
class ProductDecay:
    """``strength / 2 * sum over pairs of ||U V||_F^2``: weight decay of the product in place of its factors (FedHM).

    Computed through R x R Gram matrices, ``<U^T U, V V^T>``; the product is not formed.
    """

    strength: float
    """Coefficient lambda."""
    pairs: tuple[tuple[str, str], ...]
    """Names of U (O, R) and V (R, I)."""

    def compute_value(self, tensors: Mapping[str, Tensor]) -> Tensor:
        squares = [((tensors[u].T @ tensors[u]) * (tensors[v] @ tensors[v].T)).sum() for u, v in self.pairs]
        return 0.5 * self.strength * torch.stack(squares).sum()

    def to(self, device: torch.device) -> ProductDecay:
        return self
