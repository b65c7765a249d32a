"""The scripts in claims/ at sizes that take seconds: that they run, and that their pages say what their runs found."""

import dataclasses
import gzip
import importlib
import json
import re
import runpy
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedspan.methods.registry import METHODS
from helpers.families import others_slow

CLAIMS = Path(__file__).resolve().parents[2] / "claims"
SMOKE = {
    "fedgalore_ajive": [
        *("--size", "20", "--sizes", "24", "--clients", "2", "3", "--drifts", "1", "--noises", "0.1"),
        *("--seeds", "0", "1"),
    ],
    "bytes": ["--layer", "1", "--methods", "fedit", "rolora", "lora-a2", "flora"],
    "fedgalore_ajive_time": ["--sizes", "24", "32", "--views", "1", "2", "--rank", "4", "--seeds", "0", "1"],
    "fedgalore_trap": ["--seeds", "4", "--calibration", "8", "--settings", "2", "--drawn", "1", "--steps", "20"],
    "fedloru_stable_rank": [
        *("--images", "10", "20", "--epochs", "1", "--every", "1", "--probes", "2", "--iterations", "2"),
        *("--seeds", "0", "1"),
    ],
    "fedloru_theory": ["--sizes", "30", "40", "--clients", "2", "--most", "6", "--seeds", "0", "1"],
    "hostile_clients": [
        *("--labels", "4", "--examples", "80", "--layers", "1", "--rounds", "2", "--steps", "1", "--batch", "4"),
        *("--methods", "fedit", "--seeds", "0", "1"),
    ],
    "membership_inference": [
        *("--examples", "40", "--rounds", "2", "--budgets", "8", "--layers", "1", "--seeds", "0", "1")
    ],
    "rolora_linear": ["--seeds", "2", "--samples", "30", "--draws", "50"],
    "rolora_mnist": [
        *("--train", "60", "--validation", "20", "--test", "30", "--rounds", "2"),
        *("--rates", "0.1", "1", "--seeds", "0", "1"),
    ],
}


QUICK = ("bytes", "fedgalore_ajive", "rolora_linear")
"""The others train for seconds, and are slow."""
MakePage = Callable[[str], tuple[Path, dict[str, Any]]]


def run(script: str, *words: str) -> None:
    """As ``python claims/<script>.py``, but without the seconds that a new interpreter takes to import torch."""
    path = CLAIMS / f"{script}.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CLAIMS))
        patch.setattr(sys, "argv", [str(path), *words])
        runpy.run_path(str(path), run_name="__main__")


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


