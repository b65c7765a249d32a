"""Second moments under drift, with a known answer for AJIVE.

``draw_second_moments`` is the synthetic setting of Peng et al., "Rethinking LoRA for Data Heterogeneous Federated
Learning: Subspace and State Alignment", arXiv:2602.01746, appendix F. Shapes: N rows, M columns.
"""

import torch
from torch import Tensor


def draw_second_moments(
    size: int, clients: int, drift: float, noise: float, seed: int, rank: int = 5, drift_rank: int = 2
) -> tuple[Tensor, list[Tensor]]:
    """Draw V* = (G*)^2 and the clients' V_k = (G* + L_k + Xi_k)^2, elementwise squares, all (size, size).

    G* and L_k are products of Gaussian factors, of ranks ``rank`` and ``drift_rank``, Xi_k is Gaussian; entries have
    variance 1 in G*, ``drift ** 2`` in L_k and ``noise ** 2`` in Xi_k. For a given seed the clients have a fixed order:
    a larger number of clients appends new ones.
    """
    rng = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int) -> Tensor:
        return torch.randn((rows, columns), generator=rng, dtype=torch.float64)

    def product(inner: int) -> Tensor:
        return draw(size, inner) @ draw(inner, size) / inner**0.5

    G = product(rank)
    views = [(G + drift * product(drift_rank) + noise * draw(size, size)).square() for _ in range(clients)]
    return G.square(), views
