"""Quantizers and formats of few bits against their definitions entry by entry."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspan.wrappers.fedpaq import pack_levels, quantize, unpack_levels
from fedspan.wrappers.low_precision import Format, compress, decompress


def by_hand(value: Tensor, levels: int, draws: Tensor) -> list[int]:
    """Signed levels of FedPAQ's example 1."""
    norm, result = float(value.double().norm()), []
    for x, draw in zip(value.flatten().tolist(), draws.flatten().tolist(), strict=True):
        scaled = levels * abs(x) / norm
        level = math.floor(scaled)
        result.append(int(math.copysign(level + (draw < scaled - level), x)))
    return result


@pytest.mark.parametrize("bits", [2, 3, 5, 8, 12, 16])
def test_levels_are_the_definitions(bits: int) -> None:
    rng = torch.Generator().manual_seed(bits)
    x = torch.randn(6, 4, generator=rng, dtype=torch.float64)
    draws = torch.rand(x.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    levels, norm = quantize(x, bits, torch.Generator().manual_seed(9))
    assert abs(float(norm) - float(x.norm())) < 1e-6
    assert levels.flatten().tolist() == by_hand(x, 2 ** (bits - 1) - 1, draws)


def test_it_is_unbiased_and_within_the_papers_variance() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, generator=rng, dtype=torch.float64)
    s, draws = 3, 2000
    norm, total, squared = float(x.norm()), torch.zeros_like(x), 0.0
    for _ in range(draws):
        levels, rounded = quantize(x, 3, rng)
        estimate = levels * rounded.double() / s
        total += estimate
        squared += float((estimate - x).square().sum())
    # An entry's standard deviation is at most half a step, norm / s / 2: five standard errors.
    assert ((total / draws - x).abs() <= 5 * norm / s / 2 / math.sqrt(draws)).all()
    bound = min(x.numel() / s**2, math.sqrt(x.numel()) / s) * norm**2
    assert 0.1 * bound < squared / draws <= bound


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 16), st.integers(1, 70), st.integers(0, 2**32), st.sampled_from([1.0, 1e-30, 1e30]))
def test_packed_bits_come_back(bits: int, elements: int, seed: int, scale: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    levels, norm = quantize(torch.randn(elements, generator=rng) * scale, bits, rng)
    most = 2 ** (bits - 1) - 1
    assert int(levels.abs().max()) <= most
    packed = pack_levels(levels, norm, bits)
    assert packed.dtype == torch.uint8
    assert len(packed) == 4 + math.ceil(elements * bits / 8)
    assert torch.equal(unpack_levels(packed, bits)[:elements], levels.float() * (norm / most))


@pytest.mark.parametrize("bits", [3, 16])
def test_more_entries_than_are_spread_out_at_once(bits: int) -> None:
    rng = torch.Generator().manual_seed(1)
    levels = torch.randint(-3, 4, (2**18 + 5,), generator=rng)
    found = unpack_levels(pack_levels(levels, torch.tensor(1.0), bits), bits)[: levels.numel()]
    assert torch.equal((found * (2 ** (bits - 1) - 1)).round().to(torch.int64), levels)


@pytest.mark.parametrize("value", [torch.zeros(3, 2), torch.tensor([0.1]), torch.tensor(-5.0)])
def test_zeros_and_single_numbers_are_exact(value: Tensor) -> None:
    """One entry is its own norm: the highest level, whatever is drawn and however the norm is rounded."""
    levels, norm = quantize(value, 4, torch.Generator())
    assert torch.equal(unpack_levels(pack_levels(levels, norm, 4), 4)[: value.numel()].view_as(value), value)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(get_args(Format)),
    st.lists(st.integers(0, 7), max_size=3),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 1.0, 1e-30, 1e3]),
)
def test_names_and_shapes_come_back_and_errors_are_bounded(
    format: Format, shape: list[int], seed: int, scale: float
) -> None:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    name, restored = decompress(*compress("layer/A", value, format))
    assert (name, restored.shape, restored.dtype) == ("layer/A", value.shape, torch.float32)
    largest = float(value.abs().max()) if value.numel() else 0.0
    # bfloat16 has 8 significant bits, float16 has 11 and a smallest step of 2^-24, int8 127 levels a row or column.
    bound = {"float32": 0.0, "bfloat16": largest / 2**8, "float16": largest / 2**11 + 2**-24, "int8": largest / 253}
    assert float((restored - value).abs().max() if value.numel() else 0.0) <= bound[format]


@pytest.mark.parametrize(("shape", "prefix", "size"), [((3, 7), "rows/", 3 * 11), ((7, 3), "columns/", 11 * 3)])
def test_int8_has_one_scale_for_each_row_or_for_each_column_where_columns_are_longer(
    shape: tuple[int, int], prefix: str, size: int
) -> None:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    name, codes = compress("B", value, "int8")
    assert (name, codes.dtype, codes.numel()) == (f"{prefix}B", torch.int8, size)
    lines = value.tolist() if prefix == "rows/" else value.T.tolist()
    expected = []
    for line in lines:
        scale = torch.tensor(max(abs(x) for x in line)) / 127
        expected.append([float(round(float(torch.tensor(x) / scale)) * scale) for x in line])
    restored = decompress(name, codes)[1]
    assert (restored if prefix == "rows/" else restored.T).tolist() == expected


def test_stochastic_rounding_is_unbiased() -> None:
    rng = torch.Generator().manual_seed(3)
    value = torch.randn(4, 5, generator=rng)
    draws = 4000
    mean = sum(decompress(*compress("A", value, "int8", rng))[1].double() for _ in range(draws)) / draws
    steps = (value.abs().amax(1, keepdim=True) / 127).double()
    # The standard deviation of a rounded entry is at most half a step: five standard errors.
    assert bool(((mean - value).abs() <= 5 * steps / 2 / math.sqrt(draws)).all())
    nearest = decompress(*compress("A", value, "int8"))[1]
    assert bool(((mean - value).abs() < (nearest - value).abs().max()).all())


def test_counters_and_scalars_are_not_rounded() -> None:
    count, scalar = torch.tensor([3, 2**40]), torch.tensor(0.1)
    assert compress("count", count, "int8")[1] is count
    assert decompress("count", count)[1] is count
    assert torch.equal(decompress(*compress("scale", scalar, "int8"))[1], scalar)
    codes = torch.tensor([3, -4], dtype=torch.int8)
    assert decompress("own int8 buffer", codes)[1] is codes


def test_float16_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(OverflowError, match="largest, 65504"):
        compress("A", torch.tensor([1.0, 7e4]), "float16")
