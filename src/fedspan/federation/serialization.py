"""Serialization of messages and server states: one safetensors payload each, nothing pickled.

The tensors of a payload are numbered. Their names and structure are stored as JSON under the only key of the payload's
metadata (one key, because safetensors does not guarantee an order of several). So names may contain any characters, and
tensors of any dtype that safetensors supports are restored bit for bit, on the CPU and contiguous.

Messages are canonical: equal messages give equal bytes with sorted names, so the ledger's counts do not depend on how a
method built its dicts. States preserve the order of their dicts instead (sums over a dict of tensors depend on it in
the last bit, and a resumed run must continue with the same bits) and store a tensor object that occurs twice only once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from types import NoneType
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedspan.core.base import BasePatch, BaseUpdate, Delta, Increment
from fedspan.core.lowrank import LowRank
from fedspan.core.tensors import Tensors
from fedspan.core.values import Message, Scalar, ServerState

FORMAT = 1
"""Version of the structure below; a reader rejects any other."""

MESSAGE_HEADER = 1 << 24
"""Maximum size of a message's header in bytes, enough for 100,000 tensors. To parse a larger one takes long, and many
times its size in memory."""

_KEY = "fedspan"
_STORED = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    }
)


class Writer:
    """Collects the tensors of a value, returns a JSON structure with their numbers, and writes both as one payload.

    Args:
        canonical: Whether to sort names and store every tensor separately, so that equal values give equal bytes;
            otherwise the order of dicts is preserved and a tensor object that occurs several times is stored once.
    """

    def __init__(self, *, canonical: bool) -> None:
        self._canonical = canonical
        self._stored: dict[str, Tensor] = {}
        self._seen: dict[int, tuple[int, Tensor]] = {}  # holds the tensor, too, so that its id is not reused
        self._storages: set[int] = set()

    def _order(self, values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
        return sorted(values.items(), key=lambda item: item[0]) if self._canonical else values.items()

    def _put(self, name: str, tensor: Tensor) -> int:
        if not self._canonical and id(tensor) in self._seen:
            return self._seen[id(tensor)][0]
        if tensor.dtype not in _STORED or tensor.layout != torch.strided or tensor.is_meta:
            description = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
            raise ValueError(f"tensor {name!r} ({description}) cannot be stored")
        value = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        storage = value.untyped_storage().data_ptr()
        if storage in self._storages:
            value = value.clone()  # safetensors refuses two tensors over one storage
        self._storages.add(storage)
        number = len(self._stored)
        self._stored[str(number)] = value
        self._seen[id(tensor)] = number, tensor
        return number

    def add_tensors(self, tensors: Tensors) -> dict[str, int]:
        """Add named tensors; the structure is ``{name: number}``.

        Raises:
            ValueError: If safetensors cannot store a tensor (sparse, quantized, complex128, without data).
        """
        return {name: self._put(name, tensor) for name, tensor in self._order(tensors)}

    def check_scalars(self, scalars: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Check plain values and return them.

        Raises:
            ValueError: If a value is not an int, float, str or bool.
        """
        for name, value in scalars.items():
            if not isinstance(value, int | float | str):  # bool is an int
                raise ValueError(f"scalar {name!r} is a {type(value).__name__}, not an int, float, str or bool")
        return dict(self._order(scalars))

    def add_deltas(self, deltas: Mapping[str, Delta]) -> dict[str, list[int | float]]:
        """Add changes by layer: ``[number of B, number of A, scale]`` for factors, ``[number]`` for a dense matrix."""
        structure: dict[str, list[int | float]] = {}
        for layer, delta in self._order(deltas):
            if isinstance(delta, LowRank):
                structure[layer] = [self._put(layer, delta.B), self._put(layer, delta.A), float(delta.scale)]
            else:
                structure[layer] = [self._put(layer, delta)]
        return structure

    def add_increments(self, increments: Iterable[Increment]) -> list[dict[str, object]]:
        """Add increments of the base, in their order."""
        return [{"round": i.round, "decay": float(i.decay), "deltas": self.add_deltas(i.deltas)} for i in increments]

    def add_base(self, base: BaseUpdate) -> dict[str, object]:
        """Add a base update."""
        return {
            "round": base.round,
            "rho": float(base.rho),
            "total": self.add_deltas(base.total),
            "recent": self.add_increments(base.recent),
            "recent_from": base.recent_from,
        }

    def build_payload(self, kind: str, structure: Mapping[str, object]) -> bytes:
        """Return the safetensors payload of all added tensors with its structure."""
        text = json.dumps({"kind": kind, "format": FORMAT, **structure}, separators=(",", ":"))
        return safetensors.torch.save(self._stored, {_KEY: text})


