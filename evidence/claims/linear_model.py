"""Rank-1 federated linear regression, for which RoLoRA, FFA-LoRA and FedAvg of LoRA can be computed exactly.

Chen et al., "Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA", NeurIPS 2025,
arXiv:2502.01755, sections 5.1 and A.5, in the paper's letters: a (down-projection) is a unit vector, b is the other
factor.

    client i:  Y_i = X_i a* b_i*^T,  X_i (m, d) standard Gaussian;   l_i(a, b) = ||X_i (a* b_i*^T - a b^T)||_F^2 / m

A client's data enter only through G_i = X_i^T X_i / m; G_i = I is the population loss of section A.5. Shapes:
N clients, D inputs, P outputs. Pure functions; every method starts from unit a, and a global model is a pair (a, b).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearFederation:
    """The clients' problems.

    Args:
        G_NDD: Second moments of the inputs, one for each client.
        a_D: The a* shared by all clients, with norm 1.
        b_NP: The b* of each client.
    """

    G_NDD: Tensor
    a_D: Tensor
    b_NP: Tensor


def from_samples(X_NMD: Tensor, a_D: Tensor, b_NP: Tensor) -> LinearFederation:
    """Build clients with m samples each; ``b_NP`` with equal rows is the homogeneous case of section 5.1."""
    return LinearFederation(X_NMD.mT @ X_NMD / X_NMD.shape[1], a_D, b_NP)


def create_population(a_D: Tensor, b_NP: Tensor) -> LinearFederation:
    """Build clients with infinitely many samples."""
    identity = torch.eye(len(a_D), dtype=a_D.dtype)
    return LinearFederation(identity.expand(len(b_NP), -1, -1), a_D, b_NP)


def compute_angle_distance(a_D: Tensor, other_D: Tensor) -> float:
    """Return |sin| of the angle between two unit vectors: the norm of one's component orthogonal to the other."""
    return float(torch.linalg.norm(a_D - other_D * (other_D @ a_D)))


def losses(problem: LinearFederation, a_D: Tensor, b_P: Tensor) -> Tensor:
    """Return l_i(a, b) of every client, (N,)."""
    error_NDP = problem.a_D[:, None] * problem.b_NP[:, None, :] - torch.outer(a_D, b_P)
    return (error_NDP * (problem.G_NDD @ error_NDP)).sum((1, 2))


def minimize_b(problem: LinearFederation, a: Tensor) -> Tensor:
    """Return every argmin_b l_i(a, b), (N, P): (a^T G_i a* / a^T G_i a) b_i*; a is (D,), or (N, D) for one a client."""
    own_ND = a.expand(len(problem.b_NP), -1)
    Ga_ND = (problem.G_NDD @ own_ND[:, :, None]).squeeze(2)
    return ((Ga_ND @ problem.a_D) / (Ga_ND * own_ND).sum(1))[:, None] * problem.b_NP


def compute_gradient_a(problem: LinearFederation, a: Tensor, b: Tensor) -> Tensor:
    """Return the gradient of every l_i by a, (N, D): 2 G_i (a b^T - a* b_i*^T) b; a and b are shared or one each."""
    own_ND, b_NP = a.expand(len(problem.b_NP), -1), b.expand_as(problem.b_NP)
    residual_ND = (b_NP * b_NP).sum(1)[:, None] * own_ND - (problem.b_NP * b_NP).sum(1)[:, None] * problem.a_D
    return 2 * (problem.G_NDD @ residual_ND[:, :, None]).squeeze(2)


def run_rolora_round(problem: LinearFederation, a_D: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """Run one iteration of Algorithm 2 (two communication rounds): exact b for a, their mean, one step of a, unit norm.

    Returns:
        The new a, and the mean b used for its step.
    """
    b_P = minimize_b(problem, a_D).mean(0)
    moved_D = a_D - eta * compute_gradient_a(problem, a_D, b_P).mean(0)
    return moved_D / torch.linalg.norm(moved_D), b_P


def compute_ffa_solution(problem: LinearFederation, a_D: Tensor) -> Tensor:
    """Return FFA-LoRA's b for the frozen a: the mean of the clients' minimizers, constant after one round."""
    return minimize_b(problem, a_D).mean(0)


def compute_ffa_loss(delta: float, b_norm: float, clients: int, samples: int) -> float:
    """Return FFA-LoRA's expected training loss (Proposition 5.5) for homogeneous clients with more than 2 samples each.

    ``(1 + c) ||b*||^2 delta^2``, c = (N (4 - m) - 2) / (N^2 m (m - 2)), delta the angle distance of the frozen a. c is
    negative for m > 4, because the loss is measured on the samples to which b was fitted.
    """
    c = (clients * (4 - samples) - 2) / (clients**2 * samples * (samples - 2))
    return (1 + c) * b_norm**2 * delta**2


def run_fedit_round(problem: LinearFederation, a_D: Tensor, eta: float, steps: int = 1) -> tuple[Tensor, Tensor]:
    """Run one round of FedAvg of LoRA: every client alternates on its own, and both factors are averaged.

    A client's step is that of Algorithm 2 with its own b: exact b for its a, one step of a, unit norm. After the last
    step b is fitted once more, so that it is optimal for the final a. The mean of a is scaled to unit norm and its
    length moved into b, which leaves the product unchanged.

    Returns:
        The new a, and b.
    """
    own_ND = a_D.expand(len(problem.b_NP), -1)
    for _ in range(steps):
        moved_ND = own_ND - eta * compute_gradient_a(problem, own_ND, minimize_b(problem, own_ND))
        own_ND = moved_ND / torch.linalg.norm(moved_ND, dim=1, keepdim=True)
    b_P, mean_D = minimize_b(problem, own_ND).mean(0), own_ND.mean(0)
    length = torch.linalg.norm(mean_D)
    return mean_D / length, b_P * length
