"""What a round sets on a trainer, and how it is undone."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from fedspan.training.trainers.transformers_round import restore_losses


def test_losses_in_a_dict_and_in_other_losses_hold_the_model_again() -> None:
    model, wrapper = torch.nn.Linear(3, 2), torch.nn.Sequential()
    inner, outer = torch.nn.Module(), torch.nn.Module()
    inner.model = outer.model = model
    outer.loss = inner
    with restore_losses(SimpleNamespace(loss={"pairs": outer}), model):  # pyright: ignore[reportArgumentType]
        inner.model = outer.model = wrapper
    assert inner.model is outer.model is model
    assert outer.loss is inner
