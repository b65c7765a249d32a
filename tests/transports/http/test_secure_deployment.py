"""Secure aggregation by three nodes with TLS and keys, one of which is killed."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")

import fedspan
from helpers.sites import SITES, local_values, run_values, site_files
from helpers.stage import Deployment
from helpers.submitted_runs import finish, rounds, submitted, wait_for_round, was_asked_twice

pytestmark = pytest.mark.slow
SECURE = {"secure": {"bits": 64, "clip": 10.0}}
UNCLIPPED = {"clip_ratio": None}
"""Norms of replies are not compared in a secure sum, so the plain run must not clip them either."""


def adapter(run: Path) -> dict[str, Any]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def require_close(one: Path, other: Path, relative: float = 1e-6) -> None:
    mine, theirs = adapter(one), adapter(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert float((value - theirs[name]).norm()) <= relative * float(value.norm()), name


@pytest.fixture
def files(tiny_folder: Path, tmp_path: Path) -> dict[str, Path]:
    return site_files(tiny_folder / "corpus.csv", tmp_path)


def test_a_deployment_gives_the_plain_adapter_and_a_node_that_is_killed_costs_no_round(
    files: dict[str, Path], tiny_folder: Path, tmp_path: Path
) -> None:
    with Deployment(tmp_path / "deployment") as made:
        for site in SITES:
            limits = {"secure_only": True}
            made.join(site, made.node_file(site, files[site], limits=limits))
        values = run_values(
            tiny_folder, {"name": "fedit", "r": 2}, federation={**SECURE, "deadline": 120.0, "rounds": 3}
        )
        config = tmp_path / "config.yaml"

        plain = tmp_path / "plain"
        open_values = {
            **values,
            "federation": {key: value for key, value in values["federation"].items() if key != "secure"},
        }
        fedspan.run(local_values(open_values, files["all"], {"name": "loop"}), plain)
        config.write_text(yaml.safe_dump(values))
        run = tmp_path / "secure"
        finish(submitted(made, config, run), made)
        require_close(plain, run)

        # In the open, these nodes take no part.
        config.write_text(yaml.safe_dump(open_values))
        done = made.submit(config, tmp_path / "open", "--wait", "20", check=False)
        assert done.returncode == 2
        assert "limits.secure_only" in done.stdout + done.stderr

        # Between the shares and the vector: while it trains, a node goes; back, it gets its order again.
        values["training"] = {**values["training"], "local_steps": 600}
        config.write_text(yaml.safe_dump(values))
        run = tmp_path / "killed"
        process = submitted(made, config, run)
        wait_for_round(run, 1, process)
        made.wait_for_training(SITES[0], used=0.5)  # more than the other exchanges of a secure round take
        made.end(SITES[0])
        made.join(SITES[0], made.folder / f"{SITES[0]}.yaml")
        finish(process, made)
        assert [row["round"] for row in rounds(run)] == [1, 2, 3]
        failures = [one for row in rounds(run) for one in row.get("failures", [])]
        assert {one["client"] for one in failures} <= {SITES[0]}
        assert failures or was_asked_twice(made, SITES[0])
