"""What the games of privacy share: protections, the answer of nodes to an order of the attacker, and scores.

The attacker runs the server: it writes the run's config within the limits of a node's file, and the model of an order.
"""

from __future__ import annotations

import csv
import math
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from scipy.stats import t

from fedspan.assembly.run import Prepared, prepare
from fedspan.config import parse_config
from fedspan.core.tensors import Tensors, subtract
from fedspan.federation.federation import Federation

Rows = Sequence[tuple[str, str]]
"""Texts with their labels."""
NODES = 5
"""Nodes of a secure sum."""
PROTECTIONS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "secure": {"federation": {"secure": {"clip": 1e4, "bits": 64}}},
    "local": {"privacy": {"mechanism": "local", "epsilon": 8, "clip": 1.0}},
    "dp-sgd": {"privacy": {"mechanism": "dp-sgd", "epsilon": 8, "clip": 1.0}},
}
"""Changes of a run's config. Under central privacy the server, which is the attacker, sees what it sees without."""


def read_rows(path: Path, seed: int) -> Rows:
    """Read Banking77's texts and labels, in an order that the seed draws."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [(row["text"], row.get("label") or row["category"]) for row in csv.DictReader(file)]
    random.Random(seed).shuffle(rows)
    return rows


def format_score(values: Sequence[float]) -> str:
    """Format the mean of a score over seeds and its 95 % interval (Student's t), in points; one seed has none."""
    if len(values) == 1:
        return f"{100 * values[0]:.1f}"
    margin = t.ppf(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return f"{100 * mean(values):.1f} ± {100 * margin:.1f}"


def prepare_nodes(values: Mapping[str, Any], rows: Rows, examples: int, protection: str, seed: int) -> Prepared:
    """Build the nodes of a game, one unless their replies are summed; the first one is the victim.

    Args:
        values: Config of the run, without its data.
        rows: Texts and labels; the nodes have the first ones.
        examples: Number of examples of a node.
        protection: One of ``PROTECTIONS``.
        seed: Seed of the run.
    """
    nodes = NODES if protection == "secure" else 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *rows[: nodes * examples]])
        changes = {
            **PROTECTIONS[protection],
            "data": {"train": str(path), "test_fraction": 0.0, "labels": sorted({label for _, label in rows})},
            "federation": {"rounds": 1, "weights": "uniform", **PROTECTIONS[protection].get("federation", {})},
            "partition": {"partitioner": "iid", "clients": nodes, "validation": 0.0, "test": 0.0},
        }
        return prepare(parse_config({"seed": seed, "threads": 1, **values, **changes}))


def observe(federation: Federation, changes: Tensors) -> Tensors:
    """Send an order, the model with the attacker's changes, and return the mean change of the nodes' replies."""
    progress = federation.begin()
    state = replace(progress.state, tensors={**progress.state.tensors, **changes})
    after = federation.run_round(replace(progress, state=state)).progress.state
    return subtract(after.tensors, state.tensors)


def compute_rate(members: np.ndarray, others: np.ndarray, false: float = 0.01) -> float:
    """Share of members with a score above that which a share ``false`` of the others exceeds."""
    return float((members > np.quantile(others, 1 - false, method="higher")).mean())
