"""The targets of a task's examples."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from fedspan.errors import FedspanError
from fedspan.tasks.task import get_labels


@pytest.mark.parametrize("labels", [np.array([2, 0, 1]), np.array([0.5, -1.0, 3.0])], ids=["labels", "numbers"])
def test_labels_are_those_of_the_given_examples_in_their_order(labels: np.ndarray) -> None:
    found = get_labels(SimpleNamespace(labels=labels), np.array([2, 0]))
    assert found.dtype == labels.dtype
    assert found.tolist() == [labels[2], labels[0]]


@pytest.mark.parametrize("examples", [SimpleNamespace(), SimpleNamespace(labels=[2, 0, 1])], ids=["none", "a list"])
def test_examples_of_a_users_own_task_without_an_array_of_labels_are_refused(examples: SimpleNamespace) -> None:
    with pytest.raises(FedspanError, match="SimpleNamespace, the encoded examples of this task, has no array `labels`"):
        get_labels(examples, np.array([0]))
