"""Four offices teach a Llama to follow instructions, each with its own kind.

    python examples/instruction_tuning.py                     # a Llama of 15 million parameters, from the hub
    python examples/instruction_tuning.py --model FOLDER      # any decoder of Transformers
    python examples/instruction_tuning.py --data alpaca.json --model Qwen/Qwen2.5-0.5B

Without ``--data`` the script writes its own instructions: sums, capitals, the larger of two numbers, greetings; each
kind belongs to one office. With it, a json or jsonl file like Alpaca's (instruction, input, output) is divided at
random among four. What it shows: ``task: causal-lm``, a prompt template, the loss by round, and answers that the
trained model generates. Times: examples/README.md.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import fedspan

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry")
WORDS = ("apple", "bread", "chair", "door", "house", "river", "stone", "table")


class Progress(fedspan.Listener):
    """Print one line for each round."""

    def on_round_finish(self, row: Any) -> None:
        held_out = row["test"]
        print(
            f"round {row['round']}: held-out loss {held_out['loss']:.3f}, "
            f"token accuracy {held_out['token_accuracy']:.1%}",
            flush=True,
        )


def write_instructions(path: Path, each: int) -> None:
    """Write a number of instructions of each kind, with the office that has them."""
    rng = random.Random(0)
    rows: list[dict[str, str]] = []
    for _ in range(each):
        one, other = rng.sample(range(10), 2)
        name, word = rng.choice(NAMES), rng.choice(WORDS)
        kinds = {
            "sums": (f"Add {one} and {other}.", f"{one + other}"),
            "capitals": (f"Write {word} in capital letters.", word.upper()),
            "larger": (f"Which is larger, {one} or {other}?", f"{max(one, other)}"),
            "greetings": (f"Say hello to {name}.", f"Hello, {name}!"),
        }
        rows += [
            {"instruction": asked, "output": answer, "office": office} for office, (asked, answer) in kinds.items()
        ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nickypro/tinyllama-15M", help="a decoder: hub id or folder")
    parser.add_argument("--data", type=Path, help="json or jsonl with instruction, input and output")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--examples", type=int, default=300, help="of --data at most")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--ask", default="Add 2 and 5.")
    parser.add_argument("--out", type=Path, help="left out: runs/instruction_tuning, or runs/instruction_tuning-smoke")
    parser.add_argument("--smoke", action="store_true", help="a few seconds: one round on 40 instructions")
    args = parser.parse_args()
    args.out = args.out or Path("runs/instruction_tuning-smoke" if args.smoke else "runs/instruction_tuning")

    partition: dict[str, Any] = {"partitioner": "iid", "clients": 4}
    data = args.data
    if data is None:
        data, partition = args.out / "instructions.jsonl", {"partitioner": "natural", "column": "office"}
        write_instructions(data, each=10 if args.smoke else 40)
    config: dict[str, Any] = {
        "task": "causal-lm",
        "model": {"name": args.model, "target_modules": "all-linear", "max_length": 64 if args.smoke else 128},
        "data": {
            "train": str(data),
            "prompt": "instruction",  # or a text with columns in braces: "Question: {instruction}\nAnswer: "
            "answer": "output",
            "max_examples": 40 if args.smoke else args.examples,
            "invalid": "skip",
        },
        "partition": partition,
        "method": {"name": "fedit", "r": 8, "lora_alpha": 16},
        "federation": {"rounds": 1 if args.smoke else args.rounds},
        "training": {"lr": args.lr, "batch_size": 4},
        # At the end the model answers the held-out prompts.
        "evaluation": {"generate": True, "max_new_tokens": 4 if args.smoke else 16},
    }
    run = args.out / "run"
    report = fedspan.run(config, run, resume=True, listener=Progress())

    held_out = report.scores["test"]
    print(f"best round {report.best_round}: perplexity {held_out['perplexity']:.2f} on held-out answers, ", end="")
    print(f"{held_out['exact_match']:.1%} of them word for word")
    for example in report.examples:
        asked = example["text"].removesuffix("### Response:\n").strip().splitlines()[-1]
        print(f"  {asked}\n    wanted    {example['label']}\n    answered  {example['prediction']}")
    answer = fedspan.predict(run, [args.ask])[0]
    print(f"  {args.ask}\n    answered  {answer}")
    print(f"adapter: {run / report.adapters['global']}, {report.bytes['up'] / 1e6:.1f} MB sent by all offices together")


if __name__ == "__main__":
    main()
