"""Batches of local training, with padding and without."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedspan.core.tensors import create_generator
from fedspan.core.values import Job
from fedspan.models.adapted import AdaptedModel
from fedspan.models.calls import enter_evaluation
from fedspan.models.layout import Padded, TokenLayout
from fedspan.models.precision import compute_tolerance
from fedspan.models.unpadded import Unpadded
from fedspan.tasks.task import Examples, Task
from fedspan.training.config import TrainingSettings
from fedspan.training.jobs import Assignment, is_explained

_WINDOW = 8


def draw_epoch_batches(
    indices: np.ndarray, lengths: np.ndarray, batch_size: int, rng: torch.Generator, group_by_length: bool
) -> list[np.ndarray]:
    """Draw the batches of one epoch: every index once, ``batch_size`` at a time (the last batch may be smaller).

    With ``group_by_length``, each window of 8 shuffled batches is sorted by length before it is cut, and the batches
    are shuffled again. This reduces padding, and batches still differ from epoch to epoch.
    """
    shuffled = indices[torch.randperm(len(indices), generator=rng).numpy()]
    if not group_by_length:
        return [shuffled[first : first + batch_size] for first in range(0, len(shuffled), batch_size)]
    window = _WINDOW * batch_size
    batches: list[np.ndarray] = []
    for start in range(0, len(shuffled), window):
        part = shuffled[start : start + window]
        part = part[np.argsort(lengths[part], kind="stable")]
        batches += [part[first : first + batch_size] for first in range(0, len(part), batch_size)]
    return [batches[int(index)] for index in torch.randperm(len(batches), generator=rng)]


def _draw_epoch_steps(
    indices: np.ndarray,
    lengths: np.ndarray,
    batch_size: int,
    rng: torch.Generator,
    group_by_length: bool,
    passes: int,
    min_batch: int,
) -> list[np.ndarray]:
    """Draw the batches of one epoch, ``passes`` a step, so that each step has ``min_batch`` examples, or all.

    What full steps leave over is the last step, or joins the step before. Of few examples, some are in several passes.
    """
    rest = len(indices) % (batch_size * passes)
    if min_batch == 1 or not rest:
        return draw_epoch_batches(indices, lengths, batch_size, rng, group_by_length)
    shuffled = indices[torch.randperm(len(indices), generator=rng).numpy()]
    left = shuffled[-rest:]
    batches = draw_epoch_batches(shuffled[:-rest], lengths, batch_size, rng, group_by_length)
    if batches and rest < max(min_batch, passes):
        left = np.concatenate([*batches[-passes:], left])
        del batches[-passes:]
    left = np.resize(left, max(len(left), passes * min(len(left), max(1, min_batch // passes))))
    return [*batches, *np.array_split(left, passes)]


def draw_training_batches(
    indices: np.ndarray,
    lengths: np.ndarray,
    *,
    batch_size: int,
    epochs: int,
    batches: int | None,
    seed: int,
    key: tuple[int | str, ...],
    group_by_length: bool,
    passes: int = 1,
    min_batch: int = 1,
) -> Iterator[np.ndarray]:
    """Yield the batches of a job: ``epochs`` epochs, or exactly ``batches`` batches (over as many epochs as needed)."""
    epoch, count = 0, 0
    if not len(indices):  # no number of epochs would ever yield a batch
        return
    while epoch < epochs if batches is None else count < batches:
        rng = create_generator(seed, "batches", *key, epoch)
        for batch in _draw_epoch_steps(indices, lengths, batch_size, rng, group_by_length, passes, min_batch):
            if batches is not None and count == batches:
                return
            yield batch
            count += 1
        epoch += 1


def draw_job_batches(
    settings: TrainingSettings, seed: int, assignment: Assignment, examples: Examples
) -> Iterator[np.ndarray]:
    """Yield an assignment's batches: epochs or steps as set by its job, or else by the run; one epoch for a probe."""
    job = assignment.job
    steps = settings.local_steps if job.steps is None and job.epochs is None else job.steps
    epochs = settings.local_epochs if job.epochs is None else job.epochs
    return draw_training_batches(
        assignment.indices,
        examples.lengths,
        batch_size=settings.batch_size,
        epochs=1 if job.steps == 0 else epochs,
        batches=steps * settings.gradient_accumulation_steps if steps else None,
        seed=seed,
        key=(assignment.round, assignment.client, job.phase),
        group_by_length=settings.group_by_length,
        passes=settings.gradient_accumulation_steps,
        min_batch=1 if job.steps == 0 else assignment.min_batch,  # a probe is one step
    )


