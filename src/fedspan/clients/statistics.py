"""The client half of the exchange of statistics that initialize a head (``federation.head_start``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast, get_args

import numpy as np
import torch

from fedspan.core.heads import HeadKind, compute_statistics_shapes, summarize_features
from fedspan.core.tensors import Tensors
from fedspan.core.values import Job, Message
from fedspan.errors import FedspanError
from fedspan.federation.head_start import BOUND, KIND
from fedspan.models.head import find_output_layer
from fedspan.tasks.task import Examples, get_head_targets, get_labels
from fedspan.training.engine import Engine

_BATCH = 64
_CHUNK = 4096
"""Maximum number of examples whose features are in memory."""


@dataclass(frozen=True)
class StatisticsLimits:
    """A data owner's limits on statistics.

    Args:
        refusal: Why no statistics leave this client; None: they may.
        class_examples: Minimum number of examples of a class; examples of smaller classes are left out. All examples of
            a regression are one class.
        announced: Kinds of statistics that the run's config announced to the owner; None: any.
        examples_per_feature: Minimum number of examples for each feature.
    """

    refusal: FedspanError | None = None
    class_examples: int = 1
    announced: tuple[HeadKind, ...] | None = None
    examples_per_feature: int = 0

    def require(self, kind: HeadKind, round: int, examples: int, features: int) -> None:
        """Check that the owner lets statistics of a kind leave this client before a round."""
        if self.refusal is not None:
            raise self.refusal
        if round != 0 or (self.announced is not None and kind not in self.announced):
            problem = f"the run's config announced no statistics of this kind before round {round + 1}"
            raise FedspanError("model.head_init", kind, problem=problem)
        if examples < self.examples_per_feature * features:
            problem = f"statistics of {features} features need {self.examples_per_feature * features} examples here"
            raise FedspanError("limits.statistics_examples", self.examples_per_feature, problem=problem)


def parse_statistics_order(message: Message) -> tuple[HeadKind, float, Message]:
    """Split an order's message into the kind of statistics, the bound on features and the rest of the message.

    Raises:
        ValueError: If the kind or the bound is missing or invalid.
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
        job: Job of the model that computes the features; None: the pretrained model.
        indices: The client's training examples, (examples,).
        bound: Norm to which features are clipped before they are divided by it; 0: neither clipped nor divided.
        class_examples: Minimum number of examples of a class; those of a regression are one class.

    Raises:
        NoOutputLayer: If the model's logits are not those of one linear layer.
    """
    layer = find_output_layer(engine.adapted)
    shapes = compute_statistics_shapes(kind, layer.outputs, layer.features)
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    selected = indices
    if class_examples > 1:
        targets = torch.from_numpy(get_labels(examples, indices))
        classes = torch.zeros(len(targets), dtype=torch.int64) if kind == "least-squares" else targets
        is_kept = (torch.bincount(classes, minlength=layer.outputs) >= class_examples)[classes]
        selected = indices[is_kept.numpy()]
    engine.prepare(examples, [indices])
    for start in range(0, len(selected), _CHUNK):
        part = selected[start : start + _CHUNK]
        features = engine.compute_features(job, examples, part, _BATCH)
        if bound:
            features = features / features.norm(dim=1, keepdim=True).clamp(min=bound)
        targets = torch.from_numpy(get_head_targets(engine.task, examples, part))
        summary = summarize_features(features, targets, layer.outputs, kind).to_tensors()
        for name, value in summary.items():
            total[name] += value * (len(features) / len(indices))
    return {name: value.float() for name, value in total.items()}
