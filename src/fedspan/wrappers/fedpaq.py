"""FedPAQ: clients send what changed, quantized without bias to a few bits an entry.

Reisizadeh et al., "FedPAQ: A Communication-Efficient Federated Learning Method with Periodic Averaging and
Quantization", AISTATS 2020, arXiv:1909.13014; its quantizer (example 1) is QSGD's (arXiv:1610.02132).

    client i:  sends Q(x_i - x), every tensor by itself: its norm in 32 bits, then ``bits`` bits an entry
    server:    x_i' = x + Q(x_i - x), then as the wrapped method's;   x is sent to clients unchanged

Q is unbiased (``core.quantize``), so the mean of replies is right in expectation.

Deviations: the paper averages plainly, which is ``federation.weights: uniform``. Around a low-rank method the factors
are unbiased, but their product is only where one of them is the same for all clients (FFA-LoRA, RoLoRA). Levels have
codes of one length, s = 2^(bits - 1) - 1; the paper's s is free. The server's mean is in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from fedspan.core.method import Claims, Memory, declare_bounded
from fedspan.core.quantize import pack_levels, quantize, unpack_levels
from fedspan.core.tensors import Tensors, create_generator
from fedspan.core.values import Client, Job
from fedspan.wrappers.compression import Compression


@final
@dataclass(frozen=True, kw_only=True)
class FedPAQ(Compression):
    """Quantises replies.

    Args:
        bits: Bits per entry, sign included (2 to 16).
    """

    paper: ClassVar[str] = (
        "FedPAQ: A Communication-Efficient Federated Learning Method with Periodic Averaging and Quantization "
        "(AISTATS 2020, arXiv:1909.13014)"
    )
    key: ClassVar[str] = "fedpaq"

    bits: int = declare_bounded(8, 2, 16)

    def explain_refusal(self, claims: Claims) -> str | None:
        refusal = super().explain_refusal(claims)
        if refusal is None and claims.sends != "values":
            # Packed codes have no shape, so the server needs that of the start. The noise, in proportion to a tensor's
            # norm, is too large for whole gradients, sketches and factors, and would add up in control variates.
            other = claims.describe_other_replies()
            return f"sends changes of tensors from which all clients start alike, and this method's {other}"
        return refusal

    def compress(
        self, changes: Tensors, job: Job, client: Client, memory: Memory, round: int
    ) -> tuple[Tensors, Memory]:
        packed = {
            name: pack_levels(
                *quantize(change, self.bits, create_generator(self.seed, self.key, round, client.id, name)), self.bits
            )
            for name, change in changes.items()
        }
        return packed, memory

    def decompress(self, tensors: Tensors) -> Tensors:
        return {name: unpack_levels(value, self.bits) for name, value in tensors.items()}