def split_evaluation_batches(indices: np.ndarray, lengths: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Split all indices into batches of similar length."""
    ordered = indices[np.argsort(lengths[indices], kind="stable")]
    return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]


class AlikeGroups:
    """Groups of examples that need no padding and no mask to share a pass; each example is collated alone once.

    An additive mask hides no attention score near the largest number of its format: a server that chooses such weights
    would have the length of one example change the results of all others in its pass.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        # a held data set keeps its id
        self._shapes: dict[int, tuple[Examples, dict[int, tuple[torch.Size, ...]]]] = {}

    def split(self, examples: Examples, indices: np.ndarray) -> list[np.ndarray]:
        """Split indices into groups."""
        if getattr(self._task, "packing", False):
            return [indices[[position]] for position in range(len(indices))]
        _, known = self._shapes.setdefault(id(examples), (examples, {}))
        groups: dict[tuple[torch.Size, ...], list[int]] = {}
        for index in indices.tolist():
            if index not in known:
                try:
                    batch = self._task.collate(examples, [index], torch.device("cpu"))
                    known[index] = tuple(value.shape for value in batch.values())
                except Exception as error:
                    if is_explained(error):
                        raise
                    known[index] = ()  # it fails again in its own pass, alone
            groups.setdefault(known[index], []).append(index)
        return [np.array(groups[shapes]) for shapes in sorted(groups)]


_WORTH = 0.08
"""Minimum share of padding in a batch: moving the tokens takes time, too."""
_SAMPLE = 4
"""Number of examples on which a model is verified."""


class Padding:
    """Decides whether forward passes of an engine run without padding, and runs them so.

    Args:
        refusal: The reason why all batches are to be padded; None: it depends on the model.
    """

    def __init__(self, adapted: AdaptedModel, task: Task, refusal: str | None) -> None:
        self.adapted, self.task = adapted, task
        self._state = _State(refusal)
        self._unpadded: Unpadded | None = None

    def create_replica(self, adapted: AdaptedModel) -> Padding:
        """Return the same object for a replica of the model, in another thread."""
        copied = copy.copy(self)
        copied.adapted, copied._unpadded = adapted, None
        return copied

    @property
    def refusal(self) -> str | None:
        """The reason why batches are padded; None if they are not, or if no data set has been seen."""
        return self._state.refusal

    def ensure(self, examples: Examples) -> None:
        """Verify the model on the first data set that it gets. This installs the bare base."""
        with self._state.lock:
            if not self._state.verified and self._state.refusal is None:
                try:
                    self._unpadded = Unpadded(self.adapted)
                    try:
                        self._verify(self._unpadded, examples)
                    except Padded:
                        if not self._unpadded.variable:
                            raise
                        self._unpadded.variable = self._state.variable = False  # an older GPU: bins can still do
                        self._verify(self._unpadded, examples)
                except Padded as error:
                    self._state.refusal = str(error)
            self._state.verified = True
        if self._unpadded is None and self._state.refusal is None:
            self._unpadded = Unpadded(self.adapted)
            self._unpadded.variable = self._unpadded.variable and self._state.variable

    @property
    def possible(self) -> bool:
        """Whether batches can run without padding, as far as is known."""
        return self._unpadded is not None and self._state.refusal is None

    def remove_padding(
        self,
        batch: Mapping[str, Tensor],
        lengths: np.ndarray,
        clients: int = 1,
        real: np.ndarray | None = None,
        *,
        same_attention: bool = False,
    ) -> AbstractContextManager[TokenLayout | None]:
        """Run a batch's forward passes within this context without padding, if that pays.

        Args:
            lengths: Number of tokens of each of its examples, (B,); from the data set, since reading the batch's own
                mask would make the host wait for the device.
            clients: Number of clients whose examples are stacked in the batch, equally many of each.
            real: (B,), false for filler examples that belong to no client.
            same_attention: Attend as with padding (``TokenLayout``), on a CPU; elsewhere, run with padding.

        Returns:
            A context that yields the layout, or None if the passes run with padding.
        """
        if self._unpadded is None or self._state.refusal is not None:
            return nullcontext()
        if same_attention and self.adapted.device.type != "cpu":
            return nullcontext()
        layout = build_layout(batch, lengths, clients, real, same_attention)
        return nullcontext() if layout is None or layout.padding < _WORTH else self._unpadded.within(layout)

    def _verify(self, unpadded: Unpadded, examples: Examples) -> None:
        """Compare predictions with padding and without; ``Padded``: they differ by more than rounding."""
        order = np.argsort(examples.lengths, kind="stable")
        if not len(order):
            raise Padded("there are no examples")
        sample = order[np.unique(np.linspace(0, len(order) - 1, _SAMPLE).astype(np.int64))].tolist()
        self.adapted.install({}, {}, frozenset())
        try:
            batch = self.task.collate(examples, sample, self.adapted.device)
            layout = build_layout(batch, examples.lengths[sample])
            if layout is None or not _is_padded_right(batch, examples.lengths[sample]):
                raise Padded("its batches have no attention mask with padding on the right")
            rows = torch.eye(len(sample)).to(self.adapted.device)
            with enter_evaluation(self.adapted.model):
                expected = self.task.compute_client_losses(self.adapted.model, batch, rows)
                with unpadded.within(layout):
                    losses = self.task.compute_client_losses(self.adapted.model, batch, rows)
        except Padded:
            raise
        except Exception as error:  # on an example, which then fails alone; or in a block, on tokens in one row
            if is_explained(error):
                raise
            raise Padded(f"a forward pass without padding failed ({type(error).__name__}: {error})") from error
        difference = float((losses - expected).norm() / expected.norm())
        if not difference < compute_tolerance(self.adapted.model):
            raise Padded(f"losses differ by {difference:.1e} without padding")


class _State:
    """The state that the replicas share."""

    def __init__(self, refusal: str | None) -> None:
        self.refusal, self.verified, self.variable, self.lock = refusal, False, True, Lock()


def build_layout(
    batch: Mapping[str, Tensor],
    lengths: np.ndarray,
    clients: int = 1,
    real: np.ndarray | None = None,
    same_attention: bool = False,
) -> TokenLayout | None:
    """Return the layout of a batch that is padded on the right; None if it has no mask by token."""
    mask: Any = batch.get("attention_mask")
    if mask is None or mask.ndim != 2 or len(mask) != len(lengths):
        return None
    if real is not None:
        lengths = np.where(real, lengths, 0)
    return TokenLayout(lengths.astype(np.int64), mask.shape[1], mask.device, clients, same_attention)


def _is_padded_right(batch: Mapping[str, Tensor], lengths: np.ndarray) -> bool:
    """Check that a batch's mask shows each example's tokens first, and then its padding."""
    mask = batch["attention_mask"].bool().cpu()
    return torch.equal(mask, torch.arange(mask.shape[1]) < torch.from_numpy(lengths)[:, None])


ModelInputs = tuple[Job, np.ndarray]
"""A model, and the indices of the examples that it predicts, (examples,)."""


def build_prediction_key(job: Job) -> tuple[object, ...]:
    """Return the key of a model: models with equal keys can share a pass."""
    shapes = tuple((name, value.shape, value.dtype) for name, value in sorted(job.tensors.items()))
    return tuple(job.parametrization.items()), shapes


def split_windows(models: Iterable[ModelInputs], examples: int) -> Iterator[list[ModelInputs]]:
    """Yield consecutive models with at most ``examples`` examples together, at least one: only these are in memory."""
    window: list[ModelInputs] = []
    count = 0
    for model in models:
        if window and count + len(model[1]) > examples:
            yield window
            window, count = [], 0
        window.append(model)
        count += len(model[1])
    if window:
        yield window


def stack_models(window: Sequence[ModelInputs], models_per_pass: int, batch_size: int) -> list[list[int]]:
    """Decide which models share a pass, as positions in ``window``; those with the most examples come first.

    Args:
        models_per_pass: Largest number of models in a pass.
        batch_size: Largest number of rows in a pass of several models; each has as many as the one with the most.
    """
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, (job, _) in enumerate(window):
        kinds.setdefault(build_prediction_key(job), []).append(index)
    stacks: list[list[int]] = []
    for positions in kinds.values():
        ordered = sorted(positions, key=lambda index: -len(window[index][1]))
        start = 0
        while start < len(ordered):
            rows = max(1, len(window[ordered[start]][1]))
            count = min(models_per_pass, max(1, batch_size // rows))
            stacks.append(ordered[start : start + count])
            start += count
    return stacks


def split_job_windows(jobs: Iterable[Job], count: int) -> Iterator[list[Job]]:
    """Yield consecutive models that predict the same examples, ``count`` at a time: only these are in memory."""
    remaining = iter(jobs)
    while window := list(islice(remaining, count)):
        yield window


def stack_on_shared_examples(window: Sequence[Job], models_per_pass: int, batch_size: int) -> list[list[int]]:
    """Decide which models share passes over the same examples, as positions in ``window``.

    Args:
        models_per_pass: Largest number of models in a pass.
        batch_size: Largest number of rows in a pass; each model has at least one.
    """
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, job in enumerate(window):
        kinds.setdefault(build_prediction_key(job), []).append(index)
    count = max(1, min(models_per_pass, batch_size))
    return [
        positions[start : start + count] for positions in kinds.values() for start in range(0, len(positions), count)
    ]


def split_into_passes(batches: Sequence[np.ndarray], models: int, batch_size: int) -> list[np.ndarray]:
    """Split each batch of examples, so that every pass has at most ``batch_size`` rows, those of all models together.

    Each batch is split on its own: the passes over some of the batches do not depend on the others.
    """
    rows = max(1, batch_size // models)
    return [part for batch in batches for part in np.array_split(batch, -(-len(batch) // rows))]
