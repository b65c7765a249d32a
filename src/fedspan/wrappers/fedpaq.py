"""FedPAQ: clients send what changed, quantised without bias to a few bits an entry.

Reisizadeh et al., "FedPAQ: A Communication-Efficient Federated Learning Method with Periodic Averaging and
Quantization", AISTATS 2020, arXiv:1909.13014; its quantiser (example 1) is QSGD's (arXiv:1610.02132).

    client i:  sends Q(x_i - x), every tensor by itself: its norm in 32 bits, then ``bits`` bits an entry
    server:    x_i' = x + Q(x_i - x), then as the wrapped method's;   x travels down as it is

Q is unbiased (``core.quantise``), so the mean of replies is right in expectation.

Deviations: the paper averages plainly, which is ``federation.weights: uniform``. Around a low-rank method the factors
are unbiased, but their product is only where one of them is the same for all clients (FFA-LoRA, RoLoRA). Levels have
codes of one length, s = 2^(bits - 1) - 1; the paper's s is free. The server's mean is in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

from torch import Tensor

from fedspan.core.method import Claims, Memory, declare_bounded
from fedspan.core.quantise import pack, quantise, unpack
from fedspan.core.tensors import create_generator
from fedspan.core.values import Client, Contribution, Job, Message, Reduced, ServerState, Trained
from fedspan.errors import FedspanError
from fedspan.wrappers.wrapper import RegisteredWrapper, add_prefix, compute_common_start, split_prefix

__all__ = ["FedPAQ"]

CHANGE = "fedpaq/"
START = "fedpaq-start/"


@final
@dataclass(frozen=True, kw_only=True)
class FedPAQ(RegisteredWrapper):
    """Quantises replies.

    Args:
        bits: Bits per entry, sign included (2 to 16).
    """

    paper: ClassVar[str] = (
        "FedPAQ: A Communication-Efficient Federated Learning Method with Periodic Averaging and Quantization "
        "(AISTATS 2020, arXiv:1909.13014)"
    )
    kind: ClassVar[str] = "compression"

    bits: int = declare_bounded(8, 2, 16)

    def declared(self) -> Claims:
        return replace(self.inner.declared(), exact=False, sends="other")

    def refusal(self, claims: Claims) -> str | None:
        if claims.reduction == "stack":
            return "is unbiased for sums only, and this method's server computes something else of single replies"
        if claims.sends != "values":
            return "sends changes of tensors that all clients start from alike, and here something else is transmitted"
        return None

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        return self.inner.start(message, client, split_prefix(START, memory)[1], round)

    def finish(
        self, job: Job, trained: Trained, client: Client, memory: Memory, round: int
    ) -> tuple[Job | Message, Memory]:
        # In a later phase job.tensors are that phase's initial values; the round's wait in the memory between phases.
        stashed, own = split_prefix(START, memory)
        start = stashed or job.tensors
        result, own = self.inner.finish(job, trained, client, own, round)
        if isinstance(result, Job):
            return result, {**own, **add_prefix(START, start)}
        tensors: dict[str, Tensor] = {}
        for name, value in result.tensors.items():
            if name not in start or start[name].shape != value.shape:
                raise FedspanError(
                    "method.wrappers", "fedpaq", problem=f"the reply's {name} is no tensor that was sent"
                )
            rng = create_generator(self.seed, "fedpaq", round, client.id, name)
            tensors[name] = pack(*quantise(value - start[name], self.bits, rng), self.bits)
        return replace(result, tensors=add_prefix(CHANGE, tensors)), own

    def contribute(self, message: Message, client: Client) -> Contribution:
        # For methods that ``refusal`` admits, the method's own contribution would be the unchanged tensors.
        return Contribution(sum={name: unpack(value, self.bits) for name, value in message.tensors.items()})

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        start = compute_common_start(self.inner, state)
        changes, _ = split_prefix(CHANGE, reduced.mean)
        mean = {
            name: start[name] + change[: start[name].numel()].view_as(start[name]) for name, change in changes.items()
        }
        return self.inner.update(state, replace(reduced, mean=mean))
