"""Which labels the clients of a partition hold."""

from __future__ import annotations

import datasets
import numpy as np

from fedspan.data import PartitionConfig
from fedspan.data.partition import partition

LABELS = [str(label) for label in range(8)]


def counts(dataset: datasets.Dataset, **settings: object) -> np.ndarray:
    """Examples of each label (columns) that each client (rows) holds."""
    divided = partition(dataset, PartitionConfig.model_validate(settings), seed=0)
    return np.array([row.counts for row in divided.label_table(LABELS, dataset)])
