"""Hand-written local training of LoRA pairs from dense gradients, for several oracles. Nothing of fedspan is used.

A pair is a dict with ``B`` (O, R) and ``A`` (R, I); a model is ``{layer: pair}`` beside the dense frozen weights.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ..toys.problem import HEAD, LAYERS, Problem

Pairs = dict[str, dict[str, Tensor]]


def copied(pairs: Pairs) -> Pairs:
    """A model whose dicts may be written to."""
    return {layer: dict(pair) for layer, pair in pairs.items()}


def effective(W: dict[str, Tensor], pairs: Pairs, scaling: float) -> dict[str, Tensor]:
    """``W + s B A`` of every target layer."""
    return {layer: W[layer] + scaling * pairs[layer]["B"] @ pairs[layer]["A"] for layer in LAYERS}


def pair_gradients(
    problem: Problem, client: str, W: dict[str, Tensor], head: dict[str, Tensor], pairs: Pairs, scaling: float
) -> tuple[Pairs, dict[str, Tensor]]:
    """Gradients by B (s G A^T), A (s B^T G) and the head, G being the gradient by the dense weight."""
    dense = problem.gradients(client, {**effective(W, pairs, scaling), **head})
    by_pair = {
        layer: {"B": scaling * dense[layer] @ pairs[layer]["A"].T, "A": scaling * pairs[layer]["B"].T @ dense[layer]}
        for layer in LAYERS
    }
    return by_pair, {name: dense[name] for name in HEAD}


def descend(
    problem: Problem,
    client: str,
    W: dict[str, Tensor],
    head: dict[str, Tensor],
    pairs: Pairs,
    scaling: float,
    lr: float,
    steps: int,
    train: str = "AB",
    train_head: bool = True,
) -> None:
    """Gradient descent on a client's whole data, in place of ``pairs`` and ``head``."""
    for _ in range(steps):
        by_pair, by_head = pair_gradients(problem, client, W, head, pairs, scaling)
        for layer in LAYERS:
            for slot in train:
                pairs[layer][slot] = pairs[layer][slot] - lr * by_pair[layer][slot]
        if train_head:
            for name in HEAD:
                head[name] = head[name] - lr * by_head[name]


def average(models: Iterable[tuple[float, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """``sum_i p_i x_i`` over dicts."""
    total: dict[str, Tensor] = {}
    for share, tensors in models:
        for name, value in tensors.items():
            total[name] = total.get(name, torch.zeros_like(value)) + share * value
    return total


class Adam:
    """Adam of one tensor as its paper writes it (arXiv:1412.6980), decoupled decay of arXiv:1711.05101."""

    def __init__(
        self,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        correct: tuple[bool, bool] = (True, True),
    ) -> None:
        self.lr, self.betas, self.eps, self.correct = lr, betas, eps, correct
        self.m: Tensor | float = 0.0
        self.v: Tensor | float = 0.0
        self.t = 0

    def direction(self, gradient: Tensor) -> Tensor:
        """``lr * m^ / (sqrt(v^) + eps)``, to be subtracted."""
        (beta1, beta2), self.t = self.betas, self.t + 1
        self.m = beta1 * self.m + (1 - beta1) * gradient
        self.v = beta2 * self.v + (1 - beta2) * gradient**2
        m = self.m / (1 - beta1**self.t) if self.correct[0] else self.m
        v = self.v / (1 - beta2**self.t) if self.correct[1] else self.v
        assert math.isfinite(float(v.sum()))
        return self.lr * m / (v.sqrt() + self.eps)
