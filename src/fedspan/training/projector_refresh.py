"""Refreshes of projectors during local training: when they are due, and the projectors that they install."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from fedspan.core.lowrank import LowRank
from fedspan.core.parametrization import Projected
from fedspan.core.projectors import compute_sketched_projector, compute_svd_projector, draw_projector, reproject
from fedspan.core.tensors import create_generator, join_tensor_name
from fedspan.core.values import Job, Refresh
from fedspan.tasks.task import Examples

if TYPE_CHECKING:  # the engine loads Transformers, and reading a config imports this module
    from fedspan.training.services import TrainingServices


class Moments(Protocol):
    """The part of an optimizer's interface that projectors need."""

    def get_moment(self, kind: str, name: str) -> Tensor:
        """Return a live moment; writing to it changes the optimizer."""
        ...


def refresh_projectors(
    trainer: TrainingServices,
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
    layers = {name: projected for name, projected in job.parametrization.items() if isinstance(projected, Projected)}
    if refresh.rule == "random" or (refresh.until is not None and number >= refresh.until):
        new = {
            name: _draw_random_projector(refresh.seed + number, name, projected, live)
            for name, projected in layers.items()
        }
    else:
        new = _from_gradients(trainer, refresh, layers, live, number, examples, batch_indices)
    for layer, parametrization in layers.items():
        side, old = parametrization.side, live[join_tensor_name(layer, "P")]
        if step:
            close_segment(live, layer, parametrization)
        live[join_tensor_name(layer, "P")] = P = new[layer].to(old) if layer in new else old
        for kind, second in (("exp_avg", False), ("exp_avg_sq", True)):
            moment = optimizer.get_moment(kind, join_tensor_name(layer, "acc"))
            moment.copy_(reproject(moment, old, P, side, refresh.moments, second))
    trainer.adapted.bind(job.parametrization, live)


def refresh_due(refresh: Refresh, step: int) -> bool:
    """Return whether projectors are refreshed before a step."""
    return refresh.at_start if step == 0 else bool(refresh.period) and step % (refresh.period or 1) == 0


def _draw_random_projector(seed: int, layer: str, parametrization: Projected, live: dict[str, Tensor]) -> Tensor:
    acc, P = live[join_tensor_name(layer, "acc")], live[join_tensor_name(layer, "P")]
    rows, columns = parametrization.pair(acc, P).shape
    return draw_projector(layer, (rows, columns), _get_rank(P, parametrization.side), parametrization.side, seed)


def _get_rank(P: Tensor, side: str) -> int:
    return P.shape[0] if side == "right" else P.shape[1]


def close_segment(live: dict[str, Tensor], layer: str, parametrization: Projected) -> None:
    """Move a layer's ``acc, P`` to its finished segments ``done_B, done_A``, in ``live``; ``acc`` restarts at 0."""
    acc, P = live[join_tensor_name(layer, "acc")], live[join_tensor_name(layer, "P")]
    segment = parametrization.pair(acc.detach().clone(), P)
    name_B, name_A = join_tensor_name(layer, "done_B"), join_tensor_name(layer, "done_A")
    done_B, done_A = live.get(name_B), live.get(name_A)
    live[name_B] = segment.B if done_B is None else torch.cat([done_B, segment.B], 1)
    live[name_A] = segment.A if done_A is None else torch.cat([done_A, segment.A], 0)
    with torch.no_grad():
        acc.zero_()


def build_untrained_tensors(job: Job) -> dict[str, Tensor]:
    """Return a job's tensors as a training without any change leaves them, with the segments that refreshes finish.

    Args:
        job: The job; its tensors are not changed. Projectors stay those of its start.
    """
    tensors = dict(job.tensors)
    if job.refresh is None or not job.refresh.period or job.steps is None:
        return tensors
    for layer, parametrization in job.parametrization.items():
        if isinstance(parametrization, Projected):
            name = join_tensor_name(layer, "acc")
            tensors[name] = tensors[name].clone()
            for _ in range(job.refresh.period, job.steps, job.refresh.period):
                close_segment(tensors, layer, parametrization)
    return tensors


def _from_gradients(
    trainer: TrainingServices,
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
    projectors: dict[str, Tensor] = {}

    def take(layer: str, gradient: LowRank) -> None:
        if layer not in layers:
            return
        side = layers[layer].side
        rank = _get_rank(live[join_tensor_name(layer, "P")], side)
        if refresh.rule == "svd":
            projectors[layer] = compute_svd_projector(gradient, rank, side)
        else:
            rng = create_generator(refresh.seed + number, "sketch", layer)
            projectors[layer] = compute_sketched_projector(gradient, rank, side, rng)

    adapted = trainer.adapted
    adapted.set_dropout(None)
    with adapted.capture_gradients(take):
        batch = trainer.task.collate(examples, batch_indices.tolist(), adapted.device)
        with trainer.prefixes.feed(examples, batch_indices.tolist()):
            loss = trainer.task.compute_loss(adapted.model, batch)
        loss.backward()
    for tensor in live.values():
        tensor.grad = None
    return projectors