@pytest.fixture(scope="module")
def questions(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of Banking77's format with the tiny corpus, and the tiny model."""
    folder = tmp_path_factory.mktemp("questions")
    text = (tiny_folder / "corpus.csv").read_text().replace("text,label,site", "text,category,site")
    for part in ("train", "test"):
        (folder / f"{part}.csv").write_text(text)
    (folder / "bert").symlink_to(tiny_folder / "deep-bert")
    return folder


@pytest.fixture(scope="module")
def make_page(digits: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> MakePage:
    """``make_page(script)``: a claim's page and what it saved; it is run once, all in one folder."""
    folder = tmp_path_factory.mktemp("claims")
    data = {
        "fedloru_stable_rank": ["--data", str(digits)],
        "bytes": ["--model", str(questions / "bert")],
        "rolora_mnist": ["--data", str(digits)],
        "hostile_clients": ["--data", str(questions), "--model", str(questions / "bert")],
        "membership_inference": ["--data", str(questions), "--model", str(questions / "bert")],
    }

    def make(script: str) -> tuple[Path, dict[str, Any]]:
        page = folder / f"{script}.md"
        if not page.exists():
            run(script, *data.get(script, []), *SMOKE[script], "--out", str(folder))
        return page, json.loads(page.with_suffix(".json").read_text())

    return make


def test_every_claim_has_a_smoke_size() -> None:
    libraries = {"curvature", "linear_model", "planted_views"}  # with tests of their own
    helpers = {"all", "hypotheses", "index", "pages", "reasons", "report", "reproduced"}
    assert {path.stem for path in CLAIMS.glob("*.py")} == helpers | libraries | set(SMOKE)


@pytest.mark.parametrize("script", others_slow(SMOKE, QUICK))
def test_a_page_has_its_findings_command_machine_date_and_figure(script: str, make_page: MakePage) -> None:
    path, saved = make_page(script)
    page = path.read_text()
    assert saved["name"] == script
    assert re.search(rf"Command: `python claims/{script}.py .*--(seeds|methods)", page)
    assert str(path.parent) not in page
    assert re.search(r"Date: \d{4}-\d\d-\d\d\. Machine: \S+, \d+ cores, torch", page)
    assert f"({script}.svg)" in page
    assert "<svg" in path.with_suffix(".svg").read_text()
    assert saved["findings"]
    for finding in saved["findings"]:
        assert f"| {finding['statement']} | {finding['measured']} | **{finding['verdict']}** |" in page


def test_bytes_are_judged_by_the_paper_s_formula(make_page: MakePage) -> None:
    """The tiny model has layers of 16 x 16 (two), 24 x 16 and 16 x 24: whole, all are less than stacks of rank 16."""
    found = make_page("bytes")[1]["findings"]
    assert [one["verdict"] for one in found] == ["holds", "holds", "contradicted", "holds"]
    assert [one["measured"] for one in found[:2]] == ["up as stated, down as stated"] * 2
    assert "slots" in found[2]["measured"]
    assert found[3]["measured"] == "up as stated, down 0.5556 times as much"  # 1280 / 2304


def test_bytes_are_of_every_method() -> None:
    """``ALL`` in claims/bytes.py is written by hand, so that nothing of the methods' own counts goes into it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CLAIMS))
        assert runpy.run_path(str(CLAIMS / "bytes.py"))["ALL"].keys() == METHODS.keys()


def test_the_pages_in_the_docs_are_indexed(tmp_path: Path) -> None:
    """The three pages are what the command writes from the results beside them."""
    docs, written = CLAIMS.parent / "docs" / "claims", ("index.md", "experiments.md", "statements.md")
    for path in (*docs.glob("*.json"), *docs.glob("*.md")):
        if path.name not in written:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    run("index", "--folder", str(tmp_path))
    for name in written:
        assert (docs / name).read_text() == (tmp_path / name).read_text()


def test_the_exact_statements_of_the_linear_model_hold_at_any_size(make_page: MakePage) -> None:
    findings = make_page("rolora_linear")[1]["findings"]
    verdicts = {finding["statement"].split(":")[0].split(",")[0]: finding["verdict"] for finding in findings}
    assert verdicts["Lemma 5.3 as stated"] == "contradicted"
    assert verdicts["Theorem A.14"] == verdicts["Proposition A.17"] == "holds"


def test_the_trap_trains_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the engine: full SGD is plain gradient descent, and low-rank methods of full rank reach what it reaches.

    LoRA stays in W(0) + the row space that A spans; with B = 0 its first step leaves A alone.
    """
    monkeypatch.syspath_prepend(str(CLAIMS))
    trap = importlib.import_module("fedgalore_trap")
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


def test_the_trap_has_the_two_minima_that_the_paper_describes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flat basin's center is u c e2^T, out of A's row space; the valley's curvature along e1 is ``shallow``."""
    monkeypatch.syspath_prepend(str(CLAIMS))
    trap = importlib.import_module("fedgalore_trap")
    setting = trap.Setting(size=6, rank=2, shallow=0.3)
    trials = trap.draw(setting, range(5))
    flat, valley = trap.compute_basins(setting, trials, trials.center)
    assert float(flat.abs().max()) == 0.0
    torch.testing.assert_close(valley, torch.full_like(valley, setting.steep / 2 * setting.distance**2))
    assert float((trials.center @ trials.A.mT).abs().max()) < 1e-12
    torch.testing.assert_close(trap.compute_basins(setting, trials, trials.aside)[1], torch.full_like(valley, 0.15))
    rest = trials.aside - trials.aside @ torch.linalg.pinv(trials.A) @ trials.A
    assert float(rest.abs().max()) < 1e-12
