"""The arithmetic of the games of privacy."""

from __future__ import annotations

import numpy as np
import torch

from evidence.pages.games.harness import compute_rate
from evidence.pages.games.updates import compute_complement, compute_distance, measure_overlap


def test_a_change_spans_the_inputs_of_its_examples_and_no_others() -> None:
    inputs, others = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    change = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)) @ inputs
    complement = compute_complement(change)
    assert compute_distance(inputs, complement).max() < 1e-5
    assert compute_distance(others, complement).min() > 0.1


def test_scores_of_guesses() -> None:
    assert measure_overlap(np.array([0.5, 0.25, 0.25]), np.array([2, 1, 1])) == 1
    assert measure_overlap(np.array([1.0, 0.0, 0.0]), np.array([2, 1, 1])) == 0.5
    assert compute_rate(np.array([1.0, 3.0]), np.array([0.0, 2.0])) == 0.5
