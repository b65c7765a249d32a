"""The sum of clipped gradients and its noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("opacus", reason="the extra fedspan[privacy] is not installed")

from fedspan.core.noise import derive_seed_key
from fedspan.core.values import Job
from fedspan.training.jobs import Assignment, Privacy
from fedspan.training.noisy_sum import NoisySum


def noisy_sum(noise: float, key: bytes = derive_seed_key(0), secret: bool = False) -> NoisySum:
    like = {"layer/A": torch.zeros(150, 200), "layer/B": torch.zeros(3)}
    job = Job({}, like, ())
    privacy = Privacy("dp-sgd", 0.5, noise, key=key, secret=secret)
    return NoisySum(privacy, Assignment("a", 0, job, np.arange(9), 0.1, None, noise), like)


def test_the_noise_has_the_variance_that_the_accountant_is_told() -> None:
    total = noisy_sum(2.5)

    def nothing() -> dict[str, Tensor]:
        return {"layer/A": torch.zeros(0, 150, 200), "layer/B": torch.zeros(0, 3)}

    total.add(nothing())
    first = total.pop_mean(0, 10)["layer/A"]
    assert float(first.std()) == pytest.approx(2.5 * 0.5 / 10, rel=0.02)
    total.add(nothing())
    second = total.pop_mean(1, 10)["layer/A"]
    assert abs(float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])) < 0.02
    other = noisy_sum(2.5, derive_seed_key(1))
    other.add(nothing())
    assert not torch.equal(other.pop_mean(0, 10)["layer/A"], first)


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=5))
@settings(deadline=None, max_examples=30)
def test_no_example_adds_more_than_the_clip(sizes: list[float]) -> None:
    total = noisy_sum(0.0)
    rng = torch.Generator().manual_seed(1)
    for size in sizes:  # one after another, as micro-batches
        made = {"layer/A": torch.randn(1, 150, 200, generator=rng), "layer/B": torch.randn(1, 3, generator=rng)}
        norm = math.sqrt(sum(float(value.square().sum()) for value in made.values()))
        total.add({name: value * (size / norm) for name, value in made.items()})
    found = total.pop_mean(0, 1)
    norm = math.sqrt(sum(float(value.double().square().sum()) for value in found.values()))
    assert norm <= 0.5 * len(sizes) * (1 + 1e-5)
    if len(sizes) == 1:
        assert norm == pytest.approx(min(sizes[0], 0.5), rel=1e-2)


def test_secret_noise_never_serves_two_sums() -> None:
    for secret in (True, False):
        found = []
        for value in (0.0, 0.0, 1e-3):
            total = noisy_sum(1.0, secret=secret)
            total.add({"layer/A": torch.full((1, 150, 200), value), "layer/B": torch.zeros(1, 3)})
            found.append(total.pop_mean(0, 1)["layer/A"])
        assert torch.equal(found[0], found[1])
        assert (float((found[2] - found[0]).abs().max()) > 0.1) == secret
