"""FedGaLore's readings of its second moments, side by side, where full fine-tuning outperforms LoRA.

    python -m evidence.claims.fedgalore_moments --data FOLDER      # MNIST's or Fashion-MNIST's four idx files, gzipped

A network of two layers, 784 x 128 x 10, from random weights; ten clients whose labels are Dirichlet(0.5), as in the
paper. Each reading has the best learning rate of its own, by validation on a seed of its own; while that is the lowest
or the highest, another one is tried beyond it. An accuracy is the mean over the last quarter of the rounds.
"""

import argparse
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import ttest_rel
from torch import nn

from evidence.claims import report
from evidence.claims.rolora_mnist import CLASSES, PIXELS, Curve, Data, connect, load, make_settings, train
from fedspan.core.tensors import create_generator
from fedspan.experiments.intervals import compare_pairs
from fedspan.models.adapted import AdaptedModel
from fedspan.training.config import TrainingSettings

CLIENTS, WIDTH, RANK, BATCH, VALIDATION_SEED = 10, 128, 8, 32, 100
MAX_RATES = 5
GRADIENT = {"adaptive_refreshes": 10**6}
DEFAULT, NONE = "squared, a seed a round (default)", "no synchronization (FedGaLore-)"
READINGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    DEFAULT: ("fedgalore", {}),
    NONE: ("fedgalore", {"synchronization": "none"}),
    "keep (GaLore's code)": ("fedgalore", {"moments": "keep"}),
    "linear (the paper)": ("fedgalore", {"moments": "linear"}),
    "squared, a seed for five rounds": ("fedgalore", {"rounds_per_seed": 5}),
    "squared, gradient projectors": ("fedgalore", GRADIENT),
    "keep, gradient projectors": ("fedgalore", {"moments": "keep", **GRADIENT}),
    "LoRA (FedIT)": ("fedit", {}),
    "full fine-tuning (FedAvg)": ("fedavg", {}),
}


def divide(labels: np.ndarray, seed: int) -> list[np.ndarray]:
    """The clients' indices: each class is divided by Dirichlet(0.5)."""
    rng, owners = np.random.default_rng(seed), np.zeros(len(labels), dtype=np.int64)
    for label in range(CLASSES):
        rows = np.flatnonzero(labels == label)
        owners[rows] = rng.choice(CLIENTS, size=len(rows), p=rng.dirichlet([0.5] * CLIENTS))
    return [np.flatnonzero(owners == client) for client in range(CLIENTS)]


def run(data: Data, reading: str, lr: float, seed: int, rounds: int, steps: int) -> Curve:
    """Train, and return the accuracy on validation and test images."""
    layers = OrderedDict(hidden=nn.Linear(PIXELS, WIDTH, bias=False), out=nn.Linear(WIDTH, CLASSES, bias=False))
    with torch.no_grad():
        for name, layer in layers.items():
            bound = layer.in_features**-0.5
            layer.weight.uniform_(-bound, bound, generator=create_generator(seed, "start", name))
    model = nn.Sequential(OrderedDict(hidden=layers["hidden"], relu=nn.ReLU(), out=layers["out"]))
    training = TrainingSettings(lr=lr, batch_size=BATCH, local_steps=steps, max_grad_norm=0.0, group_by_length=False)
    (name, own), adapted, parts = READINGS[reading], AdaptedModel(model, layers, {}), divide(data.train.y.numpy(), seed)
    options, settings = {"r": RANK, "lora_alpha": 2.0 * RANK, **own}, make_settings(rounds, seed)
    return train(connect(adapted, data, parts, training, name, options, settings, by_size=True), data)


def correct(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number (Holm)."""
    order = np.argsort(p_values)
    steps = np.maximum.accumulate(np.asarray(p_values)[order] * np.arange(len(order), 0, -1))
    corrected = np.empty(len(order))
    corrected[order] = np.minimum(steps, 1.0)
    return corrected.tolist()


def main() -> None:
    """Select the rates, run all seeds, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--train", type=int, default=6_000, help="training images, over all clients")
    parser.add_argument("--validation", type=int, default=4_000)
    parser.add_argument("--test", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20, help="of a client in a round")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = load(args.data, args.train, args.validation, args.test)
    scores: dict[str, Sequence[float]] = {}
    rows: list[list[str]] = []
    for reading in READINGS:
        rates, tried = list(args.rates), dict[float, float]()
        while True:
            for r in rates:
                if r not in tried:
                    tried[r] = run(data, reading, r, VALIDATION_SEED, args.rounds, args.steps).plateau("validation")
            rate = max(tried, key=lambda rate: tried[rate])
            if rate not in (rates[0], rates[-1]) or len(rates) >= MAX_RATES:
                break
            rates = [rate / 3, *rates] if rate == rates[0] else [*rates, rate * 3]
        curves = [run(data, reading, rate, seed, args.rounds, args.steps) for seed in args.seeds]
        scores[reading] = [curve.plateau("test") for curve in curves]
        mean = sum(scores[reading]) / len(args.seeds)
        rows.append([reading, f"{rate:.2g}", f"{mean:.2f}", ", ".join(f"{tried[r]:.1f} at {r:.2g}" for r in rates)])
        print(*rows[-1], flush=True)
    others = [reading for reading in READINGS if READINGS[reading][0] == "fedgalore" and reading not in (DEFAULT, NONE)]
    families = [
        [(reading, DEFAULT) for reading in READINGS if reading != DEFAULT],
        [(reading, NONE) for reading in (DEFAULT, *others)],
        [("full fine-tuning (FedAvg)", "LoRA (FedIT)")],
    ]
    findings: list[report.Finding] = []
    for pairs in families:
        corrected = correct([ttest_rel(scores[above], scores[below]).pvalue for above, below in pairs])
        for (above, below), p_value in zip(pairs, corrected, strict=True):
            lead = compare_pairs(scores[above], scores[below])
            text = f"by {lead.mean:+.2f} ± {lead.half_width:.2f} points, p = {p_value:.3f} (Holm)"
            verdict = lead.verdict if p_value < 0.05 else "inconclusive"
            findings.append(report.Finding(f"{above} is above {below}", text, verdict))
    report.show(findings, [report.format_table(("reading", "rate", "test accuracy, %", "validation, %"), rows)])


if __name__ == "__main__":
    main()
