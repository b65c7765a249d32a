"""Central and local privacy: the noise that there is, the bound on every reply, the samples, the mean that is left."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspan.core.noise import derive_seed_key
from fedspan.core.tensors import compute_norm as norm_of
from fedspan.core.values import Client, Contribution, Reduced
from fedspan.federation.aggregation.plaintext import create_reducer
from fedspan.federation.changes import apply_change, clip_change, compute_change
from fedspan.federation.config import RoundSettings
from fedspan.federation.privacy import (
    CentralPrivacy,
    compute_client_noise,
    compute_round_charges,
    compute_sampling_rate,
    draw_poisson_cohort,
)
from fedspan.training.config import Privacy
from helpers.round_settings import make_settings

SHAPES = {"layer/A": (2, 5), "layer/B": (7, 2), "extras/bias": (3,)}


def central(**changes: Any) -> Privacy:
    return Privacy(**{"mechanism": "central", "clip": 0.5, "noise": 1.0, "rounds": 4, **changes})


def tensors(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=rng) for name, shape in SHAPES.items()}


def clients(count: int) -> list[Client]:
    return [Client(f"c{number:03}", 2, 1.0, 5 + number, 1.0) for number in range(count)]


def reduced(
    origin: Mapping[str, Tensor],
    replies: Mapping[str, Mapping[str, Tensor] | None],
    settings: RoundSettings,
    everybody: int,
    order: list[str] | None = None,
) -> Reduced:
    known = {one.id: one for one in clients(everybody)}
    reducer = create_reducer(settings, [known[id] for id in replies], everybody, 2, lambda: origin)
    for id in order or replies:
        reply = replies[id]
        reducer.add(id, None if reply is None else Contribution(sum=reply))
    return reducer.compute_result()


def moved(reply: Mapping[str, Tensor], origin: Mapping[str, Tensor], norm: float) -> dict[str, Tensor]:
    """The origin, and on it the direction of a reply with a norm."""
    change = compute_change(Contribution(sum=reply), origin)
    return apply_change({name: value * (norm / norm_of(change)) for name, value in change.items()}, origin)


@given(st.integers(0, 6), st.integers(0, 10**6), st.floats(0.01, 50), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=40)
def test_one_client_moves_the_sum_by_at_most_the_clip(count: int, seed: int, size: float, rng: Any) -> None:
    """What the accountant takes for granted, with the same noise on both sides, in any order of the replies."""
    origin, everybody, rate = tensors(seed), 8, make_settings(4, clients_per_round=5, privacy=central())
    replies = {one.id: moved(tensors(seed + 1 + n), origin, size * (n + 1)) for n, one in enumerate(clients(count + 1))}
    order = list(replies)
    rng.shuffle(order)
    with_it = reduced(origin, replies, rate, everybody, order).mean
    gone = order[0]
    without = {id: reply for id, reply in replies.items() if id != gone}
    for others in (
        reduced(origin, without, rate, everybody),
        reduced(origin, {**replies, gone: None}, rate, everybody),
    ):
        apart = {name: (with_it[name] - others.mean[name]).double() for name in SHAPES}
        norm = size * (int(gone[1:]) + 1)
        assert norm_of(apart) * 5 <= 0.5 * (1 + 1e-4)
        assert norm_of(apart) * 5 == pytest.approx(min(0.5, norm), rel=1e-2)


def test_the_noise_has_the_variance_that_the_accountant_is_told() -> None:
    origin = {"layer/A": torch.zeros(300, 400)}
    privacy = central(noise=1.7)
    mean, other = (CentralPrivacy(privacy, origin, 0.5, 20, round).release({}).mean for round in (3, 4))
    assert float(mean["layer/A"].double().std()) == pytest.approx(1.7 * 0.5 / 10, rel=0.01)
    correlation = torch.corrcoef(torch.stack([mean["layer/A"].flatten(), other["layer/A"].flatten()]))[0, 1]
    assert abs(float(correlation)) < 0.01


def test_without_much_noise_it_is_the_mean_of_clipped_changes() -> None:
    origin = tensors(0)
    replies = {
        one.id: moved(tensors(n + 1), origin, norm)
        for n, (one, norm) in enumerate(zip(clients(3), (0.1, 9, 0.4), strict=True))
    }
    found = reduced(origin, replies, make_settings(4, privacy=central(noise=1e-9)), 3).mean
    changes = [clip_change(compute_change(Contribution(sum=reply), origin), 0.5)[0] for reply in replies.values()]
    assert [round(norm_of(change), 4) for change in changes] == [0.1, 0.5, 0.4]
    for name in SHAPES:
        expected = origin[name].double() + torch.stack([change[name] for change in changes]).mean(0)
        assert torch.allclose(found[name].double(), expected, atol=1e-6)
        assert found[name].dtype == torch.float32


def test_the_expected_number_of_replies_is_released_and_never_the_real_one() -> None:
    origin = {"layer/A": torch.ones(200, 300)}
    found = reduced(origin, {}, make_settings(4, clients_per_round=2, privacy=central()), 8)
    assert found.count == 2
    assert float((found.mean["layer/A"] - 1).std()) == pytest.approx(0.5 / 2, rel=0.02)
    # A client that trained nothing and one that does not reply leave the same: SCAFFOLD multiplies by the count
    origin, settings = tensors(0), make_settings(4, clients_per_round=3, privacy=central())
    found = [
        reduced(origin, {**dict.fromkeys(["c000", "c001"]), **some}, settings, 6) for some in ({}, {"c001": origin})
    ]
    assert [one.count for one in found] == [3.0, 3.0]
    assert all(torch.equal(found[0].mean[name], found[1].mean[name]) for name in origin)


@pytest.mark.parametrize("reduction", ["median", "trimmed-mean", "multi-krum", "geometric-median", "flame"])
def test_a_reduction_that_sums_nothing_is_not_released(reduction: Any) -> None:
    """The noise hides a client in a sum; how far one client moves a median has no such bound."""
    replies = {one.id: tensors(number + 1) for number, one in enumerate(clients(4))}
    with pytest.raises(ValueError, match="no sum"):
        reduced(tensors(0), replies, make_settings(4, reduction=reduction, privacy=central()), 4)


def test_a_reply_that_does_not_fit_is_refused() -> None:
    origin = tensors(0)
    for wrong, why in (
        ({**tensors(1), "more": torch.ones(1)}, "does not contribute"),
        ({**tensors(1), "layer/A": torch.ones(5, 2)}, r"\[5, 2\], not \[2, 5\]"),
        ({**tensors(1), "layer/A": torch.full((2, 5), math.nan)}, "not finite"),
    ):
        with pytest.raises(ValueError, match=why):
            reduced(origin, {"c000": wrong}, make_settings(4, privacy=central()), 1)
    with pytest.raises(ValueError, match="are stacked"):
        compute_change(Contribution(stack=tensors(0)), origin)


def test_cohorts_are_poisson_samples() -> None:
    """Each client by itself with the rate: the number of them varies, as the accountant's theorem wants it."""
    settings, privacy = make_settings(400, clients_per_round=6, seed=5), central()
    sizes = torch.tensor([len(draw_poisson_cohort(privacy, settings, 20, number)) for number in range(2000)]).double()
    assert float(sizes.mean()) == pytest.approx(6, rel=0.03)
    assert float(sizes.var()) == pytest.approx(20 * 0.3 * 0.7, rel=0.1)
    counts = torch.zeros(20)
    for number in range(2000):
        counts[draw_poisson_cohort(privacy, settings, 20, number)] += 1
    assert float((counts / 2000 - 0.3).abs().max()) < 0.05
    assert draw_poisson_cohort(privacy, settings.model_copy(update={"clients_per_round": None}), 3, 0) == [0, 1, 2]
    assert draw_poisson_cohort(privacy, settings, 20, 3) == draw_poisson_cohort(privacy, settings, 20, 3)
    # whoever knows the seed, as every node does, must not know the cohort
    secret = central(key=derive_seed_key(99), secret=True)
    assert [draw_poisson_cohort(secret, settings, 20, n) for n in range(5)] != [
        draw_poisson_cohort(privacy, settings, 20, n) for n in range(5)
    ]


