"""Pooling of hidden states."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedspan.models.pooling import Pooling

HIDDEN = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mode", ["mean", "max", "cls", "last"])
def test_padding_does_not_matter(mode: Any) -> None:
    hidden = HIDDEN[:1]
    padded = torch.cat([hidden, torch.full((1, 2, 4), torch.nan)], 1)
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    torch.testing.assert_close(Pooling(mode)(padded, mask), Pooling(mode)(hidden, None))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("mode", ["mean", "max", "cls", "last"])
def test_each_text_is_pooled_over_its_own_tokens(mode: Any, normalize: bool) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    pooled = Pooling(mode, normalize)(HIDDEN, mask)
    for text, length, vector in zip(HIDDEN, (2, 3), pooled, strict=True):
        tokens = text[:length]
        expected = {"mean": tokens.mean(0), "max": tokens.max(0).values, "cls": tokens[0], "last": tokens[-1]}[mode]
        torch.testing.assert_close(vector, expected / expected.norm() if normalize else expected)
