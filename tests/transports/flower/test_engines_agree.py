"""One method, seed and data through loop, batched, Flower's simulation and a deployment: equal adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from torch import Tensor

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

from stage import Deployment

import fedspan
from helpers.sites import SITES, local_values, run_values, site_files

METHODS = ("fedit", "rolora", "flora", "fedsa-lora", "fedgalore", "florg")
BOUND = {"fedgalore": 1e-3}
"""AdamW; SGD: 1e-5, relative."""


def weights(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Exported tensors by file."""
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

    def made(method: str, engine: str) -> tuple[dict[str, Any], Path]:
        values = run_values(tiny_folder, {"name": method, "r": 2})
        out = tmp_path / f"{method}-{engine}"
        fedspan.run(local_values(values, files["all"], {"name": engine}), out)
        return values, out

    return files, made


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_flower_s_simulation_gives_the_loop_s_adapter(method: str, references: Any) -> None:
    pytest.importorskip("ray", reason="the extra fedspan[flower-sim] is not installed")
    _, made = references
    _, loop = made(method, "loop")
    for engine in ("batched", "flower-sim"):
        _, other = made(method, engine)
        require_equal(loop / "adapter", other / "adapter", method)


@pytest.mark.slow
def test_a_deployment_with_tls_and_keys_gives_the_loop_s_adapters(references: Any, tmp_path: Path) -> None:
    files, made = references
    with Deployment(tmp_path / "deployment") as deployment:
        for site in SITES:
            deployment.join(site, deployment.node_file(site, files[site]))
        for method in METHODS:
            values, loop = made(method, "loop")
            config = tmp_path / f"{method}.yaml"
            config.write_text(yaml.safe_dump(values))
            deployment.submit(config, tmp_path / f"{method}-deployed")
            if method == "fedsa-lora":  # every client's own, which stays on its node
                for site in SITES:
                    own = sorted((deployment.folder / f"{site}-state").glob("*/adapter"))
                    require_equal(loop / "adapter" / site, own[-1], method)
                continue
            require_equal(loop / "adapter", tmp_path / f"{method}-deployed" / "adapter", method)