def test_cohorts_come_from_the_whole_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from torch's generator, which has 2^32 streams."""
    monkeypatch.setattr(torch, "Generator", lambda *_: pytest.fail("a generator of torch"))
    settings = make_settings(400, clients_per_round=100, seed=5)
    keys = (bytes(32), bytes(31) + b"\1", b"\1" + bytes(31))
    cohorts = [tuple(draw_poisson_cohort(central(key=key), settings, 200, 3)) for key in keys]
    assert len(set(cohorts)) == 3


def test_secret_noise_never_serves_twice() -> None:
    """The same sum has the same noise, so that a round can be repeated; another sum has other noise."""
    origin, zeros = {"x": torch.zeros(50)}, {"x": torch.zeros(50, dtype=torch.float64)}
    for secret in (True, False):
        privacy = central(secret=secret)
        first, again = (CentralPrivacy(privacy, origin, 1.0, 1, 0).release(zeros).mean["x"] for _ in range(2))
        assert torch.equal(first, again)
        small = {"x": zeros["x"] + torch.eye(1, 50, dtype=torch.float64)[0] * 1e-3}
        apart = CentralPrivacy(privacy, origin, 1.0, 1, 0).release(small).mean["x"] - first
        assert (float(apart.abs().max()) > 0.1) == secret


def test_what_a_round_costs() -> None:
    settings = make_settings(4, clients_per_round=5, privacy=central())
    (charge,) = compute_round_charges(settings, 20)
    assert (charge.payer, charge.mechanism.rate, charge.mechanism.noise, charge.count) == ("", 0.25, 1.0, 1)
    assert compute_round_charges(settings.model_copy(update={"privacy": central(mechanism="local")}), 20) == ()
    assert compute_round_charges(settings.model_copy(update={"privacy": None}), 20) == ()
    assert compute_sampling_rate(settings, 3) == 1.0
    target = central(noise=None, epsilon=2.0, rounds=50)
    local = target.model_copy(update={"mechanism": "local"})
    assert compute_client_noise(local, 0.1) == compute_client_noise(local, 1.0)
    assert (
        compute_client_noise(target, 0.1)
        < compute_client_noise(target, 1.0)
        == pytest.approx(compute_client_noise(local, 1.0) / 2)
    )
