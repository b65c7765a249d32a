"""Low-precision transfer: tensors are transmitted as bfloat16, float16 or int8, in both directions.

    server:    sends D(x);   client i:  trains from D(x), sends U(x_i - D(x) [+ e_i])
    server:    x_i' = x + U(x_i - D(x)), then as the wrapped method's

U and D round to the format of each direction (``core.transfer_formats``). The server's x stays in float32, so what D
rounds off is not lost: changes below D's resolution add up in x until a client receives them. With error feedback a
client adds what U rounded off to its next change: e_i <- e_i + (x_i - D(x)) - U(...), as in Karimireddy et al., "Error
Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019, arXiv:1901.09847. Tensors without a common
start (``wrappers.compression``) are rounded themselves, and so are both messages of a second exchange.

Deviations: int8 replies without error feedback are rounded stochastically, so that they are unbiased; the paper's
scheme rounds deterministically, which int8 with error feedback does. A client drops its error when the method gives the
tensors new coordinates. The model that is evaluated and exported is D(x), which the clients receive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, final

import torch
from torch import Tensor

from fedspan.core.method import Claims, Memory
from fedspan.core.recent import MessageTensors
from fedspan.core.tensors import Tensors, create_generator
from fedspan.core.transfer_formats import Format, compress, decompress
from fedspan.core.values import Client, Job, LayerSpec, Message, Reduced, ServerState, Trained
from fedspan.errors import FedspanError
from fedspan.wrappers.compression import Compression
from fedspan.wrappers.wrapper import add_prefix

_GENERATION = "low-precision generation"  # name of a scalar of messages and jobs, and of a tensor in the memory
_ERROR = "error/"


@final
@dataclass(frozen=True, kw_only=True)
class LowPrecision(Compression):
    """Transmits tensors in fewer bits, in both directions.

    Args:
        uplink: Format of what clients send: ``float32``, ``bfloat16``, ``float16`` or ``int8``.
        downlink: Format of what clients receive.
        error_feedback: Whether a client adds what rounding removed from its change to its next change.
    """

    paper: ClassVar[str] = (
        "Error Feedback Fixes SignSGD and other Gradient Compression Schemes (ICML 2019, arXiv:1901.09847)"
    )
    key: ClassVar[str] = "low-precision"

    uplink: Format = "bfloat16"
    downlink: Format = "bfloat16"
    error_feedback: bool = False

    def explain_refusal(self, claims: Claims) -> str | None:
        refusal = super().explain_refusal(claims)
        if refusal is None and self.error_feedback and claims.reinitializes:
            return "adds rounding errors to the next change, and this method re-initializes its tensors in every round"
        if refusal is None and self.error_feedback and claims.shrinks:
            return "adds rounding errors to the next change, and this method's replies hold other slots in every round"
        if refusal is None and self.uplink == "int8" and claims.shrinks and self._has_short_sides():
            return (
                "stores a scale for each slot with int8, and this method's replies may have as many slots as a layer "
                "has outputs, or more than it has inputs"
            )
        return refusal

    def _has_short_sides(self) -> bool:
        """Return whether int8's scales, which lie along a tensor's shorter side, may lie along another than slots."""
        rank = self.get_rank(None)
        return any(layer.out_features <= rank or layer.in_features < rank for layer in self.spec.layers)

    @cached_property
    def _message_tensors(self) -> MessageTensors:
        return MessageTensors()

    def sync(self, state: ServerState, client: Client | None) -> Message:
        message = self.inner.sync(state, client)
        # Errors belong to a generation of the server's tensors; a job's generation is that of its optimizer state.
        generation = {_GENERATION: state.generation} if self.error_feedback else {}
        tensors = self._message_tensors.get_or_compute(
            state.round, message.tensors, self.downlink, lambda: _convert(message.tensors, self.downlink)
        )
        return replace(message, tensors=tensors, scalars={**message.scalars, **generation})

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        scalars = {name: value for name, value in message.scalars.items() if name != _GENERATION}
        generation_scalars = {name: value for name, value in message.scalars.items() if name == _GENERATION}
        restored = replace(message, tensors=_restore(message.tensors), scalars=scalars)
        job = super().start(restored, client, memory, round)
        return replace(job, scalars={**job.scalars, **generation_scalars})

    def finish(
        self, job: Job, trained: Trained, client: Client, memory: Memory, round: int
    ) -> tuple[Job | Message, Memory]:
        result, memory = super().finish(job, trained, client, memory, round)
        if isinstance(result, Job) and _GENERATION in job.scalars:
            result = replace(result, scalars={**result.scalars, _GENERATION: job.scalars[_GENERATION]})
        return result, memory

    def build_second_order(self, state: ServerState, reduced: Reduced) -> Message:
        order = self.inner.build_second_order(state, reduced)
        return replace(order, tensors=_convert(order.tensors, self.downlink))

    def build_second_reply(self, order: Message, tensors: Tensors, client: Client, round: int) -> Message:
        restored = replace(order, tensors=_restore(order.tensors))
        reply = self.inner.build_second_reply(restored, tensors, client, round)
        whole = add_prefix(self._whole_prefix, reply.tensors)
        sent = _convert(whole, self.uplink, self._create_generators(whole, client, round))
        return replace(reply, tensors=add_prefix(self._prefix, sent))

    def estimate_messages(self, layer: LayerSpec, rank: int, round: int) -> tuple[Message, Message] | None:
        messages = self.inner.estimate_messages(layer, rank, round)
        if messages is None:
            return None
        down, up = (
            replace(message, tensors=_convert(message.tensors, format))
            for message, format in zip(messages, (self.downlink, self.uplink), strict=True)
        )
        return down, up

    def compress(
        self, changes: Tensors, job: Job, client: Client, memory: Memory, round: int
    ) -> tuple[Tensors, Memory]:
        if not self.error_feedback or job.steps == 0:  # no later reply continues a gradient that no step follows
            return _convert(changes, self.uplink, self._create_generators(changes, client, round)), memory
        generation = int(job.scalars[_GENERATION])
        if _GENERATION in memory and int(memory[_GENERATION]) != generation:
            memory = {}
        corrected = {
            name: change + memory[_ERROR + name] if _ERROR + name in memory else change
            for name, change in changes.items()
        }
        sent = _convert(corrected, self.uplink)
        restored = _restore(sent)
        errors = {_ERROR + name: change - restored[name] for name, change in corrected.items()}
        # The memory holds errors of tensors, too, that the client does not train in this round.
        return sent, {**memory, **errors, _GENERATION: torch.tensor(generation)}

    def decompress(self, tensors: Tensors) -> Tensors:
        return _restore(tensors)

    def _create_generators(self, tensors: Tensors, client: Client, round: int) -> dict[str, torch.Generator]:
        """Create the generators of stochastic rounding, by tensor name; none where the format needs none."""
        draws = tensors if self.uplink == "int8" else {}
        return {name: create_generator(self.seed, self.key, round, client.id, name) for name in draws}


def _convert(tensors: Tensors, format: Format, rngs: dict[str, torch.Generator] | None = None) -> dict[str, Tensor]:
    try:
        return dict(compress(name, value, format, (rngs or {}).get(name)) for name, value in tensors.items())
    except OverflowError as error:
        raise FedspanError("method.wrappers", format, "bfloat16", problem=str(error)) from None


def _restore(tensors: Tensors) -> dict[str, Tensor]:
    return dict(decompress(name, value) for name, value in tensors.items())
