"""Games on updates: candidate texts and counts of labels, from the change of one training step.

Every node has as few examples as the owner's file allows, and the server orders one step of SGD over all of them.

Candidates: the gradient of a linear layer is a sum of products with the layer's inputs, so its rows span the inputs if
these are fewer than the layer is wide (DAGER, Petrov et al., NeurIPS 2024). An adapter of full rank with A = I shows
the whole gradient. In the last layer only the first token reaches the loss, so the change of as many texts as the layer
is wide, also a sum over nodes, shows whether a candidate is among them.

Labels: the bias of a head of zeros moves by the share of each label (LLG, Wainakh et al., PETS 2022).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from evidence.pages.games.harness import Rows, compute_rate, observe, prepare_nodes
from fedspan.assembly.run import Prepared

RATE = 1000.0
"""Learning rate of the step: the change is far larger than the rounding of the weights."""


def build_nodes(rows: Rows, protection: str, seed: int, examples: int) -> Prepared:
    """Build nodes whose run is one step over all examples of a node."""
    values = {
        "model": {
            "target_modules": ["intermediate.dense"],
            "layers_to_transform": [5],
            "max_length": 32,
            "head_init": "random",
            "head_rounds": 0,
            "pooling": "cls",
            "pooling_normalize": False,
        },
        "method": {"name": "fedit", "r": 384, "lora_alpha": 384},
        "training": {"optimizer": "sgd", "lr": RATE, "batch_size": examples, "local_steps": 1, "max_grad_norm": 0},
    }
    return prepare_nodes(values, rows, examples, protection, seed)


def find_layer(nodes: Prepared) -> str:
    """Return the name of the adapted layer."""
    (layer,) = nodes.engine.adapted.layers
    return layer


def compute_complement(change: Tensor) -> Tensor:
    """Return an orthonormal basis of what is orthogonal to the rows of a layer's change, (I, I - tokens)."""
    _, sizes, directions = torch.linalg.svd(torch.linalg.qr(change.double(), mode="r").R)
    return directions[int((sizes > 1e-6 * sizes[0]).sum()) :].T


def compute_distance(vectors: Tensor, complement: Tensor) -> Tensor:
    """Return the relative distance of vectors from a span; 1 if the span is everything."""
    if not complement.shape[1]:
        return torch.ones(vectors.shape[:-1], dtype=torch.float64)
    return (vectors.double() @ complement).norm(dim=-1) / vectors.double().norm(dim=-1)


def list_victims(nodes: Prepared, rows: Rows, count: int | None = None) -> Rows:
    """Return the examples of the first nodes, or of all."""
    assert nodes.partition is not None
    return [rows[index] for part in nodes.partition.clients[:count] for index in part.train.tolist()]


def play_step(rows: Rows, protection: str, seed: int, examples: int = 16) -> dict[str, float]:
    """Return the share of the victim's texts found among candidates, at 1 % false ones, and of its labels with counts.

    The scores are above those of a guess: 1 %, and as many labels by their shares in all rows.
    """
    nodes = build_nodes(rows, protection, seed, examples)
    victim, others = list_victims(nodes, rows, 1), rows[-200:]
    states = compute_states(nodes, [text for text, _ in [*victim, *others]])
    layer = find_layer(nodes)
    factors = {f"{layer}/A": torch.eye(states.shape[1])}
    change = observe(nodes.federation, factors)[f"{layer}/B"]
    scores = -compute_distance(states, compute_complement(change)).numpy()
    head = {f"extras/{name}": torch.zeros_like(value) for name, value in nodes.engine.adapted.extras.items()}
    bias = observe(nodes.federation, {**factors, **head})["extras/classifier.bias"]
    numbers = [nodes.labels.index(label) for _, label in rows]
    true = np.bincount([nodes.labels.index(label) for _, label in victim], minlength=len(nodes.labels))
    shares = (bias.double() / RATE + 1 / len(true)).numpy()
    return {
        "candidates": compute_rate(scores[: len(victim)], scores[len(victim) :]) - 0.01,
        "labels": measure_overlap(shares, true) - measure_overlap(np.bincount(numbers) / len(rows), true),
    }


def compute_states(nodes: Prepared, texts: Sequence[str]) -> Tensor:
    """Return what enters the adapted layer at the first token of each text, (texts, I)."""
    states: list[Tensor] = []
    module = nodes.engine.adapted.model.get_submodule(find_layer(nodes))
    handle = module.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0][:, 0].clone()))
    with torch.no_grad():
        for text in texts:
            inputs = nodes.model.processor(text, truncation=True, max_length=32, return_tensors="pt")
            nodes.engine.adapted.model(**inputs)
    handle.remove()
    return torch.cat(states)


def measure_overlap(shares: np.ndarray, true: np.ndarray) -> float:
    """Return the share of examples whose label is among as many guesses, by shares of labels."""
    guesses = np.zeros_like(true)
    for _ in range(true.sum()):
        guesses[np.argmax(shares - guesses / true.sum())] += 1
    return float(np.minimum(guesses, true).sum() / true.sum())
