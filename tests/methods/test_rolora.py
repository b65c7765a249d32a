"""RoLoRA as its paper says."""

from __future__ import annotations

import torch

from fedspan.core.tensors import join_tensor_name
from helpers.sent_factors import sent, slots
from helpers.watched_rounds import RunMethod


def test_rolora_alternates_beginning_with_B_and_one_factor_is_transmitted(run_method: RunMethod) -> None:
    run = run_method("rolora", federation={"clients_per_round": 4})
    for number, round in enumerate(run.rounds):
        active, other = ("B", "A") if number % 2 == 0 else ("A", "B")
        before, after = round.before.state.tensors, round.after.state.tensors
        for layer in run.layers:
            frozen, moving = join_tensor_name(layer.name, other), join_tensor_name(layer.name, active)
            assert torch.equal(before[frozen], after[frozen])
            assert not torch.equal(before[moving], after[moving])
        for _, direction, message in sent(round):
            expected = {active} if direction == "up" else {other} if number else set()
            assert slots(message) == expected
