"""What the games of privacy share: protections, the answer of nodes to an order of the attacker, and scores.

The attacker runs the server: it writes the run's config, which a node with the default limits must admit, and the model
of an order.
"""

import csv
import json
import math
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import t
from torch import Tensor

from evidence.pages.subsets import write_rows
from fedspan import __version__
from fedspan.assembly.run import Prepared, prepare
from fedspan.config import parse_config
from fedspan.config.node import NodeConfig
from fedspan.core.tensors import Tensors, subtract
from fedspan.deployment.handshake import Invitation, build_node_values
from fedspan.deployment.limits import require_config, require_frozen_words, require_workload
from fedspan.federation.federation import Federation

Rows = Sequence[tuple[str, str]]
"""Texts with their labels."""
NODES = 5
"""Nodes of a sum."""
PROTECTIONS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "secure": {"federation": {"secure": {"clip": 1e4, "bits": 64}}},
    "central": {"privacy": {"mechanism": "central", "epsilon": 8, "clip": 1.0}},
    "local": {"privacy": {"mechanism": "local", "epsilon": 8, "clip": 1.0}},
    "dp-sgd": {"privacy": {"mechanism": "dp-sgd", "epsilon": 8, "clip": 1.0}},
}
"""Changes of a run's config. Under central privacy the server sees what it sees without; the attacker of such a run has
the models only, and its orders are carried out all the same."""
SUMMED = ("secure", "central")
"""Protections under which the attacker has the sum of all nodes."""


def read_rows(path: Path, seed: int) -> Rows:
    """Read Banking77's texts and labels, in an order that the seed draws."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [(row["text"], row.get("label") or row["category"]) for row in csv.DictReader(file)]
    random.Random(seed).shuffle(rows)
    return rows


def format_score(values: Sequence[float], scale: float = 100.0) -> str:
    """Format the mean of a score over seeds and its 95 % interval (Student's t), in points; one seed has none."""
    if len(values) == 1:
        return f"{scale * values[0]:.1f}"
    margin = t.ppf(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return f"{scale * mean(values):.1f} ± {scale * margin:.1f}"


def prepare_nodes(
    values: Mapping[str, Any],
    rows: Rows,
    examples: int,
    protection: str,
    seed: int,
    rounds: int = 1,
    nodes: int | None = None,
) -> Prepared:
    """Build the nodes of a game; the first one is the victim.

    Args:
        values: Config of the run, without its data.
        rows: Texts and labels; the nodes have the first ones.
        examples: Number of examples of a node.
        protection: One of ``PROTECTIONS``.
        seed: Seed of the run.
        rounds: Rounds of the run, which the attacker may order.
        nodes: Number of nodes; None: one, or those of a sum.

    Raises:
        FedspanError: If a node with the default limits would refuse the run.
    """
    nodes = nodes or (NODES if protection in SUMMED else 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.csv"
        write_rows(path, ("text", "label"), rows[: nodes * examples])
        config = {
            **{"seed": seed, "threads": 1, **values, **PROTECTIONS[protection]},
            "data": {"train": str(path), "test_fraction": 0.0, "labels": sorted({label for _, label in rows})},
            "federation": {"rounds": rounds, "weights": "uniform", **PROTECTIONS[protection].get("federation", {})},
            "partition": {"partitioner": "iid", "clients": nodes, "validation": 0.0, "test": 0.0},
        }
        nodes_run = prepare(parse_config(config))
        _require_admitted(nodes_run, config, examples)
        return nodes_run


def _require_admitted(nodes: Prepared, config: Mapping[str, Any], examples: int) -> None:
    """Check that a node with the default limits joins a run and trains in it.

    Raises:
        FedspanError: If it would not.
    """
    data = dict(config["data"])
    node = NodeConfig(id="victim", server="localhost:1", data={"train": data.pop("train")}, validation=0.0, test=0.0)
    sent = {**config, "data": data}
    if "privacy" in sent:
        sent["privacy"] = {**sent["privacy"], "randomness": "secret"}
    joined = parse_config(build_node_values(sent, node.model_dump()))
    require_config(node, Invitation(run="game", version=__version__, config=json.dumps(sent)), joined)
    require_frozen_words(node.limits, joined, nodes.engine.adapted)
    require_workload(joined, examples, node.limits, nodes.federation.method)


def compute_features(nodes: Prepared, cache: Path | None) -> Tensor:
    """Return the features of a run's examples in the order of its rows, (examples, D) float32.

    Args:
        nodes: The run.
        cache: File of the features, which is written if it does not exist; None: there is none.
    """
    if cache is not None and cache.exists():
        return load_file(cache)["features"]
    order = np.argsort(nodes.train.lengths, kind="stable")  # texts of one batch have similar lengths
    features = nodes.engine.compute_features(None, nodes.train, order, 64)[torch.from_numpy(np.argsort(order))]
    if cache is not None:
        save_file({"features": features.contiguous()}, cache)
    return features


def observe(federation: Federation, changes: Tensors) -> Tensors:
    """Send an order, the model with the attacker's changes, and return the mean change of the nodes' replies."""
    progress = federation.begin()
    state = replace(progress.state, tensors={**progress.state.tensors, **changes})
    after = federation.run_round(replace(progress, state=state)).progress.state
    return subtract(after.tensors, state.tensors)


def compute_rate(members: np.ndarray, others: np.ndarray, false: float = 0.01) -> float:
    """Share of members with a score above that which a share ``false`` of the others exceeds."""
    return float((members > np.quantile(others, 1 - false, method="higher")).mean())
