"""RoLoRA's Figure 2: a two-layer network on MNIST whose clients hold two labels each, or one.

    python -m evidence.claims.rolora_mnist --data FOLDER        # the four idx files, gzipped

The model is ``ReLU(x A B) W_out`` with a fixed random W_out, here a target layer without a base, under the library's
own methods and engine. B = 0 makes every pre-activation 0, so the subgradient at 0 is 1: with 0, nothing would ever
train. The paper names neither the optimizer nor the rounds nor A's variance. A learning rate is selected for each
method and number of clients by validation on the first seed. An accuracy is the mean over the last quarter of the
rounds.
"""

import argparse
import gzip
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evidence.claims import report
from fedspan.core.method import compute_scaling
from fedspan.core.tensors import create_generator
from fedspan.core.values import Client
from fedspan.errors import FedspanError
from fedspan.experiments.intervals import compare_pairs, compare_to
from fedspan.federation.config import RoundSettings
from fedspan.federation.evaluation import Evaluator
from fedspan.federation.federation import Federation
from fedspan.federation.progress import ClientData
from fedspan.methods.registry import get_method_class
from fedspan.models.adapted import AdaptedModel
from fedspan.training.config import TrainingSettings
from fedspan.training.loop import LoopEngine
from fedspan.transports.in_process import simulate

METHODS = {"fedit": "LoRA", "ffa-lora": "FFA-LoRA", "rolora": "RoLoRA"}
CLIENTS = (5, 10)
PIXELS, CLASSES, RANK, BATCH, EPOCHS = 784, 10, 16, 64, 5


@dataclass(frozen=True)
class Images:
    """Pixels (examples, 784) from 0 to 1 and labels (examples,)."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    @property
    def lengths(self) -> np.ndarray:
        return np.ones(len(self), dtype=np.int64)


def read_idx(path: Path) -> np.ndarray:
    """A gzipped idx file of unsigned bytes, in its own shape."""
    data = gzip.decompress(path.read_bytes())
    kind, dimensions = data[2], data[3]
    if kind != 0x08:
        raise ValueError(f"{path.name}: idx type {kind:#x}, expected unsigned bytes (0x08)")
    shape = struct.unpack(f">{dimensions}I", data[4 : 4 + 4 * dimensions])
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def read_images(folder: Path, part: str) -> Images:
    """``train`` or ``t10k``."""
    pixels = read_idx(folder / f"{part}-images-idx3-ubyte.gz")
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz")
    x = torch.from_numpy(pixels.reshape(len(pixels), -1).astype(np.float32) / 255)
    return Images(x, torch.from_numpy(labels.astype(np.int64)))


class NoBase(nn.Linear):
    """A target layer without a base: what it computes is the adapter alone."""

    def forward(self, input: Tensor) -> Tensor:
        return input.new_zeros(*input.shape[:-1], self.out_features)


class ReLU(nn.Module):
    """max(x, 0) with the subgradient 1 at 0: with B = 0 all of x is 0, and a subgradient 0 would never train."""

    def forward(self, input: Tensor) -> Tensor:
        return input * (input >= 0)


class Classification:
    """Cross-entropy."""

    def collate(self, examples: Images, indices: Sequence[int], device: torch.device) -> Mapping[str, Tensor]:
        chosen = torch.as_tensor(indices)
        return {"x": examples.x[chosen], "y": examples.y[chosen]}

    def compute_loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor], *, generate: bool = False) -> Tensor:
        return model(batch["x"])

    def compute_metrics(self, predictions: Tensor, examples: Images, indices: Sequence[int]) -> dict[str, float]:
        return {"accuracy": float((predictions.argmax(1) == examples.y[list(indices)]).double().mean())}


@dataclass(frozen=True)
class Data:
    """Training, validation and test images."""

    train: Images
    validation: Images
    test: Images


def load(folder: Path, train: int, validation: int, test: int) -> Data:
    """The first images of a fixed shuffle of the training file, the next ones for validation, and the test file's."""
    train_images, test_images = read_images(folder, "train"), read_images(folder, "t10k")
    order = torch.randperm(len(train_images), generator=create_generator(0, "mnist"))
    if train + validation > len(train_images):
        raise SystemExit(f"--train and --validation take {train + validation} of {len(train_images)} images")
    chosen, spare = order[:train], order[train : train + validation]
    return Data(
        Images(train_images.x[chosen], train_images.y[chosen]),
        Images(train_images.x[spare], train_images.y[spare]),
        Images(test_images.x[:test], test_images.y[:test]),
    )


