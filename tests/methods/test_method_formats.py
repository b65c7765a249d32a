"""Every method on a narrow base: what it computes with singular values and small changes it computes in float32 up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedspan.core.base import to_dense
from fedspan.runs.setup import Prepared, prepare
from helpers.families import UNLIKE, methods_by_family
from helpers.watched_rounds import method_config, run_watched


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def narrow(request: pytest.FixtureRequest, tiny_folder: Path, prepared: Prepared) -> Prepared:
    return prepare(method_config(tiny_folder, "fedit", model={"dtype": request.param}), prepared.partition)


@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_a_narrow_base_is_never_written_to_nor_anything_narrow_sent(
    key: str, narrow: Prepared, tiny_folder: Path
) -> None:
    """No SVD, QR or eigenvalue comes in 16 bits, and a weight of so few loses a step's change."""
    training = {"weight_decay": 0}  # a base that decays needs float32, and says so
    model = {"dtype": narrow.config.model.dtype}
    before = {name: layer.stored_weight.detach().clone() for name, layer in narrow.engine.adapted.layers.items()}
    run = run_watched(narrow, method_config(tiny_folder, key, model=model, federation={"rounds": 3}, training=training))
    adapted = run.prepared.engine.adapted
    for round in run.rounds:
        state = round.after.state
        for value in (*state.tensors.values(), *state.memory.values()):
            assert value.dtype not in (torch.bfloat16, torch.float16)
            assert not value.is_floating_point() or value.isfinite().all()
        for layer, delta in state.base.total.items():
            assert to_dense(delta).dtype == torch.float32, layer
    for name, layer in adapted.layers.items():
        assert layer.stored_weight.dtype == getattr(torch, model["dtype"])
        assert torch.equal(layer.stored_weight, before[name])
    losses = [round.result.loss for round in run.rounds]
    assert len(set(losses)) == len(losses)
