"""Numbers of examples of a Transformers ``Trainer``: those of its data sets, and those of each optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import has_length

from fedspan.errors import FedspanError
from fedspan.training.trainers.optimizer import JobOptimizer
from fedspan.training.trainers.transformers_round import add_callback

_EXAMPLES = "fedspan_examples"
"""The entry of a batch with one element for each example: a tensor, which Accelerate can concatenate and slice."""


class _CountingCollator:
    """A collator that adds the number of examples to a batch: its tensors may have other numbers of rows (DPO)."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, rows: list[Any]) -> Any:
        batch = self._collate(rows)
        if isinstance(batch, MutableMapping):
            batch[_EXAMPLES] = torch.ones(len(rows), dtype=torch.bool)
        return batch


class _CountingLoaders(TrainerCallback):
    """Makes the loader of a training add its numbers of examples, and undoes it."""

    def __init__(self) -> None:
        self._wrapped: list[tuple[Any, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        loader = getattr(train_dataloader, "base_dataloader", train_dataloader)  # Accelerate's own wraps torch's
        collate = getattr(loader, "collate_fn", None)
        if collate is not None:
            self._wrapped.append((loader, collate))
            loader.collate_fn = _CountingCollator(collate)

    def undo(self) -> None:
        for loader, collate in self._wrapped:
            loader.collate_fn = collate


@contextmanager
def count_examples(trainer: Trainer, optimizer: JobOptimizer) -> Generator[None]:
    """Count the examples of each optimizer step within this context, before the step.

    The loader is the owner's, with any sampler: what it yields is counted. The trainer's method is replaced within the
    context, because no callback of Transformers receives the batches.
    """
    loaders, inner, own_method = _CountingLoaders(), trainer.get_batch_samples, vars(trainer).get("get_batch_samples")

    def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
        batches, items = inner(*args, **kwargs)
        optimizer.count_examples(sum(_pop_examples(batch, trainer) for batch in batches))
        return batches, items

    trainer.get_batch_samples = get_batch_samples
    try:
        with add_callback(trainer, loaders):
            yield
    finally:
        loaders.undo()
        del trainer.get_batch_samples
        if own_method is not None:
            trainer.get_batch_samples = own_method


def _pop_examples(batch: Any, trainer: Trainer) -> int:
    """Remove and return a batch's number of examples; of a loader without a collator, the rows of its first tensor."""
    if isinstance(batch, MutableMapping) and _EXAMPLES in batch:
        return len(batch.pop(_EXAMPLES))
    values = batch.values() if isinstance(batch, Mapping) else batch
    rows = next((len(value) for value in values if isinstance(value, torch.Tensor) and value.ndim), None)
    if rows is None:
        problem = (
            f"its batches ({type(batch).__name__}) hold no tensor, by whose rows examples are counted. Trainers that "
            "generate their own examples, such as TRL's GRPOTrainer, are not supported"
        )
        raise FedspanError("trainer", type(trainer).__name__, problem=problem)
    return rows


def get_length(dataset: Any) -> int:
    """Return the number of examples of a data set, or of several ones by name.

    Raises:
        FedspanError: If there is none, or its number is unknown.
    """
    if dataset is None:
        raise FedspanError("trainer", None, problem="the trainer has no train_dataset")
    if isinstance(dataset, Mapping):  # of sentence-transformers: several data sets by name
        return sum(get_length(part) for part in dataset.values())
    if not has_length(dataset):
        problem = "the number of examples of an IterableDataset is unknown, and replies are weighted by it"
        raise FedspanError("trainer", type(dataset).__name__, "a data set with a length", problem=problem)
    return len(dataset)
