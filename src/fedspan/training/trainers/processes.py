"""The processes in which a user's trainer trains: rank 0 represents the client, the others train the same jobs.

Rank 0 announces each task, as a header in JSON and tensors, both broadcast as bytes; nothing is pickled. Gradients are
averaged by the trainer's own DDP, or, with FSDP, before the optimizer steps. It steps in rank 0, which broadcasts the
new values.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from fedspan.core import parametrization as parametrizations
from fedspan.core.base import BaseUpdate, Delta
from fedspan.core.lowrank import LowRank
from fedspan.core.parametrization import Parametrization
from fedspan.core.values import Group, Job
from fedspan.errors import FedspanError

_WAIT = timedelta(days=365)
"""How long a process waits for the next task."""

_WAIT_IN_TASK = timedelta(hours=1)
"""How long a process waits for the others within a task."""

_FORMS = {
    name: form
    for name, form in vars(parametrizations).items()
    if isinstance(form, type) and form.__module__ == parametrizations.__name__
}
"""The package's own parametrizations, by name."""

Announcement = tuple[dict[str, Any], dict[str, Tensor]]
"""A task's header and its tensors by name."""


def count_processes() -> int:
    """Return in how many processes this script runs (``torchrun``, ``accelerate launch``)."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


class Processes:
    """The processes of one trainer. Every process makes this object at the same point of the script."""

    def __init__(self) -> None:
        if not distributed.is_initialized():
            problem = f"the script runs in {count_processes()} processes, and its trainer in one of them only"
            raise FedspanError("trainer", None, "a transformers.Trainer, which trains in all of them", problem=problem)
        self.rank = distributed.get_rank()
        """This process; 0 represents the client."""
        self.failure: str | None = None
        """Why this process can train no further task; None: it can."""
        self.is_busy = False
        """Whether, in rank 0, a task was announced that the processes have not finished."""
        self._group, self._task_group = _make_group(_WAIT), _make_group(_WAIT_IN_TASK)
        self._base: BaseUpdate | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this process represents the client."""
        return self.rank == 0

    def announce(self, task: str, tensors: Mapping[str, Tensor] | None = None, **header: Any) -> None:
        """Send a task from rank 0 to the other processes.

        Args:
            tensors: Tensors of the task by name; their values need not be contiguous, nor on the CPU.

        Raises:
            FedspanError: If another process ended, or the last task was not finished.
        """
        if self.is_busy:  # the others are in the middle of it, and would wait for rank 0 there
            problem = self.failure or "the last task was interrupted, and the other processes did not finish it"
            raise FedspanError("trainer", None, problem=problem)
        self.is_busy = True
        tensors = tensors or {}
        kinds = [[name, str(value.dtype).removeprefix("torch."), list(value.shape)] for name, value in tensors.items()]
        text = json.dumps({"task": task, "tensors": kinds, **header}).encode()
        try:
            self._broadcast(torch.tensor(len(text)))
            self._broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8))
            for value in tensors.values():
                self._broadcast(value.detach().to("cpu").contiguous())
        except RuntimeError as error:
            self.failure = "another process ended, for the reason in its output"
            raise FedspanError("trainer", None, problem=self.failure) from error

    def announce_job(self, task: str, job: Job, base: BaseUpdate, **header: Any) -> None:
        """Send a job from rank 0 to the other processes, with the base if it is not that of the last job.

        Raises:
            FedspanError: If the other processes cannot train the job (nothing was sent), or one of them ended.
        """
        if task == "train" and job.decay_base:
            problem = "it decays the frozen base (decay_base), and only the base of process 0 would change"
            raise FedspanError("trainer", None, "a trainer in one process", problem=problem)
        described, tensors = describe_job(job, None if base is self._base else base)
        self._base = base
        self.announce(task, tensors, **described, **header)

    def receive(self) -> Announcement:
        """Wait for the next task of rank 0, in another process."""
        try:
            size = torch.zeros((), dtype=torch.int64)
            self._broadcast(size)
            text = torch.empty(int(size), dtype=torch.uint8)
            self._broadcast(text)
            header = json.loads(bytes(text.numpy()))
            tensors: dict[str, Tensor] = {}
            for name, dtype, shape in header.pop("tensors"):
                tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                self._broadcast(tensors[name])
        except RuntimeError as error:
            problem = "process 0, which represents this client, ended. See its output, and start the script again"
            raise FedspanError("trainer", None, problem=problem) from error
        return header, tensors

    @contextmanager
    def run_together(self) -> Generator[None]:
        """Run a task that every process trains within this context; where it fails, no process can continue.

        A process that fails or is interrupted leaves the others in the middle of a step, so it must end, and its end
        fails theirs.
        """
        try:
            yield
            self.finish()  # fails if another process has ended
        except Exception as error:
            self.failure = f"process {self.rank} failed ({type(error).__name__}: {error})"
            raise

    def finish(self) -> None:
        """Finish a task in all processes.

        Raises:
            FedspanError: If another process ended, or is at another point of the task.
        """
        self.collect(0, "end of a task")
        self.is_busy = False

    def close(self) -> None:
        """End the other processes, from rank 0: at once if they wait for a task, else when this process ends.

        An interrupt (``KeyboardInterrupt``, ``SystemExit``) leaves the others in the middle of a task, where they would
        not receive another one.
        """
        if not self.is_busy:
            self.announce("end")

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors of rank 0 into those of the other processes."""
        with torch.no_grad():
            for value in tensors:
                copy = value.detach().to("cpu").contiguous()
                self._broadcast(copy, self._task_group)
                if not self.is_leader:
                    value.copy_(copy)

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their means over all processes; each calls this at the same time.

        The trainer's own process group computes them on the tensors' device.
        """
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for value in tensors:
            by_dtype.setdefault(value.dtype, []).append(value)
        for values in by_dtype.values():
            means = torch.cat([value.flatten() for value in values])
            distributed.all_reduce(means)
            means /= distributed.get_world_size()
            for value, mean in zip(values, means.split([value.numel() for value in values]), strict=True):
                value.copy_(mean.view_as(value))

    def sum(self, count: float, purpose: str) -> float:
        """Return the sum of a number over all processes; each calls this at the same time (``collect``)."""
        return math.fsum(self.collect(count, purpose))

    def compute_mean(self, value: float, purpose: str) -> float:
        """Return the mean of a number over all processes; each calls this at the same time (``collect``)."""
        return self.sum(value, purpose) / distributed.get_world_size()

    def collect(self, value: float, purpose: str) -> list[float]:
        """Return a number of every process, by rank; each calls this at the same time.

        Args:
            purpose: What the number is; all processes must give the same.

        Raises:
            FedspanError: If another process ended, or gives a number for another purpose.
        """
        own_value = torch.tensor([value, zlib.crc32(purpose.encode())], dtype=torch.float64)
        gathered = [torch.empty_like(own_value) for _ in range(distributed.get_world_size())]
        try:
            distributed.all_gather(gathered, own_value, group=self._task_group)
        except RuntimeError as error:
            self.failure = "another process ended, for the reason in its output, or did not answer in time"
            raise FedspanError("trainer", None, problem=self.failure) from error
        if any(other[1] != own_value[1] for other in gathered):
            self.failure = (
                f"process {self.rank} was at {purpose!r} and another process was not. Every process must have the "
                "same number of batches"
            )
            raise FedspanError("trainer", None, problem=self.failure)
        return [float(other[0]) for other in gathered]

    def _broadcast(self, value: Tensor, group: distributed.ProcessGroup | None = None) -> None:
        if value.numel():
            distributed.broadcast(value.reshape(-1).view(torch.uint8), 0, group=group or self._group)


