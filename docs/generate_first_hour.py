"""Write docs/first-hour.md, a transcript from a csv file to a prediction: ``python docs/generate_first_hour.py``.

Every command is run in an empty folder without a network, and its output is on the page. With a file name, only the csv
file is written: ``python docs/generate_first_hour.py inbox.csv``.
"""

from __future__ import annotations

import csv
import datetime
import os
import platform
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from helpers.hub import save_hub

PAGE = Path(__file__).parent / "first-hour.md"
CLINICS = {"Genève": 5, "Zürich Süd": 4, "Basel": 3, "Bern": 2, "Chur": 1}
"""The clinics, with their shares of the messages."""

INTRO = """# A first hour

In this hour you take a csv file that fedspan has never seen, train on it, and predict with plain PEFT and Transformers.
Five clinics share a booking system. They want a model that sorts patients' messages by concern, trained on the messages
of all five without moving them.

The block below each command shows its output ({stamp}). `python docs/generate_first_hour.py` in the
repository runs the commands and writes this page.
"""

PARTS: Sequence[tuple[str, str]] = (
    (
        "",
        """\
## The file

`inbox.csv` is a typical export: semicolons, Windows-1252 characters, Windows line ends, an unneeded date column, and
eleven rows without a concern.

```text
{inbox}
```

To follow along, make it from the built-in patients' messages: `python docs/generate_first_hour.py inbox.csv`.

## A config
""",
    ),
    (
        "fedspan init inbox.csv",
        """\
`init` detects the encoding, the delimiter, the columns, the column that names each row's clinic, and the rows to
exclude, and writes a commented config. Read it, and correct what does not fit your data:

```yaml
{config}
```

## A plan
""",
    ),
    (
        "fedspan plan fedspan.yaml",
        """\
You have not trained anything yet: the plan tells you what each client will send, receive and hold in memory.

## The run
""",
    ),
    (
        "fedspan run fedspan.yaml --out runs/first",
        """\
In a terminal you see progress bars with the round, the stage and the time left; elsewhere, as here, long stages print a
line from time to time. Before the first round, every client sends statistics from which the head starts. The row
`start` is the model before training. A terminal shows the best rounds in bold. With `fedspan init --fast`, rounds are
several times faster and reach less.

The best round is the one with the best metric on the clients' validation parts, and of equal ones that with the lowest
loss. From the best round on, `federation.final_rounds` train on all examples, those of the validation
parts included. You get the model after them, and the scores on the held-out examples are its scores.

If the run is interrupted, continue it with `fedspan run --resume runs/first`.

## A report
""",
    ),
    (
        "fedspan report runs/first --out first.html",
        """\
Open `first.html`: it has scores by round, clients, traffic and a written verdict ([contents](report.md)), and loads
nothing from the network.

## The adapter
""",
    ),
    (
        "fedspan export runs/first --out adapter",
        """\
The folder has the adapter in PEFT's format, the head, the tokenizer and a model card:

```text
{adapter}
```

## A prediction without fedspan

You no longer need fedspan: the model card has the code that loads this model. For one text:
""",
    ),
)
SNIPPET = """import json

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

base = "sentence-transformers/all-MiniLM-L6-v2"
encoder = PeftModel.from_pretrained(AutoModel.from_pretrained(base), "adapter")
head = load_file("adapter/3_Dense/model.safetensors")
labels = json.load(open("adapter/fedspan.json"))["labels"]

text = "Could I come in on Tuesday instead?"
inputs = AutoTokenizer.from_pretrained("adapter")([text], return_tensors="pt")
with torch.no_grad():
    hidden = encoder(**inputs).last_hidden_state
features = torch.nn.functional.normalize(hidden.mean(1), dim=1)
logits = features @ head["linear.weight"].T + head["linear.bias"]
for score, at in zip(*logits.softmax(1)[0].topk(3), strict=True):
    print(f"{score:.2f}  {labels[at]}")
"""
END = """## Next

- Other methods on the same data: [choosing a method](choosing.md), [comparing methods fairly](comparing.md).
- The same across machines, with a node for each clinic: [deployment](deployment.md).
- More rounds and other questions: [FAQ](faq.md).
"""


def save_inbox(path: Path) -> None:
    """Write the csv file: the built-in patients' messages as an export of five clinics."""
    draws, rows = random.Random(0), list[Mapping[str, str]]()
    for split in ("train", "test"):
        corpus = files("fedspan.data").joinpath("corpus", "patient_messages", f"{split}.csv")
        with corpus.open(encoding="utf-8", newline="") as file:
            rows += csv.DictReader(file)
    with path.open("w", encoding="cp1252", newline="") as file:
        writer = csv.writer(file, delimiter=";", lineterminator="\r\n")
        writer.writerow(["Received", "Clinic", "Message", "Concern"])
        for number, row in enumerate(rows):
            received = f"{draws.randrange(1, 29):02}.{draws.randrange(1, 13):02}.2026"
            [clinic] = draws.choices(list(CLINICS), list(CLINICS.values()))
            concern = "" if number % 150 == 75 else row["label"]
            writer.writerow([received, clinic, row["text"].replace("'", "\u2019").replace("...", "\u2026"), concern])


def run_blocks(folder: Path) -> Iterator[str]:
    """Run everything in an empty folder, and yield the texts of the page's blocks in their order."""
    save_inbox(folder / "inbox.csv")
    save_hub(folder / "hub")
    python_path = os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))
    environment = {
        **os.environ,
        "PYTHONPATH": python_path,
        "COLUMNS": "80",
        "TERM": "dumb",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(folder / "hub"),
    }

    def printed(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=folder, env=environment, text=True, capture_output=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{arguments}: {done.stdout}\n{done.stderr}")
        output = done.stdout.replace(f"{folder.resolve()}/", "")
        return "\n".join(line.rstrip() for line in output.splitlines()).strip("\n")

    for command, text in PARTS:
        if command:
            yield printed("-m", "fedspan", *shlex.split(command)[1:])
        if "{inbox}" in text:
            yield "\n".join((folder / "inbox.csv").read_text(encoding="cp1252").splitlines()[:5])
        if "{config}" in text:
            yield (folder / "fedspan.yaml").read_text(encoding="utf-8").strip()
        if "{adapter}" in text:
            inside = sorted((folder / "adapter").rglob("*"))
            yield "\n".join(str(path.relative_to(folder)) for path in inside if path.is_file())
    yield printed("-c", SNIPPET)


def page(blocks: Iterator[str], stamp: str) -> str:
    """The page, from its blocks in order."""
    parts = [INTRO.format(stamp=stamp)]
    for command, text in PARTS:
        if command:
            parts.append(f"```bash\n{command}\n```\n\n```text\n{next(blocks)}\n```\n")
        for name in ("inbox", "config", "adapter"):
            if f"{{{name}}}" in text:
                text = text.replace(f"{{{name}}}", next(blocks))
        parts.append(text)
    parts.append(f"```python\n{SNIPPET}```\n\n```text\n{next(blocks)}\n```\n")
    return "\n".join([*parts, END])


def format_stamp() -> str:
    """The date and machine of the outputs."""
    import torch

    today = datetime.datetime.now(tz=datetime.UTC).date()
    return f"{today}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"


def main() -> None:
    """Write the page, or only the csv file."""
    if len(sys.argv) > 1:
        save_inbox(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory(prefix="fedspan-") as folder:
        PAGE.write_text(page(run_blocks(Path(folder)), format_stamp()), encoding="utf-8")


if __name__ == "__main__":
    main()
