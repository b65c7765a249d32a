"""FlexLoRA: average the clients' products, then give every client the best approximation of its rank.

Bai et al., "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources",
NeurIPS 2024, arXiv:2402.11505.

    client i:  trains A_i, B_i of its own rank r_i
    server:    D = sum_i p_i s_i B_i A_i = U S V^T
    client i:  starts from B_i = U_{r_i} S_{r_i} / s_i,  A_i = V_{r_i}^T

Not exact: the base never changes, so in every round a client loses what lies beyond its rank.

Deviations: the SVD is that of the stacked factors, never of an O x I matrix. The scalings are the clients' own (the
published code has one numerator built in). It puts S into B; ports share it between both factors: the option ``split``.
The server stores as many components as the largest rank that has replied so far, at least r. A client of a larger rank,
or of one that D does not reach, has the rest of its directions as at the beginning: A random, B = 0. Moments are
dropped every round, because the factors are new ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, final

from torch import Tensor

from fedspan.core.aggregation import map_layers, sum_products
from fedspan.core.factors import create_lora_job, flatten_pairs, resize_factors
from fedspan.core.lowrank import LowRank, assign_values_to_B, balance_factors, svd
from fedspan.core.method import Claims, Memory, RegisteredMethod
from fedspan.core.recent import MessageTensors
from fedspan.core.tensors import Tensors, join_tensor_name
from fedspan.core.values import Client, Job, LayerSpec, Message, Reduced, ServerState, Weights


@final
@dataclass(frozen=True, kw_only=True)
class FlexLoRA(RegisteredMethod):
    """Average products, truncate to each client's rank.

    Args:
        split: Destination of the singular values: ``B`` (published code), or half to each (``balance_factors``).
    """

    claims: ClassVar[Claims] = Claims(
        paper="Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources "
        "(NeurIPS 2024, arXiv:2402.11505)",
        exact=False,
        heterogeneous_ranks=True,
        reduction="stack",
        reinitializes=True,
    )

    split: Literal["B", "balanced"] = "B"

    def init(self, weights: Weights) -> ServerState:
        return ServerState()

    @cached_property
    def _message_tensors(self) -> MessageTensors:
        return MessageTensors()

    def sync(self, state: ServerState, client: Client | None) -> Message:
        rank, share = self.get_rank(client), self.get_scaling(client) ** (1.0 if self.split == "B" else 0.5)

        def cut() -> Tensors:
            factors: dict[str, Tensor] = {}
            for layer in self.spec.layers if state.tensors else ():
                a, b = join_tensor_name(layer.name, "A"), join_tensor_name(layer.name, "B")
                A, B = state.tensors[a][:rank], state.tensors[b][:, :rank]
                factors |= {a: A if self.split == "B" else A / share, b: B / share}
            return factors

        tensors = self._message_tensors.get_or_compute(state.round, state.tensors, (rank, share), cut)
        return Message(tensors, {"generation": state.generation})

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        tensors = resize_factors(self, message.tensors, self.get_rank(client))
        return create_lora_job(self, tensors, client, ("A", "B"), int(message.scalars["generation"]))

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        """Store the SVD itself, scaling 1; ``sync`` cuts it to a client's rank and scaling."""
        largest = max(
            self.r, int(state.scalars.get("rank", 0)), *(contribution.client.rank for contribution in reduced.stack)
        )
        share = assign_values_to_B if self.split == "B" else balance_factors

        def decompose(layer: LayerSpec) -> LowRank:
            stacked = sum_products(layer.name, reduced)
            return share(*svd(stacked, largest)).to(stacked.B.dtype)

        tensors = flatten_pairs(map_layers(decompose, self.spec.layers))
        return state.advance_round(tensors=tensors, scalars={"rank": largest}, generation=state.generation + 1)
