"""An owner's own trainer for ``digests.py``: a plain PyTorch loop on the texts of a site.

python tests/tools/digest_trainer.py NODE.yaml INPUTS SITE     # joins a deployment with it
"""

import csv
import sys
from pathlib import Path
from typing import Any

from digest_inputs import LABELS

_BATCH, _HELD_OUT = 4, 3


def make_trainer(inputs: Path, site: str) -> Any:
    """Make the trainer of a site; it measures the loss of its last examples and trains on the others, in their order.

    Args:
        inputs: Folder of ``digest_inputs.save_inputs``.
        site: Id of the site.
    """
    import torch
    import transformers

    import fedspan

    with (inputs / "corpus" / f"{site}.csv").open() as file:
        rows = list(csv.DictReader(file))
    tokenizer = transformers.AutoTokenizer.from_pretrained(inputs / "deep-bert")
    torch.manual_seed(7)  # all trainers have the same head
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        inputs / "deep-bert", num_labels=len(LABELS)
    )

    def encode(chosen: list[dict[str, str]]) -> dict[str, Any]:
        batch = dict(tokenizer([row["text"] for row in chosen], padding=True, return_tensors="pt"))
        batch.pop("token_type_ids", None)
        return {**batch, "labels": torch.tensor([LABELS.index(row["label"]) for row in chosen])}

    used, held_out = rows[:-_HELD_OUT], encode(rows[-_HELD_OUT:])
    batches = [encode(used[at : at + _BATCH]) for at in range(0, len(used), _BATCH)]

    def train(round: fedspan.TrainingRound) -> None:
        for batch in round.batches(batches):
            loss = model(**batch).loss
            loss.backward()
            round.step(loss, len(batch["labels"]))

    return fedspan.TorchTrainer(
        model,
        train,
        len(used),
        evaluate=lambda: {"loss": float(model(**held_out).loss)},
        validation_examples=_HELD_OUT,
        processor=tokenizer,
        batches=len(batches),
    )


def main(node: Path, inputs: Path, site: str) -> None:
    import torch

    import fedspan

    torch.set_num_threads(1)
    fedspan.join(node, trainer=make_trainer(inputs, site))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
