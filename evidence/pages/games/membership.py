"""Membership: whether an example is among those that a node trained on, from the adapter after its last round.

LiRA, online (Carlini et al., "Membership Inference Attacks From First Principles", S&P 2022): models are trained on
random halves of the candidates. Each in turn is the victim, and all others show how sure a model is of an example that
it was trained on, and of one that it was not. The score of an example is the likelihood ratio of the two normal
distributions with a common variance for all examples.

One-run auditing (Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023): every
candidate is in the data with probability 1/2. The surest guesses of a run bound its epsilon from below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.stats import binom

from evidence.pages.games.harness import Rows, compute_rate, observe, prepare_nodes
from fedspan.core.tensors import create_generator
from fedspan.federation.evaluation import Evaluator
from fedspan.federation.federation import Federation
from fedspan.federation.progress import ClientData
from fedspan.runs.setup import Prepared
from fedspan.tasks.task import get_labels
from fedspan.transports.in_process import simulate

DEFAULTS: Mapping[str, Any] = {
    "model": {
        "target_modules": ["query", "value"],
        "layers_to_transform": [4, 5],
        "head_init": "random",
        "head_rounds": 4,
    },
    "method": {"name": "fedit", "r": 8, "lora_alpha": 16},
}
"""The config of ``fedspan init``, with the start of a deployment."""


def train_models(
    rows: Rows, candidates: int, models: int, values: Mapping[str, Any], protection: str, rounds: int, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray, float]]:
    """Train a node's model on random halves of the candidates.

    Args:
        rows: Texts and labels: the candidates, and others for the accuracy.
        candidates: Number of candidates.
        models: Number of models.
        values: Config of the run.
        protection: One of ``PROTECTIONS``; a node under secure aggregation is not alone.
        rounds: Rounds of the run, in which the node is alone.
        seed: Seed of the run and of the halves.

    Yields:
        Which candidates are members, how sure the model is of each candidate, and its accuracy on the other rows.
    """
    node = prepare_nodes(values, rows, len(rows), protection, seed, rounds)
    everything = np.arange(len(rows))
    node.engine.prepare(node.train, [everything])
    labels = torch.from_numpy(get_labels(node.train, everything))
    for number in range(models):
        order = torch.randperm(candidates, generator=create_generator(seed, "halves", number)).numpy()
        members = np.sort(order[: candidates // 2])
        alone = build_alone(node, members, number)
        progress = alone.begin()
        for _ in range(rounds):
            progress = alone.run_round(progress).progress
        job = Evaluator(alone, 64).build_job(progress, None)
        logits = node.engine.predict(job, node.train, everything, 64).double()
        accuracy = float((logits.argmax(1) == labels)[candidates:].double().mean())
        yield np.isin(everything[:candidates], members), compute_confidence(logits, labels)[:candidates], accuracy


def build_alone(node: Prepared, members: np.ndarray, number: int) -> Federation:
    """Build the federation of one node with some of the examples; its noise depends on its number."""
    nothing = np.empty(0, np.int64)
    (data,) = node.federation.clients.values()
    client = replace(data.client, id=f"node-{number}", examples=len(members))
    alone = ClientData(client, members, nothing, nothing)
    return simulate(node.federation.method, node.engine, [alone], node.train, node.federation.settings)


def compute_confidence(logits: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    """Return log(p / (1 - p)) of each example's own label, which is about normal over models."""
    own = logits.gather(1, labels[:, None])[:, 0]
    others = logits.scatter(1, labels[:, None], -math.inf).logsumexp(1)
    return (own - others).numpy()


def compute_likelihood_ratios(members: np.ndarray, confidences: np.ndarray, victim: int) -> np.ndarray:
    """Return the logarithm of the likelihood ratio of each candidate.

    Args:
        members: Which candidates each model was trained on, (models, candidates).
        confidences: How sure each model is of each candidate, (models, candidates).
        victim: Row of the attacked model; the others are the attacker's own.
    """
    others = np.arange(len(members)) != victim
    known, is_member = confidences[others], members[others]
    means = [np.where(chosen, known, 0.0).sum(0) / chosen.sum(0) for chosen in (is_member, ~is_member)]
    variances = [
        np.square(np.where(chosen, known - mean, 0.0)).sum() / (chosen.sum() - chosen.shape[1])
        for chosen, mean in zip((is_member, ~is_member), means, strict=True)
    ]
    distances = [
        np.square(confidences[victim] - mean) / variance for mean, variance in zip(means, variances, strict=True)
    ]
    return (distances[1] - distances[0]) / 2


