"""Low-precision transfer: tensors are transmitted as bfloat16, float16 or int8, in both directions.

    server:    sends D(x);   client i:  trains from D(x), sends U(x_i - D(x) [+ e_i])
    server:    x_i' = x + U(x_i - D(x)), then as the wrapped method's

U and D round to the format of each direction: bfloat16, float16, or int8 with one scale per row or column
(``compress``). The server's x stays in float32, so what D rounds off is not lost: changes below D's resolution add up
in x until a client receives them. With error feedback a client adds what U rounded off to its next change: e_i <- e_i +
(x_i - D(x)) - U(...), as in Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
ICML 2019, arXiv:1901.09847. Tensors without a common start (``wrappers.compression``) are rounded themselves, and so
are both messages of a second exchange.

Deviations: int8 replies without error feedback are rounded stochastically, so that they are unbiased; the paper's
scheme rounds deterministically, which int8 with error feedback does. A client drops its error when the method gives the
tensors new coordinates. The model that is evaluated and exported is D(x), which the clients receive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from fedspan.core.method import Claims, Memory
from fedspan.core.recent import MessageTensors
from fedspan.core.tensors import Tensors, create_generator
from fedspan.core.values import Client, Job, LayerSpec, Message, Reduced, ServerState, Trained
from fedspan.errors import FedspanError
from fedspan.wrappers.compression import Compression
from fedspan.wrappers.wrapper import add_prefix

Format = Literal["float32", "bfloat16", "float16", "int8"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ROWS, _COLUMNS = "rows/", "columns/"  # prefixes of int8 names: where the scales are
_SCALE = 4  # bytes of a float32
_LEVELS = 127
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


def compress(name: str, value: Tensor, format: Format, rng: torch.Generator | None = None) -> tuple[str, Tensor]:
    """Convert a tensor to a format of fewer bits.

    Integer tensors are returned as they are. int8 stores q = round(x / s) with s = max |x| / 127 over a row, or over a
    column where columns are longer, so that the scales are the smaller part: an (m, n) tensor becomes (m, n + 4) or
    (m + 4, n) entries of int8, of which the last four of every row, or the last four rows, are the bytes of the float32
    scales. Scalars and tensors without an entry in the first and the last dimension are stored as float32.

    Args:
        name: Name of the tensor.
        value: Floating-point tensor of any shape.
        format: The format.
        rng: Generator of stochastic rounding, by which int8 is unbiased; None: to the nearest level.

    Returns:
        The name and the tensor to transmit; ``decompress`` restores both.

    Raises:
        OverflowError: If a finite value exceeds float16's largest number.
    """
    if not value.is_floating_point():
        return name, value
    if format == "int8" and value.ndim and max(value.shape[0], value.shape[-1]):
        return _quantize(name, value.float(), rng)
    if format == "int8":
        format = "float32"
    converted = value.to(_DTYPES[format])
    if format == "float16" and bool((converted.isinf() & value.isfinite()).any()):
        raise OverflowError(f"{name} has values above float16's largest, {torch.finfo(torch.float16).max:g}")
    return name, converted


def decompress(name: str, value: Tensor) -> tuple[str, Tensor]:
    """Restore the name and the float32 values, of the original shape, of a tensor that ``compress`` returned."""
    if value.dtype != torch.int8 or not name.startswith((_ROWS, _COLUMNS)):
        return name, value.float() if value.is_floating_point() else value
    if name.startswith(_COLUMNS):
        return name.removeprefix(_COLUMNS), _dequantize(value.movedim(0, -1)).movedim(-1, 0)
    return name.removeprefix(_ROWS), _dequantize(value)


def _quantize(name: str, value: Tensor, rng: torch.Generator | None) -> tuple[str, Tensor]:
    columns = value.shape[0] > value.shape[-1]
    last = value.movedim(0, -1) if columns else value
    scales = last.abs().amax(-1, keepdim=True) / _LEVELS
    scaled = last / torch.where(scales > 0, scales, 1.0)
    levels = scaled.round() if rng is None else (scaled + torch.rand(scaled.shape, generator=rng)).floor()
    scale_bytes = scales.flatten().view(torch.int8).view(*last.shape[:-1], _SCALE)
    codes = torch.cat([levels.clamp(-_LEVELS, _LEVELS).to(torch.int8), scale_bytes], -1)
    return (_COLUMNS + name, codes.movedim(-1, 0).contiguous()) if columns else (_ROWS + name, codes)


def _dequantize(codes: Tensor) -> Tensor:
    scales = codes[..., -_SCALE:].clone(memory_format=torch.contiguous_format).view(torch.float32)  # aligned
    return codes[..., :-_SCALE].float() * scales
