"""The scripts of the claims at sizes that take seconds: that they run, and what they find at any size."""

import dataclasses
import gzip
import runpy
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from evidence.claims import fedgalore_drift as drift
from evidence.claims import fedgalore_moments as moments
from evidence.claims import fedgalore_trap as trap
from evidence.claims import florg_gram as florg
from helpers.families import others_slow

CLAIMS = Path(__file__).resolve().parents[2] / "evidence" / "claims"
SMOKE = {
    "fedgalore_ajive": [
        *("--size", "20", "--clients", "2", "3"),
        *("--seeds", "0", "1"),
    ],
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
FIGURES = {
    "rolora_linear": "rolora",
    "fedloru_theory": "fedloru",
    "fedgalore_ajive": "fedgalore",
}
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
