"""Texts, word for word, from the changes of steps over the examples of a node: one step for each label.

The server sends an adapter that cancels the attention of every layer, so that no token depends on another one, and a
head in which only the examples of one label have a gradient: its logit is far below all others. Then

1. Inputs: the gradient of the first adapted layer spans its inputs, each the function of a word and its place, if these
   are fewer than the layer is wide (DAGER, Petrov et al., NeurIPS 2024). All words are tried at all places.
2. Order: the head's row of the label changes by the sum of the features of its texts, and features are means over
   tokens. Their coefficients by word and place, none of them negative, are least squares.

A sum over nodes has the texts of a label of all nodes. Rate and clipping are those of honest runs, and no number of the
adapter is larger than those of the model: the change is small, and exact. Sami et al., "Gradient Inversion Attacks on
Parameter-Efficient Fine-Tuning" (CVPR 2025), show malicious adapters for images.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from evidence.pages.games.harness import Rows, observe, prepare_nodes
from evidence.pages.games.heads import BIAS, WEIGHT
from evidence.pages.games.updates import compute_complement, compute_distance, list_victims
from fedspan.assembly.run import Prepared
from fedspan.core.tensors import Tensors

LENGTH = 48
"""Largest number of tokens of a text."""
ORDERS = 50
"""Orders of a run: as many rounds as a node's file allows (``limits.run_rounds``)."""
FIRST = "layer.0.intermediate.dense"
DIRECTIONS = 8
"""Directions in which words are compared first."""


def build_nodes(rows: Rows, protection: str, seed: int, examples: int, modules: Sequence[str] = ()) -> Prepared:
    """Build nodes whose run is one step over all examples of a node.

    Args:
        rows: Texts and labels.
        protection: One of ``PROTECTIONS``.
        seed: Seed of the run.
        examples: Number of examples of a node.
        modules: Modules of the base that train.
    """
    values: Mapping[str, Any] = {
        "model": {
            "target_modules": ["attention.output.dense", FIRST],
            "modules_to_save": list(modules),
            "max_length": LENGTH,
            "head_init": "random",
            "head_rounds": 0,
            "pooling": "mean",
            "pooling_normalize": False,
        },
        "method": {"name": "fedit", "r": 384, "lora_alpha": 384},
        "training": {"optimizer": "sgd", "batch_size": examples, "local_steps": 1},
    }
    return prepare_nodes(values, rows, examples, protection, seed, ORDERS)


def build_adapter(nodes: Prepared) -> dict[str, Tensor]:
    """Build the adapter that cancels attention and shows the gradient of the first layer after it."""
    adapted, tensors = nodes.engine.adapted, dict[str, Tensor]()
    for layer in adapted.layers:
        W = adapted.get_weight(layer).float()
        tensors[f"{layer}/A"] = torch.eye(W.shape[1])
        if "attention" in layer:
            tensors[f"{layer}/B"] = -W
    return tensors


def build_head(nodes: Prepared, label: int) -> dict[str, Tensor]:
    """Build the head in which only the examples of one label have a gradient."""
    extras = nodes.engine.adapted.extras
    weight, bias = (torch.zeros_like(extras[name.removeprefix("extras/")]).detach() for name in (WEIGHT, BIAS))
    row = torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(0))  # layer norms remove a constant
    weight[label], bias[label] = row / row.norm(), -30.0
    return dict(zip((WEIGHT, BIAS), (weight, bias), strict=True))


def play_texts(rows: Rows, protection: str, seed: int, orders: int, examples: int = 16) -> dict[str, float]:
    """Return the share of the texts of a sum that are recovered word for word, and that of their words.

    Words are above those of as many guesses by the public texts, which also complete the attacker's.

    Args:
        rows: Texts and labels.
        protection: One of ``PROTECTIONS``.
        seed: Seed of the run.
        orders: Number of orders: one counts labels, each other one reads the texts of a label, the most frequent first.
        examples: Examples of a node.
    """
    nodes = build_nodes(rows, protection, seed, examples)
    adapter, victims = build_adapter(nodes), list_victims(nodes, rows)
    zeros = {name: torch.zeros_like(value) for name, value in build_head(nodes, 0).items()}
    counts = count_labels(observe(nodes.federation, {**adapter, **zeros})[BIAS], len(victims))
    most = np.argsort(-counts, kind="stable")[: orders - 1].tolist()
    labels = [label for label in most if counts[label]] or most  # noise may hide that there is any
    changes = [observe(nodes.federation, {**adapter, **build_head(nodes, label)}) for label in labels]
    guesses: list[tuple[int, ...]] = []
    with torch.no_grad():
        for label, change, pairs in zip(labels, changes, find_pairs(nodes, changes), strict=True):
            mean = (change[WEIGHT][label] / change[BIAS][label]).double().numpy()
            guesses += solve_texts(nodes, mean * counts[label], pairs, int(counts[label]))
    sought = [text for text, label in victims if nodes.labels.index(label) in labels]
    return score_texts(nodes, sought, guesses, [text for text, _ in rows[-1000:]])


