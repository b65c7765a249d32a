"""SLoRA: some rounds of sparse fine-tuning, whose result initializes LoRA.

Babakniya et al., "SLoRA: Federated Parameter Efficient Fine-Tuning of Language Models", arXiv:2308.06522.

    rounds 0 .. sparse_rounds - 1:  client i trains the entries of W under one random mask M of the given density,
                                    server: the masked entries <- sum_i p_i of them
    then:       W_sparse - W0 ~= U_r S_r V_r^T;  B = U_r S_r / s,  A = V_r^T;  the base is W0 again
    after that: A <- sum_i p_i A_i,  B <- sum_i p_i B_i        (as FedIT)

The mask depends on no data and is drawn from the seed, so only the values are transmitted. The first stage is exact.

Deviations: the values train as a change of W0 that starts at 0, so weight decay acts on the change and not on the
weight, and ``lora_dropout`` on its input. The first stage may have a learning rate of its own. A re-implementation in
FlexLoRA's code draws a mask for every client; here all have one, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from fedspan.core.factors import create_lora_job, list_tensor_names
from fedspan.core.lowrank import compute_leading_svd
from fedspan.core.method import Claims, Memory, RegisteredMethod, declare_bounded
from fedspan.core.parametrization import Sparse, count_entries, draw_entries, scatter_entries
from fedspan.core.tensors import Tensors, join_tensor_name
from fedspan.core.values import Client, Group, Job, LayerSpec, Message, Reduced, ServerState, Weights


@final
@dataclass(frozen=True, kw_only=True)
class SLoRA(RegisteredMethod):
    """Sparse fine-tuning, then LoRA from its principal part.

    Args:
        sparse_rounds: Number of rounds of the first stage (at least 1).
        density: Share of a weight's entries that train in the first stage, above 0 and at most 1.
        sparse_lr_scale: Multiplier on its learning rate: single entries of W take smaller steps than factors.
    """

    claims: ClassVar[Claims] = Claims(
        paper="SLoRA: Federated Parameter Efficient Fine-Tuning of Language Models (arXiv:2308.06522)",
        exact=False,
    )

    sparse_rounds: int = 5
    density: float = declare_bounded(0.01, 1e-9, 1.0)
    sparse_lr_scale: float = 1.0

    def init(self, weights: Weights) -> ServerState:
        return ServerState(tensors=self._create_zeros())

    def _create_zeros(self) -> dict[str, Tensor]:
        return {
            join_tensor_name(layer.name, "values"): torch.zeros(count_entries(layer.shape, self.density))
            for layer in self.spec.layers
        }

    def _draw_entries(self, layer: LayerSpec) -> Tensor:
        return draw_entries(layer.shape, self.density, self.seed, layer.name)

    def sync(self, state: ServerState, client: Client | None) -> Message:
        # The values start at 0, so the first round transmits none.
        return Message(state.tensors if state.round else {})

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        if round >= self.sparse_rounds:
            return create_lora_job(self, message.tensors, client, train=("A", "B"), generation=1)
        entries = {join_tensor_name(layer.name, "entries"): self._draw_entries(layer) for layer in self.spec.layers}
        return Job(
            parametrization={layer.name: Sparse(layer.shape) for layer in self.spec.layers},
            tensors={**(message.tensors or self._create_zeros()), **entries},
            trainable=(Group(list_tensor_names(self.spec, "values"), lr_scale=self.sparse_lr_scale),),
        )

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        if state.round + 1 != self.sparse_rounds:
            return state.advance_round(tensors=reduced.mean)
        return state.advance_round(tensors=self._compute_principal(reduced.mean), generation=state.generation + 1)

    def _compute_principal(self, values: Tensors) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for layer in self.spec.layers:
            layer_values = values[join_tensor_name(layer.name, "values")]
            U, S, Vt = compute_leading_svd(
                scatter_entries(layer_values.double(), self._draw_entries(layer), layer.shape), self.r
            )
            tensors[join_tensor_name(layer.name, "A")] = Vt.to(layer_values.dtype).contiguous()
            tensors[join_tensor_name(layer.name, "B")] = (U * S / self.get_scaling(None)).to(layer_values.dtype)
        return tensors