def divide(labels: Tensor, clients: int, seed: int) -> list[np.ndarray]:
    """Every label to one client: two labels each for five clients, one for ten; which ones, the seed draws."""
    order = torch.randperm(CLASSES, generator=create_generator(seed, "division", clients))
    own_classes = order.reshape(clients, CLASSES // clients)
    return [torch.isin(labels, classes).nonzero()[:, 0].numpy() for classes in own_classes]


def make_settings(rounds: int, seed: int) -> RoundSettings:
    """Settings of rounds of trusted clients, without limits of their changes and weights."""
    return RoundSettings(rounds=rounds, seed=seed, clip_ratio=None, max_weight_ratio=None).trust()


def connect(
    adapted: AdaptedModel,
    data: Data,
    parts: Sequence[np.ndarray],
    training: TrainingSettings,
    method: str,
    options: Mapping[str, Any],
    settings: RoundSettings,
    *,
    by_size: bool = False,
) -> Federation:
    """A federation of clients with these images, weighted equally or by their number."""
    made = get_method_class(method)(spec=adapted.spec, seed=settings.seed, **options)
    engine = LoopEngine(adapted, Classification(), training, settings.seed)
    rank, empty = options["r"], np.array([], dtype=np.int64)
    scaling = compute_scaling(options["lora_alpha"], rank)
    clients = [
        ClientData(
            Client(f"client-{k}", rank, scaling, len(rows), float(len(rows)) if by_size else 1.0), rows, empty, empty
        )
        for k, rows in enumerate(parts)
    ]
    return simulate(made, engine, clients, data.train, settings)


def build(data: Data, method: str, clients: int, lr: float, seed: int, rounds: int) -> Federation:
    """The federation of one curve of the figure."""
    W_out = nn.Linear(PIXELS, CLASSES, bias=False)
    bound = PIXELS**-0.5
    with torch.no_grad():
        W_out.weight.uniform_(-bound, bound, generator=create_generator(seed, "W_out"))
    hidden = NoBase(PIXELS, PIXELS, bias=False)
    model = nn.Sequential(OrderedDict(hidden=hidden, relu=ReLU(), out=W_out))
    training = TrainingSettings(
        optimizer="sgd", lr=lr, batch_size=BATCH, local_epochs=EPOCHS, max_grad_norm=0.0, group_by_length=False
    )
    # Section 5.2: "A is initialized to a random Gaussian matrix"; its variance is PEFT's, 1/r^2.
    options = {"r": RANK, "lora_alpha": float(RANK), "init_A": "gaussian"}
    adapted, parts = AdaptedModel(model, {"hidden": hidden}, {}), divide(data.train.y, clients, seed)
    return connect(adapted, data, parts, training, method, options, make_settings(rounds, seed))


@dataclass(frozen=True)
class Curve:
    """Accuracy in % after every round."""

    validation: tuple[float, ...]
    test: tuple[float, ...]

    def plateau(self, part: str) -> float:
        """The mean over the last quarter of the rounds: rounds that train A and rounds that train B differ."""
        values = getattr(self, part)
        last = values[-max(1, len(values) // 4) :]
        return sum(last) / len(last)


def train(federation: Federation, data: Data) -> Curve:
    """Train; a run whose loss is no longer finite stays at chance."""
    evaluator, rounds = Evaluator(federation, batch_size=2000), federation.settings.rounds
    progress, scores = federation.begin(), {"validation": list[float](), "test": list[float]()}
    for _ in range(rounds):
        try:
            progress = federation.run_round(progress).progress
        except FedspanError:  # the loss of a client became infinite
            chance = (100 / CLASSES,) * rounds
            return Curve(chance, chance)
        for part, values in scores.items():
            values.append(100 * evaluator.evaluate_heldout(progress, getattr(data, part))["global"]["accuracy"])
    return Curve(tuple(scores["validation"]), tuple(scores["test"]))


def build_findings(curves: Mapping[tuple[str, int], Sequence[Curve]]) -> list[report.Finding]:
    """The paper's three statements, one row a comparison."""
    level = {key: [curve.plateau("test") for curve in runs] for key, runs in curves.items()}
    findings: list[report.Finding] = []
    for clients in CLIENTS:
        plateau = compare_to(level["ffa-lora", clients], 55.0, 5.0)
        text = f"FFA-LoRA plateaus around 55 % with {clients} clients (read as: 50 to 60 %)"
        findings.append(report.Finding(text, f"{plateau.mean:.1f} ± {plateau.half_width:.1f} %", plateau.verdict))
    fall = compare_pairs(level["fedit", 5], level["fedit", 10])
    findings.append(report.Finding("LoRA falls from 5 to 10 clients", f"by {fall} points", fall.verdict))
    for clients in CLIENTS:
        for other in ("ffa-lora", "fedit"):
            lead = compare_pairs(level["rolora", clients], level[other, clients])
            text = f"RoLoRA is ahead of {METHODS[other]} with {clients} clients"
            findings.append(report.Finding(text, f"by {lead} points", lead.verdict))
    return findings


def main() -> None:
    """Select the rates, then run all seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST's four .gz files")
    parser.add_argument("--train", type=int, default=16_000, help="training images, over all clients")
    parser.add_argument("--validation", type=int, default=5_000)
    parser.add_argument("--test", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.03, 0.1, 0.3, 1.0, 3.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = load(args.data, args.train, args.validation, args.test)
    curves: dict[tuple[str, int], list[Curve]] = {}
    rows: list[list[str]] = []
    sweep: list[list[str]] = []
    for clients in CLIENTS:
        for method, name in METHODS.items():
            first = {
                rate: train(build(data, method, clients, rate, args.seeds[0], args.rounds), data) for rate in args.rates
            }
            best = max(first, key=lambda rate: first[rate].plateau("validation"))
            sweep.append([f"{name}, {clients}", *(f"{one.plateau('validation'):.1f}" for one in first.values())])
            rest = [train(build(data, method, clients, best, seed, args.rounds), data) for seed in args.seeds[1:]]
            curves[method, clients] = [first[best], *rest]
            levels = [curve.plateau("test") for curve in curves[method, clients]]
            rows.append([f"{name}, {clients}", f"{best:g}", *(f"{level:.1f}" for level in levels)])
            print(*rows[-1], flush=True)
    header = ("method, clients", "lr", *(f"seed {seed}" for seed in args.seeds))
    rates = ("method, clients", *(f"lr {rate:g}" for rate in args.rates))
    report.show(build_findings(curves), [report.format_table(header, rows), report.format_table(rates, sweep)])


if __name__ == "__main__":
    main()
