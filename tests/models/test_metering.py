"""FLOPs and bytes of passes without values: torch's own counter on real passes, and sums that can be done by hand."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fedspan.models.metering import Meter, meter_pass

ROWS, INPUTS, WIDTH = 6, 10, 14


def net(device: str, frozen: int = 0) -> nn.Sequential:
    """Three layers, the first of which may be frozen."""
    made = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    for layer in list(made)[:frozen]:
        layer.requires_grad_(False)
    return made.to(device)


def test_flops_are_those_of_torch_s_counter_on_a_real_pass() -> None:
    for frozen in (0, 1, 3):
        real, empty = net("cpu", frozen), net("meta", frozen)
        with FlopCounterMode(display=False) as counter:
            loss = real(torch.ones(ROWS, INPUTS)).sum()
            forward = counter.get_total_flops()
            loss.backward()
        found = meter_pass(lambda empty=empty: empty(torch.empty(ROWS, INPUTS, device="meta")))
        assert (found.forward, found.forward + found.backward) == (forward, counter.get_total_flops())


def test_frozen_weights_have_no_gradients_and_nothing_goes_below_the_first_that_moves() -> None:
    layer, last = 2 * ROWS * WIDTH * WIDTH, 2 * ROWS * WIDTH
    found = meter_pass(lambda: net("meta", frozen=3)(torch.empty(ROWS, INPUTS, device="meta")))
    assert found.forward == 2 * ROWS * INPUTS * WIDTH + layer + last
    assert found.backward == last  # of the last weight alone


def test_the_peak_is_of_what_is_held_at_the_same_time() -> None:
    """A chain without gradients holds two tensors at a time; one with them holds all until they are used."""
    x = torch.empty(1000, device="meta")

    def chain() -> torch.Tensor:
        y = x
        for _ in range(5):
            y = y.sin()
        return y

    assert meter_pass(chain).peak == 2 * 4000
    weight = torch.empty(1000, device="meta", requires_grad=True)

    def saved() -> torch.Tensor:
        y = weight
        for _ in range(5):
            y = y.sin()  # keeps its input: four results; the fifth one is the output
        return y

    assert 5 * 4000 <= meter_pass(saved).peak <= 8 * 4000


def test_what_is_computed_again_is_counted_again_and_not_kept() -> None:
    chain = [nn.Sequential(nn.Linear(WIDTH, 50), nn.GELU(), nn.Linear(50, WIDTH)).to("meta") for _ in range(8)]

    def blocks(again: bool) -> torch.Tensor:
        y = torch.empty(100, WIDTH, device="meta", requires_grad=True)
        for block in chain:
            block.requires_grad_(False)
            y = checkpoint(block, y, use_reentrant=False) if again else block(y)
        return y

    kept, again = meter_pass(lambda: blocks(False)), meter_pass(lambda: blocks(True))
    assert again.forward == kept.forward
    assert again.backward > kept.backward
    assert again.peak < kept.peak


def test_questions_about_values_are_answered_with_yes() -> None:
    mask = torch.empty(3, dtype=torch.bool, device="meta")
    with Meter():
        assert bool(mask.all())
        assert F.relu(torch.empty(2, device="meta")).shape == (2,)
