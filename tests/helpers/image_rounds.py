"""Rounds of a run, and what the model that it exports predicts."""

import torch
from torch import Tensor, nn

from fedspan.assembly.run import Prepared, prepare
from fedspan.config import RunConfig
from fedspan.federation.progress import Progress


def run_rounds(config: RunConfig, rounds: int = 2) -> tuple[Prepared, Progress]:
    """Prepare a run, and make its first rounds."""
    made = prepare(config)
    progress = made.federation.begin()
    for _ in range(rounds):
        progress = made.federation.run_round(progress).progress
    return made, progress


def theirs(made: Prepared, model: nn.Module) -> Tensor:
    """What a model predicts of the run's test set."""
    batch = made.task.collate(made.test, range(len(made.test)), torch.device("cpu"))
    with torch.no_grad():
        return made.task.predict(model.eval(), batch)


def close(one: Tensor, other: Tensor) -> bool:
    """Whether no number differs by 1e-4."""
    return float((one - other).abs().max()) < 1e-4
