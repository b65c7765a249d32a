"""Renewing projectors in mid-job: close the segment under the old one, choose the new one, carry the moments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedspan.core.parametrization import Projected
from fedspan.core.projectors import reproject, seeded_projector, svd_projector
from fedspan.core.tensors import tensor_name
from fedspan.core.values import Job
from fedspan.engines.optimizers import LocalOptimizer
from fedspan.tasks.task import Examples

if TYPE_CHECKING:
    from fedspan.engines.loop import LoopEngine

__all__ = ["refresh_projectors"]


def refresh_projectors(
    engine: LoopEngine,
    job: Job,
    live: dict[str, Tensor],
    optimizer: LocalOptimizer,
    step: int,
    examples: Examples,
    batch_indices: np.ndarray,
) -> None:
    """At the steps that ``job.refresh`` names, replace every ``Projected`` layer's projector (in ``live``, in place).

    The finished segment ``acc, P`` moves to ``done_B, done_A``; ``acc`` restarts at 0, so the weight does not jump.
    """
    refresh = job.refresh
    assert refresh is not None
    if step % refresh.period or (step == 0 and not refresh.at_start):
        return
    gradients = _full_gradients(engine, live, examples, batch_indices) if refresh.rule == "svd" else {}
    number = step // refresh.period
    for layer, parametrization in job.parametrization.items():
        if not isinstance(parametrization, Projected):
            continue
        side = parametrization.side
        acc, old = live[tensor_name(layer, "acc")], live[tensor_name(layer, "P")]
        rank = acc.shape[1] if side == "right" else acc.shape[0]
        if refresh.rule == "svd":
            new = svd_projector(gradients[layer], rank, side)
        else:
            shape = (acc.shape[0], old.shape[1]) if side == "right" else (old.shape[0], acc.shape[1])
            new = seeded_projector(layer, shape, rank, side, refresh.seed + number)
        new = new.to(old)
        _close_segment(live, layer, parametrization)
        live[tensor_name(layer, "P")] = new
        for kind, second in (("exp_avg", False), ("exp_avg_sq", True)):
            moment = optimizer.moment(kind, tensor_name(layer, "acc"))
            moment.copy_(reproject(moment, old, new, side, refresh.moments, second))
    engine.adapted.bind(job.parametrization, live)


def _close_segment(live: dict[str, Tensor], layer: str, parametrization: Projected) -> None:
    acc, P = live[tensor_name(layer, "acc")], live[tensor_name(layer, "P")]
    if not acc.detach().any():  # nothing was trained under the old projector
        return
    segment = parametrization.pair(acc.detach().clone(), P)
    name_B, name_A = tensor_name(layer, "done_B"), tensor_name(layer, "done_A")
    done_B, done_A = live.get(name_B), live.get(name_A)
    live[name_B] = segment.B if done_B is None else torch.cat([done_B, segment.B], 1)
    live[name_A] = segment.A if done_A is None else torch.cat([done_A, segment.A], 0)
    with torch.no_grad():
        acc.zero_()


def _full_gradients(
    engine: LoopEngine, live: Mapping[str, Tensor], examples: Examples, batch_indices: np.ndarray
) -> dict[str, Tensor]:
    """The minibatch gradient by each target layer's whole weight, (O, I)."""
    adapted = engine.adapted
    adapted.capture_gradients(True)
    batch = engine.task.batch(examples, batch_indices.tolist(), adapted.device)
    engine.task.loss(adapted.model, batch).backward()
    gradients = {name: layer.take_gradient() for name, layer in adapted.layers.items()}
    adapted.capture_gradients(False)
    for tensor in live.values():
        tensor.grad = None
    return gradients
