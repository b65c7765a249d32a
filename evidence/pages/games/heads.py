"""The rounds with which a deployment begins, which train the head alone: on stored features, thousands in an hour."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evidence.pages.games.harness import PROTECTIONS, Rows, compute_features, prepare_nodes
from fedspan.clients.secagg import SecureClient
from fedspan.clients.secagg_store import MemorySessionStore
from fedspan.core.noise import derive_seed_key
from fedspan.federation.progress import ClientData
from fedspan.runs.head_setup import begin_at_random
from fedspan.runs.setup import Prepared
from fedspan.tasks.task import get_labels
from fedspan.training.loop import LoopEngine
from fedspan.transports.in_process import simulate

ROUNDS = 4
"""Rounds of the head: those of ``fedspan init``'s 20 in a deployment."""


@dataclass(frozen=True)
class Heads:
    """Nodes that train a head.

    Args:
        nodes: A run with all examples.
        features: Their features, (examples, D) float64.
        labels: Their labels, (examples,) int64.
    """

    nodes: Prepared
    features: Tensor
    labels: Tensor


def prepare_heads(rows: Rows, protection: str, cache: Path | None) -> Heads:
    """Build a run whose nodes may have any of some rows.

    Args:
        rows: Texts and labels, a multiple of three.
        protection: One of ``PROTECTIONS`` but dp-sgd.
        cache: File of the features (``compute_features``).
    """
    # Without privacy, these rounds have ten times the epochs of the others.
    epochs = 10 if "privacy" in PROTECTIONS[protection] else 1
    values: Mapping[str, Any] = {
        "model": {"head_init": "random", "head_rounds": ROUNDS},
        "method": {"name": "fedit", "r": 8, "lora_alpha": 16},
        "training": {"local_epochs": epochs},
        "engine": {"name": "loop", "prefix_cache": False},
    }
    nodes = prepare_nodes(values, rows, len(rows) // 3, protection, 0, ROUNDS + 1, nodes=3)
    features, everything = compute_features(nodes, cache), np.arange(len(rows))
    assert isinstance(nodes.engine, LoopEngine)
    nodes.engine.features.ensure(nodes.train, everything, lambda: features)
    return Heads(nodes, features.double(), torch.from_numpy(get_labels(nodes.train, everything)))


def train_head(heads: Heads, parts: Sequence[np.ndarray], number: int) -> tuple[Tensor, float]:
    """Train a head, and return its logits of all examples, (examples, C), and the seconds of a round.

    Args:
        heads: The run.
        parts: Examples of each node.
        number: Number of the head; noise, keys and batches depend on it.
    """
    run, nothing = heads.nodes.federation, np.empty(0, np.int64)
    known = next(iter(run.clients.values())).client
    clients = [
        ClientData(replace(known, id=f"node-{number}-{index}", examples=len(part)), part, nothing, nothing)
        for index, part in enumerate(parts)
    ]
    settings, secure = run.settings, None
    if settings.privacy is not None:
        settings = replace(settings, privacy=replace(settings.privacy, key=derive_seed_key(number)))
    if heads.nodes.config.federation.secure is not None:
        secure = {data.client.id: SecureClient(data.client.id, MemorySessionStore()) for data in clients}
    federation = simulate(
        *(run.method, run.engine, clients, heads.nodes.train, settings, run.rules, run.new_aggregation), secure=secure
    )
    began = time.perf_counter()
    progress = begin_at_random(federation)
    for _ in range(ROUNDS):
        progress = federation.run_round(progress).progress
    seconds = (time.perf_counter() - began) / ROUNDS
    weight, bias = (progress.state.tensors[f"extras/classifier.{name}"].double() for name in ("weight", "bias"))
    return heads.features @ weight.T + bias, seconds


def compute_accuracy(heads: Heads, logits: Tensor, indices: np.ndarray) -> float:
    """Return the accuracy on some examples."""
    return float((logits.argmax(1) == heads.labels)[indices].double().mean())
