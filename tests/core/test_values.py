"""Shapes, factors, turns, keyed draws, what methods may claim; penalties, moments and smoothing as they are defined."""

import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import convolve1d
from torch import Tensor

from fedspan.core import factors
from fedspan.core.alignment import compute_ajive
from fedspan.core.method import Claims
from fedspan.core.noise import (
    KEY_BYTES,
    add_gaussian,
    compute_tensor_digest,
    derive_seed_key,
    draw_gaussian,
    draw_poisson_sample,
)
from fedspan.core.parametrization import Projected, count_entries, draw_entries, scatter_entries
from fedspan.core.penalties import Proximal, SlotProduct
from fedspan.core.projectors import draw_projector, draw_random_projector
from fedspan.core.recent import MessageTensors, RecentValues
from fedspan.core.second_moments import MomentSynchronizer, compute_covering_projector
from fedspan.core.smoothing import smooth, smooth_groups
from fedspan.core.tensors import Tensors, create_generator
from fedspan.core.values import Group, LayerSpec, Spec
from helpers.ajive_parts import lift
from helpers.refusals import refused


@pytest.mark.parametrize(("turns", "turn", "active"), [(1, 0, [0, 1, 2, 3, 4]), (2, 1, [1, 3]), (3, 0, [0, 3])])
def test_a_group_is_active_in_its_turn(turns: int, turn: int, active: list[int]) -> None:
    group = Group(("a",), turns=turns, turn=turn)
    assert [step for step in range(5) if group.is_active(step)] == active
    assert [group.count_steps(steps) for steps in range(6)] == [
        sum(step < steps for step in active) for steps in range(6)
    ]


@pytest.mark.parametrize(("turns", "turn"), [(2, 2), (1, -1), (0, 0)])
def test_a_group_that_would_never_train_is_refused(turns: int, turn: int) -> None:
    with refused("turn", "the group would never train"):
        Group(("a",), turns=turns, turn=turn)


def test_claims_with_a_second_exchange_must_sum() -> None:
    with refused("claims.reduction"):
        Claims(paper="none", exact=False, reduction="stack", second_exchange=True)


