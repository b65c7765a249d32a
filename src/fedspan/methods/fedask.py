"""FedASK: two exchanges of random sketches in a round give the SVD of the mean product, so that noise can stay in B.

Wen et al., "Differentially Private Federated Low Rank Adaptation Beyond Fixed-Matrix", NeurIPS 2025, arXiv:2507.09990.

    client i:  trains B_i under the global A (or both), l = r + oversampling
    client i:  sends Y_i = B_i (A_i Omega),  Omega (I, l) Gaussian, of the round and the layer
    server:    Q = an orthonormal basis of the columns of sum_i p_i Y_i, sends Q
    client i:  sends P_i = A_i^T (B_i^T Q)
    server:    Q (sum_i p_i P_i)^T = U S V^T;   B <- U_r S_r^(1/2),  A <- S_r^(1/2) V_r^T

No client sends a factor, and both factors change although only B meets the noise of DP-SGD: the sketches and the SVD
follow from B_i, which is private, and from A and Omega, which depend on no data. Where clients train B alone, the mean
product has rank r and Q spans it for any l >= r, so the average is exact. With ``train_A`` its rank is up to K r for K
clients: the result is then close to its best approximation of rank r, the closer the larger the oversampling.

Deviations: sources are the paper's abstract and the authors' code, where clients train both factors unless ``freezeA``
is set, and B alone under DP-SGD; here ``train_A`` is off in both cases, because only then the average is exact. In the
code one Omega serves all rounds; here each round draws its own. Q is from an SVD instead of a QR, so that directions of
rounding can be left out. Moments are dropped every round. The head follows ``model.extras``; it is averaged over the
clients of the first exchange. A client that drops out between the exchanges is in Q, but not in P, and the average is
then not exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from fedspan.core.aggregation import map_layers
from fedspan.core.factors import create_b_factors, create_lora_job, draw_a_factors, flatten_pairs
from fedspan.core.lowrank import LowRank, balance_factors, fix_signs, svd
from fedspan.core.method import Claims, Memory, RegisteredMethod, declare_bounded
from fedspan.core.tensors import Tensors, create_generator, join_tensor_name
from fedspan.core.values import Client, Job, LayerSpec, Message, Reduced, ServerState, Trained, Weights
from fedspan.errors import FedspanError


@final
@dataclass(frozen=True, kw_only=True)
class FedASK(RegisteredMethod):
    """Average products of factors by two sketches.

    Args:
        oversampling: Columns of the sketches beyond r; with none, a sketch in float32 may be ill-conditioned.
        train_A: Whether clients also train A; under DP-SGD, A then receives noise, too.
    """

    claims: ClassVar[Claims] = Claims(
        paper="Differentially Private Federated Low Rank Adaptation Beyond Fixed-Matrix "
        "(NeurIPS 2025, arXiv:2507.09990)",
        exact=True,
        reinitializes=True,
        sends="other",
        second_exchange=True,
    )

    oversampling: int = declare_bounded(4, 0)
    train_A: bool = False

    def declare_claims(self) -> Claims:
        """Return the claims; where clients train A, too, the mean product has a higher rank than the result."""
        return replace(self.claims, exact=not self.train_A)

    def init(self, weights: Weights) -> ServerState:
        return ServerState(tensors={**draw_a_factors(self, self.r), **create_b_factors(self.spec, self.r)})

    def sync(self, state: ServerState, client: Client | None) -> Message:
        return Message(state.tensors, {"generation": state.generation})

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        train = ("A", "B") if self.train_A else ("B",)
        return create_lora_job(self, message.tensors, client, train, int(message.scalars["generation"]))

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory, round: int) -> tuple[Message, Memory]:
        def sketch(layer: LayerSpec) -> Tensor:
            B, A = _get_factors(layer, trained.tensors)
            Omega = self._draw_sketch(layer, round).to(A.device)
            return (B.double() @ (A.double() @ Omega)).to(B.dtype)

        return Message(_name(map_layers(sketch, self.spec.layers), "Y")), memory

    def build_second_order(self, state: ServerState, reduced: Reduced) -> Message:
        def compute_basis(layer: LayerSpec) -> Tensor:
            return _compute_basis(reduced.mean[join_tensor_name(layer.name, "Y")])

        return Message(_name(map_layers(compute_basis, self.spec.layers), "Q"))

    def build_second_reply(self, order: Message, tensors: Tensors, client: Client, round: int) -> Message:
        """``Method.build_second_reply``.

        Raises:
            FedspanError: If the order's matrices are not those of the layers.
        """

        def project(layer: LayerSpec) -> Tensor:
            B, A = _get_factors(layer, tensors)
            Q = order.tensors.get(join_tensor_name(layer.name, "Q"))
            shape = (layer.out_features, min(layer.out_features, self._width))
            if Q is None or Q.shape != shape or not Q.is_floating_point():
                raise FedspanError("message.tensors", layer.name, f"a matrix Q {list(shape)} of the sketch")
            return (A.double().T @ (B.double().T @ Q.to(B.device).double())).to(A.dtype)

        return Message(_name(map_layers(project, self.spec.layers), "P"))

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        def decompose(layer: LayerSpec) -> LowRank:
            Y, P = (reduced.mean[join_tensor_name(layer.name, slot)] for slot in "YP")
            return balance_factors(*svd(LowRank(_compute_basis(Y), P.T), self.r)).to(Y.dtype)

        pairs = map_layers(decompose, self.spec.layers)
        return state.advance_round(tensors=flatten_pairs(pairs), generation=state.generation + 1)

    @property
    def _width(self) -> int:
        return self.r + self.oversampling

    def _draw_sketch(self, layer: LayerSpec, round: int) -> Tensor:
        """Draw Omega (I, l) in float64; every client of a round draws the same."""
        rng = create_generator(self.seed, "sketch", layer.name, round)
        return torch.randn((layer.in_features, self._width), generator=rng, dtype=torch.float64)


def _get_factors(layer: LayerSpec, tensors: Tensors) -> tuple[Tensor, Tensor]:
    return tensors[join_tensor_name(layer.name, "B")], tensors[join_tensor_name(layer.name, "A")]


def _compute_basis(Y: Tensor) -> Tensor:
    """Compute an orthonormal basis of a mean sketch (O, l), as (O, min(O, l)) in its dtype.

    Columns of singular values that are 0 to the rounding of Y are zeros: their directions would be those of the
    rounding, and show in P when other clients reply than in Y.
    """
    U, S, Vt = torch.linalg.svd(Y.double(), full_matrices=False)
    return (fix_signs(U, Vt)[0] * (torch.finfo(Y.dtype).eps * S[:1] < S)).to(Y.dtype)


def _name(tensors: dict[str, Tensor], slot: str) -> dict[str, Tensor]:
    return {join_tensor_name(layer, slot): value.contiguous() for layer, value in tensors.items()}
