"""Membership: whether an example is among those that nodes trained on.

LiRA, online (Carlini et al., "Membership Inference Attacks From First Principles", S&P 2022): the attacker's own models
are trained on random halves of the candidates. They show how sure a model is of an example that it was trained on, and
of one that it was not. The score of an example is the likelihood ratio of the two normal distributions with a common
variance for all examples. With one node, the victim's model is its reply; with more, it is their sum, the final model.

One-run auditing (Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023): every
candidate is in the data with probability 1/2. The surest guesses of a run bound its epsilon from below.
"""

import math
from dataclasses import replace

import numpy as np
import torch
from scipy.stats import binom

from evidence.pages.games.harness import NODES, SUMMED, Rows, compute_rate, observe, prepare_nodes
from evidence.pages.games.heads import BIAS, WEIGHT, Heads, compute_accuracy, train_head, train_many
from fedspan.core.tensors import create_generator
from fedspan.federation.progress import ClientData
from fedspan.tasks.task import get_labels
from fedspan.transports.in_process import replace_clients

GUESSES = 200
"""Candidates about which an audit guesses: the surest half of them members, and the surest half others."""
DELTA = 1e-5


def draw_members(candidates: int, seed: int, number: int) -> np.ndarray:
    """Draw each candidate with probability 1/2, (candidates,) bool."""
    return torch.rand(candidates, generator=create_generator(seed, "members", number)).numpy() < 0.5


def play_membership(
    heads: Heads, protection: str, models: int, seed: int, candidates: int = 2000, tested: int = 3000
) -> dict[str, float]:
    """Attack a federation with models of the attacker's own.

    Args:
        heads: The run.
        protection: Its protection.
        models: Number of the attacker's models.
        seed: Seed of candidates, members, victim and models.
        candidates: Number of candidates, about half of them members.
        tested: Number of other examples on which the accuracy is measured.

    Returns:
        Members found at 1 % false ones, above 1 %; the lower bound on epsilon at 95 % confidence; and the accuracy of
        the victim and of the models.
    """
    order = np.random.default_rng(seed).permutation(len(heads.labels))
    own, others = order[:candidates], order[candidates : candidates + tested]
    members = np.array([draw_members(candidates, seed, number) for number in range(models + 1)])
    runs = [np.array_split(own[drawn], NODES if protection in SUMMED else 1) for drawn in members]
    logits = [*train_many(heads, runs[:-1], seed), train_head(heads, runs[-1], seed)[0]]
    confidences = np.array([compute_confidence(part[own], heads.labels[own]) for part in logits])
    accuracies = [compute_accuracy(heads, part, others) for part in logits]
    scores, drawn = compute_likelihood_ratios(members, confidences, models), members[-1]
    return {
        "membership": compute_rate(scores[drawn], scores[~drawn]) - 0.01,
        "epsilon": audit(scores, drawn),
        "accuracy": accuracies[-1],
        "accuracy of the attacker's models": float(np.mean(accuracies[:-1])),
    }


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
    means, variances = list[np.ndarray](), list[float]()
    for chosen in (is_member, ~is_member):
        means.append(np.where(chosen, known, 0.0).sum(0) / np.maximum(1, chosen.sum(0)))
        left = np.where(chosen, known - means[-1], 0.0)
        variances.append(float(np.square(left).sum() / np.maximum(0, chosen.sum(0) - 1).sum()))
    inside, outside = (
        np.square(confidences[victim] - mean) / variance for mean, variance in zip(means, variances, strict=True)
    )
    return (outside - inside) / 2


def audit(scores: np.ndarray, members: np.ndarray) -> float:
    """Return the lower bound on epsilon that the surest guesses of a run show."""
    order = np.argsort(scores)
    right = int(members[order[-GUESSES // 2 :]].sum() + (~members[order[: GUESSES // 2]]).sum())
    return compute_epsilon(GUESSES, right, len(scores), DELTA)


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


def play_audit(rows: Rows, seed: int) -> dict[str, float]:
    """Audit one step of DP-SGD over all examples of a node, about half of the rows.

    The server sends adapters and a head of zeros: every example's gradient is that of the head, of the clipping norm,
    and known. The shares of the examples in the change are estimated by ridge regression.

    Args:
        rows: The candidates.
        seed: Seed of the members and of the noise.

    Returns:
        Members found at 1 % false ones, above 1 %, and the lower bound on epsilon at 95 % confidence.
    """
    values = {
        "model": {"layers_to_transform": [5], "head_init": "random", "head_rounds": 0},
        "method": {"name": "fedit", "r": 8, "lora_alpha": 16},
        "training": {
            **{"optimizer": "sgd", "lr": 1.0, "local_steps": 1},
            **{"batch_size": 1000, "gradient_accumulation_steps": math.ceil(len(rows) / 1000)},
        },
    }
    node = prepare_nodes(values, rows, len(rows), "dp-sgd", seed)
    privacy, everything, nothing = node.engine.privacy, np.arange(len(rows)), np.empty(0, np.int64)
    assert privacy is not None
    features = node.engine.compute_features(None, node.train, everything, 64).double()
    labels = torch.from_numpy(get_labels(node.train, everything))
    errors = torch.full((len(rows), len(node.labels)), 1 / len(node.labels), dtype=torch.float64)
    errors[everything, labels] -= 1
    lengths = errors.norm(dim=1) * (features.square().sum(1) + 1).sqrt()
    errors *= (privacy.clip / lengths.clamp(min=privacy.clip))[:, None]
    products = (errors @ errors.T) * (features @ features.T + 1)
    start = {name: torch.zeros_like(value) for name, value in node.federation.begin().state.tensors.items()}
    (data,) = node.federation.clients.values()
    drawn = draw_members(len(rows), seed, 0)
    client = replace(data.client, examples=int(drawn.sum()))
    clients = {client.id: ClientData(client, np.flatnonzero(drawn), nothing, nothing)}
    alone = replace_clients(node.federation, clients)
    change = observe(alone, start)
    weight, bias = (change[name].double() for name in (WEIGHT, BIAS))
    along = -drawn.sum() * ((errors @ weight * features).sum(1) + errors @ bias) - products.sum(1) / 2
    (cost,) = alone.compute_next_charges(alone.begin())
    ridge = products + 4 * (cost.mechanism.noise * privacy.clip) ** 2 * torch.eye(len(rows), dtype=torch.float64)
    scores = torch.linalg.solve(ridge, along).numpy()
    return {
        "membership": compute_rate(scores[drawn], scores[~drawn]) - 0.01,
        "epsilon": audit(scores, drawn),
    }
