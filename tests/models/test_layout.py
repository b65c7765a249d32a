"""Where tokens stand without padding: every move has an inverse and its own gradient, and bins hold whole texts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspan.models.layout import Move, Padded, TokenLayout, pack_bins, round_up

CPU = torch.device("cpu")


@st.composite
def cohorts(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Lengths of C * B texts, T, and C; some texts are nobody's, every client has one of its own."""
    clients, batch = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    tokens = draw(st.integers(1, 90))
    lengths = np.array(
        [draw(st.integers(1 if at % batch == 0 else 0, tokens)) for at in range(clients * batch)], dtype=np.int64
    )
    return lengths, tokens, clients


@settings(max_examples=60, deadline=None)
@given(cohorts(), st.integers(1, 3))
def test_what_is_moved_comes_back(cohort: tuple[np.ndarray, int, int], width: int) -> None:
    lengths, tokens, clients = cohort
    layout = TokenLayout(lengths, tokens, CPU, clients)
    real = torch.arange(tokens) < torch.from_numpy(lengths)[:, None]
    x = torch.randn(len(lengths), tokens, width)
    packed = layout.pack(x)
    assert packed.shape == (1, layout.places, width)
    assert torch.equal(packed[0, : layout.used], x[real])
    assert not packed[0, layout.used :].any()
    assert torch.equal(layout.unpack(packed), x * real[:, :, None])
    assert torch.equal(layout.ungroup(layout.group_by_client(packed)), packed[0])
    grouped = layout.group_by_client(packed)
    for client, own in enumerate(real.view(clients, -1, tokens)):
        assert torch.equal(grouped[client, : own.sum()], x.view(clients, -1, tokens, width)[client][own])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 5))
def test_a_move_s_gradient_is_its_transpose(kept: list[bool], empty: int) -> None:
    rows = len(kept)
    chosen = [row for row in range(rows) if kept[row]]
    source = np.random.default_rng(0).permutation([*chosen, *[-1] * (empty + (not chosen))])
    matrix = torch.zeros(len(source), rows, dtype=torch.float64)
    for place, row in enumerate(source.tolist()):
        if row >= 0:
            matrix[place, row] = 1
    move = Move.from_sources(source, rows, CPU)
    x = torch.randn(rows, 2, dtype=torch.float64, requires_grad=True)
    made = move(x)
    assert torch.equal(made, matrix @ x)
    gradient = torch.randn_like(made)
    assert torch.equal(torch.autograd.grad(made, x, gradient)[0], matrix.T @ gradient)
    assert torch.equal(move.reverse(gradient), matrix.T @ gradient)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 700), min_size=1, max_size=40).filter(any))
def test_bins_hold_every_text_once_and_whole(lengths: list[int]) -> None:
    seen: dict[int, list[int]] = {}
    found = pack_bins(np.array(lengths, dtype=np.int64))
    for bins in found:
        assert bins.width % 32 == 0
        for text, position in zip(bins.text, bins.position, strict=True):
            for one in {*text.tolist()} - {-1}:
                assert one not in seen  # in one bin only
                seen[one] = position[text == one].tolist()
    assert seen == {text: list(range(length)) for text, length in enumerate(lengths) if length}
    assert len({bins.width for bins in found}) == len(found)


@given(st.integers(1, 100_000))
def test_few_shapes_and_little_waste(count: int) -> None:
    assert count <= round_up(count) <= count * 1.0625 + 1
    assert len({round_up(one) for one in range(513, 1025)}) <= 16


@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_bins_is_attention_text_by_text(causal: bool) -> None:
    lengths, tokens, heads, width = np.array([3, 40, 7, 1, 20]), 40, 4, 6
    layout = TokenLayout(lengths, tokens, CPU)
    dtype, least = torch.float64, torch.finfo(torch.float64).min
    real = torch.arange(tokens) < torch.from_numpy(lengths)[:, None]
    allowed = real[:, None, None, :].expand(-1, 1, tokens, -1)
    if causal:
        allowed = allowed & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, least)

    def eager(module: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scaling: float):
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
        weights = torch.softmax(q @ k.mT * scaling + mask, -1)
        return (weights @ v).transpose(1, 2).contiguous(), weights

    q, k, v = (torch.randn(len(lengths), tokens, count, width, dtype=dtype) for count in (heads, 2, 2))
    parts = [layout.pack(one.flatten(2)).view(1, layout.places, -1, width).transpose(1, 2) for one in (q, k, v)]
    found = layout.attend(eager, torch.nn.Identity(), *parts, mask, {"scaling": 0.3})
    for text, length in enumerate(lengths.tolist()):
        own = [one[text : text + 1, :length].transpose(1, 2) for one in (q, k, v)]
        wanted = eager(None, *own, mask[text : text + 1, :, :length, :length], 0.3)[0]
        start = int(lengths[:text].sum())
        torch.testing.assert_close(found[:, start : start + length], wanted)


def test_a_mask_of_another_form_is_refused() -> None:
    layout = TokenLayout(np.array([2, 3]), 3, CPU)  # None would do if no text were padded
    x = torch.zeros(1, 2, layout.places, 4)
    for mask in (None, torch.zeros(2, 2, 3, 3), torch.ones(2, 1, 3, 3, dtype=torch.bool), torch.zeros(2, 3)):
        with pytest.raises(Padded):
            layout.attend(lambda *_: None, torch.nn.Identity(), x, x, x, mask, {})