@pytest.mark.parametrize(
    ("layer", "shape", "rectangle"),
    [
        (LayerSpec("linear", 12, 8), (12, 8), (12, 8)),
        (LayerSpec("convolution", 8, 4 * 3 * 3, (3, 3)), (8, 36), (24, 12)),
        (LayerSpec("convolution", 8, 4 * 5 * 2, (5, 2)), (8, 40), (40, 8)),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_convolution_is_also_a_more_nearly_square_matrix(
    layer: LayerSpec, shape: tuple[int, int], rectangle: tuple[int, int]
) -> None:
    assert layer.shape == shape
    assert layer.rectangle == rectangle


def test_equal_specs_hash_alike() -> None:
    one, other = (Spec((LayerSpec("linear", 12, 8),), {"head": (3, 12), "bias": (3,)}, clients=3) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != Spec((LayerSpec("linear", 12, 8),), {"head": (4, 12), "bias": (3,)}, clients=3)


def test_the_least_recently_used_values_are_dropped_and_the_last_one_stays() -> None:
    computed = list[str]()

    def get(values: RecentValues[str], key: str, size: int = 4) -> str:
        def compute() -> tuple[str, int]:
            computed.append(key)
            return key.upper(), size

        return values.get_or_compute(key, compute)

    values = RecentValues[str](max_bytes=8)
    assert [get(values, key) for key in "ababcab"] == list("ABABCAB")
    assert "".join(computed) == "abcab"
    computed.clear()
    get(values, "d", size=100)
    get(values, "d")
    assert computed == ["d"]
    values.clear()
    get(values, "a")
    get(values, "b")
    get(values, "a")
    assert computed == ["d", "a", "b"]


def test_tensors_are_shared_within_a_round_and_only_for_the_same_sources() -> None:
    shared, sources = MessageTensors(), {"x": torch.ones(2)}

    def double() -> Tensors:
        return {"x": 2 * sources["x"]}

    first = shared.get_or_compute(0, sources, "key", double)
    assert shared.get_or_compute(0, dict(sources), "key", double)["x"] is first["x"]
    assert shared.get_or_compute(0, sources, "other", double)["x"] is not first["x"]
    assert shared.get_or_compute(0, {"x": torch.ones(2)}, "key", double)["x"] is not first["x"]
    assert shared.get_or_compute(1, sources, "key", double)["x"] is not first["x"]


def test_a_copy_in_another_process_starts_empty() -> None:
    shared, sources = MessageTensors(), {"x": torch.ones(1000)}
    shared.get_or_compute(0, sources, "key", lambda: dict(sources))
    assert len(pickle.dumps(shared)) < 200
    assert isinstance(pickle.loads(pickle.dumps(shared)), MessageTensors)


@given(
    rows=st.integers(1, 30), columns=st.integers(1, 30), density=st.floats(1e-6, 1.0), seed=st.integers(0, 2**63 - 1)
)
@settings(max_examples=100, deadline=None)
def test_a_mask_has_the_density_asked_for_and_follows_from_the_seed(
    rows: int, columns: int, density: float, seed: int
) -> None:
    entries = draw_entries((rows, columns), density, seed, "one")
    assert len(set(entries.tolist())) == len(entries) == count_entries((rows, columns), density)
    assert abs(len(entries) - max(1.0, density * rows * columns)) <= 0.5
    assert 0 <= int(entries.min()) <= int(entries.max()) < rows * columns
    assert torch.equal(entries, draw_entries((rows, columns), density, seed, "one"))
    dense = scatter_entries(torch.ones(len(entries)), entries, (rows, columns))
    assert dense.sum() == len(entries)
    assert all(dense[index // columns, index % columns] == 1 for index in entries.tolist())


def test_masks_are_uniform_and_differ_by_layer_and_seed() -> None:
    drawn = torch.stack(
        [scatter_entries(torch.ones(10), draw_entries((5, 8), 0.25, seed, "a"), (5, 8)) for seed in range(800)]
    )
    # Of each of 40 entries 800 draws with probability 1/4: a standard deviation of 12.2.
    assert ((drawn.sum(0) - 200).abs() < 5 * 12.3).all()
    assert not torch.equal(draw_entries((5, 8), 0.25, 0, "a"), draw_entries((5, 8), 0.25, 0, "b"))


def draw(*key: int | str) -> tuple[float, ...]:
    seed, purpose, *rest = key
    return tuple(torch.rand(4, generator=create_generator(int(seed), str(purpose), *rest)).tolist())


def test_every_part_of_a_key_counts_and_no_global_state() -> None:
    """Neighboring seeds, rounds and layers, and parts that read alike when written together."""
    keys = [(0, "A"), (1, "A"), (0, "B"), (0, "A", 1), (0, "A", 2), (0, "A", 1, 2), (0, "A", 12), (0, "A", "l1", 2)]
    assert all(draw(*one) != draw(*other) for one, other in itertools.combinations(keys, 2))
    assert draw(*keys[0]) == draw(*keys[0])
    before = torch.get_rng_state()
    first = draw(3, "A", "layer"), draw_random_projector((9, 4), 2, "right", create_generator(3, "projector"))
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        assert draw(3, "A", "layer") == first[0]


def test_they_are_made_on_the_cpu_in_float64_wherever_the_model_is() -> None:
    """CPU and CUDA generators differ; a QR in float64 with fixed signs rounds to the same float32 nearly everywhere."""
    made = draw_projector("layer", (9, 4), 2, "right", 7)
    assert made.device.type == create_generator(7, "x").device.type == "cpu"
    assert made.dtype == torch.float32
    double = torch.randn((4, 2), generator=create_generator(7, "projector", "layer"), dtype=torch.float64)
    Q, R = torch.linalg.qr(double)
    assert torch.equal(made, (Q * R.diagonal().sign()).T.float())
    triangle = made.double() @ double  # Q^T of what was drawn: the signs are those of a positive diagonal
    assert (triangle.diagonal() > 0).all()


@given(st.integers(0, 30), st.one_of(st.none(), st.integers(0, 30)))
def test_a_client_is_sent_what_changed_since_it_was_here(round: int, held: int | None) -> None:
    """Against a history of factors, each named after the round that made it."""
    held = None if held is None else min(held, round)
    state, history = {"A": "initial", "B": "initial"}, [{"A": "initial", "B": "initial"}]
    for number in range(round):
        state = {**state, factors.get_alternating_factor(number): f"of round {number}"}
        history.append(state)
    known = history[held or 0]
    assert set(factors.list_alternating_factors(round, held)) == {
        slot for slot in "AB" if known[slot] != history[round][slot]
    }


def test_B_comes_first_and_cut_slots_copies_the_first_slots() -> None:
    assert [factors.get_alternating_factor(number) for number in range(4)] == ["B", "A", "B", "A"]
    tensors = {"one/A": torch.arange(6.0).reshape(3, 2), "one/B": torch.arange(12.0).reshape(4, 3)}
    cut = factors.cut_slots(tensors, 2)
    assert cut["one/A"].tolist() == [[0, 1], [2, 3]]
    assert cut["one/B"].tolist() == [[0, 1], [3, 4], [6, 7], [9, 10]]
    assert all(
        value.is_contiguous() and value.untyped_storage().nbytes() == 4 * value.numel() for value in cut.values()
    )


def test_gaussian_factors_are_peft_s_draws() -> None:
    found = factors.draw_initial_A(LayerSpec("layer", 6, 5), 4, torch.Generator().manual_seed(3), "gaussian")
    expected = torch.nn.init.normal_(torch.empty(4, 5), std=1 / 4, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shape", [(3, 7), (7, 3)])
def test_a_rank_is_at_most_a_layer_s_shorter_side(shape: tuple[int, int]) -> None:
    spec = Spec((LayerSpec("large", 9, 8), LayerSpec("small", *shape)))
    assert factors.require_rank(spec, 3) is None
    assert factors.require_rank(spec, 4) == f"small is {shape[0]} x {shape[1]}: at most 3"


KEY = derive_seed_key(1)


def test_draws_are_standard_normal() -> None:
    draws = draw_gaussian(KEY, torch.Size([400, 500]), "a")
    assert draws.dtype == torch.float64
    assert scipy.stats.kstest(draws.flatten().numpy(), "norm").pvalue > 1e-3
    assert abs(float(draws.mean())) < 0.01
    assert abs(float(draws.std()) - 1) < 0.01
    assert abs(float((draws[:, 1:] * draws[:, :-1]).mean())) < 0.01


@given(st.integers(0, KEY_BYTES - 1), st.integers(1, 255))
def test_every_byte_of_the_key_counts(place: int, flip: int) -> None:
    other = bytes(value ^ flip if at == place else value for at, value in enumerate(KEY))
    shape = torch.Size([64])
    assert float((draw_gaussian(KEY, shape, "a") - draw_gaussian(other, shape, "a")).abs().min()) > 0
    # and two changes that would cancel in a sum of the key's words
    both = bytes(value ^ flip if at in (place, (place + 4) % KEY_BYTES) else value for at, value in enumerate(KEY))
    assert not torch.equal(draw_gaussian(KEY, shape, "a"), draw_gaussian(both, shape, "a"))
    samples = {tuple(draw_poisson_sample(one, 0.5, 256, "a").tolist()) for one in (KEY, other, both)}
    assert len(samples) == 3


def test_a_generator_of_torch_has_too_few_streams() -> None:
    """Why there is ``core.noise``: who sees a draw could try all seeds."""
    first, second = (torch.Generator().manual_seed(seed) for seed in (7, 7 + 2**32))
    assert torch.equal(torch.randn(8, generator=first), torch.randn(8, generator=second))


def test_a_poisson_sample_takes_each_position_by_itself() -> None:
    samples = [draw_poisson_sample(KEY, 0.3, 20, "sample", number).numpy() for number in range(2000)]
    sizes = np.array([len(sample) for sample in samples])
    assert sizes.mean() == pytest.approx(6, rel=0.03)
    assert sizes.var() == pytest.approx(20 * 0.3 * 0.7, rel=0.1)
    counts = np.bincount(np.concatenate(samples), minlength=20)
    assert abs(counts / 2000 - 0.3).max() < 0.05
    assert all((np.diff(sample) > 0).all() for sample in samples)
    assert draw_poisson_sample(KEY, 1.0, 5, "a").tolist() == [0, 1, 2, 3, 4]
    assert draw_poisson_sample(KEY, 0.5, 0, "a").tolist() == []


def test_a_noisy_value_has_steps_that_only_the_noise_decides() -> None:
    value = torch.full((1000,), 1e-3 + 2**-60, dtype=torch.float64)
    for std in (0.7, 3e-5):
        noisy = add_gaussian(value, std, KEY, "a")
        torch.testing.assert_close(noisy, value + std * draw_gaussian(KEY, value.shape, "a"), atol=std * 1e-9, rtol=0)
        steps = noisy / 2.0 ** (math.floor(math.log2(std)) - 29)
        assert torch.equal(steps, steps.round())


def test_labels_name_draws() -> None:
    shape = torch.Size([3, 5])
    assert torch.equal(draw_gaussian(KEY, shape, "a", 1), draw_gaussian(KEY, shape, "a", 1))
    for other in (("a", 2), ("a", "1", ""), ("a1",), ()):
        assert not torch.equal(draw_gaussian(KEY, shape, "a", 1), draw_gaussian(KEY, shape, *other))
    assert draw_gaussian(KEY, torch.Size([0, 3]), "a").shape == (0, 3)
    with pytest.raises(ValueError, match="32 bytes, not 4"):
        draw_gaussian(b"four", shape)
    assert derive_seed_key(1) != derive_seed_key(2)


def test_a_digest_tells_tensors_apart() -> None:
    value = torch.arange(6.0).view(2, 3)
    same = compute_tensor_digest({"a": value, "b": value})
    assert compute_tensor_digest({"b": value.clone(), "a": value}) == same
    for other in (
        {"a": value, "c": value},
        {"a": value, "b": value.view(3, 2)},
        {"a": value, "b": value.double()},
        {"a": value, "b": value + torch.eye(2, 3) * 1e-6},
    ):
        assert compute_tensor_digest(other) != same


def test_slot_product_is_the_product_of_the_last_slots_norms() -> None:
    rng = torch.Generator().manual_seed(0)
    tensors = {
        "one/A": torch.randn((3, 4), generator=rng),
        "one/B": torch.randn((5, 3), generator=rng),
        "two/A": torch.randn((3, 2), generator=rng),
        "two/B": torch.randn((6, 3), generator=rng),
    }
    expected = 0.0
    for layer in ("one", "two"):
        last_A = sum(float(value) ** 2 for value in tensors[f"{layer}/A"][1:].flatten()) ** 0.5
        last_B = sum(float(value) ** 2 for value in tensors[f"{layer}/B"][:, 1:].flatten()) ** 0.5
        expected += 0.5 * last_A * last_B
    assert abs(float(SlotProduct(0.5, 1, ("one", "two")).compute_value(tensors)) - expected) < 1e-5


def test_slot_product_has_no_gradient_by_a_factor_that_is_zero_and_its_norm_by_none() -> None:
    """B = 0 at the start: the subgradient 0 by B, and A's gradient is 0 because it is weighted by ||B||. No NaN."""
    A, B = torch.ones((3, 4), requires_grad=True), torch.zeros((5, 3), requires_grad=True)
    SlotProduct(1.0, 1, ("one",)).compute_value({"one/A": A, "one/B": B}).backward()
    assert not A.grad.any()
    assert not B.grad.any()


def test_slot_product_pulls_both_factors_and_no_earlier_slot() -> None:
    """By hand: lambda ||A_g|| B_g / ||B_g||, and likewise by A; on tensors without a graph it would be none."""
    rng = torch.Generator().manual_seed(1)
    A = torch.randn((3, 4), generator=rng).requires_grad_()
    B = torch.randn((5, 3), generator=rng).requires_grad_()
    SlotProduct(0.5, 1, ("one",)).compute_value({"one/A": A, "one/B": B}).backward()
    a, b = A.detach()[1:], B.detach()[:, 1:]
    assert torch.allclose(A.grad[1:], 0.5 * b.norm() * a / a.norm(), rtol=1e-5)
    assert torch.allclose(B.grad[:, 1:], 0.5 * a.norm() * b / b.norm(), rtol=1e-5)
    assert not A.grad[0].any()
    assert not B.grad[:, 0].any()


@pytest.mark.parametrize("side", ["right", "left"])
def test_proximal_holds_the_sum_of_a_projected_layer_s_segments(side: str) -> None:
    """Its value and its gradient by acc are those of the dense change, of which acc sees the projected part."""
    rng = torch.Generator().manual_seed(1)
    one, shape, rank = Projected(side), (7, 5) if side == "right" else (5, 7), 2
    P = draw_random_projector(shape, rank, side, rng).double()
    acc = torch.randn((7, rank) if side == "right" else (rank, 7), generator=rng, dtype=torch.float64)
    done = {slot: torch.randn(size, generator=rng, dtype=torch.float64) for slot, size in _segments(shape, rank)}
    penalty = Proximal(0.7, {"one/acc": torch.zeros_like(acc)}, {"one": one})
    acc.requires_grad_()
    tensors = {"one/acc": acc, "one/P": P}
    assert torch.allclose(penalty.compute_value(tensors), 0.35 * one.pair(acc, P).to_dense().square().sum())
    dense = one.pair(acc, P).to_dense() + done["done_B"] @ done["done_A"]
    value = penalty.compute_value({**tensors, **{f"one/{slot}": tensor for slot, tensor in done.items()}})
    assert torch.allclose(value, 0.35 * dense.square().sum())
    (gradient,) = torch.autograd.grad(value, acc)
    assert torch.allclose(gradient, 0.7 * (dense @ P.T if side == "right" else P.T @ dense))


def _segments(shape: tuple[int, int], rank: int) -> list[tuple[str, tuple[int, int]]]:
    return [("done_B", (shape[0], 2 * rank)), ("done_A", (2 * rank, shape[1]))]


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (1, 4), (2, 5, 6), (4, 2)])
@pytest.mark.parametrize("axis", [0, 1])
def test_it_is_scipy_s_mirrored_convolution(shape: tuple[int, ...], axis: int) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = convolve1d(values.numpy(), np.array([1, 4, 6, 4, 1]) / 16, axis=axis, mode="reflect")
    torch.testing.assert_close(smooth(values, axis), torch.from_numpy(expected), rtol=1e-12, atol=1e-14)


def test_smoothing_leaves_a_constant_and_acts_along_the_axis_of_a_group() -> None:
    signs = torch.tensor([1.0, -1.0] * 4)[None].expand(2, -1)
    assert torch.equal(smooth(torch.ones(2, 8), 1), torch.ones(2, 8))
    assert not smooth(signs, 1)[:, 2:-2].any()
    values = torch.arange(12.0).square().view(3, 4)
    groups = (Group(("l/A",), smoothed_axis=1), Group(("l/B",), smoothed_axis=0), Group(("extras/w",)))
    smoothed = smooth_groups(groups, {"l/A": values, "l/B": values, "extras/w": values})
    assert torch.equal(smoothed["l/A"], smooth(values, 1))
    assert torch.equal(smoothed["l/B"], smooth(values, 0))
    assert smoothed["extras/w"] is values


WEIGHTS = [0.2, 0.3, 0.5]


def synchronizer(rule: Any, joint_rank: int = 2) -> MomentSynchronizer:
    return MomentSynchronizer(
        rule=rule, joint_rank=joint_rank, estimate_joint_rank=False, view_rank=3, identifiable=False
    )


def random_clients() -> tuple[list[Tensor], list[Tensor], torch.Generator]:
    """Moments (9, 3) and projectors (3, 7) of three clients."""
    rng = torch.Generator().manual_seed(3)
    moments = [torch.rand(9, 3, generator=rng, dtype=torch.float64) for _ in WEIGHTS]
    drawn = [torch.randn(7, 3, generator=rng, dtype=torch.float64) for _ in WEIGHTS]
    return moments, [torch.linalg.qr(matrix)[0].T for matrix in drawn], rng


def mean(matrices: list[Tensor]) -> Tensor:
    return torch.stack([weight * matrix for weight, matrix in zip(WEIGHTS, matrices, strict=True)]).sum(0)


def nearest(matrix: Tensor, rank: int) -> Tensor:
    U, S, Vt = torch.linalg.svd(matrix, full_matrices=False)
    return (U[:, :rank] * S[:rank]) @ Vt[:rank]


def test_moments_of_one_basis_are_joined_by_each_rule() -> None:
    moments, _, rng = random_clients()
    found = compute_ajive(moments, 2, 3)
    parts = [found.compute_joint(number) + shift for number, shift in enumerate(found.means)]
    expected = {"average": mean(moments), "average-svd": nearest(mean(moments), 2), "ajive": mean(parts)}
    for rule, matrix in expected.items():
        v = synchronizer(rule).join(moments, WEIGHTS, rng)
        torch.testing.assert_close(v, matrix.clamp_min(0.0), rtol=1e-9, atol=1e-12)
        assert (v >= 0).all()


def test_linear_moments_of_own_projectors_are_joined_as_the_dense_matrices_are() -> None:
    moments, projectors, rng = random_clients()
    views = [v @ P for v, P in zip(moments, projectors, strict=True)]
    found = compute_ajive(views, 3, 3)
    parts = [lift(found.views[n], found.compute_joint(n)) + view.mean(0) for n, view in enumerate(views)]
    for rule, matrix in {"average": mean(views), "ajive": mean(parts)}.items():
        v, P = synchronizer(rule, 3).join_projected(moments, projectors, WEIGHTS, rng, linear=True)
        torch.testing.assert_close(v @ P, nearest(matrix, 3), rtol=1e-9, atol=1e-12)


def test_moments_of_one_projector_stay_as_they_are_under_squared_entries() -> None:
    moments, projectors, rng = random_clients()
    shared = [projectors[0]] * len(moments)
    v, P = synchronizer("average").join_projected(moments, shared, WEIGHTS, rng, linear=False)
    squares = (shared[0] @ P.T).square()
    torch.testing.assert_close(v, mean(moments) @ squares, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(P.T @ P, shared[0].T @ shared[0], rtol=1e-9, atol=1e-12)


def test_the_covering_projector_captures_more_of_the_projectors_than_any_of_them() -> None:
    _, projectors, _ = random_clients()

    def captured(P: Tensor) -> float:
        return sum(w * float((own @ P.T).square().sum()) for w, own in zip(WEIGHTS, projectors, strict=True))

    best = compute_covering_projector(projectors, WEIGHTS)
    torch.testing.assert_close(best @ best.T, torch.eye(3, dtype=torch.float64))
    assert all(captured(best) >= captured(P) for P in projectors)
