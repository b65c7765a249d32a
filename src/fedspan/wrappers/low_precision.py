"""Low-precision transfer: tensors travel as bfloat16, float16 or int8, in both directions.

    server:    sends D(x);   client i:  trains from D(x), sends U(x_i - D(x) [+ e_i])
    server:    x_i' = x + U(x_i - D(x)), then as the wrapped method's

U and D round to the format of each direction (``core.transfer_formats``). The server's x stays in float32, so what D
rounds off is not lost: changes below D's resolution add up in x until a client receives them. With error feedback a
client adds what U rounded off to its next change: e_i <- e_i + (x_i - D(x)) - U(...), as in Karimireddy et al., "Error
Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019, arXiv:1901.09847.

Deviations: int8 replies without error feedback are rounded stochastically, so that they are unbiased; the paper's
scheme rounds deterministically, which int8 with error feedback does. A client drops its error when the method gives the
tensors new coordinates. The model that is evaluated and exported is D(x), which the clients receive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from fedspan.core.method import Claims, Memory
from fedspan.core.tensors import Tensors, generator
from fedspan.core.transfer_formats import Format, compress, decompress
from fedspan.core.values import Client, Job, Message, ServerState
from fedspan.errors import FedspanError
from fedspan.wrappers.compression import Compression

__all__ = ["LowPrecision"]

_GENERATION = "generation"  # of the errors beside it
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

    def refusal(self, claims: Claims) -> str | None:
        if self.error_feedback and claims.reinitialises:
            return "adds rounding errors to the next change, and this method re-initializes its tensors in every round"
        return super().refusal(claims)

    def sync(self, state: ServerState, client: Client | None) -> Message:
        message = self.inner.sync(state, client)
        return replace(message, tensors=_convert(message.tensors, self.downlink))

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        return super().start(replace(message, tensors=_restore(message.tensors)), client, memory, round)

    def compress(
        self, changes: Tensors, job: Job, client: Client, memory: Memory, round: int
    ) -> tuple[Tensors, Memory]:
        generation = torch.tensor(job.generation)
        current = self.error_feedback and torch.equal(memory.get(_GENERATION, generation), generation)
        changes = {
            name: change + memory[_ERROR + name] if current and _ERROR + name in memory else change
            for name, change in changes.items()
        }
        stochastic = self.uplink == "int8" and not self.error_feedback
        rngs = {name: generator(self.seed, self.key, round, client.id, name) for name in changes if stochastic}
        sent = _convert(changes, self.uplink, rngs)
        if not self.error_feedback:
            return sent, {}
        restored = _restore(sent)
        return sent, {
            _GENERATION: generation,
            **{_ERROR + name: change - restored[name] for name, change in changes.items()},
        }

    def decompress(self, tensors: Tensors) -> Tensors:
        return _restore(tensors)


def _convert(tensors: Tensors, format: Format, rngs: dict[str, torch.Generator] | None = None) -> dict[str, Tensor]:
    try:
        return dict(compress(name, value, format, (rngs or {}).get(name)) for name, value in tensors.items())
    except OverflowError as error:
        raise FedspanError("method.wrappers", format, "bfloat16", problem=str(error)) from None


def _restore(tensors: Tensors) -> dict[str, Tensor]:
    return dict(decompress(name, value) for name, value in tensors.items())
