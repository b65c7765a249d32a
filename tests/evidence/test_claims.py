"""The scripts of the claims at sizes that take seconds, and their libraries against their definitions."""

import dataclasses
import gzip
import math
import runpy
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evidence.claims import fedgalore_drift as drift
from evidence.claims import fedgalore_moments as moments
from evidence.claims import fedgalore_trap as trap
from evidence.claims import florg_gram as florg
from evidence.claims import linear_model
from evidence.claims.planted_views import draw_second_moments
from helpers.families import others_slow

CLAIMS = Path(__file__).resolve().parents[2] / "evidence" / "claims"
SMOKE = {
    "fedgalore_ajive": [*("--size", "20", "--clients", "2", "3"), *("--seeds", "0", "1")],
    "fedgalore_drift": ["--seeds", "0", "1"],
    "fedgalore_moments": [
        *("--train", "60", "--validation", "20", "--test", "30", "--rounds", "2"),
        *("--steps", "2", "--rates", "0.01", "--seeds", "0", "1"),
    ],
    "fedgalore_trap": ["--seeds", "4", "--calibration", "8", "--settings", "2", "--drawn", "1", "--steps", "20"],
    "fedloru_rate": ["--seeds", "2", "--rounds", "4", "8"],
    "fedloru_theory": ["--size", "40", "--clients", "2", "--most", "6", "--seeds", "0", "1"],
    "florg_gram": ["--rounds", "3", "9", "--seeds", "0", "1"],
    "rolora_linear": ["--seeds", "2", "--samples", "30", "--draws", "50"],
    "rolora_mnist": [
        *("--train", "60", "--validation", "20", "--test", "30", "--rounds", "2"),
        *("--rates", "0.1", "1", "--seeds", "0", "1"),
    ],
}
QUICK = ("fedgalore_ajive", "rolora_linear")
"""The others train for seconds, and are slow."""
FIGURES = {"rolora_linear": "rolora", "fedloru_theory": "fedloru", "fedgalore_ajive": "fedgalore"}
"""Names of the pictures; the other scripts have none."""


def run(script: str, *words: str) -> None:
    """As its command, but without the seconds that a new interpreter takes to import torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *words])
        runpy.run_module(f"evidence.claims.{script}", run_name="__main__")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four files of MNIST's format: 100 and 40 images of noise, brighter in the rows of their label."""
    folder, rng = tmp_path_factory.mktemp("digits"), np.random.default_rng(0)
    for part, count in (("train", 100), ("t10k", 40)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = rng.integers(0, 60, (count, 28, 28)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label + 2 : 2 * label + 6] += 150
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (folder / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))
    return folder


def test_every_script_has_a_smoke_size() -> None:
    libraries = {"linear_model", "planted_views", "report"}
    assert {path.stem for path in CLAIMS.glob("*.py")} - {"__init__"} == libraries | set(SMOKE)


