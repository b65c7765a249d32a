"""Projector refresh during a job: close the segment of the old projector, choose a new one, transfer the moments."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedspan.core.lowrank import LowRank
from fedspan.core.parametrization import Projected
from fedspan.core.projectors import reproject, seeded_projector, sketch_projector, svd_projector
from fedspan.core.tensors import generator, tensor_name
from fedspan.core.values import Job, Refresh
from fedspan.tasks.task import Examples
from fedspan.training.trainer import Trainer

__all__ = ["Moments", "refresh_due", "refresh_projectors"]


class Moments(Protocol):
    """The part of an optimizer's interface that projectors need."""

    def moment(self, kind: str, name: str) -> Tensor:
        """Return a live moment; writing to it changes the optimizer."""
        ...


def refresh_projectors(
    trainer: Trainer,
    job: Job,
    live: dict[str, Tensor],
    optimizer: Moments,
    step: int,
    examples: Examples,
    batch_indices: np.ndarray,
) -> None:
    """Replace every ``Projected`` layer's projector (in ``live``, in place) at the steps that ``job.refresh`` names.

    The finished segment ``acc, P`` moves to ``done_B, done_A``; ``acc`` restarts at 0, so the weight does not jump.
    If projectors come from the gradient, a layer without a gradient keeps its projector.
    """
    refresh = job.refresh
    assert refresh is not None
    if not refresh_due(refresh, step):
        return
    number = step // refresh.period if refresh.period else 0
    layers = {name: one for name, one in job.parametrization.items() if isinstance(one, Projected)}
    if refresh.rule == "random" or (refresh.until is not None and number >= refresh.until):
        new = {name: _random(refresh.seed + number, name, one, live) for name, one in layers.items()}
    else:
        new = _from_gradients(trainer, refresh, layers, live, number, examples, batch_indices)
    for layer, parametrization in layers.items():
        side, old = parametrization.side, live[tensor_name(layer, "P")]
        if step:
            _close_segment(live, layer, parametrization)
        live[tensor_name(layer, "P")] = P = new[layer].to(old) if layer in new else old
        for kind, second in (("exp_avg", False), ("exp_avg_sq", True)):
            moment = optimizer.moment(kind, tensor_name(layer, "acc"))
            moment.copy_(reproject(moment, old, P, side, refresh.moments, second))
    trainer.adapted.bind(job.parametrization, live)


def refresh_due(refresh: Refresh, step: int) -> bool:
    """Return whether projectors are refreshed before a step."""
    return refresh.at_start if step == 0 else bool(refresh.period) and step % (refresh.period or 1) == 0


def _random(seed: int, layer: str, parametrization: Projected, live: dict[str, Tensor]) -> Tensor:
    acc, P = live[tensor_name(layer, "acc")], live[tensor_name(layer, "P")]
    rows, columns = parametrization.pair(acc, P).shape
    return seeded_projector(layer, (rows, columns), _rank(P, parametrization.side), parametrization.side, seed)


def _rank(P: Tensor, side: str) -> int:
    return P.shape[0] if side == "right" else P.shape[1]


def _close_segment(live: dict[str, Tensor], layer: str, parametrization: Projected) -> None:
    acc, P = live[tensor_name(layer, "acc")], live[tensor_name(layer, "P")]
    segment = parametrization.pair(acc.detach().clone(), P)
    name_B, name_A = tensor_name(layer, "done_B"), tensor_name(layer, "done_A")
    done_B, done_A = live.get(name_B), live.get(name_A)
    live[name_B] = segment.B if done_B is None else torch.cat([done_B, segment.B], 1)
    live[name_A] = segment.A if done_A is None else torch.cat([done_A, segment.A], 0)
    with torch.no_grad():
        acc.zero_()


def _from_gradients(
    trainer: Trainer,
    refresh: Refresh,
    layers: dict[str, Projected],
    live: dict[str, Tensor],
    number: int,
    examples: Examples,
    batch_indices: np.ndarray,
) -> dict[str, Tensor]:
    """Compute projectors from the minibatch gradient of each target layer's full weight, in one extra pass.

    The gradient itself is not stored.
    """
    found: dict[str, Tensor] = {}

    def take(layer: str, gradient: LowRank) -> None:
        if layer not in layers:
            return
        side = layers[layer].side
        rank = _rank(live[tensor_name(layer, "P")], side)
        if refresh.rule == "svd":
            found[layer] = svd_projector(gradient, rank, side)
        else:
            rng = generator(refresh.seed + number, "sketch", layer)
            found[layer] = sketch_projector(gradient, rank, side, rng)

    adapted = trainer.adapted
    adapted.set_dropout(None)
    with adapted.captured_gradients(take):
        batch = trainer.task.batch(examples, batch_indices.tolist(), adapted.device)
        with trainer.prefixes.feed(examples, batch_indices.tolist()):
            loss = trainer.task.loss(adapted.model, batch)
        loss.backward()
    for tensor in live.values():
        tensor.grad = None
    return found
