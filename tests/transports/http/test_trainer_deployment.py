"""Three nodes that train with their owners' trainers, one in two processes: one is killed, and sums are secure."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from helpers.sites import SITES, run_values
from helpers.stage import Deployment
from helpers.submitted_runs import finish, rounds, submitted, was_asked_twice

pytestmark = pytest.mark.slow
STEPS = 300
"""Of a client's round, so that there is time to kill somebody in it."""
ROUNDS = 2


def join(made: Deployment, site: str, tiny_folder: Path) -> None:
    """Start the training script of a site; the last one's in two processes."""
    script = ["-m", "helpers.trainer_script", str(made.folder / f"{site}.yaml"), str(tiny_folder), site]
    if site == SITES[-1]:
        script = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *script]
    made.start(site, options=[sys.executable, *script])


def join_all(made: Deployment, tiny_folder: Path, **limits: Any) -> None:
    """Start the training scripts of all sites, whose examples are the trainers' own."""
    for site in SITES:
        path = made.node_file(site, Path("none"), limits={"train_examples": 1, **limits})
        values = yaml.safe_load(path.read_text())
        del values["data"]
        path.write_text(yaml.safe_dump(values))
        join(made, site, tiny_folder)


def wait_for_order(made: Deployment, site: str, orders: int) -> None:
    """Wait until a node has received its so many-th order to train."""
    path, until = made.folder / f"{site}-state" / "audit.jsonl", time.monotonic() + 120
    while True:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if sum(row["event"] == "asked" and row.get("task") == "train" for row in rows) >= orders:
            return
        assert time.monotonic() < until, rows
        time.sleep(0.02)


def config(tiny_folder: Path, folder: Path, steps: int = STEPS, **federation: Any) -> Path:
    values = run_values(
        tiny_folder,
        {"name": "rolora", "r": 2},
        federation={"rounds": ROUNDS, "deadline": 120.0, "min_replies": 3, **federation},
    )
    values["training"] = {"optimizer": "adamw", "lr": 0.002, "local_steps": steps, "batch_size": 4}
    values["partition"] |= {"validation": 0.1}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_a_node_that_is_killed_in_mid_round_returns_and_trains_it_again(tiny_folder: Path, tmp_path: Path) -> None:
    with Deployment(tmp_path / "deployment") as made:
        join_all(made, tiny_folder)
        plan = config(tiny_folder, tmp_path, clip_ratio=None)
        clean = tmp_path / "clean"
        finish(submitted(made, plan, clean), made)
        losses = [row["loss"] for row in rounds(clean)]
        assert losses[-1] < losses[0]

        # A node in mid-round, which comes back: the order comes again.
        run = tmp_path / "killed"
        process = submitted(made, config(tiny_folder, tmp_path, 3 * STEPS, clip_ratio=None), run)
        wait_for_order(made, SITES[0], 2 * ROUNDS)
        made.wait_for_training(SITES[0], has_worker=False)
        made.end(SITES[0])
        join(made, SITES[0], tiny_folder)
        finish(process, made)
        assert [row["round"] for row in rounds(run)] == [1, 2]
        assert was_asked_twice(made, SITES[0])


def test_secure_sums_of_trainers_give_the_plain_adapter(tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")
    adapters: dict[str, dict[str, Any]] = {}
    kinds = {"plain": {"clip_ratio": None}, "secure": {"secure": {"bits": 64, "clip": 10.0}}}
    for kind, federation in kinds.items():  # new nodes: a trainer's state lasts as long as its process
        with Deployment(tmp_path / f"{kind}-nodes") as made:
            join_all(made, tiny_folder)
            finish(submitted(made, config(tiny_folder, tmp_path, 7, **federation), tmp_path / kind), made)
            adapters[kind] = load_file(tmp_path / kind / "adapter" / "adapter_model.safetensors")
    assert adapters["plain"].keys() == adapters["secure"].keys()
    for name, value in adapters["plain"].items():
        assert float((value - adapters["secure"][name]).norm()) <= 1e-6 * float(value.norm()), name
    plain, secure = (rounds(tmp_path / kind)[0]["bytes"]["up"] for kind in kinds)
    assert secure > plain  # keys, shares and masked vectors
