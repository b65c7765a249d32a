"""Layouts of a batch's tokens without padding: in one row, by client, and in bins of whole texts for attention.

Numbers of places are rounded up slightly, so that few distinct shapes occur: on a CPU, oneDNN compiles its bfloat16
products for every new shape.

Shapes: B examples, T tokens of the longest, P places in the row, W places of a bin, C clients, S places of a client, D
features.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedspan.core.tensors import to_device


@dataclass(frozen=True)
class Bins:
    """Attention rows of one width, each with one or several texts."""

    width: int
    """Number of places of a bin, W."""
    text: np.ndarray
    """Index of the text at each place, (bins, W); -1 at empty places."""
    position: np.ndarray
    """Position of the token within its text, (bins, W)."""

    def build_mask(self, mask: Tensor) -> Tensor:
        """Return the additive mask (bins, 1, W, W): the batch's (B, 1, 1 or T, T) within a text, masked elsewhere."""
        text, position = (to_device(torch.from_numpy(array), mask.device) for array in (self.text, self.position))
        is_same_text = (text[:, :, None] == text[:, None, :]) & (text >= 0)[:, :, None]
        query = position[:, :, None] if mask.shape[2] > 1 else torch.zeros_like(position)[:, :, None]
        additive = mask[text.clamp(min=0)[:, :, None], 0, query, position[:, None, :]]
        return additive.masked_fill(~is_same_text, torch.finfo(mask.dtype).min)[:, None]


def round_up(count: int) -> int:
    """Round a number of places up; at most sixteen distinct results lie between consecutive powers of two."""
    return _round_up(count, 16)


