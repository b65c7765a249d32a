"""The low-pass filter of gradients against SciPy's convolution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.ndimage import convolve1d

from fedspan.core.smoothing import smooth, smooth_groups
from fedspan.core.values import Group


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (1, 4), (2, 5, 6), (4, 2)])
@pytest.mark.parametrize("axis", [0, 1])
def test_it_is_scipy_s_mirrored_convolution(shape: tuple[int, ...], axis: int) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = convolve1d(values.numpy(), np.array([1, 4, 6, 4, 1]) / 16, axis=axis, mode="reflect")
    torch.testing.assert_close(smooth(values, axis), torch.from_numpy(expected), rtol=1e-12, atol=1e-14)


def test_a_constant_does_not_change_and_an_alternating_sign_vanishes() -> None:
    signs = torch.tensor([1.0, -1.0] * 4)[None].expand(2, -1)
    assert torch.equal(smooth(torch.ones(2, 8), 1), torch.ones(2, 8))
    assert not smooth(signs, 1)[:, 2:-2].any()


def test_groups_are_smoothed_along_their_own_axis_and_others_are_not() -> None:
    values = torch.arange(12.0).square().view(3, 4)
    groups = (Group(("l/A",), smoothed_axis=1), Group(("l/B",), smoothed_axis=0), Group(("extras/w",)))
    smoothed = smooth_groups(groups, {"l/A": values, "l/B": values, "extras/w": values})
    assert torch.equal(smoothed["l/A"], smooth(values, 1))
    assert torch.equal(smoothed["l/B"], smooth(values, 0))
    assert smoothed["extras/w"] is values