def score_texts(
    nodes: Prepared, victims: Sequence[str], guesses: Sequence[tuple[int, ...]], public: Sequence[str]
) -> dict[str, float]:
    """Return the share of the texts that are guessed, and that of their words above guesses by public texts."""

    def encode(texts: Sequence[str]) -> list[tuple[int, ...]]:
        return [tuple(nodes.model.processor(text, truncation=True, max_length=LENGTH)["input_ids"]) for text in texts]

    encoded = encode(victims)
    total = Counter(token for text in encoded for token in text[1:-1])
    guessed = Counter(token for text in guesses for token in text[1:-1])
    frequencies, size = Counter(token for text in encode(public) for token in text[1:-1]), sum(total.values())

    def guess(count: int) -> Counter[int]:
        return Counter({token: round(count * number / frequencies.total()) for token, number in frequencies.items()})

    hits = total & (guessed + guess(max(0, size - guessed.total())))
    return {
        "texts": (Counter(guesses) & Counter(encoded)).total() / max(1, len(victims)),
        "words": (hits.total() - (total & guess(size)).total()) / max(1, size),
    }


def count_labels(bias: Tensor, examples: int) -> np.ndarray:
    """Return the number of examples of each label, from the change of a head of zeros: one that no example has falls.

    All of them fall alike, by the rate over the number of labels.
    """
    shares = bias.double() / (-bias.double().min() * len(bias)) + 1 / len(bias)
    return torch.round(shares * examples).long().numpy()


def get_encoder(nodes: Prepared) -> Any:
    """Return the base model."""
    return next(part for part in nodes.engine.adapted.model.modules() if hasattr(part, "embeddings"))


def compute_inputs(nodes: Prepared, words: Tensor, places: Tensor) -> Tensor:
    """Return what enters the first adapted layer, of words at places, (tokens, I); it depends on nothing else."""
    model = get_encoder(nodes)
    parts, output = model.embeddings, model.encoder.layer[0].attention.output
    position = parts.position_embeddings.weight[places] + parts.token_type_embeddings.weight[0]
    return output.LayerNorm(parts.LayerNorm(parts.word_embeddings.weight[words] + position) + output.dense.bias)


def compute_outputs(nodes: Prepared, words: Tensor, places: Tensor) -> Tensor:
    """Return what leaves the last layer, of words at places, (tokens, D)."""
    states = compute_inputs(nodes, words, places)
    for number, layer in enumerate(get_encoder(nodes).encoder.layer):
        if number:
            states = layer.attention.output.LayerNorm(states + layer.attention.output.dense.bias)
        states = layer.output(layer.intermediate(states), states)
    return states


def find_pairs(nodes: Prepared, changes: Sequence[Tensors]) -> Iterator[Tensor]:
    """Yield the words with places whose inputs each change of the first layer spans, (pairs, 2).

    None, if it spans everything, as noise does.
    """
    gradients = [next(value for name, value in change.items() if name.endswith(f"{FIRST}/B")) for change in changes]
    complements = [compute_complement(gradient) for gradient in gradients]
    sketches = [
        complement.float() @ torch.randn(complement.shape[1], DIRECTIONS, generator=torch.Generator().manual_seed(0))
        for complement in complements
    ]
    words = torch.arange(len(get_encoder(nodes).embeddings.word_embeddings.weight))
    found = [[torch.empty(0, 2, dtype=torch.int64)] for _ in changes]
    for place in range(LENGTH):
        inputs = compute_inputs(nodes, words, torch.tensor(place))
        parts = (inputs @ torch.cat(sketches, 1)).unflatten(1, (len(changes), DIRECTIONS)).norm(dim=2)
        parts /= inputs.norm(dim=1, keepdim=True)
        for number, complement in enumerate(complements):
            if complement.shape[1]:
                near = words[parts[:, number] < 0.1]
                near = near[compute_distance(inputs[near], complement) < 1e-3]
                found[number].append(torch.stack([near, torch.full_like(near, place)], 1))
    yield from (torch.cat(pairs) for pairs in found)


def solve_texts(nodes: Prepared, features: np.ndarray, pairs: Tensor, count: int) -> list[tuple[int, ...]]:
    """Return the texts of a label, from the sum of their features and the words at places that they may have."""
    words, end = sorted(set(pairs[:, 0].tolist())), nodes.model.processor.sep_token_id
    if end not in words:
        return []
    columns = compute_outputs(nodes, pairs[:, 0], pairs[:, 1]).double().numpy()
    coefficients, _ = nnls(columns.T, features, maxiter=20 * len(columns))
    table = np.zeros((len(words), LENGTH))
    table[[words.index(word) for word in pairs[:, 0].tolist()], pairs[:, 1].numpy()] = coefficients
    return read_texts(table, words, end, count)


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
