"""RAVAN: several heads between fixed factors, of which clients train only the r x r cores and one scale each.

Raje et al., "Ravan: Multi-Head Low-Rank Adaptation for Federated Fine-Tuning", NeurIPS 2025, arXiv:2506.05568.

    W + s sum_j c_j B_j R_j A_j;   B_j, A_j fixed, R_j = 0 at the beginning, c_j = 1 at the beginning of every round
    client i:  trains R_ij and c_ij;  sends c_ij R_ij
    server:    R_j <- sum_i p_i c_ij R_ij

Exact, because B_j and A_j are the same for all clients; the update has rank h r for h r^2 numbers a layer (h heads).

Deviations: sources are the paper's abstract and two published summaries of its text; its code was not available. The
paper's clients with little compute train only their most important heads, and a head is averaged over those that
trained it; here all clients train all heads. The paper has no s: set ``lora_alpha`` to ``r``. If h r exceeds a
dimension of a layer, its columns of B (rows of A) are orthonormal in sets of that size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from fedspan.core.factors import list_tensor_names
from fedspan.core.method import Claims, Memory, RegisteredMethod
from fedspan.core.parametrization import MultiHeadCore
from fedspan.core.tensors import create_generator, join_tensor_name
from fedspan.core.values import Client, Group, Job, Message, ServerState, Trained, Weights


def _draw_columns(rows: int, columns: int, rng: torch.Generator, *, orthonormal: bool) -> Tensor:
    """Draw a matrix (rows, columns), float32: Gaussian with columns of norm 1 on average, or with orthonormal columns.

    More than ``rows`` columns are orthonormal in sets of ``rows``, the last of which may be smaller.
    """
    gaussian = torch.randn((rows, columns), generator=rng, dtype=torch.float64)
    if not orthonormal:
        return (gaussian / rows**0.5).to(torch.float32)
    parts = [torch.linalg.qr(part) for part in gaussian.split(rows, 1)]
    return torch.cat([Q * torch.sign(torch.diagonal(R)) for Q, R in parts], 1).to(torch.float32)


@final
@dataclass(frozen=True, kw_only=True)
class RAVAN(RegisteredMethod):
    """Average the cores of several heads.

    Args:
        heads: Number of heads, of rank ``r`` each.
        fixed_factors: Distribution of B and A: ``orthonormal`` across all heads, or ``gaussian``.
    """

    claims: ClassVar[Claims] = Claims(
        paper="Ravan: Multi-Head Low-Rank Adaptation for Federated Fine-Tuning (NeurIPS 2025, arXiv:2506.05568)",
        exact=True,
    )

    heads: int = 4
    fixed_factors: Literal["orthonormal", "gaussian"] = "orthonormal"

    def init(self, weights: Weights) -> ServerState:
        shape = (self.heads, self.r, self.r)
        return ServerState(tensors={name: torch.zeros(shape) for name in list_tensor_names(self.spec, "R")})

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        scales = {name: torch.ones(self.heads) for name in list_tensor_names(self.spec, "c")}
        return Job(
            parametrization={layer.name: MultiHeadCore(self.get_scaling(client)) for layer in self.spec.layers},
            tensors={**self._draw_fixed(), **message.tensors, **scales},
            trainable=(Group(list_tensor_names(self.spec, "R", "c")),),
        )

    def _draw_fixed(self) -> dict[str, Tensor]:
        """Draw B (O, h R) and A (h R, I) of every target layer."""
        tensors: dict[str, Tensor] = {}
        for layer in self.spec.layers:
            for slot, size in (("A", layer.in_features), ("B", layer.out_features)):
                rng = create_generator(self.seed, slot, layer.name)
                is_orthonormal = self.fixed_factors == "orthonormal"
                drawn = _draw_columns(size, self.heads * self.r, rng, orthonormal=is_orthonormal)
                tensors[join_tensor_name(layer.name, slot)] = drawn if slot == "B" else drawn.T.contiguous()
        return tensors

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory, round: int) -> tuple[Message, Memory]:
        cores: dict[str, Tensor] = {}
        for layer in self.spec.layers:
            name = join_tensor_name(layer.name, "R")
            cores[name] = trained.tensors[join_tensor_name(layer.name, "c")][:, None, None] * trained.tensors[name]
        return Message(cores), memory
