"""FedHM: every client trains a low-rank factorization of the whole weight, of the rank that it can afford.

Yao et al., "FedHM: Efficient Federated Learning for Heterogeneous Models via Low-rank Factorization", arXiv:2111.14655.

    server:    W = U S V^T;  client i gets U_r S_r^(1/2) and S_r^(1/2) V_r^T with r = r_i
    client i:  trains both factors; there is no frozen base
    server:    W <- sum_i p_i U_i V_i

A convolution's weight (O, C, k1, k2) is factorized as the (O k1) x (C k2) matrix. The average is exact; what a client
is sent is truncated to its rank. A rank beyond a layer's own is that layer's full rank.

Deviations: after a round W has at most the rank sum_i r_i, so it is stored as the factors of its SVD (from those of the
replies, never formed) and a client is sent a slice of them. A client of higher rank than W is sent U = 0 and a random
V for the rest, which changes nothing but can be trained. Ranks are numbers, not ratios, and equal for all layers; which
layers are factorized is ``model.target_modules``. ``keep_global`` is an option, not a rule, and its weight is that of
one client among equals; the published code's weights by rank and masked classes are left out. Batch normalization
between the two halves of a convolution, which the published models have, is not added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, final

from torch import Tensor

from fedspan.core.aggregation import map_layers
from fedspan.core.factors import draw_kaiming, list_tensor_names
from fedspan.core.lowrank import LowRank, balance_factors, compute_leading_svd, concatenate, svd
from fedspan.core.method import Claims, Memory, RegisteredMethod, declare_bounded
from fedspan.core.parametrization import Factorized, FactorizedConv, reshape_to_rectangle
from fedspan.core.penalties import ProductDecay
from fedspan.core.recent import MessageTensors
from fedspan.core.tensors import Tensors, create_generator, join_tensor_name
from fedspan.core.values import Client, Group, Job, LayerSpec, Message, Reduced, ServerState, Weights


def _pair(tensors: Tensors, layer: LayerSpec, scale: float = 1.0) -> LowRank:
    return LowRank(tensors[join_tensor_name(layer.name, "U")], tensors[join_tensor_name(layer.name, "V")], scale)


def _flatten_pairs(pairs: Mapping[str, LowRank]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for layer, pair in pairs.items():
        tensors[join_tensor_name(layer, "U")], tensors[join_tensor_name(layer, "V")] = (
            pair.B.contiguous(),
            pair.A.contiguous(),
        )
    return tensors


@final
@dataclass(frozen=True, kw_only=True)
class FedHM(RegisteredMethod):
    """Train factors, average products.

    Args:
        frobenius_decay: Weight decay of the products U V, in place of the factors' own; 0 retains the latter.
        keep_global: Whether the old weight counts as one more client in layers that no client trained at full rank.
    """

    claims: ClassVar[Claims] = Claims(
        paper="FedHM: Efficient Federated Learning for Heterogeneous Models via Low-rank Factorization "
        "(arXiv:2111.14655)",
        exact=True,
        heterogeneous_ranks=True,
        reduction="stack",
        adapter=False,
        reinitializes=True,
        sends="other",
    )

    frobenius_decay: float = declare_bounded(0.0, 0.0)
    keep_global: bool = False

    def init(self, weights: Weights) -> ServerState:
        def factorize(layer: LayerSpec) -> LowRank:
            matrix = reshape_to_rectangle(weights.get_weight(layer.name), layer.kernel)
            return balance_factors(*compute_leading_svd(matrix, min(matrix.shape))).to(matrix.dtype)

        return ServerState(tensors=_flatten_pairs(map_layers(factorize, self.spec.layers)))

    @cached_property
    def _message_tensors(self) -> MessageTensors:
        return MessageTensors()

    def sync(self, state: ServerState, client: Client | None) -> Message:
        if client is None:
            return Message(state.tensors)
        rank = client.rank

        def cut() -> Tensors:
            return _flatten_pairs({layer.name: self._cut(state, layer, rank) for layer in self.spec.layers})

        tensors = self._message_tensors.get_or_compute(state.round, state.tensors, rank, cut)
        return Message(tensors, {"generation": state.generation})

    def _cut(self, state: ServerState, layer: LayerSpec, rank: int) -> LowRank:
        """Return the first ``rank`` components of a layer, padded with components that add nothing."""
        pair, (rows, columns) = _pair(state.tensors, layer), layer.rectangle
        retained = LowRank(pair.B[:, :rank], pair.A[:rank])
        missing = min(rank, rows, columns) - retained.rank
        if missing <= 0:
            return retained
        random = draw_kaiming(missing, columns, create_generator(self.seed, "V", layer.name, state.round)).to(
            retained.A
        )
        return concatenate([retained, LowRank(retained.B.new_zeros(rows, missing), random)])

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        decay = ProductDecay(
            self.frobenius_decay,
            tuple((join_tensor_name(layer.name, "U"), join_tensor_name(layer.name, "V")) for layer in self.spec.layers),
        )
        group = Group(list_tensor_names(self.spec, "U", "V"), weight_decay=0.0 if self.frobenius_decay else None)
        return Job(
            parametrization={
                layer.name: Factorized() if layer.kernel == (1, 1) else FactorizedConv(layer.kernel)
                for layer in self.spec.layers
            },
            tensors=message.tensors,
            trainable=(group,),
            penalties=(decay,) if self.frobenius_decay else (),
            generation=int(message.scalars.get("generation", 0)),
        )

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        def average(layer: LayerSpec) -> LowRank:
            replies = [_pair(item.tensors, layer, item.weight) for item in reduced.stack]
            if self.keep_global and max(reply.rank for reply in replies) < min(layer.rectangle):
                share = 1 / (len(replies) + 1)
                replies = [LowRank(reply.B, reply.A, reply.scale * (1 - share)) for reply in replies]
                replies.append(_pair(state.tensors, layer, share))
            mean = concatenate(replies)
            return balance_factors(*svd(mean)).to(mean.B.dtype)

        pairs = map_layers(average, self.spec.layers)
        return state.advance_round(tensors=_flatten_pairs(pairs), generation=state.generation + 1)