def _round_up(count: int, parts: int) -> int:
    step = max(1, (1 << max(0, count - 1).bit_length()) // (2 * parts))
    return -(-count // step) * step


def pack_bins(lengths: np.ndarray) -> list[Bins]:
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
        index = bisect_left(room, (length, 0))
        if index < len(room):
            free_places, number = room.pop(index)
        else:
            step = 32 if length <= 128 else 64 if length <= 512 else 128
            free_places, number = -(-length // step) * step, len(widths)
            widths.append(free_places)
            contents.append([])
        contents[number].append(text)
        insort(room, (free_places - length, number))
    return [
        _fill_bins(
            width, [texts for texts, bin_width in zip(contents, widths, strict=True) if bin_width == width], lengths
        )
        for width in sorted(set(widths))
    ]


def _fill_bins(width: int, contents: list[list[int]], lengths: np.ndarray) -> Bins:
    count = _round_up(len(contents), 8)
    text = np.full((count, width), -1, dtype=np.int64)
    position = np.zeros((count, width), dtype=np.int64)
    for number, bin_texts in enumerate(contents):
        sizes = lengths[bin_texts]
        end = int(sizes.sum())
        text[number, :end] = np.repeat(bin_texts, sizes)
        position[number, :end] = np.arange(end) - np.repeat(sizes.cumsum() - sizes, sizes)
    return Bins(width, text, position)


class Padded(Exception):
    """A model or batch that needs its padding; the text is the reason, without a full stop."""


@dataclass(frozen=True)
class Move:
    """Mapping of rows from one layout to the places of another; places without a row are zero."""

    take: Tensor
    """Source row of each place, (M,)."""
    empty: Tensor
    """Places without a source row."""
    back: Tensor
    """Target place of each row, (N,)."""
    lost: Tensor
    """Rows without a target place."""

    @classmethod
    def from_sources(cls, source: np.ndarray, rows: int, device: torch.device) -> Move:
        """Build the move from the source row of each place (M,), -1 at empty places; no row has two places."""
        filled = np.flatnonzero(source >= 0)
        target = np.full(rows, -1, dtype=np.int64)
        target[source[filled]] = filled
        parts = (np.maximum(source, 0), np.flatnonzero(source < 0), np.maximum(target, 0), np.flatnonzero(target < 0))
        return cls(*(to_device(torch.from_numpy(part), device) for part in parts))

    @property
    def reverse(self) -> Move:
        """The inverse move."""
        return Move(self.back, self.lost, self.take, self.empty)

    def __call__(self, rows: Tensor) -> Tensor:
        """(N, D) -> (M, D)."""
        return _Moved.apply(rows, self.take, self.empty, self.back, self.lost)  # pyright: ignore


class _Moved(torch.autograd.Function):
    """Row selection whose backward pass selects rows by the inverse move, where autograd would add them up."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, take: Tensor, empty: Tensor, back: Tensor, lost: Tensor) -> Tensor:
        ctx.save_for_backward(back, lost)
        return _select_rows(rows, take, empty)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _select_rows(gradients[0], *ctx.saved_tensors), None, None, None, None


def _select_rows(rows: Tensor, take: Tensor, empty: Tensor) -> Tensor:
    selected = rows.index_select(0, take)
    return selected.index_fill_(0, empty, 0) if len(empty) else selected


class TokenLayout:
    """Places of a batch's tokens: padded on the right, in one row, by client, and in attention.

    Args:
        lengths: Length of each example, (B,); examples of length 0 belong to no client and are left out.
        tokens: Number of tokens of the longest example, T.
        clients: Number of clients, C, with equally many examples each, one client below the other.
        same_attention: Attend in the shape of the padded batch. The bits are those with padding, where the product of a
            row does not depend on other rows.
    """

    def __init__(
        self, lengths: np.ndarray, tokens: int, device: torch.device, clients: int = 1, same_attention: bool = False
    ) -> None:
        self.lengths, self.tokens, self.device, self.clients = lengths, tokens, device, clients
        self.same_attention, self.used = same_attention, int(lengths.sum())
        self.places = round_up(self.used)
        self._starts = lengths.cumsum() - lengths
        self._along: dict[int, tuple[Tensor, Tensor]] = {}
        self._masks: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._moves: dict[int, Move] = {}
        self._grouped: tuple[Tensor, Tensor] | None = None
        self.fused = False
        """Whether attention in bins is PyTorch's fused one, not the model's own."""
        self.variable = False
        """Whether attention takes texts of variable length in place of bins."""

    @property
    def padding(self) -> float:
        """Share of the padded batch that the row saves."""
        return 1 - self.places / (len(self.lengths) * self.tokens)

    @cached_property
    def _row(self) -> Move:
        example = np.repeat(np.arange(len(self.lengths)), self.lengths)
        source = np.full(self.places, -1, dtype=np.int64)
        source[: self.used] = example * self.tokens + np.arange(self.used) - self._starts[example]
        return Move.from_sources(source, len(self.lengths) * self.tokens, self.device)

    def pack(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) -> (1, P, D)."""
        return self._row(x_BTD.reshape(-1, x_BTD.shape[-1]))[None]

    def unpack(self, x_1PD: Tensor) -> Tensor:
        """(1, P, D) -> (B, T, D), zero where there is padding."""
        return self._row.reverse(x_1PD[0]).view(len(self.lengths), self.tokens, -1)

    def pack_argument(self, value: Any) -> Any:
        """Pack an argument of a block beside the hidden states if it has values by token (such as positions' sines)."""
        if isinstance(value, tuple):
            return tuple(self.pack_argument(item) for item in value)
        full_shape = (len(self.lengths), self.tokens)
        if not isinstance(value, Tensor) or value.ndim != 3 or value.shape[1] != self.tokens:
            return value
        if id(value) not in self._along:  # the same for every block; holding it keeps its id unique
            self._along[id(value)] = (value, self.pack(value.expand(*full_shape, -1)))
        return self._along[id(value)][1]

    @cached_property
    def _by_client(self) -> Move:
        counts = self.lengths.reshape(self.clients, -1).sum(1)
        width = round_up(int(counts.max()))
        source = np.full((self.clients, width), -1, dtype=np.int64)
        start = 0
        for client, count in enumerate(counts.tolist()):
            source[client, :count] = np.arange(start, start + count)
            start += count
        return Move.from_sources(source.ravel(), self.places, self.device)

    def is_flat(self, x: Tensor) -> bool:
        """Check whether a tensor is in one row: (1, P, D), or (P, D) in some models."""
        return x.ndim > 1 and x.shape[:-1] in ((1, self.places), (self.places,))

    def group_by_client(self, x_PD: Tensor) -> Tensor:
        """(P, D) or (1, P, D) -> (C, S, D)."""
        if self._grouped is None or self._grouped[0] is not x_PD:  # queries, keys and values share one input
            grouped = self._by_client(x_PD.reshape(self.places, -1)).view(self.clients, -1, x_PD.shape[-1])
            self._grouped = (x_PD, grouped)
        return self._grouped[1]

    def ungroup(self, x_CSD: Tensor) -> Tensor:
        """(C, S, D) -> (P, D)."""
        return self._by_client.reverse(x_CSD.flatten(0, 1))

    @cached_property
    def text_ends(self) -> tuple[Tensor, int]:
        """Ends of the texts in the row (int32, after a 0), and the longest length; empty places count as a text."""
        lengths = [*self.lengths[self.lengths > 0].tolist(), self.places - self.used]
        ends = np.cumsum([0, *(length for length in lengths if length)]).astype(np.int32)
        return to_device(torch.from_numpy(ends), self.device), max(lengths)

    @cached_property
    def _bins(self) -> list[Bins]:
        return pack_bins(self.lengths)

    @cached_property
    def _bin_places(self) -> list[np.ndarray]:
        """Place in the row of every bin's places, (bins, W) for each width; -1 at empty places."""
        return [np.where(bins.text < 0, -1, self._starts[bins.text] + bins.position) for bins in self._bins]

    def _to_bins(self, heads: int) -> Move:
        """Return the move from the row's places and heads, (P * heads, d), to each bin's (bins, heads, W) in turn."""
        if heads not in self._moves:
            bins, head_numbers = (positions[:, None, :] for positions in self._bin_places), np.arange(heads)[:, None]
            parts = [np.where(positions < 0, -1, positions * heads + head_numbers).ravel() for positions in bins]
            self._moves[heads] = Move.from_sources(np.concatenate(parts), self.places * heads, self.device)
        return self._moves[heads]

    @cached_property
    def _from_bins(self) -> Move:
        """Move from the places of all bins to those of the row."""
        places = np.concatenate([place.ravel() for place in self._bin_places])
        return Move.from_sources(places, self.places, self.device).reverse

    def attend(
        self,
        forward: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        options: dict[str, Any],
    ) -> Tensor:
        """Run a model's own attention bin by bin, or (``same_attention``) in the padded batch.

        Args:
            forward: Transformers' eager attention of the model's family, or its fused one.
            query: Queries, (1, heads, P, d).
            key: Keys, shaped like the queries but possibly with fewer heads.
            value: Values, shaped like the keys.
            mask: Additive mask of the padded batch, (B or 1, 1, 1 or T, T).
            options: Other arguments of ``forward``.

        Returns:
            (1, P, heads, d).
        """
        if self.same_attention:
            padded = [self.unpack(x.transpose(1, 2).flatten(2)) for x in (query, key, value)]
            heads = [x.unflatten(2, (-1, query.shape[3])).transpose(1, 2) for x in padded]  # with a model's own strides
            output = forward(module, *heads, mask, **options)[0]
            return self.pack(output.flatten(2)).unflatten(2, output.shape[2:])
        parts = zip(*(self._split_parts(tensor) for tensor in (query, key, value)), strict=True)
        outputs = [
            forward(module, *part, masked, **options)[0].flatten(0, 1)
            for part, masked in zip(parts, self._build_bin_masks(mask), strict=True)
        ]
        heads, width = outputs[0].shape[1:]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self._from_bins(output.flatten(1)).view(1, self.places, heads, width)

    def _split_parts(self, x_1HPd: Tensor) -> list[Tensor]:
        """Return (bins, heads, W, d) for every width."""
        heads, width = x_1HPd.shape[1], x_1HPd.shape[3]
        rows = self._to_bins(heads)(x_1HPd[0].transpose(0, 1).reshape(-1, width))
        shapes = [(len(bins.text), heads, bins.width, width) for bins in self._bins]
        if len(shapes) == 1:
            return [rows.view(shapes[0])]
        parts = rows.split([count * heads * size for count, _, size, _ in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _build_bin_masks(self, mask: Any) -> list[Tensor]:
        if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[3] != self.tokens:
            raise Padded("attention is given a mask of a form of its own")
        if not mask.is_floating_point():
            raise Padded("attention is given a mask that is not added")
        if id(mask) not in self._masks:  # the same for many blocks; holding it keeps its id unique
            full_mask = mask.expand(len(self.lengths), *mask.shape[1:])
            self._masks[id(mask)] = (mask, [bins.build_mask(full_mask) for bins in self._bins])
        return self._masks[id(mask)][1]
