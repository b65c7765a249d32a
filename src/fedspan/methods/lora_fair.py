"""LoRA-FAIR: FedAvg of LoRA, then the server corrects B so that B A points where the exact average does.

Bian et al., "LoRA-FAIR: Federated LoRA Fine-Tuning with Aggregation and Initialization Refinement", ICCV 2025,
arXiv:2411.14961.

    client i:  trains A_i, B_i from the global A, B
    server:    A <- sum_i p_i A_i,  B' = sum_i p_i B_i,  D = sum_i p_i B_i A_i
               B <- B' + dB,  dB = argmin 1 - cos(D, (B' + dB) A) + lambda ||dB||_F

D enters through C = D A^T (O, r) and ||D|| alone, so nothing larger than a stack of factors is formed:
``<D, X A> = <C, X>`` and ``||X A||^2 = <X G, X>`` with G = A A^T. Not exact, but nearer than FedIT.

Deviations: the paper writes the similarity where its argmin needs 1 - similarity. It leaves the exponent of ||dB|| and
the optimizer's settings open: ``penalty`` chooses the exponent, and the objective is minimized by ``server_steps``
steps of gradient descent whose rate is ``server_lr`` times ||B'||^2 (its gradient shrinks as B grows), halved whenever
the objective would rise. ``objective: frobenius`` is no part of the paper: ``||D - (B' + dB) A||^2 + lambda ||dB||^2``,
whose minimizer is ``dB = (C - B' G)(G + lambda I)^-1``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from fedspan.core.aggregation import average_stack, map_layers, sum_products
from fedspan.core.factors import create_b_factors, create_lora_job, draw_a_factors
from fedspan.core.lowrank import compute_inner_product
from fedspan.core.method import Claims, Memory, RegisteredMethod
from fedspan.core.tensors import join_tensor_name
from fedspan.core.values import Client, Job, LayerSpec, Message, Reduced, ServerState, Weights


def descend_to_cosine(
    B: Tensor, C: Tensor, G: Tensor, size: float, lam: float, exponent: int, steps: int, lr: float
) -> Tensor:
    """Find the X that descends ``1 - <C, X> / (size sqrt(<X G, X>)) + lam ||X - B||^exponent`` from X = B.

    A step that raises it is halved; the first step that does not lower it is the last one.
    """
    X, rate = B, lr * float(B.square().sum())

    def objective(X: Tensor) -> float:
        cosine = (C * X).sum() / (size * (X @ G * X).sum().sqrt())
        return float(1 - cosine + lam * (X - B).norm() ** exponent)

    value = objective(X)
    for _ in range(steps):
        XG, dB = X @ G, X - B
        length, correlation = (XG * X).sum().sqrt(), (C * X).sum()
        gradient = (correlation / length**2 * XG - C) / (size * length)
        distance = dB.norm()
        if distance > 0:
            gradient = gradient + lam * exponent * distance ** (exponent - 2) * dB
        while (lower := objective(X - rate * gradient)) > value and rate > 0:
            rate /= 2
        if not lower < value:
            break
        X, value = X - rate * gradient, lower
    return X


@final
@dataclass(frozen=True, kw_only=True)
class LoRAFAIR(RegisteredMethod):
    """Average A and B; correct B.

    Args:
        objective: ``cosine`` (paper), or ``frobenius``, which has a closed form.
        lam: The paper's lambda, on the length of the correction.
        penalty: ``norm``, or ``squared`` norm of the correction, under ``cosine``.
        server_steps: Number of gradient steps under ``cosine``.
        server_lr: Learning rate of server steps under ``cosine``, relative to the squared norm of the averaged B.
    """

    claims: ClassVar[Claims] = Claims(
        paper="LoRA-FAIR: Federated LoRA Fine-Tuning with Aggregation and Initialization Refinement "
        "(ICCV 2025, arXiv:2411.14961)",
        exact=False,
        reduction="stack",
    )

    objective: Literal["cosine", "frobenius"] = "cosine"
    lam: float = 0.01
    penalty: Literal["norm", "squared"] = "norm"
    server_steps: int = 100
    server_lr: float = 0.1

    def init(self, weights: Weights) -> ServerState:
        return ServerState(tensors={**draw_a_factors(self, self.r), **create_b_factors(self.spec, self.r)})

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        return create_lora_job(self, message.tensors, client, train=("A", "B"))

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        means = average_stack(reduced)

        def correct(layer: LayerSpec) -> Tensor:
            stacked = sum_products(layer.name, reduced).to(torch.float64)  # s D: s cancels in the cosine
            mean = means[join_tensor_name(layer.name, "B")]
            A, B = means[join_tensor_name(layer.name, "A")].double(), mean.double()
            scaling = self.get_scaling(None)
            C, G = stacked.B @ (stacked.A @ A.T) / scaling, A @ A.T
            if self.objective == "frobenius":
                ridge = G + self.lam * torch.eye(len(G), dtype=G.dtype)
                return (B + torch.linalg.solve(ridge, C - B @ G, left=False)).to(mean.dtype)
            size = float(compute_inner_product(stacked, stacked).sqrt()) / scaling
            if not size * float((B @ G * B).sum()) > 0:  # no direction to compare with
                return mean
            exponent = 1 if self.penalty == "norm" else 2
            return descend_to_cosine(B, C, G, size, self.lam, exponent, self.server_steps, self.server_lr).to(
                mean.dtype
            )

        by_layer = map_layers(correct, self.spec.layers)
        return state.advance_round(tensors=means | {join_tensor_name(layer, "B"): B for layer, B in by_layer.items()})