def _make_group(timeout: timedelta) -> distributed.ProcessGroup:
    group = distributed.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, distributed.ProcessGroup)
    return group


def describe_job(job: Job, base: BaseUpdate | None) -> Announcement:
    """Describe a job for the processes that do not step: what only the optimizer needs (masks, moments) is left out.

    Args:
        base: The base on which it trains; None: that of the last job.

    Returns:
        Plain values, and tensors by name.

    Raises:
        FedspanError: If a layer's parametrization is not one of fedspan's own, by which the others would build it.
    """
    for layer, form in job.parametrization.items():
        kind = type(form).__name__
        if _FORMS.get(kind) is not type(form):
            problem = f"the parametrization of {layer} is a class of your own, which only process 0 has"
            raise FedspanError("trainer", kind, "a trainer in one process", problem=problem)
    tensors = {f"job/{name}": value for name, value in job.tensors.items()}
    header: dict[str, Any] = {
        "phase": job.phase,
        "steps": job.steps,
        "epochs": job.epochs,
        "trainable": job.trainable_names,
        "parametrization": {
            layer: [type(form).__name__, asdict(form)]  # pyright: ignore[reportArgumentType]
            for layer, form in job.parametrization.items()
        },
        "base": None,
    }
    if base is not None:
        layers: dict[str, float | None] = {}
        for layer, delta in base.total.items():
            layers[layer] = delta.scale if isinstance(delta, LowRank) else None
            parts = {"B": delta.B, "A": delta.A} if isinstance(delta, LowRank) else {"W": delta}
            tensors |= {f"base/{layer}/{slot}": value for slot, value in parts.items()}
        header["base"] = {"round": base.round, "rho": base.rho, "layers": layers}
    return header, tensors


def read_job(announced: Announcement, base: BaseUpdate) -> tuple[Job, BaseUpdate]:
    """Read a job of ``describe_job``.

    Args:
        announced: Plain values and tensors of the job, as rank 0 announced them.

    Returns:
        The job without what only the optimizer needs, and its base.
    """
    header, tensors = announced
    forms: dict[str, Parametrization] = {}
    for layer, (kind, fields) in header["parametrization"].items():
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
        forms[layer] = _FORMS[kind](**values)
    job = Job(
        forms,
        {name.removeprefix("job/"): value for name, value in tensors.items() if name.startswith("job/")},
        (Group(tuple(header["trainable"])),),
        steps=header["steps"],
        epochs=header["epochs"],
        phase=header["phase"],
    )
    if header["base"] is None:
        return job, base
    total: dict[str, Delta] = {}
    for layer, scale in header["base"]["layers"].items():
        part = f"base/{layer}/"
        total[layer] = (
            tensors[part + "W"] if scale is None else LowRank(tensors[part + "B"], tensors[part + "A"], scale)
        )
    return job, BaseUpdate(header["base"]["round"], header["base"]["rho"], total)
