"""Gaussian noise from a key: normal, its own for every key and label, and from more keys than torch has streams."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedspan.core.noise import (
    KEY_BYTES,
    add_gaussian,
    compute_tensor_digest,
    derive_seed_key,
    draw_gaussian,
    draw_poisson_sample,
)

KEY = derive_seed_key(1)


def test_draws_are_standard_normal() -> None:
    draws = draw_gaussian(KEY, torch.Size([400, 500]), "a")
    assert draws.dtype == torch.float64
    assert scipy.stats.kstest(draws.flatten().numpy(), "norm").pvalue > 1e-3
    assert abs(float(draws.mean())) < 0.01
    assert abs(float(draws.std()) - 1) < 0.01
    assert abs(float((draws[:, 1:] * draws[:, :-1]).mean())) < 0.01


@given(st.integers(0, KEY_BYTES - 1), st.integers(1, 255))
def test_every_byte_of_the_key_counts(place: int, flip: int) -> None:
    other = bytes(value ^ flip if at == place else value for at, value in enumerate(KEY))
    shape = torch.Size([64])
    assert float((draw_gaussian(KEY, shape, "a") - draw_gaussian(other, shape, "a")).abs().min()) > 0
    # and two changes that would cancel in a sum of the key's words
    both = bytes(value ^ flip if at in (place, (place + 4) % KEY_BYTES) else value for at, value in enumerate(KEY))
    assert not torch.equal(draw_gaussian(KEY, shape, "a"), draw_gaussian(both, shape, "a"))
    samples = {tuple(draw_poisson_sample(one, 0.5, 256, "a").tolist()) for one in (KEY, other, both)}
    assert len(samples) == 3


def test_a_generator_of_torch_has_too_few_streams() -> None:
    """Why there is ``core.noise``: who sees a draw could try all seeds."""
    first, second = (torch.Generator().manual_seed(seed) for seed in (7, 7 + 2**32))
    assert torch.equal(torch.randn(8, generator=first), torch.randn(8, generator=second))


def test_a_poisson_sample_takes_each_position_by_itself() -> None:
    samples = [draw_poisson_sample(KEY, 0.3, 20, "sample", number).numpy() for number in range(2000)]
    sizes = np.array([len(sample) for sample in samples])
    assert sizes.mean() == pytest.approx(6, rel=0.03)
    assert sizes.var() == pytest.approx(20 * 0.3 * 0.7, rel=0.1)
    counts = np.bincount(np.concatenate(samples), minlength=20)
    assert abs(counts / 2000 - 0.3).max() < 0.05
    assert all((np.diff(sample) > 0).all() for sample in samples)
    assert draw_poisson_sample(KEY, 1.0, 5, "a").tolist() == [0, 1, 2, 3, 4]
    assert draw_poisson_sample(KEY, 0.5, 0, "a").tolist() == []


def test_a_noisy_value_has_steps_that_only_the_noise_decides() -> None:
    value = torch.full((1000,), 1e-3 + 2**-60, dtype=torch.float64)
    for std in (0.7, 3e-5):
        noisy = add_gaussian(value, std, KEY, "a")
        torch.testing.assert_close(noisy, value + std * draw_gaussian(KEY, value.shape, "a"), atol=std * 1e-9, rtol=0)
        steps = noisy / 2.0 ** (math.floor(math.log2(std)) - 29)
        assert torch.equal(steps, steps.round())


def test_labels_name_draws() -> None:
    shape = torch.Size([3, 5])
    assert torch.equal(draw_gaussian(KEY, shape, "a", 1), draw_gaussian(KEY, shape, "a", 1))
    for other in (("a", 2), ("a", "1", ""), ("a1",), ()):
        assert not torch.equal(draw_gaussian(KEY, shape, "a", 1), draw_gaussian(KEY, shape, *other))
    assert draw_gaussian(KEY, torch.Size([0, 3]), "a").shape == (0, 3)
    with pytest.raises(ValueError, match="32 bytes, not 4"):
        draw_gaussian(b"four", shape)
    assert derive_seed_key(1) != derive_seed_key(2)


def test_a_digest_tells_tensors_apart() -> None:
    value = torch.arange(6.0).view(2, 3)
    same = compute_tensor_digest({"a": value, "b": value})
    assert compute_tensor_digest({"b": value.clone(), "a": value}) == same
    for other in (
        {"a": value, "c": value},
        {"a": value, "b": value.view(3, 2)},
        {"a": value, "b": value.double()},
        {"a": value, "b": value + torch.eye(2, 3) * 1e-6},
    ):
        assert compute_tensor_digest(other) != same
