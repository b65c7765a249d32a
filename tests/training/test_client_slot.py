"""Tensors that clients of a stack share."""

from __future__ import annotations

import torch

from fedspan.training.client_slot import SharedTensors

CPU = torch.device("cpu")


def test_equal_tensors_of_clients_are_one_copy() -> None:
    shared, value = SharedTensors(), torch.randn(3, 2)
    first = shared.get("layer/A", value, CPU)
    assert torch.equal(first, value)
    assert shared.get("layer/A", value.clone(), CPU) is first
    value.add_(1)  # a client's own tensor may change, the copy does not
    assert not torch.equal(first, value)


def test_other_tensors_are_copies_of_their_own() -> None:
    shared, value = SharedTensors(), torch.randn(3, 2)
    first = shared.get("layer/A", value, CPU)
    for other in (value + 1, value.double(), value.reshape(2, 3)):
        copied = shared.get("layer/A", other, CPU)
        assert copied is not first
        assert copied is not other
        assert torch.equal(copied, other)
    assert shared.get("other/A", value, CPU) is not first
    assert shared.get("layer/A", value, CPU) is first
    shared.clear()
    assert shared.get("layer/A", value, CPU) is not first
