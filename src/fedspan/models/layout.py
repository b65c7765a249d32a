"""Where the tokens of a batch stand without padding: in one row, by client, and in attention.

Numbers of places are rounded up a little, so that few different shapes occur: on a CPU, oneDNN compiles its bfloat16
products for every new one.

Shapes: B examples, T tokens of the longest, P places in the row, C clients, S places of a client, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Padded", "TokenLayout", "grouped_by_length", "rounded"]

_LEVELS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Lengths to which attention pads its groups."""
_GROUP = 8192
"""Pairs of tokens that attention computes in the time that one more group takes."""


class Padded(Exception):
    """A model, or a batch, that needs its padding; the text is the reason, without a full stop."""


@dataclass(frozen=True)
class Move:
    """Rows of one layout in the places of another; places that are nobody's are zero.

    Args:
        take: for each place, the row that it is filled from, (M,).
        empty: places that are filled from none.
        back: for each row, the place that it went to, (N,).
        lost: rows that went nowhere.
    """

    take: Tensor
    empty: Tensor
    back: Tensor
    lost: Tensor

    @classmethod
    def of(cls, source: np.ndarray, rows: int, device: torch.device) -> Move:
        """From the row of each place (M,), -1 where there is none; no row has two places."""
        filled = np.flatnonzero(source >= 0)
        target = np.full(rows, -1, dtype=np.int64)
        target[source[filled]] = filled
        parts = (np.maximum(source, 0), np.flatnonzero(source < 0), np.maximum(target, 0), np.flatnonzero(target < 0))
        return cls(*(torch.from_numpy(part).to(device) for part in parts))

    @property
    def reverse(self) -> Move:
        """The way back."""
        return Move(self.back, self.lost, self.take, self.empty)

    def __call__(self, rows: Tensor) -> Tensor:
        """(N, D) -> (M, D)."""
        return _Moved.apply(rows, self.take, self.empty, self.back, self.lost)  # pyright: ignore


