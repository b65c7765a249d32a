"""The scripts in claims/ at sizes that take seconds: that they run, and that their pages say what their runs found."""

from __future__ import annotations

import gzip
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

CLAIMS = Path(__file__).resolve().parents[2] / "claims"
SMOKE = {
    "rolora_linear": ["--seeds", "2", "--samples", "30", "--draws", "50"],
    "rolora_mnist": [
        *("--train", "60", "--validation", "20", "--test", "30", "--rounds", "2"),
        *("--rates", "0.1", "1", "--seeds", "0", "1"),
    ],
}


def run(script: str, *words: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(CLAIMS / f"{script}.py"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


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
def pages(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of all claims, and the index."""
    folder = tmp_path_factory.mktemp("claims")
    for script, words in SMOKE.items():
        data = ["--data", str(digits)] if script == "rolora_mnist" else []
        run(script, *data, *words, "--out", str(folder))
    run("index", "--folder", str(folder))
    return folder


def test_every_claim_has_a_smoke_size() -> None:
    helpers = {"index", "report", "verdict"}
    assert {path.stem for path in CLAIMS.glob("*.py")} == helpers | set(SMOKE)


@pytest.mark.parametrize("script", SMOKE)
def test_a_page_has_its_findings_command_machine_date_and_figure(script: str, pages: Path) -> None:
    page, saved = (pages / f"{script}.md").read_text(), json.loads((pages / f"{script}.json").read_text())
    assert saved["name"] == script
    assert re.search(rf"Command: `python claims/{script}.py .*--seeds", page)
    assert str(pages) not in page
    assert re.search(r"Date: \d{4}-\d\d-\d\d\. Machine: \S+, \d+ cores, torch", page)
    assert f"({script}.svg)" in page
    assert "<svg" in (pages / f"{script}.svg").read_text()
    assert saved["findings"]
    for finding in saved["findings"]:
        assert f"| {finding['statement']} | {finding['measured']} | **{finding['verdict']}** |" in page


def test_the_index_lists_every_finding(pages: Path) -> None:
    index = (pages / "index.md").read_text()
    count = 0
    for script in SMOKE:
        saved = json.loads((pages / f"{script}.json").read_text())
        assert f"[{saved['title']}]({script}.md)" in index
        for finding in saved["findings"]:
            count += 1
            assert f"| {finding['statement']} | {finding['measured']} | **{finding['verdict']}** |" in index
    assert f"{count} statements" in index


def test_the_pages_in_the_docs_are_indexed(tmp_path: Path) -> None:
    """docs/claims/index.md is what the command writes from the results beside it."""
    docs = CLAIMS.parent / "docs" / "claims"
    for path in docs.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    run("index", "--folder", str(tmp_path))
    assert (docs / "index.md").read_text() == (tmp_path / "index.md").read_text()


def test_the_exact_statements_of_the_linear_model_hold_at_any_size(pages: Path) -> None:
    findings = json.loads((pages / "rolora_linear.json").read_text())["findings"]
    verdicts = {finding["statement"].split(":")[0].split(",")[0]: finding["verdict"] for finding in findings}
    assert verdicts["Lemma 5.3 as stated"] == "contradicted"
    assert verdicts["Theorem A.14"] == verdicts["Proposition A.17"] == "holds"
