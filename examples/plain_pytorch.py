"""A plain PyTorch model, federated: no Transformers model, no tokenizer, a task of your own.

    python examples/plain_pytorch.py

Five factories classify vibrations of machines (even, worn, cracked). ``Vibrations`` is any ``nn.Module``, trained on a
public machine before. Every factory's machines sound different, and no recording leaves it. The result is an adapter
and a state dict, which PyTorch loads without fedspan.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedspan
from fedspan.data.columns import LABELED_TEXTS
from fedspan.data.config import DataConfig
from fedspan.tasks.settings import TaskSettings
from fedspan.tasks.single_label import SingleLabelClassification

if TYPE_CHECKING:
    import datasets

KINDS = ("cracked", "even", "worn")
LENGTH = 24


class Vibrations(nn.Module):
    """A small transformer over windows of a signal. B signals, T values, W windows of 4 values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, batch_first=True)
        self.hidden = nn.Linear(16, 20)
        self.classifier = nn.Linear(20, len(KINDS))

    def forward(self, signal_BT: Tensor) -> Tensor:
        """Compute the logits, (B, kinds)."""
        windows = self.block(self.embed(signal_BT.unflatten(1, (-1, 4))))
        return self.classifier(torch.relu(self.hidden(windows.mean(1))))


@dataclass(frozen=True)
class Signals:
    """Signals, (N, T) float32, with one label and one cost each."""

    values: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


class SignalClassification(SingleLabelClassification):
    """One label for a signal, which is a text of numbers in the data. Loss and metrics are those of classification."""

    def encode(self, dataset: datasets.Dataset) -> Signals:
        """Read the numbers of each signal."""
        values = np.array([[float(number) for number in text.split()] for text in dataset["text"]], np.float32)
        return Signals(values, np.array(dataset["label"], np.int64), np.ones(len(values), np.int64))

    def collate(self, examples: Signals, indices: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Collate signals and labels."""
        rows = list(indices)
        values, labels = torch.from_numpy(examples.values[rows]), torch.from_numpy(examples.labels[rows])
        return {"signal": values.to(device), "labels": labels.to(device)}

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor], *, generate: bool = False) -> Tensor:
        """Compute the logits; the model is called with the arguments of its own forward."""
        return model(batch["signal"])

    def describe_examples(self, examples: Signals) -> tuple[str, ...]:
        """Return no notes."""
        return ()


def build(processor: Any, settings: TaskSettings, data: DataConfig | None) -> SignalClassification:
    """Build the task; there is no tokenizer."""
    return SignalClassification(settings.labels, settings.metric)


SIGNALS = fedspan.TaskDefinition(
    name="signal-classification",
    title="a label for a signal",
    head="classification",  # the layer named `classifier` trains whole
    build=build,
    target_type="label",
    metrics=("accuracy", "macro_f1", "loss"),
    columns=LABELED_TEXTS,
    loss_options=SignalClassification.loss_options,
)


def make_signals(factory: int, count: int) -> list[dict[str, Any]]:
    """Record machines of one factory, each with its own speed and loudness."""
    rng = random.Random(factory)
    signals: list[dict[str, Any]] = []
    for _ in range(count):
        kind, phase, speed = rng.choice(KINDS), rng.uniform(0, math.tau), 0.5 + 0.1 * factory
        values = [math.sin(speed * at + phase) for at in range(LENGTH)]
        if kind == "worn":
            values = [value + 0.5 * math.sin(3 * speed * at + phase) for at, value in enumerate(values)]
        if kind == "cracked":
            values[rng.randrange(LENGTH)] += 2.0
        text = " ".join(f"{value * (1 + 0.2 * factory) + rng.gauss(0, 0.1):.3f}" for value in values)
        signals.append({"text": text, "label": kind})
    return signals


def pretrain(steps: int) -> Vibrations:
    """Train a model on a public machine, before the federation."""
    torch.manual_seed(0)
    model, signals = Vibrations(), make_signals(0, 400)
    values = torch.tensor([[float(number) for number in row["text"].split()] for row in signals])
    labels = torch.tensor([KINDS.index(row["label"]) for row in signals])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        rows = torch.arange(32 * step, 32 * (step + 1)) % len(values)
        loss = nn.functional.cross_entropy(model(values[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="left out: runs/plain_pytorch, or runs/plain_pytorch-smoke")
    parser.add_argument("--smoke", action="store_true", help="a few seconds: two rounds of 30 signals a factory")
    args = parser.parse_args()
    args.out = args.out or Path("runs/plain_pytorch-smoke" if args.smoke else "runs/plain_pytorch")

    model = pretrain(20 if args.smoke else 300)
    signals = {f"factory-{number}": make_signals(number, 30 if args.smoke else 200) for number in range(1, 6)}
    config = {
        "model": {"target_modules": ["embed", "linear1", "linear2", "hidden"]},
        "method": {"name": "fedit", "r": 4},
        "federation": {"rounds": 2 if args.smoke else args.rounds},
        "training": {"lr": 5e-3, "batch_size": 16},
    }
    report = fedspan.run(config, args.out, data=signals, model=model, task=SIGNALS, resume=True)
    print(f"accuracy: {100 * report.scores['test']['accuracy']:.1f} % after round {report.best_round}")

    new = make_signals(2, 3)
    for row, answer in zip(new, fedspan.predict(args.out, [row["text"] for row in new], model=model), strict=True):
        print(f"{row['label']}: predicted {answer[0]} ({answer[1]:.2f})")

    alone = Vibrations()  # without fedspan
    alone.load_state_dict(load_file(args.out / "adapter" / "state_dict.safetensors"))
    logits = alone.eval()(torch.tensor([[float(number) for number in row["text"].split()] for row in new]))
    print(f"by PyTorch alone: {', '.join(KINDS[at] for at in logits.argmax(1).tolist())}")


if __name__ == "__main__":
    main()
