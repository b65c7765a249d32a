"""The rounds with which a deployment begins, which train the head alone on stored features.

``train_head`` runs a federation. ``train_many`` trains the heads of many at once, in batches of its own: the models
with which an attacker compares its victim, and those of which only the accuracy is of interest.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evidence.pages.games.harness import PROTECTIONS, Rows, compute_features, prepare_nodes
from fedspan.assembly.head import begin_at_random
from fedspan.assembly.run import Prepared
from fedspan.clients.secagg import SecureClient
from fedspan.clients.secagg_store import MemorySessionStore
from fedspan.core.heads import SCALE
from fedspan.core.noise import derive_seed_key
from fedspan.core.values import Job
from fedspan.federation.privacy import compute_client_noise
from fedspan.federation.progress import ClientData
from fedspan.tasks.task import get_labels
from fedspan.training.dp_sgd import compute_expected_batch, compute_noise, compute_private_steps
from fedspan.training.loop import LoopEngine
from fedspan.transports.in_process import simulate
from fedspan.wrappers.head_rounds import RATE

EPOCHS, BATCH = 10, 16
PRIVATE_PASSES = 16
"""Passes of a step under dp-sgd, whose noise hides less of a sum of many gradients."""
WEIGHT, BIAS = "extras/classifier.weight", "extras/classifier.bias"
HEAD_PROTECTIONS = tuple(name for name in PROTECTIONS if name != "dp-sgd")
"""Protections of which ``train_head`` can run the rounds: dp-sgd does not train on stored features."""
ROUNDS = 4
"""Rounds that train the head alone in a deployment of the config of ``fedspan init``."""


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
        protection: One of ``PROTECTIONS``.
        cache: File of the features (``compute_features``).
    """
    # Without privacy, these rounds have ten times the epochs of the others.
    epochs = EPOCHS if "privacy" in PROTECTIONS[protection] else 1
    values: Mapping[str, Any] = {
        "model": {"head_init": "random", "head_rounds": ROUNDS},
        "method": {"name": "fedit", "r": 8, "lora_alpha": 16},
        "training": {
            **{"local_epochs": epochs, "batch_size": BATCH},
            "gradient_accumulation_steps": PRIVATE_PASSES if protection == "dp-sgd" else 1,
        },
        "engine": {"name": "loop", "prefix_cache": False},
    }
    nodes = prepare_nodes(values, rows, len(rows) // 3, protection, 0, ROUNDS + 1, nodes=3)
    features, everything = compute_features(nodes, cache), np.arange(len(rows))
    assert isinstance(nodes.engine, LoopEngine)
    nodes.engine.features.ensure(nodes.train, everything, lambda: features)
    return Heads(nodes, features.double(), torch.from_numpy(get_labels(nodes.train, everything)))


def train_head(heads: Heads, parts: Sequence[np.ndarray], number: int, rounds: int = ROUNDS) -> tuple[Tensor, float]:
    """Train a head, and return its logits of all examples, (examples, C), and the seconds of the processor a round.

    Args:
        heads: The run.
        parts: Examples of each node.
        number: Number of the head; noise, keys and batches depend on it.
        rounds: Number of rounds.
    """
    run, nothing = heads.nodes.federation, np.empty(0, np.int64)
    known = next(iter(run.clients.values())).client
    clients = [
        ClientData(replace(known, id=f"node-{number}-{index}", examples=len(part)), np.sort(part), nothing, nothing)
        for index, part in enumerate(parts)
    ]
    settings, secure = run.settings, None
    if settings.privacy is not None:
        privacy = settings.privacy.model_copy(update={"key": derive_seed_key(number)})
        settings = settings.model_copy(update={"privacy": privacy})
    if heads.nodes.config.federation.secure is not None:
        secure = {data.client.id: SecureClient(data.client.id, MemorySessionStore()) for data in clients}
    federation = simulate(run.method, run.engine, clients, heads.nodes.train, settings, secure=secure)
    began = time.process_time()
    progress = begin_at_random(federation)
    for _ in range(rounds):
        progress = federation.run_round(progress).progress
    seconds = (time.process_time() - began) / rounds
    weight, bias = (progress.state.tensors[name].double() for name in (WEIGHT, BIAS))
    return heads.features @ weight.T + bias, seconds


def train_many(heads: Heads, runs: Sequence[Sequence[np.ndarray]], seed: int) -> list[Tensor]:
    """Train the heads of many runs, and return the logits of each of all examples, (examples, C).

    Args:
        heads: A run.
        runs: Examples of each node, by run; all have as many nodes.
        seed: Seed of batches and noise.
    """
    generator, features, nodes = torch.Generator().manual_seed(seed), heads.features.float(), len(runs[0])
    parts = [torch.from_numpy(part) for run in runs for part in run]
    rows = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    is_own = torch.arange(rows.shape[1]) < torch.tensor([len(part) for part in parts])[:, None]
    start = heads.nodes.federation.begin().state.tensors
    model = [torch.zeros(len(runs), *start[name].shape) for name in (WEIGHT, BIAS)]
    rates = [RATE * start[BIAS].numel() ** 0.5 * scale for scale in (SCALE**2, 1.0)]
    privacy, training = heads.nodes.engine.privacy, heads.nodes.federation.training
    clip, noise, size, steps = None, 0.0, BATCH, None
    if privacy is not None and privacy.mechanism == "dp-sgd":
        (count,) = {len(part) for part in parts}
        job, clip, size = Job({}, {}, ()), privacy.clip, compute_expected_batch(training, count)
        noise = clip / size * compute_noise(privacy, training, [job], count)
        steps = compute_private_steps(training, job, count)
    for _ in range(ROUNDS):
        weight, bias = (value.repeat_interleave(nodes, 0) for value in model)
        for batch, own in _draw_batches(is_own, size, steps, generator):
            indices = rows.gather(1, batch)
            x = features[indices]
            errors = torch.baddbmm(bias[:, None], x, weight.mT).softmax(2)
            errors.scatter_add_(2, heads.labels[indices][:, :, None], -torch.ones(*indices.shape, 1))
            if clip is None:
                errors *= (own / own.sum(1, keepdim=True).clamp(min=1))[:, :, None]
            else:
                norms = errors.norm(dim=2) * (x.square().sum(2) + 1).sqrt()
                errors *= (own / size * (clip / norms).clamp(max=1))[:, :, None]
                weight -= rates[0] * noise * torch.randn(weight.shape, generator=generator)
                bias -= rates[1] * noise * torch.randn(bias.shape, generator=generator)
            weight.baddbmm_(errors.mT, x, alpha=-rates[0])
            bias -= rates[1] * errors.sum(1)
        model = _combine(heads, [weight, bias], model, nodes, generator)
    return [heads.features @ weight.double().T + bias.double() for weight, bias in zip(*model, strict=True)]


def _draw_batches(
    is_own: Tensor, size: int, steps: int | None, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of a round: positions, and which of them count, both (nodes, examples).

    Args:
        is_own: Positions that hold examples.
        size: Size of a batch, on average if it is sampled.
        steps: Number of batches of which each example is drawn independently, of rows that have as many examples. None:
            epochs over all.
        generator: The generator.
    """
    if steps is not None:
        for _ in range(steps):
            drawn = torch.rand(is_own.shape, generator=generator) < size / is_own.shape[1]
            batch = drawn.byte().argsort(1, descending=True)[:, : int(drawn.sum(1).max())]
            yield batch, drawn.gather(1, batch)
        return
    for _ in range(EPOCHS):
        order = torch.rand(is_own.shape, generator=generator).masked_fill(~is_own, 2.0).argsort(1)
        for batch in order.split(size, 1):
            yield batch, is_own.gather(1, batch)


def _combine(
    heads: Heads, trained: Sequence[Tensor], model: Sequence[Tensor], nodes: int, generator: torch.Generator
) -> list[Tensor]:
    """Return the means over the nodes of each run, clipped and with the noise of the run's privacy."""
    changes = [new - old.repeat_interleave(nodes, 0) for new, old in zip(trained, model, strict=True)]
    privacy, noise = heads.nodes.federation.settings.privacy, 0.0
    if privacy is not None and privacy.mechanism != "dp-sgd":
        norms = torch.cat([change.flatten(1) for change in changes], 1).norm(dim=1)
        factors = (privacy.clip / norms).clamp(max=1)
        changes = [change * factors.view(-1, *[1] * (change.ndim - 1)) for change in changes]
        noise = privacy.clip * compute_client_noise(privacy, 1.0)
        noise /= nodes if privacy.mechanism == "central" else nodes**0.5
    means = [change.unflatten(0, (-1, nodes)).mean(1) for change in changes]
    return [
        old + mean + noise * torch.randn(mean.shape, generator=generator)
        for old, mean in zip(model, means, strict=True)
    ]


def compute_accuracy(heads: Heads, logits: Tensor, indices: np.ndarray) -> float:
    """Return the accuracy on some examples."""
    return float((logits.argmax(1) == heads.labels)[indices].double().mean())
