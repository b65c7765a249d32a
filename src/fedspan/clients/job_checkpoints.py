"""Checkpoints within a round: the progress of a client's training, which survives the process that trains it."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedspan.clients.state_files import Kind, read_moments, write_moments
from fedspan.core.tensors import Tensors
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Order
from fedspan.federation.serialization import Reader, Writer, expect
from fedspan.files import convert_disk_errors, read_bytes, remove, write_atomic
from fedspan.training.jobs import TrainingProgress, TrainingTotals

log = logging.getLogger("fedspan.node")


def _list_strides(tensors: Tensors) -> dict[str, list[int]]:
    """Return the strides of tensors that are not contiguous: products with other strides may differ in their bits."""
    return {name: list(value.stride()) for name, value in tensors.items() if not value.is_contiguous()}


def _apply_strides(tensors: Tensors, strides: Mapping[str, list[int]]) -> dict[str, Tensor]:
    return {
        name: torch.empty_strided(value.shape, strides[name], dtype=value.dtype).copy_(value)
        if name in strides
        else value
        for name, value in tensors.items()
    }


def _write_progress(writer: Writer, progress: TrainingProgress) -> Mapping[str, object]:
    moments = progress.optimizer_state.moments
    return {
        "totals": asdict(progress.totals),
        "tensors": writer.add_tensors(progress.tensors),
        "gradients": writer.add_tensors(progress.gradients),
        "optimizer": write_moments(writer, (progress.optimizer_state, 0)),
        "strides": _list_strides(progress.tensors),
        "moment_strides": {kind: _list_strides(values) for kind, values in moments.items()},
    }


def _read_progress(reader: Reader, structure: object) -> TrainingProgress:
    totals, moment_strides = expect(structure, "totals", dict), expect(structure, "moment_strides", dict)
    state, _ = read_moments(reader, expect(structure, "optimizer", dict))
    moments = {kind: _apply_strides(values, moment_strides[kind]) for kind, values in state.moments.items()}
    return TrainingProgress(
        TrainingTotals(
            passes=expect(totals, "passes", int),
            steps=expect(totals, "steps", int),
            loss_sum=expect(totals, "loss_sum", float),
            examples=expect(totals, "examples", float),
            decay=expect(totals, "decay", float),
        ),
        _apply_strides(reader.read_tensors(expect(structure, "tensors", dict)), expect(structure, "strides", dict)),
        replace(state, moments=moments),
        reader.read_tensors(expect(structure, "gradients", dict)),
    )


PROGRESS: Kind[TrainingProgress] = Kind("training", _write_progress, _read_progress)


@dataclass
class DiskJobCheckpoint:
    """The stored progress of one job of an order (``training.jobs.JobCheckpoint``).

    Args:
        key: What the job was computed from; the progress of a job with another key is not used.
        steps: Number of optimizer steps between two checkpoints; None: any.
        seconds: Number of seconds between two checkpoints; None: any.
    """

    path: Path
    key: str
    round: int
    steps: int | None
    seconds: float | None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._last_steps, self._last_time = 0, self.clock()

    def load(self) -> TrainingProgress | None:
        """Load the progress; damaged progress is reported in the log and not used."""
        if not self.path.is_file():
            return None
        try:
            progress = PROGRESS.decode(read_bytes(self.path), self.key, self.round)
        except ValueError as error:
            log.warning("round %d: the training starts over, because %s %s", self.round + 1, self.path, error)
            return None
        self._last_steps = progress.totals.steps
        log.info("round %d: training continues after step %d", self.round + 1, progress.totals.steps)
        return progress

    def is_due(self, steps: int) -> bool:
        """Return whether enough steps or enough time have passed since the last checkpoint."""
        by_steps = self.steps is not None and steps - self._last_steps >= self.steps
        return by_steps or (self.seconds is not None and self.clock() - self._last_time >= self.seconds)

    def store(self, progress: TrainingProgress) -> None:
        """Replace the stored progress atomically.

        A disk that refuses to write is reported in the log, and training goes on: it needs no checkpoint.
        """
        try:
            with convert_disk_errors(self.path.parent, "free some space on the node"):
                write_atomic(self.path, PROGRESS.encode(self.key, self.round, progress), mode=0o600)
        except FedspanError as error:
            log.warning("round %d: no checkpoint after step %d: %s", self.round + 1, progress.totals.steps, error)
        self._last_steps, self._last_time = progress.totals.steps, self.clock()


class JobCheckpoints:
    """The checkpoints of a client's newest order; those of an older order are deleted when it is carried out.

    Args:
        context: What all orders of the run depend on, such as a digest of its config; progress of another one is not
            used.
        steps: Number of optimizer steps between two checkpoints; None: any.
        minutes: Number of minutes between two checkpoints; None: any.
    """

    def __init__(self, folder: Path, context: str, steps: int | None, minutes: float | None) -> None:
        self.folder, self.context, self.steps = folder, context, steps
        self.seconds = None if minutes is None else 60 * minutes

    def open(self, order: Order, number: int) -> DiskJobCheckpoint:
        """Return the checkpoint of an order's job.

        Args:
            order: The order. An order that repeats a round with the same message continues its training.
            number: Number of the job within the order, from 0.
        """
        key = hashlib.sha256(f"{self.context} {order.key}".encode()).hexdigest()[:32]
        with convert_disk_errors(self.folder, "free some space on the node"):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for path in self.folder.iterdir():
                if not path.name.startswith(key):
                    remove(path)
        return DiskJobCheckpoint(
            self.folder / f"{key}-{number}.safetensors", f"{key}-{number}", order.round, self.steps, self.seconds
        )

    def clear(self) -> None:
        """Delete all progress."""
        with suppress(OSError):  # what stays is deleted by the next order to train
            remove(self.folder)