def expect(structure: object, name: str, *kinds: type) -> Any:
    """Return a value of exactly one of the given types from a JSON object (so ``true`` is not an int).

    Raises:
        ValueError: If it is missing or of another type.
    """
    value = structure.get(name, Ellipsis) if isinstance(structure, dict) else Ellipsis
    if type(value) not in kinds:
        raise ValueError(f"{name!r} is missing or of the wrong type")
    return value


class Reader:
    """Reads a payload of ``Writer``: the structure and the tensors that its numbers refer to.

    Args:
        kind: Kind of value that the payload must hold.

    Raises:
        ValueError: If the bytes are not such a payload; no input raises any other error.
    """

    def __init__(self, data: bytes, kind: str) -> None:
        try:
            size = int.from_bytes(data[:8], "little")
            if kind == "message" and size > MESSAGE_HEADER:
                raise ValueError(f"a header of {size} bytes, of {MESSAGE_HEADER} at most")
            header = json.loads(data[8 : 8 + size])
            text = expect(expect(header, "__metadata__", dict), _KEY, str)
            self.structure: dict[str, Any] = json.loads(text)
            self._stored = safetensors.torch.load(data)
            # Bytes other than 0 and 1 are accepted as bools until something computes with them.
            if any((t.view(torch.uint8) > 1).any() for t in self._stored.values() if t.dtype == torch.bool):
                raise ValueError("a bool that is neither true nor false")
        except (ValueError, SafetensorError, RuntimeError, KeyError, TypeError) as error:
            # RuntimeError: nesting too deep for JSON, shapes too large for torch. KeyError: a dtype torch lacks.
            # TypeError: a dimension beyond 64 bits.
            raise ValueError(f"not a fedspan {kind}: {error}") from error
        if expect(self.structure, "kind", str) != kind:
            raise ValueError(f"a fedspan {self.structure['kind']}, not a {kind}")
        if expect(self.structure, "format", int) != FORMAT:
            raise ValueError(f"a fedspan {kind} of format {self.structure['format']}; this version reads {FORMAT}")

    def _get(self, number: object) -> Tensor:
        if type(number) is not int or str(number) not in self._stored:
            raise ValueError(f"no tensor {number!r}")
        return self._stored[str(number)]

    def read_tensors(self, structure: Mapping[str, object]) -> dict[str, Tensor]:
        """Read named tensors, in the order in which they were written."""
        return {name: self._get(number) for name, number in structure.items()}

    def read_scalars(self, structure: Mapping[str, object]) -> dict[str, Scalar]:
        """Read plain values with their original types."""
        return {name: expect(structure, name, int, float, str, bool) for name in structure}

    def read_deltas(self, structure: Mapping[str, object]) -> dict[str, Delta]:
        """Read changes by layer."""
        deltas: dict[str, Delta] = {}
        for layer, parts in structure.items():
            match parts:
                case [dense]:
                    deltas[layer] = self._get(dense)
                case [b, a, int() | float() as scale]:
                    deltas[layer] = LowRank(self._get(b), self._get(a), float(scale))
                case _:
                    raise ValueError(f"the change of layer {layer!r} is neither factors nor a matrix")
        return deltas

    def read_increments(self, structure: Iterable[object]) -> tuple[Increment, ...]:
        """Read increments of the base, in their order."""
        return tuple(
            Increment(
                expect(i, "round", int),
                self.read_deltas(expect(i, "deltas", dict)),
                float(expect(i, "decay", float, int)),
            )
            for i in structure
        )

    def read_base(self, structure: Mapping[str, object]) -> BaseUpdate:
        """Read a base update."""
        return BaseUpdate(
            round=expect(structure, "round", int),
            rho=float(expect(structure, "rho", float, int)),
            total=self.read_deltas(expect(structure, "total", dict)),
            recent=self.read_increments(expect(structure, "recent", list)),
            recent_from=expect(structure, "recent_from", int),
        )