@pytest.mark.parametrize("script", others_slow(SMOKE, QUICK))
def test_a_script_prints_its_findings_and_saves_its_figure(
    script: str, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--data", str(digits)] if script in ("fedgalore_moments", "rolora_mnist") else []
    out = ["--out", str(tmp_path)] if script in FIGURES else []
    run(script, *data, *SMOKE[script], *out)
    printed = capsys.readouterr().out
    rows = printed[printed.index("| the paper's statement |") :].split("\n\n", 1)[0].splitlines()[2:]
    verdicts = {row.strip("| ").split(" | ")[-1] for row in rows}
    assert verdicts <= {"same direction", "opposite direction", "no measurable difference"}
    assert verdicts
    if out:
        assert "<svg" in (tmp_path / f"{FIGURES[script]}.svg").read_text()


def test_the_exact_statements_of_the_linear_model_hold_at_any_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("rolora_linear", *SMOKE["rolora_linear"], "--out", str(tmp_path))
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    verdicts = {row[0].split(":")[0].split(",")[0]: row[-1] for row in rows}
    assert verdicts["Lemma 5.3 as stated"] == "opposite direction"
    assert verdicts["Theorem A.14"] == verdicts["Proposition A.17"] == "same direction"


def test_florg_s_constant_is_negative_at_any_size() -> None:
    """A^T A has an eigenvalue of 0 where r < k; with equal clients, (17c)'s bound is short by their number."""
    rows = florg.run(0, florg.RANK, 4, 0.0)
    torch.testing.assert_close(rows[:, 0], torch.full_like(rows[:, 0], -0.5 - florg.STEP / 4))
    torch.testing.assert_close(rows[:, 3], torch.full_like(rows[:, 3], florg.CLIENTS))


def test_drift_starts_where_it_says_and_one_seed_keeps_the_rank() -> None:
    exact, own = (drift.measure_radius(0, 1.0, kind) for kind in ("reference", "own"))
    assert exact["B_m"] == exact["B_v"] == 0.0 < own["B_v"]
    equal, apart = (drift.measure_tails(0, size) for size in (0.0, 1.0))
    assert max(equal.values()) < 1e-6
    assert apart["GaLore, one seed"] < 1e-6
    assert min(apart["GaLore"], apart["LoRA"]) > 1.0


def test_the_readings_divide_all_images_by_label() -> None:
    labels = np.repeat(np.arange(10), 30)
    parts = moments.divide(labels, 0)
    assert sorted(np.concatenate(parts)) == list(range(300))
    shares = np.array([np.bincount(labels[part], minlength=10) for part in parts]) / 30
    assert shares.max() > 0.5  # Dirichlet(0.5): most of a label at one client


def test_the_trap_trains_what_it_says() -> None:
    """Through the engine: full SGD is plain gradient descent, and low-rank methods of full rank reach what it reaches.

    LoRA stays in W(0) + the row space that A spans; with B = 0 its first step leaves A alone.
    """
    setting = trap.Setting(size=4, rank=2, steps=7, period=3)
    trials = trap.draw(setting, range(3))
    W = trials.start(setting, 0.3)
    full = trap.train("full", setting, trials, W)
    assert (full - W).norm() > 0.1
    torch.testing.assert_close(full, trap.run_plain_sgd(setting, trials, W), rtol=1e-12, atol=1e-12)

    whole = dataclasses.replace(setting, rank=4)
    square = dataclasses.replace(trials, A=torch.eye(4, dtype=torch.float64).expand(3, -1, -1))
    torch.testing.assert_close(trap.train("galore", whole, square, W), full, rtol=1e-5, atol=1e-6)

    one = dataclasses.replace(setting, steps=1)
    gradient = (W - trap.run_plain_sgd(one, trials, W)) * setting.steep
    expected = W - gradient @ trials.A.mT @ trials.A / setting.steep
    torch.testing.assert_close(trap.train("lora", one, trials, W), expected, rtol=1e-12, atol=1e-12)
    U, S, Vt = torch.linalg.svd(gradient)
    cut = (U[..., :2] * S[:, None, :2]) @ Vt[:, :2] / setting.steep
    torch.testing.assert_close(trap.train("galore", one, trials, W), W - cut, rtol=1e-5, atol=1e-6)


def test_the_trap_has_the_two_minima_that_the_paper_describes() -> None:
    """The flat basin's center is u c e2^T, out of A's row space; the valley's curvature along e1 is ``shallow``."""
    setting = trap.Setting(size=6, rank=2, shallow=0.3)
    trials = trap.draw(setting, range(5))
    flat, valley = trap.compute_basins(setting, trials, trials.center)
    assert float(flat.abs().max()) == 0.0
    torch.testing.assert_close(valley, torch.full_like(valley, setting.steep / 2 * setting.distance**2))
    assert float((trials.center @ trials.A.mT).abs().max()) < 1e-12
    torch.testing.assert_close(trap.compute_basins(setting, trials, trials.aside)[1], torch.full_like(valley, 0.15))
    rest = trials.aside - trials.aside @ torch.linalg.pinv(trials.A) @ trials.A
    assert float(rest.abs().max()) < 1e-12


N, M, D, P, ETA = 3, 9, 5, 4, 0.1


class Data:
    """X_i and Y_i themselves; every step as the paper writes it."""

    def __init__(self, seed: int = 0, homogeneous: bool = False) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.X = torch.randn((N, M, D), generator=rng, dtype=torch.float64)
        self.a_star = unit(torch.randn(D, generator=rng, dtype=torch.float64))
        self.b_star = torch.randn((N, P), generator=rng, dtype=torch.float64)
        if homogeneous:
            self.b_star = self.b_star[:1].repeat(N, 1)
        self.Y = [X @ torch.outer(self.a_star, b) for X, b in zip(self.X, self.b_star, strict=True)]
        self.a = unit(torch.randn(D, generator=rng, dtype=torch.float64))

    def problem(self) -> linear_model.LinearFederation:
        return linear_model.from_samples(self.X, self.a_star, self.b_star)

    def loss(self, i: int, a: Tensor, b: Tensor) -> Tensor:
        return (self.Y[i] - self.X[i] @ torch.outer(a, b)).square().sum() / M

    def best_b(self, i: int, a: Tensor) -> Tensor:
        return torch.linalg.lstsq((self.X[i] @ a)[:, None], self.Y[i]).solution[0]

    def slope(self, i: int, a: Tensor, b: Tensor) -> Tensor:
        leaf = a.clone().requires_grad_()
        return torch.autograd.grad(self.loss(i, leaf, b), leaf)[0]


def unit(vector: Tensor) -> Tensor:
    return vector / vector.norm()


@pytest.mark.parametrize("homogeneous", [False, True])
def test_losses_minimizers_and_gradients_are_those_of_the_data(homogeneous: bool) -> None:
    data = Data(homogeneous=homogeneous)
    problem, b = data.problem(), torch.randn(P, dtype=torch.float64)
    for i in range(N):
        assert torch.allclose(linear_model.losses(problem, data.a, b)[i], data.loss(i, data.a, b), rtol=1e-12)
        assert torch.allclose(linear_model.minimize_b(problem, data.a)[i], data.best_b(i, data.a), rtol=1e-10)
        assert torch.allclose(
            linear_model.compute_gradient_a(problem, data.a, b)[i], data.slope(i, data.a, b), rtol=1e-10
        )


def test_three_iterations_of_algorithm_2() -> None:
    data = Data()
    problem, a, expected = data.problem(), data.a, data.a
    for _ in range(3):
        a, b = linear_model.run_rolora_round(problem, a, ETA)
        mean_b = sum(data.best_b(i, expected) for i in range(N)) / N
        moved = expected - ETA / N * sum(data.slope(i, expected, mean_b) for i in range(N))
        expected = moved / moved.norm()
        assert torch.allclose(b, mean_b, rtol=1e-10)
        assert torch.allclose(a, expected, rtol=1e-10)


def test_three_rounds_of_fedit_average_both_factors() -> None:
    """Two local steps; the product is that of the two means, whatever the length of the mean of a."""
    data = Data()
    problem, a, expected = data.problem(), data.a, data.a
    for _ in range(3):
        a, b = linear_model.run_fedit_round(problem, a, ETA, steps=2)
        finals = []
        for i in range(N):
            own = expected
            for _ in range(2):
                moved = own - ETA * data.slope(i, own, data.best_b(i, own))
                own = moved / moved.norm()
            finals.append((own, data.best_b(i, own)))
        mean_a, mean_b = (sum(pair[k] for pair in finals) / N for k in (0, 1))
        assert torch.allclose(torch.outer(a, b), torch.outer(mean_a, mean_b), rtol=1e-10)
        assert math.isclose(float(a.norm()), 1.0)
        expected = mean_a / mean_a.norm()


def test_ffa_lora_stops_at_the_mean_of_the_minimizers() -> None:
    data = Data()
    mean_b = sum(data.best_b(i, data.a) for i in range(N)) / N
    assert torch.allclose(linear_model.compute_ffa_solution(data.problem(), data.a), mean_b, rtol=1e-10)


def test_the_population_is_the_limit_of_many_samples() -> None:
    """l_i = ||a* b_i*^T - a b^T||^2, and b = b* cos(a, a*)."""
    data = Data()
    problem, b = linear_model.create_population(data.a_star, data.b_star), torch.randn(P, dtype=torch.float64)
    for i in range(N):
        dense = torch.outer(data.a_star, data.b_star[i]) - torch.outer(data.a, b)
        assert torch.allclose(linear_model.losses(problem, data.a, b)[i], dense.square().sum(), rtol=1e-12)
    assert torch.allclose(linear_model.minimize_b(problem, data.a), data.b_star * (data.a @ data.a_star), rtol=1e-12)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.floats(0.02, 1.0))
