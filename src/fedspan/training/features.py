"""Features that enter a model's output layer, stored for jobs that train this layer alone."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedspan.core.tensors import join_extra_name, to_device
from fedspan.core.values import Job
from fedspan.models.adapted import AdaptedModel
from fedspan.models.calls import replace_forward
from fedspan.models.head import NoOutputLayer, find_output_layer
from fedspan.tasks.task import Examples


def trains_output_layer(job: Job, adapted: AdaptedModel) -> bool:
    """Return whether a job trains the output layer of the pretrained model, and is of nothing else."""
    if job.parametrization or adapted.base.moved or set(job.tensors) != set(job.trainable_names):
        return False
    try:
        path = find_output_layer(adapted).path
    except NoOutputLayer:
        return False
    return set(job.tensors) <= {join_extra_name(f"{path}.{name}") for name in ("weight", "bias")}


class FeatureStore:
    """Features of the examples of each data set, float32 on the CPU, which the threads of an engine share."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._stored: dict[int, tuple[Examples, Tensor, np.ndarray]] = {}  # a held data set keeps its id

    def ensure(self, examples: Examples, indices: np.ndarray, compute: Callable[[], Tensor]) -> None:
        """Store the features of some examples, unless all of them are stored.

        Args:
            indices: The examples, (examples,).
            compute: Computes their features, (examples, D).
        """
        entry = self._stored.get(id(examples))
        if entry is not None and entry[2][indices].all():
            return
        features = compute()
        with self._lock:
            if id(examples) not in self._stored:
                shape = (len(examples.lengths), features.shape[1])
                self._stored[id(examples)] = examples, torch.zeros(shape), np.zeros(shape[0], dtype=bool)
        _, rows, known = self._stored[id(examples)]
        rows[torch.tensor(indices)] = features
        known[indices] = True

    def clear(self) -> None:
        """Forget all features."""
        self._stored.clear()

    @contextmanager
    def feed(self, adapted: AdaptedModel, examples: Examples, indices: Sequence[int]) -> Generator[None]:
        """Let forward passes of a batch of examples compute the output layer alone within this context."""
        layer = adapted.model.get_submodule(find_output_layer(adapted).path)
        features = to_device(self._stored[id(examples)][1][list(indices)], adapted.device)

        def forward(*args: Any, **options: Any) -> Any:
            return SimpleNamespace(logits=layer(features))

        with replace_forward(adapted.model, forward):
            yield
