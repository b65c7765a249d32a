"""The shapes of a target layer."""

from __future__ import annotations

import pytest

from fedspan.core.spec import LayerSpec, Spec


@pytest.mark.parametrize(
    ("layer", "shape", "rectangle"),
    [
        (LayerSpec("linear", 12, 8), (12, 8), (12, 8)),
        (LayerSpec("convolution", 8, 4 * 3 * 3, (3, 3)), (8, 36), (24, 12)),
        (LayerSpec("convolution", 8, 4 * 5 * 2, (5, 2)), (8, 40), (40, 8)),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_convolution_is_also_a_more_nearly_square_matrix(
    layer: LayerSpec, shape: tuple[int, int], rectangle: tuple[int, int]
) -> None:
    assert layer.shape == shape
    assert layer.rectangle == rectangle


def test_equal_specs_hash_alike() -> None:
    one, other = (Spec((LayerSpec("linear", 12, 8),), {"head": (3, 12), "bias": (3,)}, clients=3) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != Spec((LayerSpec("linear", 12, 8),), {"head": (4, 12), "bias": (3,)}, clients=3)
