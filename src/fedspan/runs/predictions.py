"""The predicted classes of the held-out examples, which a run records for the intervals of its differences.

``predictions/start.safetensors`` and ``result.safetensors`` have ``targets``, (items,), and ``predicted``, (models,
items), both int32: one model for all clients, or one for each. Their metadata have the names of the classes and the
digest of the examples. A baseline has the latter file in its own folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedspan.errors import FedspanError
from fedspan.files import convert_disk_errors, write_atomic
from fedspan.run_folder import RunFolder
from fedspan.tasks.label_scores import score_labels
from fedspan.tasks.task import get_labels

if TYPE_CHECKING:
    from torch import Tensor

    from fedspan.assembly.run import Prepared

__all__ = ["Items", "read_items", "record_items"]


@dataclass(frozen=True)
class Items:
    """The predicted classes of the held-out examples.

    Args:
        targets: The true classes, (items,).
        predicted: The predicted classes of each model, (models, items); the score is the mean over the models.
        examples: SHA-256 of the examples and their true classes: equal classes alone may be those of other examples.
    """

    targets: np.ndarray
    predicted: np.ndarray
    labels: tuple[str, ...]
    examples: str

    def compute_score(self, metric: str, rows: np.ndarray) -> float:
        """Compute the score of some items, which may be repeated."""
        targets = self.targets[rows]
        return float(np.mean([score_labels(metric, targets, predicted[rows]) for predicted in self.predicted]))


@contextmanager
def record_items(prepared: Prepared, run_folder: RunFolder, name: str) -> Generator[Callable[[Tensor], None] | None]:
    """Yield a function that receives each model's predictions, and write them; None if the task has no classes."""
    from fedspan.tasks.single_label import SingleLabelClassification  # imports torch, which readers do not need

    if prepared.test is None or not isinstance(prepared.task, SingleLabelClassification):
        yield None
        return
    predicted: list[np.ndarray] = []
    yield lambda logits: predicted.append(logits.argmax(1).numpy().astype(np.int32))
    if not predicted:  # of personal models that stay with their clients
        return
    targets = get_labels(prepared.test, np.arange(len(prepared.test))).astype(np.int32)
    with convert_disk_errors(run_folder.path):
        run_folder.predictions.mkdir(parents=True, exist_ok=True)
        identity = json.dumps([prepared.test_names, targets.tolist()])
        examples = hashlib.sha256(identity.encode()).hexdigest()
        # One entry: safetensors writes several in any order.
        metadata = {"fedspan": json.dumps({"labels": prepared.labels, "examples": examples})}
        content = save({"targets": targets, "predicted": np.stack(predicted)}, metadata)
        write_atomic(run_folder.predictions / f"{name}.safetensors", content)


def read_items(folder: str | Path, name: str = "result") -> Items | None:
    """Read the predictions of a run, or of its baseline; None if there are none."""
    path = RunFolder(folder).predictions / f"{name}.safetensors"
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = json.loads(file.metadata()["fedspan"])
            labels, targets, predicted = metadata["labels"], file.get_tensor("targets"), file.get_tensor("predicted")
            items = Items(targets, predicted, tuple(labels), metadata["examples"])
        if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
            raise ValueError("classes that are not a list of names")
        if items.targets.dtype != np.int32 or items.predicted.dtype != np.int32:
            raise ValueError("classes that are not int32")
        if items.predicted.ndim != 2 or items.targets.shape != items.predicted.shape[1:] or not items.predicted.size:
            raise ValueError("shapes that do not fit together")
        if any(values.min() < 0 or values.max() >= len(labels) for values in (items.targets, items.predicted)):
            raise ValueError("a class without a name")
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise FedspanError(str(path), path.name, "predictions as fedspan writes them") from error
    return items
