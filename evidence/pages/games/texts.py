"""Texts, word for word, from the changes of two steps over the examples of a node.

The server sends an adapter that cancels the attention of every layer, so that no token depends on another one. Then

1. Inputs: the gradient of a word's embedding is zero unless a text has the word, whatever the number of nodes in a sum
   (an imprint with a bin for every word: Fowl et al., "Robbing the Fed", ICLR 2022). The gradient of the first adapted
   layer spans its inputs, each the function of a word and its place, if these are fewer than the layer is wide (DAGER,
   Petrov et al., NeurIPS 2024).
2. Order: a head of zeros changes by the sum of the features of each label, and features are means over tokens. Their
   coefficients by word and place, none of them negative, are least squares.

Sami et al., "Gradient Inversion Attacks on Parameter-Efficient Fine-Tuning" (CVPR 2025), show malicious adapters
for images.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from evidence.pages.games.harness import Rows, observe, prepare_nodes
from evidence.pages.games.updates import RATE, compute_complement, compute_distance, list_victims
from fedspan.assembly.run import Prepared
from fedspan.core.tensors import Tensors

LENGTH = 48
"""Largest number of tokens of a text."""


def build_nodes(rows: Rows, protection: str, seed: int, examples: int) -> Prepared:
    """Build nodes whose run is one step over all examples of a node."""
    values: Mapping[str, Any] = {
        "model": {
            "target_modules": ["attention.output.dense", "intermediate.dense"],
            "modules_to_save": ["word_embeddings"],
            "max_length": LENGTH,
            "head_init": "random",
            "head_rounds": 0,
            "pooling": "mean",
            "pooling_normalize": False,
        },
        "method": {"name": "fedit", "r": 384, "lora_alpha": 384},
        "training": {"optimizer": "sgd", "lr": RATE, "batch_size": examples, "local_steps": 1, "max_grad_norm": 0},
    }
    return prepare_nodes(values, rows, examples, protection, seed)


def build_adapter(nodes: Prepared) -> dict[str, Tensor]:
    """Build the adapter that cancels attention and shows the gradients of the layers after it."""
    adapted, tensors = nodes.engine.adapted, dict[str, Tensor]()
    for layer in adapted.layers:
        W = adapted.get_weight(layer).float()
        tensors[f"{layer}/A"] = torch.eye(W.shape[1])
        if "attention" in layer:
            tensors[f"{layer}/B"] = -W
    return tensors


def play_texts(rows: Rows, protection: str, seed: int, examples: int = 16) -> dict[str, float]:
    """Return the share of the texts of a sum that are recovered word for word, and that of their words.

    Words are above those of as many guesses by the public texts.
    """
    nodes = build_nodes(rows, protection, seed, examples)
    adapter = build_adapter(nodes)
    first = observe(nodes.federation, adapter)
    head = {name: torch.zeros_like(value) for name, value in first.items() if "classifier" in name}
    second = observe(nodes.federation, {**adapter, **head})
    tokenizer = nodes.model.processor
    victims = list_victims(nodes, rows)
    encoded = [tokenizer(text, truncation=True, max_length=LENGTH)["input_ids"] for text, _ in victims]
    public = [tokenizer(text)["input_ids"] for text, _ in rows[-1000:]]
    words = find_words(first)
    with torch.no_grad():
        inputs, features = compute_token_states(nodes, words)
    pairs = find_pairs(first, inputs)
    guesses = solve_texts(nodes, second, features, pairs, words, len(victims))
    found = Counter(map(tuple, guesses)) & Counter(map(tuple, encoded))
    total = Counter(token for text in encoded for token in text[1:-1])
    guessed = Counter(token for text in guesses for token in text)
    frequencies = Counter(token for text in public for token in text[1:-1])
    size, mass = sum(total.values()), sum(frequencies.values())
    prior = sum(min(round(size * count / mass), total[token]) for token, count in frequencies.items()) / size
    return {
        "texts": sum(found.values()) / len(victims),
        "words": sum((total & guessed).values()) / size - prior,
    }


def find_words(change: Tensors) -> list[int]:
    """Return the words whose embeddings changed."""
    (embedding,) = (value for name, value in change.items() if "word_embeddings" in name)
    sizes = embedding.double().norm(dim=1)
    return torch.nonzero(sizes > 1e-6 * sizes.max())[:, 0].tolist()


def compute_token_states(nodes: Prepared, words: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return what enters the first adapted layer and the mean of the features, of words at places, (words, places, I).

    Without attention, both depend on the word and its place only.
    """
    model = next(part for part in nodes.engine.adapted.model.modules() if hasattr(part, "embeddings"))
    embedding = next(path for path in nodes.engine.adapted.extras if "word_embeddings" in path)
    table, parts = nodes.engine.adapted.get_extra(embedding), model.embeddings
    places = parts.position_embeddings.weight[:LENGTH] + parts.token_type_embeddings.weight[0]
    states = parts.LayerNorm(table[list(words)][:, None] + places)
    inputs: list[Tensor] = []
    for layer in model.encoder.layer:
        inputs.append(layer.attention.output.LayerNorm(states + layer.attention.output.dense.bias))
        states = layer.output(layer.intermediate(inputs[-1]), inputs[-1])
    return inputs[0], states


def find_pairs(change: Tensors, inputs: Tensor) -> np.ndarray:
    """Return the words with places whose inputs the change of the first layer spans, as indices, (pairs, 2).

    All, if there are more inputs in the texts than the layer is wide.
    """
    (gradient,) = (value for name, value in change.items() if name.endswith("layer.0.intermediate.dense/B"))
    complement = compute_complement(gradient)
    if not complement.shape[1]:
        return np.argwhere(np.ones(inputs.shape[:2], bool))
    return np.argwhere((compute_distance(inputs, complement) < 1e-2).numpy())


def solve_texts(
    nodes: Prepared, change: Tensors, features: Tensor, pairs: np.ndarray, words: Sequence[int], examples: int
) -> list[tuple[int, ...]]:
    """Return the texts of each label, from the sums of features that the head's change shows."""
    weight, bias = (
        next(value for name, value in change.items() if name.endswith(end)).double().numpy() / RATE
        for end in ("classifier.weight", "classifier.bias")
    )
    counts = np.rint((bias + 1 / len(bias)) * examples).astype(int)
    absent = weight[counts == 0].mean(0)
    columns = features[pairs[:, 0], pairs[:, 1]].double().numpy()
    guesses: list[tuple[int, ...]] = []
    for label in np.flatnonzero(counts):
        coefficients, _ = nnls(columns.T, (weight[label] - absent) * examples, maxiter=20 * len(columns))
        table = np.zeros((len(words), LENGTH))
        table[pairs[:, 0], pairs[:, 1]] = coefficients
        guesses += read_texts(table, words, nodes.model.processor.sep_token_id, counts[label])
    return guesses


def read_texts(table: np.ndarray, words: Sequence[int], end: int, count: int) -> list[tuple[int, ...]]:
    """Return the texts of a table of coefficients, (words, places): one over its length for each word of a text."""
    table = table.copy()
    guesses: list[tuple[int, ...]] = []
    for _ in range(count):
        lengths = np.arange(1, table.shape[1] + 1)
        length = int((table[words.index(end)] * lengths).argmax()) + 1
        chosen = np.abs(table[:, :length] - 1 / length).argmin(0)
        table[chosen, np.arange(length)] -= 1 / length
        guesses.append(tuple(words[word] for word in chosen))
    return guesses