def test_population_iterations_contract_as_lemma_A16_says(seed: int, share: float) -> None:
    """delta' <= delta (1 - 2 eta (1 - delta0^2) ||mean b*||^2) for eta up to 1 / (2 ||mean b*||^2)."""
    data = Data(seed)
    problem, size = linear_model.create_population(data.a_star, data.b_star), float(data.b_star.mean(0).square().sum())
    eta, a, first = share / (2 * size), data.a, linear_model.compute_angle_distance(data.a, data.a_star)
    for _ in range(5):
        delta = linear_model.compute_angle_distance(a, data.a_star)
        a, _ = linear_model.run_rolora_round(problem, a, eta)
        assert (
            linear_model.compute_angle_distance(a, data.a_star) <= delta * (1 - 2 * eta * (1 - first**2) * size) + 1e-12
        )


@pytest.mark.parametrize(("clients", "samples"), [(1, 5), (3, 8), (5, 20)])
def test_proposition_5_5_is_the_mean_over_draws(clients: int, samples: int) -> None:
    """10,000 draws; within four standard errors, and far from the value without c."""
    rng = torch.Generator().manual_seed(clients)
    a = torch.tensor([1.0, 0.0], dtype=torch.float64)  # two inputs are enough: only X a and X a* matter
    a_star, b_star = torch.tensor([0.6, 0.8], dtype=torch.float64), torch.tensor([[2.0]], dtype=torch.float64)
    X = torch.randn((10_000, clients, samples, 2), generator=rng, dtype=torch.float64)

    def loss(drawn: Tensor) -> Tensor:
        problem = linear_model.from_samples(drawn, a_star, b_star.expand(clients, 1))
        return linear_model.losses(problem, a, linear_model.compute_ffa_solution(problem, a)).mean()

    values = torch.vmap(loss)(X)
    error = float(values.std() / len(values) ** 0.5)
    assert abs(float(values.mean()) - linear_model.compute_ffa_loss(0.8, 2.0, clients, samples)) < 4 * error
    assert abs(float(values.mean()) - 4 * 0.64) > 4 * error


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
