"""Tensors in fewer bits for transfer: bfloat16, float16, and int8 with one scale per row or column.

int8 stores q = round(x / s) with s = max |x| / 127 over a row, or over a column where columns are longer, so that the
scales are the smaller part: an (m, n) tensor becomes (m, n + 4) or (m + 4, n) entries of int8, of which the last four
of every row, or the last four rows, are the bytes of the float32 scales.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Format = Literal["float32", "bfloat16", "float16", "int8"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ROWS, _COLUMNS = "rows/", "columns/"  # prefixes of int8 names: where the scales are
_SCALE = 4  # bytes of a float32
_LEVELS = 127


def compress(name: str, value: Tensor, format: Format, rng: torch.Generator | None = None) -> tuple[str, Tensor]:
    """Convert a tensor to a format of fewer bits.

    Integer tensors are returned as they are. With int8, scalars and tensors without an entry in the first and the last
    dimension are stored as float32.

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
