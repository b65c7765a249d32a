"""Flower's simulation repeats every method and wrapper of the registry to the bit.

One method of each family also goes through loop, batched, Flower's simulation and a deployment; the heads start from
statistics, so that this exchange is compared, too. In a deployment, the whole registry is in
``test_supernode_methods.py``.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from torch import Tensor

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

import fedspan
from fedspan.deployment.deploy import submit
from fedspan.methods.registry import METHODS
from fedspan.transports.flower.server import read_link
from helpers.conformance import SIMULATED, describe_case, list_cases, require_same_model
from helpers.families import others_slow
from helpers.sites import SITES, local_values, run_values, site_files
from helpers.stage import Deployment

FAMILIES = ("fedit", "flora", "fedsa-lora", "fedgalore")
"""One method of each family: averaged factors, stacked factors, personal factors, projected gradients."""
BOUND = {"fedgalore": 1e-3}
"""Relative; FedGaLore trains with AdamW; others: 1e-5."""


def weights(folder: Path) -> dict[str, dict[str, Tensor]]:
    found = {str(path.relative_to(folder)): load_file(path) for path in sorted(folder.rglob("*.safetensors"))}
    assert found
    return found


def require_equal(one: Path, other: Path, method: str) -> None:
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    for file, tensors in mine.items():
        assert tensors.keys() == theirs[file].keys()
        for name, value in tensors.items():
            apart = (value - theirs[file][name]).norm() / value.norm().clamp(min=1e-12)
            assert apart <= BOUND.get(method, 1e-5), (file, name, float(apart))


@pytest.fixture
def references(tiny_folder: Path, tmp_path: Path) -> Any:
    files = site_files(tiny_folder / "corpus.csv", tmp_path)

    def made(method: str, engine: str, **options: Any) -> tuple[dict[str, Any], Path]:
        # In the model of one layer, rounding of some methods grows beyond the bounds.
        head = "lda" if method == FAMILIES[0] else "random"  # nodes send statistics once
        values = run_values(tiny_folder, {"name": method, "r": 2}, kind="deep-bert", model={"head_init": head})
        out = tmp_path / f"{method}-{engine}"
        fedspan.run(local_values(values, files["all"], {"name": engine, **options}), out)
        return values, out

    return files, made


@pytest.fixture(scope="module")
def data(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return site_files(tiny_folder / "corpus.csv", tmp_path_factory.mktemp("sites"))["all"]


@pytest.mark.parametrize("case", others_slow(list_cases(), SIMULATED))
@pytest.mark.usefixtures("kept_worker")
def test_every_method_and_wrapper_has_the_bits_of_the_loop_engine(
    case: str, data: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    values = run_values(tiny_folder, **describe_case(case))
    for name, options in (("loop", {}), ("flower-sim", {"workers": 1})):
        fedspan.run(local_values(values, data, {"name": name, **options}), tmp_path / name, progress=False)
    require_same_model(tmp_path / "loop", tmp_path / "flower-sim")


@pytest.mark.slow
@pytest.mark.parametrize("method", FAMILIES)
def test_flower_s_simulation_gives_the_loop_s_adapter(method: str, references: Any) -> None:
    pytest.importorskip("ray", reason="the extra fedspan[flower-sim] is not installed")
    _, made = references
    _, loop = made(method, "loop")
    # Each worker is a process that imports torch: only one method has two of them, side by side.
    workers = 2 if method == FAMILIES[0] else 1
    for engine, options in (("batched", {}), ("flower-sim", {"workers": workers})):
        _, other = made(method, engine, **options)
        require_equal(loop / "adapter", other / "adapter", method)


@pytest.mark.slow
def test_the_simulation_joins_no_other_cluster(data: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """Ray would join the cluster of the environment, or the last one that was started on the machine."""
    pytest.importorskip("ray", reason="the extra fedspan[flower-sim] is not installed")
    values = run_values(tiny_folder, {"name": "fedit", "r": 2})
    values = local_values(values, data, {"name": "flower-sim", "workers": 1})
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    command = [sys.executable, "-m", "fedspan", "run", str(config), "--out", str(tmp_path / "run")]
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:9"}  # nothing answers there
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_a_deployment_with_tls_and_keys_gives_the_loop_s_adapters(references: Any, tmp_path: Path) -> None:
    files, made = references
    with Deployment(tmp_path / "deployment") as deployment:
        for site in SITES:
            limits = {"class_examples": 1}  # simulated clients count every label
            deployment.join(site, deployment.node_file(site, files[site], limits=limits))
        for method in FAMILIES:
            values, loop = made(method, "loop")
            if method == FAMILIES[0]:
                config = tmp_path / f"{method}.yaml"
                config.write_text(yaml.safe_dump(values))
                deployment.submit(config, tmp_path / f"{method}-deployed")
            else:  # what the command calls, without another process that imports torch
                submit(values, tmp_path / f"{method}-deployed", read_link(deployment.server))
            if not METHODS[method].claims.personal:
                require_equal(loop / "adapter", tmp_path / f"{method}-deployed" / "adapter", method)
                continue
            for site in SITES:  # every client's own, which stays on its node
                own = list((deployment.folder / f"{site}-state").glob("*/adapter"))
                latest = max(own, key=lambda path: path.stat().st_mtime)
                require_equal(loop / "adapter" / site, latest, method)
