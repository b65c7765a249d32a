"""Attention bins of texts, and rounded numbers of places.

Numbers of places are rounded up slightly, so that few distinct shapes occur: on a CPU, oneDNN compiles its bfloat16
products for every new shape.

Shapes: B texts, T tokens of the longest text, W places of a bin.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["Bins", "binned", "rounded"]


@dataclass(frozen=True)
class Bins:
    """Attention rows of one width, each with one or several texts.

    Args:
        width: Number of places of a bin, W.
        text: Index of the text at each place, (bins, W); -1 at empty places.
        position: Position of the token within its text, (bins, W).
    """

    width: int
    text: np.ndarray
    position: np.ndarray

    def masked(self, mask: Tensor) -> Tensor:
        """Return the additive mask (bins, 1, W, W): the batch's (B, 1, 1 or T, T) within a text, masked elsewhere."""
        text, at = (torch.from_numpy(one).to(mask.device) for one in (self.text, self.position))
        own = (text[:, :, None] == text[:, None, :]) & (text >= 0)[:, :, None]
        query = at[:, :, None] if mask.shape[2] > 1 else torch.zeros_like(at)[:, :, None]
        made = mask[text.clamp(min=0)[:, :, None], 0, query, at[:, None, :]]
        return made.masked_fill(~own, torch.finfo(mask.dtype).min)[:, None]


def rounded(count: int) -> int:
    """Round a number of places up; at most sixteen distinct results lie between consecutive powers of two."""
    return _rounded(count, 16)


def _rounded(count: int, parts: int) -> int:
    step = max(1, (1 << max(0, count - 1).bit_length()) // (2 * parts))
    return -(-count // step) * step


def binned(lengths: np.ndarray) -> list[Bins]:
    """Pack texts into attention bins, best fit and longest first; leave out empty texts.

    Widths are multiples of 32: softmax is several times slower in rows that do not fill a processor's vectors, and many
    small products cost more than a few larger ones with other texts masked.
    """
    widths: list[int] = []
    contents: list[list[int]] = []
    room: list[tuple[int, int]] = []  # free places and number of every bin, sorted
    for text in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[text])
        if not length:
            break
        at = bisect_left(room, (length, 0))
        if at < len(room):
            left, number = room.pop(at)
        else:
            left, number = _width(length), len(widths)
            widths.append(left)
            contents.append([])
        contents[number].append(text)
        insort(room, (left - length, number))
    return [
        _filled(width, [own for own, one in zip(contents, widths, strict=True) if one == width], lengths)
        for width in sorted(set(widths))
    ]


def _width(length: int) -> int:
    step = 32 if length <= 128 else 64 if length <= 512 else 128
    return -(-length // step) * step


def _filled(width: int, contents: list[list[int]], lengths: np.ndarray) -> Bins:
    count = _rounded(len(contents), 8)
    text = np.full((count, width), -1, dtype=np.int64)
    position = np.zeros((count, width), dtype=np.int64)
    for number, own in enumerate(contents):
        sizes = lengths[own]
        end = int(sizes.sum())
        text[number, :end] = np.repeat(own, sizes)
        position[number, :end] = np.arange(end) - np.repeat(sizes.cumsum() - sizes, sizes)
    return Bins(width, text, position)
