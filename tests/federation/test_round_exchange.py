"""What a round exchanges: orders, the failures and losses of replies, and the error of a round with too few."""

from __future__ import annotations

import math

import pytest

from fedspan.federation.protocol import Part, Reply
from fedspan.federation.round_exchange import compute_mean_loss


@pytest.mark.parametrize(
    ("counts", "ratio", "weights"),
    [
        ((1, 1, 100, 100), 4.0, (1, 1, 4, 4)),  # the mean of the middle two would limit nothing
        ((100, 1, 100, 1), 4.0, (4, 1, 4, 1)),
        ((10, 20, 100), 4.0, (10, 20, 80)),
        ((0, 10, 100), 4.0, (0, 10, 40)),
        ((0, 0, 7, 100), 4.0, (0, 0, 7, 100)),  # the lower middle one is 0: no limit
        ((1, 1, 100, 100), None, (1, 1, 100, 100)),
    ],
)
def test_the_mean_loss_weighs_a_phase_up_to_a_multiple_of_the_lower_median(
    counts: tuple[int, ...], ratio: float | None, weights: tuple[int, ...]
) -> None:
    losses = [2.0**number for number in range(len(counts))]
    replies = [
        Reply("train", 0, 0, "a", (Part(loss=loss, examples=float(count)),))
        for loss, count in zip(losses, counts, strict=True)
    ]
    expected = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
    assert compute_mean_loss(replies, ratio) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("parts", [(), (Part(loss=0.5, examples=0.0),)])
def test_a_mean_loss_over_no_examples_is_nan(parts: tuple[Part, ...]) -> None:
    assert math.isnan(compute_mean_loss([Reply("train", 0, 0, "a", parts)] * 2, 4.0))
