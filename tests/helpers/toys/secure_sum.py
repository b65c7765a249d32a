"""A sum that shows the server no single reply: fixed-point contributions under pairwise masks that cancel.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, without its key
agreement and its recovery from dropouts:

    client i:  y_i = round(w_i x_i 2^f) + sum_{j > i} m_ij - sum_{j < i} m_ji   (mod 2^32)
    server:    sum_i y_i = sum_i round(w_i x_i 2^f)                             (mod 2^32)

The client itself puts its reply in the form in which replies combine: ``contribute`` needs no server state. Weights are
summed under masks too.
"""

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from fedspan.core.method import Memory
from fedspan.core.tensors import create_generator
from fedspan.core.values import Client, Contribution, Job, Message, Reduced, ServerState, Trained
from fedspan.errors import FedspanError
from fedspan.wrappers.wrapper import Wrapper

MODULUS = 2**32
WEIGHT = "secure/weight"


@final
@dataclass(frozen=True, kw_only=True)
class SecureSum(Wrapper):
    """Masks contributions.

    Args:
        cohort: Ids of the clients selected in every round, which the six functions do not know.
        fraction_bits: Number of bits f after the binary point.
        seed: Seed of the pairwise masks, in place of the keys that two clients agree on.
    """

    cohort: tuple[str, ...]
    fraction_bits: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if self.declare_claims().reduction == "stack":
            raise FedspanError(
                "privacy.secure_aggregation",
                True,
                "hides single replies, and this method's server needs them one by one",
            )

    def finish(
        self, job: Job, trained: Trained, client: Client, memory: Memory, round: int
    ) -> tuple[Job | Message, Memory]:
        result, memory = self.inner.finish(job, trained, client, memory, round)
        if isinstance(result, Job):
            return result, memory
        contribution = self.inner.contribute(result, client)
        weight = client.weight if contribution.weight is None else contribution.weight
        terms = {name: value.double() * weight for name, value in contribution.sum.items()}
        terms[WEIGHT] = torch.tensor(weight, dtype=torch.float64)
        masked = {name: self._masked(name, value, client.id, round) for name, value in terms.items()}
        return Message(masked), memory

    def _masked(self, name: str, value: Tensor, client: str, round: int) -> Tensor:
        total = (value * 2**self.fraction_bits).round().to(torch.int64)
        for other in self.cohort:
            if other != client:
                rng = create_generator(self.seed, "mask", round, *sorted((client, other)), name)
                mask = torch.randint(MODULUS, value.shape, generator=rng)
                total = total + mask if client < other else total - mask
        return total % MODULUS

    def contribute(self, message: Message, client: Client) -> Contribution:
        # The reducer sums in float64, which is exact for integers below 2^53; its mean would truncate int64.
        return Contribution(sum={name: value.double() for name, value in message.tensors.items()}, weight=1.0)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        sums: dict[str, Tensor] = {}
        for name, mean in reduced.mean.items():
            total = (mean * reduced.count).round().to(torch.int64) % MODULUS
            signed = torch.where(total >= MODULUS // 2, total - MODULUS, total)
            sums[name] = signed.double() / 2**self.fraction_bits
        weight = sums.pop(WEIGHT)
        means = {name: value / weight for name, value in sums.items()}
        return self.inner.update(state, replace(reduced, mean=means))