class _Moved(torch.autograd.Function):
    """Its own gradient goes the way back: selecting rows, where autograd would add them up."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, take: Tensor, empty: Tensor, back: Tensor, lost: Tensor) -> Tensor:
        ctx.save_for_backward(back, lost)
        return _selected(rows, take, empty)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _selected(gradients[0], *ctx.saved_tensors), None, None, None, None


def _selected(rows: Tensor, take: Tensor, empty: Tensor) -> Tensor:
    made = rows.index_select(0, take)
    return made.index_fill_(0, empty, 0) if len(empty) else made


@dataclass(frozen=True)
class _Group:
    """Texts of like length in attention: how many, padded to which length, and which (their rows)."""

    texts: int
    length: int
    rows: Tensor


class TokenLayout:
    """Where the tokens of a batch stand, padded on the right, in one row, by client, and in attention.

    Args:
        lengths: of each example, (B,); 0: it is nobody's, and left out.
        tokens: T.
        device: where the batch is.
        clients: C, whose examples stand one below the other, as many of each.
    """

    def __init__(self, lengths: np.ndarray, tokens: int, device: torch.device, clients: int = 1) -> None:
        self.lengths, self.tokens, self.device, self.clients = lengths, tokens, device, clients
        self.used = int(lengths.sum())
        self.places = rounded(self.used)
        self._starts = lengths.cumsum() - lengths
        self._along: dict[int, tuple[Tensor, Tensor]] = {}
        self._masks: dict[int, tuple[Tensor, list[Tensor]]] = {}

    @property
    def padding(self) -> float:
        """Share of the padded batch that the row does without."""
        return 1 - self.places / (len(self.lengths) * self.tokens)

    @cached_property
    def _row(self) -> Move:
        example = np.repeat(np.arange(len(self.lengths)), self.lengths)
        source = np.full(self.places, -1, dtype=np.int64)
        source[: self.used] = example * self.tokens + np.arange(self.used) - self._starts[example]
        return Move.of(source, len(self.lengths) * self.tokens, self.device)

    def pack(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) -> (1, P, D)."""
        return self._row(x_BTD.reshape(-1, x_BTD.shape[-1]))[None]

    def unpack(self, x_1PD: Tensor) -> Tensor:
        """(1, P, D) -> (B, T, D), zero where there is padding."""
        return self._row.reverse(x_1PD[0]).view(len(self.lengths), self.tokens, -1)

    def along(self, value: Any) -> Any:
        """What a block is given beside hidden states: values by token (positions' sines, say) are packed with them."""
        if isinstance(value, tuple):
            return tuple(self.along(one) for one in value)
        whole = (len(self.lengths), self.tokens)
        if not isinstance(value, Tensor) or value.ndim != 3 or value.shape[1] != self.tokens:
            return value
        if id(value) not in self._along:  # the same for every block; it is held, so that its id stays its own
            self._along[id(value)] = (value, self.pack(value.expand(*whole, -1)))
        return self._along[id(value)][1]

    @cached_property
    def _by_client(self) -> Move:
        counts = self.lengths.reshape(self.clients, -1).sum(1)
        width = rounded(int(counts.max()))
        source = np.full((self.clients, width), -1, dtype=np.int64)
        at = 0
        for client, count in enumerate(counts.tolist()):
            source[client, :count] = np.arange(at, at + count)
            at += count
        return Move.of(source.ravel(), self.places, self.device)

    def holds(self, x: Tensor) -> bool:
        """Whether it is in one row: (1, P, D), or (P, D), as some models have it."""
        return x.ndim > 1 and x.shape[:-1] in ((1, self.places), (self.places,))

    def by_client(self, x_PD: Tensor) -> Tensor:
        """(P, D) or (1, P, D) -> (C, S, D)."""
        return self._by_client(x_PD.reshape(self.places, -1)).view(self.clients, -1, x_PD.shape[-1])

    def together(self, x_CSD: Tensor) -> Tensor:
        """(C, S, D) -> (P, D)."""
        return self._by_client.reverse(x_CSD.flatten(0, 1))

    @cached_property
    def _groups(self) -> tuple[list[_Group], Move]:
        groups: list[_Group] = []
        source: list[np.ndarray] = []
        for rows, length in grouped_by_length(self.lengths, self.tokens):
            texts = _rounded(len(rows), 4)
            places = np.arange(length) + self._starts[rows][:, None]
            places[np.arange(length) >= self.lengths[rows][:, None]] = -1
            source.append(np.pad(places, ((0, texts - len(rows)), (0, 0)), constant_values=-1).ravel())
            chosen = np.pad(rows, (0, texts - len(rows)), mode="edge")
            groups.append(_Group(texts, length, torch.from_numpy(chosen).to(self.device)))
        return groups, Move.of(np.concatenate(source), self.places, self.device)

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
        """A model's own attention, group by group.

        Args:
            forward: Transformers' eager attention of the model's family.
            module: it is called for.
            query: (1, heads, P, d).
            key: as the query, maybe of fewer heads.
            value: as the key.
            mask: of the padded batch, additive, (B or 1, 1, 1 or T, T); None: nothing is masked.
            options: others of ``forward``.

        Returns:
            (1, P, heads, d).
        """
        groups, move = self._groups
        sizes = [(group.texts, group.length) for group in groups]
        parts = zip(*(self._parts(move, one, sizes) for one in (query, key, value)), strict=True)
        made = [
            forward(module, *own, masked, **options)[0].flatten(0, 1)
            for own, masked in zip(parts, self._group_masks(mask), strict=True)
        ]
        heads, width = made[0].shape[1:]
        return move.reverse(torch.cat(made).flatten(1)).view(1, self.places, heads, width)

    def _parts(self, move: Move, x_1HPd: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """A group's texts each, (texts, heads, length, d)."""
        rows = x_1HPd[0].transpose(0, 1)
        places = move(rows.reshape(self.places, -1)).unflatten(1, rows.shape[1:])
        parts = places.split([texts * length for texts, length in sizes])
        return [part.unflatten(0, size).transpose(1, 2) for part, size in zip(parts, sizes, strict=True)]

    def _group_masks(self, mask: Any) -> Sequence[Tensor | None]:
        groups, _ = self._groups
        if mask is None:
            if any(one < self.tokens for one in self.lengths.tolist() if one):
                raise Padded("attention is given no mask although texts differ in length")
            return [None] * len(groups)
        if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[-1] != self.tokens:
            raise Padded("attention is given a mask of a form of its own")
        if id(mask) not in self._masks:
            whole = mask.expand(len(self.lengths), *mask.shape[1:])
            queries = [min(group.length, mask.shape[2]) for group in groups]
            made = [whole[group.rows, :, :count, : group.length] for group, count in zip(groups, queries, strict=True)]
            self._masks[id(mask)] = (mask, made)
        return self._masks[id(mask)][1]


def rounded(count: int) -> int:
    """A number of places, at least so many: sixteen different ones up to each power of two."""
    return _rounded(count, 16)


def _rounded(count: int, parts: int) -> int:
    step = max(1, (1 << max(0, count - 1).bit_length()) // (2 * parts))
    return -(-count // step) * step


def grouped_by_length(lengths: np.ndarray, longest: int) -> list[tuple[np.ndarray, int]]:
    """Texts in groups, shortest first: their rows, and the length that they are padded to. Empty ones are left out."""
    order = np.argsort(lengths, kind="stable")
    order = order[lengths[order] > 0]
    levels = [min(longest, next((level for level in _LEVELS if level >= one), longest)) for one in lengths[order]]
    ends = [*np.flatnonzero(np.diff(levels)).tolist(), len(order) - 1]
    groups: list[tuple[np.ndarray, int]] = []
    start = 0
    for end in ends:
        rows, level = order[start : end + 1], levels[end]
        if groups and len(groups[-1][0]) * (level**2 - groups[-1][1] ** 2) < _GROUP:
            rows = np.concatenate([groups.pop()[0], rows])
        groups.append((rows, level))
        start = end + 1
    return groups
