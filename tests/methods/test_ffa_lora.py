"""FFA-LoRA as its paper says."""

from __future__ import annotations

import pytest
import torch

from fedspan.core.tensors import join_tensor_name
from helpers.sent_factors import sent, slots
from helpers.watched_rounds import RunMethod


@pytest.mark.parametrize("init_A", ["kaiming", "gaussian", "orthonormal"])
def test_ffa_lora_keeps_one_A_that_is_never_transmitted(init_A: str, run_method: RunMethod) -> None:
    run = run_method("ffa-lora", method={"init_A": init_A}, federation={"rounds": 3})
    first = run.rounds[0].trained[0].job.tensors
    for round in run.rounds:
        assert all(slots(message) == {"B"} for _, _, message in sent(round))
        for local in round.trained:
            for layer in run.layers:
                A = join_tensor_name(layer.name, "A")
                assert torch.equal(local.trained.tensors[A], first[A])
    A = first[join_tensor_name(run.layers[0].name, "A")].double()
    gram = 3 * A @ A.T
    assert torch.allclose(gram, torch.eye(3, dtype=torch.float64), atol=1e-6) == (init_A == "orthonormal")
