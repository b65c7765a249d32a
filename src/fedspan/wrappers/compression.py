"""Base of compressing wrappers: clients send the change of every tensor in fewer bits.

    client i:  sends C(x_i - x), every tensor by itself;   server:  x_i' = x + C(x_i - x), then as the wrapped method's

A change takes fewer bits than the new value at equal precision, because its entries are smaller. Tensors that are not
new values of what all clients start from (changes, gradients, sketches, control variates), and values that the method
converts before it sums them (``Claims.whole``), have no such x. They are compressed whole, and the server restores
them before the method's ``contribute``:

    client i:  sends C(y_i);   server:  y_i' = C(y_i), then as the wrapped method's
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


@dataclass(frozen=True, kw_only=True)
class Compression(RegisteredWrapper):
    """Compresses replies. Integer tensors (counters of batches, indices of slots) are sent as they are."""

    kind: ClassVar[str] = "compression"
    key: ClassVar[str]
    """Key in the registry, and prefix of the names of compressed tensors."""

    @abstractmethod
    def compress(
        self, changes: Tensors, job: Job, client: Client, memory: Memory, round: int
    ) -> tuple[Tensors, Memory]:
        """Compress the changes of a round's tensors, and tensors that are compressed whole (client).

        Args:
            changes: Changes, or whole tensors, by name.
            job: The last job of the round.
            client: The client.
            memory: The wrapper's own part of the client's memory.

        Returns:
            The tensors to transmit and the wrapper's new memory.
        """

    @abstractmethod
    def decompress(self, tensors: Tensors) -> Tensors:
        """Decompress transmitted tensors (server). Changes may be flat, with surplus entries at the end."""

    def declare_claims(self) -> Claims:
        claims = self.inner.declare_claims()
        quantities = tuple(
            replace(quantity, names=frozenset(self._prefix + name for name in quantity.names))
            for quantity in claims.quantities
        )
        sends = "changes" if claims.sends == "values" else claims.sends
        return replace(claims, exact=False, sends=sends, quantities=quantities)

    def explain_refusal(self, claims: Claims) -> str | None:
        if claims.reduction == "stack":
            return "compresses changes for a server that sums them, and this method's server needs single replies"
        if claims.sends == "nothing":
            return f"compresses replies, and this method's {claims.describe_other_replies()}"
        return None

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        return self.inner.start(message, client, self._select_inner_memory(memory), round)

    def finish(
        self, job: Job, trained: Trained, client: Client, memory: Memory, round: int
    ) -> tuple[Job | Message, Memory]:
        # In a later phase job.tensors are that phase's initial values; the round's wait in the memory between phases.
        stashed, _ = split_prefix(self._start_prefix, memory)
        stored, _ = split_prefix(self._memory_prefix, memory)
        start = stashed or job.tensors
        result, inner_memory = self.inner.finish(job, trained, client, self._select_inner_memory(memory), round)
        stored_residuals = add_prefix(self._memory_prefix, stored)
        if isinstance(result, Job):
            return result, {**inner_memory, **stored_residuals, **add_prefix(self._start_prefix, start)}
        claims = self.inner.declare_claims()
        changes: dict[str, Tensor] = {}
        integers: dict[str, Tensor] = {}
        for name, value in result.tensors.items():
            is_change = name in start and start[name].shape == value.shape
            if claims.sends == "values" and not is_change:
                raise FedspanError(
                    "method.wrappers", self.key, problem=f"the reply has a tensor that was not sent: {name}"
                )
            if not value.is_floating_point():
                integers[name] = value
            elif is_change and name.rpartition("/")[2] not in claims.whole:
                changes[name] = value - start[name]
            else:
                changes[self._whole_prefix + name] = value
        tensors, stored = self.compress(changes, job, client, stored, round)
        reply = replace(result, tensors={**add_prefix(self._prefix, tensors), **integers})
        return reply, {**inner_memory, **add_prefix(self._memory_prefix, stored)}

    def contribute(self, message: Message, client: Client) -> Contribution:
        # The method passes tensors on unchanged unless they are whole, so it need not see those that changes are of.
        compressed, integers = split_prefix(self._prefix, message.tensors)
        whole, changes = split_prefix(self._whole_prefix, self.decompress(compressed))
        contribution = self.inner.contribute(replace(message, tensors={**integers, **whole}), client)
        return replace(contribution, sum={**contribution.sum, **add_prefix(self._prefix, changes)})

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
    def _whole_prefix(self) -> str:
        return f"{self.key}-whole/"

    @property
    def _start_prefix(self) -> str:
        return f"{self.key}-start/"

    @property
    def _memory_prefix(self) -> str:
        return f"{self.key}-memory/"

    def _select_inner_memory(self, memory: Memory) -> Memory:
        for prefix in (self._start_prefix, self._memory_prefix):
            _, memory = split_prefix(prefix, memory)
        return memory
