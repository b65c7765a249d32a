"""Training of plain PyTorch on the batches of a client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedspan.runs.setup import Prepared
from fedspan.training.batching import draw_training_batches


def batches(prepared: Prepared, id: str, round: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """What a client sees in a round's two steps: inputs and labels."""
    given = draw_training_batches(
        prepared.federation.clients[id].train,
        prepared.train.lengths,
        batch_size=4,
        epochs=1,
        batches=2,
        seed=prepared.config.seed,
        key=(round, id, "train"),
        group_by_length=True,
    )
    for indices in given:
        inputs = prepared.task.collate(prepared.train, indices.tolist(), torch.device("cpu"))
        labels = inputs.pop("labels")
        yield inputs, labels


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterable[tuple[dict[str, Tensor], Tensor]]) -> None:
    """Plain training, clipped to norm 1."""
    for inputs, labels in data:
        optimizer.zero_grad()
        F.cross_entropy(model(**inputs).logits, labels).backward()
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        optimizer.step()
