"""Candidates from noisy metrics: a node evaluates models of the attacker and sends each accuracy with its own noise.

A row of the head for each label answers for one candidate: it exceeds that of an invented label near the candidate's
features only. In each evaluation half of the rows are switched off, by a Hadamard matrix, so every answer is
about half of the candidates, and all answers together are about each of them (Dinur and Nissim, PODS 2003).
"""

import numpy as np
from scipy.linalg import hadamard
from torch import Tensor

from evidence.pages.games.harness import compute_rate
from fedspan.clients.metric_noise import add_noise
from fedspan.tasks.losses import get_loss_bound
from fedspan.tasks.task import Task


def play_metrics(features: Tensor, labels: Tensor, task: Task, evaluations: int, epsilon: float, seed: int) -> float:
    """Return the share of members among the candidates that are found, at 1 % false ones at most, above 1 %.

    Args:
        features: Features of norm 1, (examples, features): the first half is the node's, and of candidates the others.
        labels: Their labels.
        task: The run's task.
        evaluations: Number of evaluations.
        epsilon: Epsilon of each.
        seed: Seed of the candidates.
    """
    rng, half = np.random.default_rng(seed), len(labels) // 2
    own, own_labels = features[:half].numpy(), labels[:half].numpy()
    candidates: list[int] = []
    for label in np.unique(own_labels):
        is_from_node = rng.random() < 0.5
        pool = np.flatnonzero(labels.numpy() == label)
        candidates.append(rng.choice(pool[(pool < half) == is_from_node]))
    rows = features[candidates].numpy()
    fires = (own @ rows.T > 0.999) & (own_labels[:, None] == labels[candidates].numpy())
    size = 2 ** int(np.ceil(np.log2(max(evaluations, len(candidates) + 1))))
    design = hadamard(size)[rng.permutation(size)[:evaluations], 1 : len(candidates) + 1]
    answers: list[float] = []
    for signs in design:
        accuracy = float((fires & (signs > 0)).any(1).mean())
        exact = {"accuracy": accuracy, "loss": (1 - accuracy) * get_loss_bound(task)}
        sent = add_noise(exact, half, half, epsilon, task)
        answers.append(sent["accuracy"] - sent["loss"] / get_loss_bound(task))
    scores = design.T @ (np.array(answers) - np.mean(answers))
    is_member = np.array(candidates) < half
    return compute_rate(scores[is_member], scores[~is_member]) - 0.01
