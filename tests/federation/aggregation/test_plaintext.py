"""The size that a round lets a client's reply have."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from fedspan.core.spec import LayerSpec, Spec
from fedspan.core.values import Client, Message, OptimizerSpec
from fedspan.federation import serialization
from fedspan.federation.aggregation.plaintext import PlaintextAggregation
from fedspan.federation.federation import STRICT
from fedspan.federation.progress import ClientData
from fedspan.federation.round_context import RoundContext, Tally
from fedspan.federation.settings import RoundSettings
from fedspan.methods.lora_a2 import LoRAA2
from fedspan.training.jobs import TrainingSettings

RANK, NONE = 8, np.array([], dtype=np.int64)


@pytest.mark.parametrize("round", [0, 1])
def test_a_reply_whose_size_depends_on_data_is_within_its_limit(round: int) -> None:
    narrow, wide = LayerSpec("narrow", 4, 3), LayerSpec("wide", 700, 900)
    method = LoRAA2(spec=Spec(layers=(narrow, wide)), seed=1, r=RANK, lora_alpha=RANK)
    client = Client("a", rank=4, scaling=1.0, examples=5, weight=5.0)
    context = RoundContext(
        method=method,
        settings=RoundSettings(rounds=2),
        training=TrainingSettings(OptimizerSpec()),
        clients={"a": ClientData(client, NONE, NONE, NONE)},
        state=method.init({}).advance_round() if round else method.init({}),
        ids=("a",),
        draw_order=("a",),
        target=1,
        rules=STRICT,
        transport=cast(Any, None),
        run="",
    )
    limit = PlaintextAggregation(context, Tally()).compute_reply_bytes(client)

    # The client's budget, 4 slots for each of two layers, is spent on the wide one, as its data may have it.
    active, shape = ("B", (wide.out_features, RANK)) if round == 0 else ("A", (RANK, wide.in_features))
    empty = (narrow.out_features, 0) if round == 0 else (0, narrow.in_features)
    tensors = {
        "narrow/slots": torch.zeros(0, dtype=torch.int32),
        f"narrow/d{active}": torch.zeros(empty),
        "wide/slots": torch.arange(RANK, dtype=torch.int32),
        f"wide/d{active}": torch.ones(shape),
    }
    reply = Message(tensors, {"active": active})
    method.contribute(reply, client)  # it is one that the server accepts
    assert len(serialization.encode(reply)) <= limit < 2 * len(serialization.encode(reply))
