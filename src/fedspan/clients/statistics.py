"""The client half of the exchange of statistics that a head starts from (``federation.head_start``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast, get_args

import numpy as np
import torch

from fedspan.core.heads import HeadKind, statistics_shapes, summarize
from fedspan.core.tensors import Tensors
from fedspan.core.values import Job, Message
from fedspan.federation.head_start import BOUND, KIND
from fedspan.models.head import find_output_layer
from fedspan.tasks.task import Examples
from fedspan.training.engine import Engine

__all__ = ["StatisticsLimits", "compute_client_statistics", "parse_statistics_order"]

_BATCH = 64
_CHUNK = 4096
"""Examples whose features are in memory at a time."""


@dataclass(frozen=True)
class StatisticsLimits:
    """What a client's owner allows of statistics.

    Args:
        allowed: Whether statistics leave this client at all.
        class_examples: Examples that a class needs here to be counted; examples of smaller classes are left out. Those
            of a regression are one class.
        announced: Kinds of start that the run's config announced to the owner; None: any.
    """

    allowed: bool = True
    class_examples: int = 1
    announced: tuple[HeadKind, ...] | None = None


def parse_statistics_order(message: Message) -> tuple[HeadKind, float, Message]:
    """Take the kind of start and the bound on features out of an order's message.

    Raises:
        ValueError: If they are missing or not such.
    """
    scalars = dict(message.scalars)
    kind, bound = scalars.pop(KIND, None), scalars.pop(BOUND, None)
    if kind not in get_args(HeadKind) or not isinstance(bound, float) or not 0 <= bound < float("inf"):
        raise ValueError(f"an order for statistics of kind {kind!r} with a bound of {bound!r}")
    return cast(HeadKind, kind), bound, replace(message, scalars=scalars)


def compute_client_statistics(
    engine: Engine,
    job: Job | None,
    examples: Examples,
    indices: np.ndarray,
    kind: HeadKind,
    bound: float,
    class_examples: int,
) -> Tensors:
    """Compute the statistics of a client's examples.

    Args:
        engine: The engine with the model.
        job: The model whose features are computed; None: the pretrained one.
        examples: The data set that the indices point into.
        indices: The client's training examples, (examples,).
        kind: Kind of start.
        bound: Norm to which features are clipped before they are divided by it; 0: they are sent as they are.
        class_examples: Examples that a class needs to be counted; those of a regression are one class.

    Raises:
        NoOutputLayer: If the model's logits are not those of one linear layer.
    """
    layer = find_output_layer(engine.adapted)
    shapes = statistics_shapes(kind, layer.outputs, layer.features)
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    answers, own = torch.from_numpy(cast(Any, examples).labels[indices]), indices
    if class_examples > 1:
        classes = torch.zeros(len(answers), dtype=torch.int64) if kind == "least-squares" else answers
        kept = (torch.bincount(classes, minlength=layer.outputs) >= class_examples)[classes]
        own, answers = indices[kept.numpy()], answers[kept]
    engine.prepare(examples, [indices])
    for start in range(0, len(own), _CHUNK):
        part = own[start : start + _CHUNK]
        features = engine.features(job, examples, part, _BATCH)
        if bound:
            features = features / features.norm(dim=1, keepdim=True).clamp(min=bound)
        found = summarize(features, answers[start : start + _CHUNK], layer.outputs, kind).tensors()
        for name, value in found.items():
            total[name] += value * (len(part) / len(indices))
    return {name: value.float() for name, value in total.items()}
