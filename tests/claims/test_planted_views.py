"""Views with known answers: what is planted is there, and second moments are what the paper's appendix F says."""

from __future__ import annotations

import pytest
import torch
from planted_views import draw_second_moments, draw_views, time_shortest


@pytest.mark.parametrize("shared", [True, False])
def test_planted_views_have_half_of_their_column_space_in_common(shared: bool) -> None:
    """Two views span rank + rank / 2 columns together; rows coincide exactly where the projector is shared."""
    views = [pair.to_dense() for pair in draw_views(20, 6, 2, shared)]
    assert [int(torch.linalg.matrix_rank(view)) for view in views] == [6, 6]
    assert int(torch.linalg.matrix_rank(torch.cat(views, 1))) == 9
    assert int(torch.linalg.matrix_rank(torch.cat(views, 0))) == (6 if shared else 12)


def test_second_moments_without_drift_and_noise_are_the_target_of_rank_15() -> None:
    target, views = draw_second_moments(24, 3, 0.0, 0.0, seed=1)
    assert all(torch.equal(view, target) for view in views)
    assert int(torch.linalg.matrix_rank(target)) == 15
    drifted = draw_second_moments(40, 1, 0.5, 0.0, seed=1)[1][0]
    assert int(torch.linalg.matrix_rank(drifted)) == 28


def test_the_mean_of_many_second_moments_is_the_target_and_a_constant() -> None:
    """E V_k = V* + drift^2 + noise^2 in every entry; entries of G* have variance 1."""
    target, views = draw_second_moments(12, 20_000, 0.5, 0.3, seed=2)
    bias = torch.stack(views).mean(0) - target
    assert float(bias.mean()) == pytest.approx(0.5**2 + 0.3**2, abs=0.01)
    assert float((bias - 0.34).abs().max()) < 0.1
    wide = torch.stack([draw_second_moments(12, 0, 0.5, 0.3, seed)[0] for seed in range(500)])
    assert float(wide.mean()) == pytest.approx(1.0, abs=0.05)


def test_more_clients_are_the_same_ones_and_others() -> None:
    few, many = draw_second_moments(8, 2, 0.5, 0.1, seed=3), draw_second_moments(8, 4, 0.5, 0.1, seed=3)
    assert torch.equal(few[0], many[0])
    assert all(torch.equal(one, other) for one, other in zip(few[1], many[1][:2], strict=True))


def test_shortest_calls_as_often_as_asked_and_returns_the_last_result() -> None:
    calls: list[int] = []
    seconds, result = time_shortest(lambda: calls.append(len(calls)) or len(calls), 3)
    assert (result, len(calls)) == (3, 3)
    assert 0 <= seconds < 1
