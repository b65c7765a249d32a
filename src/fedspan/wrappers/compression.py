"""What compressing wrappers share: clients send the change of every tensor in fewer bits.

    client i:  sends C(x_i - x), every tensor by itself;   server:  x_i' = x + C(x_i - x), then as the wrapped method's

A change takes fewer bits than the new value at equal precision, because its entries are smaller.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedspan.core.method import Claims, Memory
from fedspan.core.tensors import Tensors
from fedspan.core.values import Client, Contribution, Job, Message, Reduced, ServerState, Trained
from fedspan.errors import FedspanError
from fedspan.wrappers.wrapper import RegisteredWrapper, add_prefix, compute_common_start, split_prefix

__all__ = ["Compression"]


@dataclass(frozen=True, kw_only=True)
class Compression(RegisteredWrapper):
    """Compresses replies. Integer tensors (counters of batches) are sent as they are."""

    kind: ClassVar[str] = "compression"
    key: ClassVar[str]
    """Key in the registry, and prefix of the names of compressed tensors."""

    @abstractmethod
    def compress(
        self, changes: Tensors, job: Job, client: Client, memory: Memory, round: int
    ) -> tuple[Tensors, Memory]:
        """Compress the changes of a round's tensors (client).

        Args:
            changes: Changes by tensor name.
            job: The last job of the round.
            client: The client.
            memory: The wrapper's own part of the client's memory.
            round: Number of the round, from 0.

        Returns:
            The tensors to transmit and the wrapper's new memory.
        """

    @abstractmethod
    def decompress(self, tensors: Tensors) -> Tensors:
        """Decompress transmitted changes (server). They may be flat, with surplus entries at the end."""

    def declare_claims(self) -> Claims:
        claims = self.inner.declare_claims()
        quantities = tuple(
            replace(quantity, names=frozenset(self._prefix + name for name in quantity.names))
            for quantity in claims.quantities
        )
        return replace(claims, exact=False, sends="changes", quantities=quantities)  # of values, or it is refused

    def explain_refusal(self, claims: Claims) -> str | None:
        if claims.reduction == "stack":
            return "compresses changes for a server that sums them, and this method's server needs single replies"
        if claims.sends != "values":
            other = claims.describe_other_replies()
            return f"sends changes of tensors from which all clients start alike, and this method's {other}"
        return None

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        return self.inner.start(message, client, self._inner_memory(memory), round)

    def finish(
        self, job: Job, trained: Trained, client: Client, memory: Memory, round: int
    ) -> tuple[Job | Message, Memory]:
        # In a later phase job.tensors are that phase's initial values; the round's wait in the memory between phases.
        stashed, _ = split_prefix(self._start_prefix, memory)
        stored, _ = split_prefix(self._memory_prefix, memory)
        start = stashed or job.tensors
        result, inner_memory = self.inner.finish(job, trained, client, self._inner_memory(memory), round)
        stored_residuals = add_prefix(self._memory_prefix, stored)
        if isinstance(result, Job):
            return result, {**inner_memory, **stored_residuals, **add_prefix(self._start_prefix, start)}
        changes: dict[str, Tensor] = {}
        for name, value in result.tensors.items():
            if name not in start or start[name].shape != value.shape:
                raise FedspanError(
                    "method.wrappers", self.key, problem=f"the reply has a tensor that was not sent: {name}"
                )
            if value.is_floating_point():
                changes[name] = value - start[name]
        counts = {name: value for name, value in result.tensors.items() if name not in changes}
        tensors, stored = self.compress(changes, job, client, stored, round)
        reply = replace(result, tensors={**add_prefix(self._prefix, tensors), **counts})
        return reply, {**inner_memory, **add_prefix(self._memory_prefix, stored)}

    def contribute(self, message: Message, client: Client) -> Contribution:
        # For methods that ``explain_refusal`` admits, the method's own contribution would be the unchanged tensors.
        compressed, others = split_prefix(self._prefix, message.tensors)
        contribution = self.inner.contribute(replace(message, tensors=others), client)
        return replace(contribution, sum={**contribution.sum, **add_prefix(self._prefix, self.decompress(compressed))})

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        start = compute_common_start(self.inner, state)
        changes, others = split_prefix(self._prefix, reduced.mean)
        mean = {
            name: start[name] + change.flatten()[: start[name].numel()].view_as(start[name])
            for name, change in changes.items()
        }
        return self.inner.update(state, replace(reduced, mean={**others, **mean}))

    @property
    def _prefix(self) -> str:
        return f"{self.key}/"

    @property
    def _start_prefix(self) -> str:
        return f"{self.key}-start/"

    @property
    def _memory_prefix(self) -> str:
        return f"{self.key}-memory/"

    def _inner_memory(self, memory: Memory) -> Memory:
        for prefix in (self._start_prefix, self._memory_prefix):
            _, memory = split_prefix(prefix, memory)
        return memory