def encode(message: Message) -> bytes:
    """Encode a message; equal messages give equal bytes. The ledger counts their number.

    Raises:
        ValueError: If a tensor or scalar cannot be stored (``Writer.add_tensors``, ``Writer.check_scalars``).
    """
    writer = Writer(canonical=True)
    structure: dict[str, object] = {
        "tensors": writer.add_tensors(message.tensors),
        "scalars": writer.check_scalars(message.scalars),
        "base": None,
    }
    if (base := message.base) is not None:
        structure["base"] = {
            "round": base.round,
            "whole": base.whole,
            "rho": float(base.rho),
            "total": writer.add_deltas(base.total),
            "increments": writer.add_increments(base.increments),
        }
    return writer.build_payload("message", structure)


def decode(data: bytes) -> Message:
    """Decode a payload of ``encode``: tensors bit for bit on the CPU, names sorted.

    Raises:
        ValueError: If the bytes are not such a payload. No input raises any other error or runs code.
    """
    reader = Reader(data, "message")
    base = expect(reader.structure, "base", dict, NoneType)
    return Message(
        tensors=reader.read_tensors(expect(reader.structure, "tensors", dict)),
        scalars=reader.read_scalars(expect(reader.structure, "scalars", dict)),
        base=None
        if base is None
        else BasePatch(
            round=expect(base, "round", int),
            increments=reader.read_increments(expect(base, "increments", list)),
            whole=expect(base, "whole", bool),
            rho=float(expect(base, "rho", float, int)),
            total=reader.read_deltas(expect(base, "total", dict)),
        ),
    )


def compute_payload_size(message: Message) -> int:
    """Return the bytes of tensor data in a message, including its base update, without names and structure."""
    tensors = list(message.tensors.values())
    if message.base is not None:
        for deltas in (message.base.total, *(increment.deltas for increment in message.base.increments)):
            for delta in deltas.values():
                tensors.extend((delta.B, delta.A) if isinstance(delta, LowRank) else (delta,))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def encode_state(state: ServerState) -> bytes:
    """Encode a server state; dicts preserve their order.

    Raises:
        ValueError: If a tensor or scalar cannot be stored, as in ``encode``.
    """
    writer = Writer(canonical=False)
    structure = {
        "round": state.round,
        "generation": state.generation,
        "tensors": writer.add_tensors(state.tensors),
        "memory": writer.add_tensors(state.memory),
        "scalars": writer.check_scalars(state.scalars),
        "base": writer.add_base(state.base),
    }
    return writer.build_payload("state", structure)


def decode_state(data: bytes) -> ServerState:
    """Decode a payload of ``encode_state``.

    Raises:
        ValueError: If the bytes are not such a payload, as in ``decode``.
    """
    reader = Reader(data, "state")
    return ServerState(
        round=expect(reader.structure, "round", int),
        tensors=reader.read_tensors(expect(reader.structure, "tensors", dict)),
        base=reader.read_base(expect(reader.structure, "base", dict)),
        memory=reader.read_tensors(expect(reader.structure, "memory", dict)),
        scalars=reader.read_scalars(expect(reader.structure, "scalars", dict)),
        generation=expect(reader.structure, "generation", int),
    )
