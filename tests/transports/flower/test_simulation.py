"""Flower's simulation repeats every method and wrapper of the registry to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

import fedspan
from helpers.conformance import FEW, describe_case, list_cases, require_same_model
from helpers.families import others_slow
from helpers.sites import local_values, run_values, site_files


@pytest.fixture(scope="module")
def data(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus of all sites."""
    return site_files(tiny_folder / "corpus.csv", tmp_path_factory.mktemp("sites"))["all"]


@pytest.mark.parametrize("case", others_slow(list_cases(), FEW))
@pytest.mark.usefixtures("kept_worker")
def test_every_method_and_wrapper_has_the_bits_of_the_loop_engine(
    case: str, data: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    values = run_values(tiny_folder, **describe_case(case))
    for name, options in (("loop", {}), ("flower-sim", {"workers": 1})):
        fedspan.run(local_values(values, data, {"name": name, **options}), tmp_path / name, progress=False)
    require_same_model(tmp_path / "loop", tmp_path / "flower-sim")
