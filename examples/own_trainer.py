"""Two offices fine-tune a language model with TRL's SFTTrainer, and federate it in four added lines.

    pip install -e '.[trl]'
    python examples/own_trainer.py                     # a Llama of 15 million parameters, from the hub
    python examples/own_trainer.py --model FOLDER      # any decoder of Transformers
    python examples/own_trainer.py --alone north       # the script as it was: one office, without fedspan

``make_trainer`` is an ordinary TRL script. The lines that federate it are those of ``federate``; ``own_trainer.yaml``
beside this script names method, layers and optimizer. Everything else about training (data, batch size, precision,
evaluation, callbacks) stays as its owner wrote it.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

try:
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportPrivateImportUsage]
except ImportError:
    raise SystemExit("This example trains with TRL, which is not installed: pip install -e '.[trl]'") from None

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry")
OFFICES = ("north", "south")


def create_texts(office: str, count: int) -> Dataset:
    """Write the letters of an office, which has its own greeting."""
    rng = random.Random(office)
    greeting = "Good morning" if office == "north" else "Dear"
    rows = [{"text": f"{greeting} {rng.choice(NAMES)}, here are {rng.randrange(10)} books."} for _ in range(count)]
    return Dataset.from_list(rows)


def make_trainer(office: str, name: str, out: Path, count: int) -> SFTTrainer:
    """Build the trainer of an office, as its own training script does."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = create_texts(office, count).train_test_split(0.25, seed=0)
    return SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(name, dtype="float32"),
        args=SFTConfig(
            output_dir=str(out / office),
            per_device_train_batch_size=4,
            max_length=64,
            num_train_epochs=1,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            bf16=False,
        ),
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        processing_class=tokenizer,
    )


def federate(make: Callable[[str], SFTTrainer], config: Path, folder: Path) -> None:
    import fedspan

    trainers = {office: make(office) for office in OFFICES}
    report = fedspan.simulate(config, folder, trainers=trainers, resume=True)
    print(f"best round {report.best_round}: loss {report.scores['validation']['loss']:.3f} on held-out letters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nickypro/tinyllama-15M", help="a decoder: hub id or folder")
    parser.add_argument("--alone", choices=OFFICES, help="train one office without fedspan")
    parser.add_argument("--config", type=Path, help="left out: own_trainer.yaml beside this script")
    parser.add_argument("--texts", type=int, default=80, help="letters of an office")
    parser.add_argument("--out", type=Path, help="left out: runs/own_trainer, or runs/own_trainer-smoke")
    parser.add_argument("--smoke", action="store_true", help="a few seconds: 16 letters of an office")
    args = parser.parse_args()
    out = args.out or Path("runs/own_trainer-smoke" if args.smoke else "runs/own_trainer")
    make = partial(make_trainer, name=args.model, out=out, count=16 if args.smoke else args.texts)
    if (office := args.alone) is not None:
        make(office).train()
        return
    federate(make, args.config or Path(sys.argv[0]).with_name("own_trainer.yaml"), out / "run")
    print(f"adapter: {out / 'run' / 'adapter'}")


if __name__ == "__main__":
    main()
