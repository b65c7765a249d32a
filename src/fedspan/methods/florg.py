"""FLoRG: one trainable factor A under fixed bases; the server averages Gram matrices and aligns the new factor.

"FLoRG", ICLR 2026, arXiv:2602.17095. With k = min(m, n) for a layer of m x n:

    W_t = W0 + s L A_t^T A_t R,   L (m, k) and R (k, n) fixed,  L^T L = I,  R R^T = I,  A (r, k)
    client i:  trains A_i from A_t
    server:    Q = sum_i p_i A_i^T A_i = P^T Lambda P;   A~ = Lambda^(1/2) P  (r', k), r' <= r,
               of the greatest eigenvalues
               A_t A~^T = U Sigma V^T;   A_{t+1} = U V^T A~  (r, k)

Q is not formed: A~ comes from the SVD of the stacked sqrt(p_i) A_i. L and R follow from the seed and are never
transmitted.

Deviations: the equations have no alpha; s = lora_alpha / r stands before the product here. Q has a rank of up to K r,
and the paper does not say how many eigenpairs A~ has; its proof (appendix A.1, lemma 2) needs r' <= r: ``alignment:
paper`` takes the r greatest, the nearest Gram matrix of rank r, and rotates them towards A_t. ``untruncated`` takes
all, as the equations read without the proof, and keeps the r-dimensional part near A_t. ``none`` is ``paper`` without
the rotation. The paper says of L and R only that they are orthonormal: ``bases: structured`` takes the identity on the
shorter side and a seeded cosine transform on the longer one, ``dense`` two uniformly random matrices. A_1 is Gaussian
or has orthonormal rows of size ``init_std``. ``center`` takes s L A_1^T A_1 R off W0. ``gram_sums``: a reply
contributes A_i^T A_i (k x k, float64), so that Q is a weighted mean, which secure aggregation can compute; squaring
costs half of the digits. A_{t+1} is rotated towards A_t, so SCAFFOLD's variates last. Clients' stored moments are
dropped in every round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from fedspan.core.alignment import compute_gram_factor, factorize_gram, solve_procrustes
from fedspan.core.base import BaseUpdate, Increment
from fedspan.core.factors import list_tensor_names
from fedspan.core.lowrank import LowRank
from fedspan.core.method import Claims, Memory, RegisteredMethod
from fedspan.core.parametrization import Gram, MixedGram, Parametrization, draw_dense_bases, draw_mixing_keys
from fedspan.core.projectors import draw_random_projector
from fedspan.core.tensors import Tensors, create_generator, join_tensor_name, select_slots
from fedspan.core.values import Client, Contribution, Group, Job, LayerSpec, Message, Reduced, ServerState, Weights


@final
@dataclass(frozen=True, kw_only=True)
class FLoRG(RegisteredMethod):
    """Average Gram matrices; align.

    Args:
        alignment: Reduction of the averaged Gram matrix to rank r: paper (its r greatest eigenpairs, rotated towards
            A_t), untruncated (all eigenpairs, of which the part near A_t remains), or none (paper without rotation).
        bases: Kind of L and R: structured (no memory) or dense (as large as the layer) L and R.
        init_A: Distribution of A_1: gaussian entries, or orthonormal rows of the same expected length.
        init_std: Standard deviation of A's initial entries.
        center: Whether to subtract the initial product from the base.
        gram_sums: Whether replies contribute Gram matrices, which can be summed, instead of factors, which cannot.
    """

    claims: ClassVar[Claims] = Claims(paper="FLoRG (ICLR 2026, arXiv:2602.17095)", exact=False, reduction="stack")

    alignment: Literal["paper", "untruncated", "none"] = "paper"
    bases: Literal["structured", "dense"] = "structured"
    init_A: Literal["gaussian", "orthonormal"] = "gaussian"
    init_std: float = 0.01
    center: bool = False
    gram_sums: bool = False

    def declare_claims(self) -> Claims:
        claims = replace(self.claims, reinitializes=self.alignment == "none", sends_base=self.center)
        return replace(claims, reduction="sum", sends="other", whole=("A",)) if self.gram_sums else claims

    def draw_first_A(self, layer: LayerSpec) -> Tensor:
        """Draw A_1 (R, K), float32."""
        rng, k = create_generator(self.seed, "A", layer.name), min(layer.shape)
        if self.init_A == "gaussian":
            return self.init_std * torch.randn(self.r, k, generator=rng)
        rows = draw_random_projector((k, k), min(self.r, k), "right", rng)
        return self.init_std * math.sqrt(k) * torch.cat([rows, rows.new_zeros(self.r - len(rows), k)])

    def build_fixed(self, layer: LayerSpec) -> tuple[Parametrization, dict[str, Tensor]]:
        """Return the layer's parametrization and its slots for L and R, all from the seed."""
        scaling = self.get_scaling(None)
        if self.bases == "dense":
            L_OK, R_KI = draw_dense_bases(layer.shape, self.seed, layer.name)
            return Gram(scaling), {"L": L_OK, "R": R_KI}
        positions, signs = draw_mixing_keys(max(layer.shape), min(layer.shape), self.seed, layer.name)
        side = "right" if layer.out_features <= layer.in_features else "left"
        return MixedGram(scaling, side), {"places": positions, "signs": signs}

    def init(self, weights: Weights) -> ServerState:
        tensors = {join_tensor_name(layer.name, "A"): self.draw_first_A(layer) for layer in self.spec.layers}
        if not self.center:
            return ServerState(tensors=tensors)
        products = {layer.name: self._compute_product(layer, tensors) for layer in self.spec.layers}
        negative = {name: LowRank(pair.B, pair.A, -pair.scale) for name, pair in products.items()}
        return ServerState(tensors=tensors, base=BaseUpdate().add(Increment(0, negative)))

    def _compute_product(self, layer: LayerSpec, tensors: Tensors) -> LowRank:
        parametrization, fixed = self.build_fixed(layer)
        pair = parametrization.compute_effective({**select_slots(tensors, layer.name), **fixed}).pair
        assert isinstance(pair, LowRank)
        return pair

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        parametrization: dict[str, Parametrization] = {}
        tensors = dict(message.tensors)
        for layer in self.spec.layers:
            parametrization[layer.name], fixed = self.build_fixed(layer)
            tensors |= {join_tensor_name(layer.name, slot): value for slot, value in fixed.items()}
        return Job(parametrization, tensors, trainable=(Group(list_tensor_names(self.spec, "A")),), generation=round)

    def contribute(self, message: Message, client: Client) -> Contribution:
        if not self.gram_sums:
            return Contribution(stack=message.tensors)
        sums: dict[str, Tensor] = {}
        for layer in self.spec.layers:
            A = message.tensors[join_tensor_name(layer.name, "A")].double()
            sums[join_tensor_name(layer.name, "gram")] = A.T @ A
        return Contribution(sum=sums)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        tensors: dict[str, Tensor] = {}
        for layer in self.spec.layers:
            name = join_tensor_name(layer.name, "A")
            dtype = (state if self.gram_sums else reduced.stack[0]).tensors[name].dtype
            tensors[name] = self._align(self._compute_mean(layer, reduced), state.tensors[name].double()).to(dtype)
        return state.advance_round(tensors=tensors, generation=state.generation + (self.alignment == "none"))

    def _compute_mean(self, layer: LayerSpec, reduced: Reduced) -> Tensor:
        if self.gram_sums:
            return factorize_gram(reduced.mean[join_tensor_name(layer.name, "gram")])
        name = join_tensor_name(layer.name, "A")
        return compute_gram_factor(
            torch.cat([math.sqrt(item.weight) * item.tensors[name].double() for item in reduced.stack])
        )

    def _align(self, A_tilde: Tensor, before_RK: Tensor) -> Tensor:
        source = A_tilde if self.alignment == "untruncated" else A_tilde[: self.r]
        if self.alignment == "none":
            return torch.cat([source, source.new_zeros(self.r - len(source), source.shape[1])])
        return solve_procrustes(source, before_RK) @ source