def compute_epsilon(guesses: int, right: int, candidates: int, delta: float, error: float = 0.05) -> float:
    """Return the largest epsilon that a run refutes (theorem 5.2): a lower bound at the confidence 1 - ``error``.

    Args:
        guesses: Number of candidates about which the attacker guesses.
        right: Number of its right guesses.
        candidates: Number of candidates, each of which was included with probability 1/2.
        delta: Delta of the promise.
        error: Probability of a bound above the truth.
    """

    def compute_p_value(epsilon: float) -> float:
        chance = 1 / (1 + math.exp(-epsilon))
        tails = np.cumsum(binom.pmf(right - np.arange(1, right + 1), guesses, chance))
        slack = float((tails / np.arange(1, right + 1)).max(initial=0.0))
        return float(binom.sf(right - 1, guesses, chance)) + slack * delta * 2 * candidates

    low, high = 0.0, 50.0
    if compute_p_value(low) > error:
        return low
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if compute_p_value(middle) < error else (low, middle)
    return low


def play_membership(*settings: Any) -> dict[str, list[float]]:
    """Attack each model with all others: true positives at 1 % false ones above 1 %, and accuracies.

    Args:
        settings: Of ``train_models``.
    """
    members, confidences, accuracies = (np.array(part) for part in zip(*train_models(*settings), strict=True))
    scores = [compute_likelihood_ratios(members, confidences, victim) for victim in range(len(members))]
    rates = [
        compute_rate(score[is_member], score[~is_member]) - 0.01
        for score, is_member in zip(scores, members, strict=True)
    ]
    return {"membership": rates, "accuracy": list(accuracies)}


def play_audit(rows: Rows, runs: int, seed: int, guesses: int = 200) -> dict[str, list[float]]:
    """Audit one step of DP-SGD over all examples of a node, about half of the rows, in several runs.

    The server sends adapters and a head of zeros: every example's gradient is that of the head, of the clipping norm,
    and known. The shares of the examples in the change are estimated by ridge regression.

    Returns:
        Members found at 1 % false ones, above 1 %, and the lower bound on epsilon at 95 % confidence, of each run.
    """
    step = {"optimizer": "sgd", "lr": 1.0, "batch_size": len(rows), "local_steps": 1}
    values = {**DEFAULTS, "model": {**DEFAULTS["model"], "head_rounds": 0}, "training": step}
    node = prepare_nodes(values, rows, len(rows), "dp-sgd", seed)
    privacy, everything = node.federation.training.privacy, np.arange(len(rows))
    assert privacy is not None
    features = node.engine.compute_features(None, node.train, everything, 64).double()
    labels = torch.from_numpy(get_labels(node.train, everything))
    errors = torch.full((len(rows), len(node.labels)), 1 / len(node.labels), dtype=torch.float64)
    errors[everything, labels] -= 1
    lengths = errors.norm(dim=1) * (features.square().sum(1) + 1).sqrt()
    errors *= (privacy.clip / lengths.clamp(min=privacy.clip))[:, None]
    products = (errors @ errors.T) * (features @ features.T + 1)
    start = {name: torch.zeros_like(value) for name, value in node.federation.begin().state.tensors.items()}
    rates: list[float] = []
    bounds: list[float] = []
    for run in range(runs):
        drawn = torch.rand(len(rows), generator=create_generator(seed, "members", run)).numpy() < 0.5
        alone = build_alone(node, np.flatnonzero(drawn), run)
        change = observe(alone, start)
        weight, bias = (
            next(value for name, value in change.items() if name.endswith(end)).double()
            for end in ("classifier.weight", "classifier.bias")
        )
        along = -drawn.sum() * ((errors @ weight * features).sum(1) + errors @ bias)
        (cost,) = alone.compute_next_charges(alone.begin())
        variance = (cost.mechanism.noise * privacy.clip) ** 2
        along -= products.sum(1) / 2
        ridge = products + 4 * variance * torch.eye(len(rows), dtype=torch.float64)
        scores = torch.linalg.solve(ridge, along).numpy()
        rates.append(compute_rate(scores[drawn], scores[~drawn]) - 0.01)
        order = np.argsort(scores)
        right = int(drawn[order[-guesses // 2 :]].sum() + (~drawn[order[: guesses // 2]]).sum())
        bounds.append(compute_epsilon(guesses, right, len(rows), privacy.delta))
    return {"membership": rates, "epsilon": bounds}
