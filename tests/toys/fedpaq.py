"""FedPAQ: clients upload their change of every tensor, quantised without bias.

Reisizadeh et al., "FedPAQ: A Communication-Efficient Federated Learning Method with Periodic Averaging and
Quantization", AISTATS 2020, arXiv:1909.13014; the quantiser is that of its example 1 (QSGD, arXiv:1610.02132):

    Q(x)_j = ||x|| sign(x_j) xi_j,  xi_j = (l + 1) / s with probability s |x_j| / ||x|| - l, else l / s

per tensor, l = floor(s |x_j| / ||x||). The server adds the mean to the same reference that every client started from:
``start(sync(state, None), None, {}).tensors``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from fedspan.core.method import Memory
from fedspan.core.tensors import Tensors, generator
from fedspan.core.values import Client, Contribution, Job, Message, Reduced, ServerState, Trained
from fedspan.errors import FedspanError
from fedspan.wrappers.wrapper import Wrapper

from .carry import into_job, into_next_phase, round_of, with_round

NORM = "#norm"
STASH = "fedpaq:start/"


def quantise(value: Tensor, levels: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Signed integer levels in [-s, s] and the norm; ``norm * level / s`` is an unbiased estimate of ``value``."""
    norm = value.norm()
    scaled = levels * value.abs() / norm if norm > 0 else torch.zeros_like(value)
    lower = scaled.floor()
    up = torch.rand(value.shape, generator=rng, dtype=torch.float64) < scaled - lower
    dtype = torch.int8 if levels <= 127 else torch.int32
    return (torch.sign(value) * (lower + up)).to(dtype), norm


def dequantise(quantised: Tensor, norm: Tensor, levels: int) -> Tensor:
    """The estimate, in the norm's dtype."""
    return quantised.to(norm.dtype) * (norm / levels)


@final
@dataclass(frozen=True, kw_only=True)
class FedPAQ(Wrapper):
    """Quantises replies of any method that replies with tensors that its clients were sent.

    Args:
        levels: s.
        seed: of the quantisers' draws.
    """

    levels: int = 127
    seed: int = 0

    def __post_init__(self) -> None:
        claims = self.declared()
        if claims.reinitialises or claims.heterogeneous_ranks:
            raise FedspanError(
                "method.compression",
                "fedpaq",
                "sends changes of tensors that server and clients share; this method's clients start from their own",
            )

    def reference(self, state: ServerState) -> Tensors:
        """What every client starts from."""
        return self.inner.start(self.inner.sync(state, None), None, {}).tensors

    def sync(self, state: ServerState, client: Client | None) -> Message:
        return with_round(self.inner.sync(state, client), state.round)

    def start(self, message: Message, client: Client | None, memory: Memory) -> Job:
        return into_job(self.inner.start(message, client, memory), message)

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory) -> tuple[Job | Message, Memory]:
        round = round_of(job)
        # In a second phase job.tensors is the start of the phase: the start of the round waits in memory, the only
        # thing beside the job that one ``finish`` hands to the next.
        stash = {name.removeprefix(STASH): value for name, value in memory.items() if name.startswith(STASH)}
        own = {name: value for name, value in memory.items() if not name.startswith(STASH)}
        start = stash or job.tensors
        result, own = self.inner.finish(job, trained, client, own)
        if isinstance(result, Job):
            return into_next_phase(result, round), {**own, **{STASH + name: value for name, value in start.items()}}
        tensors: dict[str, Tensor] = {}
        for name, value in result.tensors.items():
            if name not in start or start[name].shape != value.shape:
                raise FedspanError("method.compression", "fedpaq", f"the reply's {name} is no tensor that was sent")
            rng = generator(self.seed, "fedpaq", round, client.id, name)
            tensors[name], tensors[name + NORM] = quantise(value - start[name], self.levels, rng)
        return replace(result, tensors=tensors), own

    def contribute(self, message: Message, client: Client) -> Contribution:
        tensors = message.tensors
        changes = {
            name: dequantise(value, tensors[name + NORM], self.levels)
            for name, value in tensors.items()
            if not name.endswith(NORM)
        }
        return self.inner.contribute(replace(message, tensors=changes), client)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        reference = self.reference(state)

        def restored(changes: Tensors) -> Tensors:
            return {name: reference[name] + change for name, change in changes.items()}

        stack = tuple(replace(item, tensors=restored(item.tensors)) for item in reduced.stack)
        return self.inner.update(state, replace(reduced, mean=restored(reduced.mean), stack=stack))
