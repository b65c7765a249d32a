"""Draws are functions of their keys: of no draw before, no device and no global generator."""

from __future__ import annotations

import itertools

import torch

from fedspan.core.projectors import draw_projector, draw_random_projector
from fedspan.core.tensors import create_generator


def draw(*key: int | str) -> tuple[float, ...]:
    seed, purpose, *rest = key
    return tuple(torch.rand(4, generator=create_generator(int(seed), str(purpose), *rest)).tolist())


def test_every_part_of_a_key_counts() -> None:
    """Neighboring seeds, rounds and layers, and parts that read alike when written together."""
    keys = [(0, "A"), (1, "A"), (0, "B"), (0, "A", 1), (0, "A", 2), (0, "A", 1, 2), (0, "A", 12), (0, "A", "l1", 2)]
    assert all(draw(*one) != draw(*other) for one, other in itertools.combinations(keys, 2))
    assert draw(*keys[0]) == draw(*keys[0])


def test_no_global_state_is_read_or_moved() -> None:
    before = torch.get_rng_state()
    first = draw(3, "A", "layer"), draw_random_projector((9, 4), 2, "right", create_generator(3, "projector"))
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        assert draw(3, "A", "layer") == first[0]


def test_they_are_made_on_the_cpu_in_float64_wherever_the_model_is() -> None:
    """CPU and CUDA generators differ; a QR in float64 with fixed signs rounds to the same float32 nearly everywhere."""
    made = draw_projector("layer", (9, 4), 2, "right", 7)
    assert made.device.type == create_generator(7, "x").device.type == "cpu"
    assert made.dtype == torch.float32
    double = torch.randn((4, 2), generator=create_generator(7, "projector", "layer"), dtype=torch.float64)
    Q, R = torch.linalg.qr(double)
    assert torch.equal(made, (Q * R.diagonal().sign()).T.float())
    triangle = made.double() @ double  # Q^T of what was drawn: the signs are those of a positive diagonal
    assert (triangle.diagonal() > 0).all()
