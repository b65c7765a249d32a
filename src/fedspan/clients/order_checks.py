"""Checks of a server's tensors by the model and the rank that its client agreed to.

A reply to a projector or factors of full rank would be the whole gradient of a layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch

from fedspan.core.penalties import ProductDecay
from fedspan.core.tensors import EXTRAS, Tensors, group_by_layer, join_extra_name, join_tensor_name
from fedspan.core.values import Job, LayerSpec, Message, Spec
from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.training.config import TrainingSettings

MOST_ERASED = 0.1
"""Share of earlier steps that a step may pull back: a reply would be the gradient of its last step."""
_LONGEST = 4096
"""Side that a matrix of even the smallest layer may have, such as the number of a method's heads."""
_SCALE = 4
"""Entries by which a side may exceed that of the values (the scales of ``wrappers.low_precision``)."""


def require_known(message: Message, spec: Spec) -> None:
    """Check, before anything is computed from a message, that its tensors are the model's and bounded by its shapes.

    Raises:
        FedspanError: If a tensor belongs to no target layer and to nothing that trains in full, or is larger than these
            allow, or if a change of the base does not have the shape of its layer.
    """
    layers = {layer.name: layer for layer in spec.layers}
    for name, value in message.tensors.items():
        owner, part = ("", *name.split("/"))[-2:]  # without prefixes of wrappers
        if owner in layers:
            shape, longest = layers[owner].shape, max(_LONGEST, *layers[owner].shape, *layers[owner].rectangle)
            longest = math.prod(shape) if value.ndim < 2 else longest
            fits = value.ndim <= 3 and all(side <= longest + _SCALE for side in value.shape)
        elif owner == EXTRAS and part in spec.extras:
            shape = spec.extras[part]
            surplus = [side - agreed for side, agreed in zip(value.shape, shape, strict=False)]
            fits = value.ndim == len(shape) and all(0 <= more <= _SCALE for more in surplus)
        else:
            raise FedspanError("message.tensors", name, "a tensor of a layer that the run trains")
        if not fits:
            raise FedspanError("message.tensors", name, f"a tensor for {list(shape)}, not {list(value.shape)}")
    for deltas in () if message.base is None else (message.base.total, *(i.deltas for i in message.base.increments)):
        for name, delta in deltas.items():
            if name not in layers or delta.shape != layers[name].shape:
                raise FedspanError("message.base", name, "a change of a target layer, in its shape")


def require_agreed(job: Job, message: Message, rank: int | None, lr: float, adapted: AdaptedModel) -> None:
    """Check that what a job starts from has the shapes of the model and the rank, in float32 or as the model has it.

    Args:
        rank: Largest rank of factors, cores and projectors; None: that of the layer.
        lr: Peak learning rate.

    Raises:
        FedspanError: If a tensor has another shape or number format, or if factors are so large that the decay of their
            product erases what was trained.
    """
    slots = group_by_layer(job.tensors)
    initial: Tensors = {join_extra_name(path): adapted.get_initial(path) for path in adapted.get_values()}
    for layer in adapted.spec.layers:
        shapes = getattr(job.parametrization.get(layer.name), "slots", None)
        if isinstance(shapes, Mapping):  # a node's own method may have a form without them
            _require_slots(layer, shapes, slots.get(layer.name, {}), rank)
    for name, value in job.tensors.items():
        formats = {torch.float32, initial[name].dtype} if name in initial else {torch.float32}
        if name in message.tensors and value.dtype not in formats:
            raise FedspanError("message.tensors", name, f"numbers of {torch.float32}, not {value.dtype}")
        if name in initial and value.shape != initial[name].shape:
            raise FedspanError("message.tensors", name, f"the shape {list(initial[name].shape)}")
    moments = () if job.optimizer_state is None else job.optimizer_state.moments.values()
    for values in (job.gradient_offset, *moments):
        for name, value in values.items():
            if name in job.tensors and value.shape != job.tensors[name].shape:
                raise FedspanError("message.tensors", name, f"moments and variates of {list(job.tensors[name].shape)}")
    for decay in (penalty for penalty in job.penalties if isinstance(penalty, ProductDecay)):
        for name in itertools.chain.from_iterable(decay.pairs):  # one factor's gradient has the square of the other
            norm = float(torch.linalg.matrix_norm(job.tensors[name].float(), 2))
            if not lr * decay.strength * norm**2 <= MOST_ERASED:
                expected = f"a factor by which steps erase at most {MOST_ERASED:.0%}"
                raise FedspanError("message.tensors", name, expected)


def compute_min_batch(job: Job, settings: TrainingSettings, min_batch: int, train_examples: int) -> int:
    """Return the fewest examples of a step of a job, by the limits of its client's owner.

    What trains in turns, or under one of several projectors, is a reply of its own; a projector may come from the
    gradient of a step's first pass.

    Raises:
        FedspanError: If the run's full steps have fewer.
    """
    if min_batch == 1:
        return 1
    passes, refresh = settings.gradient_accumulation_steps, job.refresh
    is_parted = (refresh is not None and refresh.period is not None) or any(group.turns > 1 for group in job.trainable)
    least = max(train_examples if is_parted else 1, min_batch if refresh is None else min_batch * passes)
    if (count := settings.batch_size * passes) < least:
        problem = f"steps of this job, which the reply tells apart, are of {count} examples"
        raise FedspanError("limits.train_examples", train_examples, f"at least {least}", problem=problem)
    return least


def _require_slots(layer: LayerSpec, shapes: Mapping[str, str], slots: Tensors, rank: int | None) -> None:
    """Check a layer's tensors by the letters of their shapes (``core.parametrization``)."""
    sides = dict(zip("OIoi", (*layer.shape, *layer.rectangle), strict=True))
    sides["K"] = min(layer.shape)
    most = min(layer.rectangle) if rank is None else rank
    for slot, value in slots.items():
        letters, name = shapes.get(slot, ""), join_tensor_name(layer.name, slot)
        if value.ndim != len(letters) or not letters:
            expected = ", ".join(f"{own} ({', '.join(shape)})" for own, shape in shapes.items())
            raise FedspanError("message.tensors", name, f"tensors {expected}")
        for letter, side in zip(letters, value.shape, strict=True):
            if letter == "R" and side > most:
                raise FedspanError("message.tensors", name, f"factors of at most rank {most}")
            if sides.setdefault(letter, side) != side:
                expected = f"the shape {letters} with {letter} = {sides[letter]}, not {list(value.shape)}"
                raise FedspanError("message.tensors", name, expected)
