"""Slots of stacked clients, and which clients share a stack."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from fedspan.core.tensors import EXTRAS, create_generator, group_by_layer, is_extra, select, to_device
from fedspan.core.values import OptimizerState, Trained
from fedspan.tasks.task import Examples
from fedspan.training.batching import draw_job_batches
from fedspan.training.config import TrainingSettings
from fedspan.training.jobs import Assignment, build_not_finite_error
from fedspan.training.optimizers import Layout, build_optimizer_spec, join_states


class SharedTensors:
    """Tensors that do not train and are equal in many clients: one copy of each on the device.

    The first client's tensors are the shared ones. Of each, a copy remains where it came from, for comparison: on an
    accelerator, that takes as much of the host's memory.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, tuple[Tensor, Tensor]] = {}  # in the memory that they came from, and on the device

    def get(self, name: str, value: Tensor, device: torch.device) -> Tensor:
        """Return a copy of a tensor on a device: the first client's, if this one is equal, or one of its own."""
        if name in self._tensors:
            source, copied = self._tensors[name]
            if source.device == value.device and source.dtype == value.dtype and torch.equal(source, value):
                return copied
            return _copy_to(device, value)
        copied = _copy_to(device, value)
        source = copied if copied.device == value.device else value.detach().clone()
        self._tensors[name] = source, copied
        return copied

    def clear(self) -> None:
        """Forget all tensors."""
        self._tensors.clear()


def _copy_to(device: torch.device, value: Tensor) -> Tensor:
    detached = value.detach()
    moved = to_device(detached, device)
    return moved.clone() if moved is detached else moved


class ClientSlot:
    """A client's tensors, moments and position in its batches; ``place_rows`` fills its rows.

    Args:
        examples: The data set that its indices point into.
        class_terms: Per-class inputs of the loss (weights, logit offsets), (labels,), by the key of a batch's rows;
            all clients have the same keys.
        shared: Tensors that do not train, which clients with equal ones share; the slot adds its own.
    """

    def __init__(
        self,
        assignment: Assignment,
        layout: Layout,
        settings: TrainingSettings,
        seed: int,
        examples: Examples,
        device: torch.device,
        class_terms: Mapping[str, Tensor],
        shared: SharedTensors,
    ) -> None:
        job = assignment.job
        self.class_terms = class_terms
        self.assignment, self.layout, self.settings = assignment, layout, settings
        self.spec = build_optimizer_spec(assignment, settings)
        self.batches = list(draw_job_batches(settings, seed, assignment, examples))
        self.costs = [int(examples.lengths[batch].max()) for batch in self.batches]
        self.batches_done = 0  # batches used so far
        self.steps = 0  # optimizer steps so far
        self.frozen = {
            name: _copy_to(device, value) if name in job.buffers else shared.get(name, value, device)
            for name, value in _order(job.tensors).items()
            if name not in layout.names
        }
        self._names = tuple(_order(job.tensors))
        self._returns_moments = job.want_moments or settings.optimizer_state == "keep"
        state = join_states(assignment.moments, job.optimizer_state) or OptimizerState()
        self._initial = state
        names = ("exp_avg", "exp_avg_sq") if self.spec.name == "adamw" else ("momentum_buffer",)
        self.moments = names if self.spec.name == "adamw" or self.spec.momentum else ()  # kinds, which name rows
        first = state.moments.get("exp_avg", {})
        self.counts = np.array([state.steps.get(name, 0) for name in layout.names], dtype=np.int64)
        # If the first moment starts at zero and the second one is handed over, the first is corrected from here on.
        self.steps_before = np.array([0 if n in first else state.steps.get(n, 0) for n in layout.names], dtype=np.int64)
        optional = {"mask": job.masks, "offset": job.gradient_offset}
        self.sources = {"values": job.tensors, **{kind: state.moments.get(kind, {}) for kind in self.moments}}
        self.sources |= {name: tensors for name, tensors in optional.items() if tensors}
        # On the device, (P,): those of `sources`, `gathered` (gradient of a step's batches), `gradient` (of all steps).
        self.rows: dict[str, Tensor] = {}
        self._changed = set(job.buffers)  # names in `frozen` whose values may differ from the job's
        self.penalties = tuple(penalty.to(device) for penalty in job.penalties)
        self.kind = 0  # clients of one kind can share a pass; set by the engine
        self.losses: list[Tensor] = []  # of the batches so far, scalars that are read when the job has ended

    @property
    def is_probe(self) -> bool:
        """Whether the job only measures its gradient."""
        return self.assignment.job.steps == 0

    @property
    def batches_left(self) -> int:
        """The number of batches left."""
        return len(self.batches) - self.batches_done

    @property
    def batch(self) -> np.ndarray:
        """The next batch."""
        return self.batches[self.batches_done]

    @property
    def cost(self) -> int:
        """Length of the next batch's longest example."""
        return self.costs[self.batches_done]

    @property
    def share(self) -> float:
        """Weight of the next batch in its step's gradient."""
        steps = self.settings.gradient_accumulation_steps
        return len(self.batch) / len(self.assignment.indices) if self.is_probe else 1 / steps

    def get_grouping_key(self) -> tuple[object, ...]:
        """Return the grouping key: clients with equal keys can share a pass."""
        job = self.assignment.job
        shapes = tuple((name, value.shape, value.dtype) for name, value in self.frozen.items())
        parametrization = tuple(job.parametrization.items())
        return self.layout, parametrization, shapes, job.buffers, self.spec, self.is_probe, not job.masks

    def has_equal_steps(self, active: np.ndarray) -> bool:
        """Return whether AdamW, with both bias corrections, has taken equally many steps with all moments.

        Args:
            active: Mask of the tensors that count, bool (N,).
        """
        counts = self.counts[active]
        equal = bool((counts == counts[0]).all()) and not self.steps_before.any()
        return self.spec.name == "adamw" and all(self.spec.bias_correction) and equal

    def get_tensors(self) -> dict[str, Tensor]:
        """Return the current tensors of the job; trainable ones are views."""
        trainable = self.layout.split_views(self.rows["values"])
        return {name: trainable[name] if name in trainable else self.frozen[name] for name in self._names}

    def get_moment(self, kind: str, name: str) -> Tensor:
        """Return a view of one tensor's moment; writing to it changes the optimizer."""
        return self.layout.split_views(self.rows[kind])[name]

    def update_tensors(self, live: Mapping[str, Tensor]) -> None:
        """Copy in tensors that were changed outside (by a projector refresh), new names included."""
        trainable = self.layout.split_views(self.rows["values"])
        for name, value in live.items():
            if name in trainable:
                trainable[name].copy_(value.detach())
            else:
                self.frozen[name] = value.detach().clone()  # extras live in the model, which other clients will use
                self._changed.add(name)
        self._names = (*self._names, *(name for name in live if name not in self._names))

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Add a gradient (P,) to a row of that name, which may not exist yet."""
        self.rows[name] = self.rows[name] + gradient if name in self.rows else gradient

    def list_results(self) -> dict[str, Tensor]:
        """Return what the job's result needs from the device, by the name of a row or tensor."""
        kinds = self.moments if self.steps and self._returns_moments else ()
        names = [name for name in ("values", *kinds, "gradient") if name in self.rows]
        return {**select(self.rows, names), **select(self.frozen, sorted(self._changed))}

    def build_result(self, losses: Sequence[float], read: Mapping[str, Tensor]) -> Trained:
        """Return the result of the job, from the losses of its batches and ``list_results`` on the CPU."""
        assignment = self.assignment
        for value in losses:
            if not math.isfinite(value):
                raise build_not_finite_error(assignment, value)
        sizes = [len(batch) for batch in self.batches]
        initial = self._initial.moments if self._returns_moments else {}
        moments = {kind: dict(values) for kind, values in initial.items()}
        counts = dict(self._initial.steps)
        taken = [group.count_steps(self.steps) for group in self.layout.groups]
        stepped = [name for name, steps in zip(self.layout.names, taken, strict=True) if steps]
        if stepped:
            steps = dict(zip(self.layout.names, self.counts.tolist(), strict=True))
            counts.update({name: steps[name] for name in stepped})
            for kind in self.moments if self._returns_moments else ():
                moments.setdefault(kind, {}).update(select(self.layout.split_views(read[kind]), stepped))
        tensors = {**assignment.job.tensors, **read, **self.layout.split_views(read["values"])}
        gradient = read.get("gradient")
        return Trained(
            tensors=_copy(select(tensors, self._names)),
            optimizer_state=OptimizerState({kind: _copy(values) for kind, values in moments.items()}, counts),
            steps=self.steps,
            lr_sum=assignment.lr * self.steps,
            gradient={} if gradient is None else _copy(self.layout.split_views(gradient / max(1, self.steps))),
            metrics={
                "loss": sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes),
                "examples": float(sum(sizes)),
            },
        )


def place_rows(slots: Iterable[ClientSlot], device: torch.device) -> None:
    """Fill the rows of opened slots, those of one layout together (``Layout.copy_rows``)."""
    groups: dict[tuple[Layout, str], list[ClientSlot]] = {}
    for slot in slots:
        for name in slot.sources:
            groups.setdefault((slot.layout, name), []).append(slot)
    for (layout, name), group in groups.items():
        rows = layout.copy_rows([slot.sources[name] for slot in group], device, float(name == "mask"))
        for slot, row in zip(group, rows, strict=True):
            slot.rows[name] = row


def build_results(slots: Sequence[ClientSlot]) -> Iterator[Trained]:
    """Yield the results of clients of one kind; what they have by the same name leaves an accelerator in one copy."""
    if not slots:
        return
    losses = iter(torch.stack([loss for slot in slots for loss in slot.losses]).double().tolist())
    parts = [slot.list_results() for slot in slots]
    if slots[0].rows["values"].device.type != "cpu":
        for name in dict.fromkeys(name for part in parts for name in part):
            owners = [part for part in parts if name in part]
            for part, row in zip(owners, torch.stack([part[name] for part in owners]).cpu(), strict=True):
                part[name] = row
    for slot, part in zip(slots, parts, strict=True):
        yield slot.build_result(list(islice(losses, len(slot.losses))), part)


def _order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Order a job's tensors as an installed model does: layer by layer, then the extras."""
    ordered = {
        f"{layer}/{slot}": value
        for layer, slots in group_by_layer(tensors).items()
        if layer != EXTRAS
        for slot, value in slots.items()
    }
    ordered.update({name: value for name, value in tensors.items() if is_extra(name)})
    return ordered


def _copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, value in tensors.items()
    }


_LENGTH_RATIO = 1.2
"""Batches may share a pass if their longest examples differ by no more than this factor: padding costs time too."""


def select_group(slots: Sequence[ClientSlot], clients_per_pass: int, padded: bool = True) -> list[ClientSlot]:
    """Select the clients of the next pass: the one with the most batches left, and those with the most similar ones."""
    leader = max(slots, key=lambda slot: slot.batches_left)
    candidates = [slot for slot in slots if slot.kind == leader.kind]
    if leader.assignment.job.buffers:  # norm layers that use statistics of their batch
        candidates = [slot for slot in candidates if len(slot.batch) == len(leader.batch)]
    low, high = leader.cost / _LENGTH_RATIO, leader.cost * _LENGTH_RATIO
    candidates = [slot for slot in candidates if slot is not leader and (not padded or low <= slot.cost <= high)]
    candidates.sort(key=lambda slot: (abs(len(slot.batch) - len(leader.batch)), abs(slot.cost - leader.cost)))
    selected = {id(slot) for slot in (leader, *candidates[: clients_per_pass - 1])}
    return [slot for slot in slots if id(slot) in selected]


def stack_frozen(group: Sequence[ClientSlot]) -> dict[str, Tensor]:
    """Stack the tensors that do not train, (C, ...) each; tensors that all clients share are not copied."""
    stacked: dict[str, Tensor] = {}
    for name, first in group[0].frozen.items():
        values = [slot.frozen[name] for slot in group]
        shared = all(value is first for value in values) and len(values) > 1
        stacked[name] = first.expand(len(values), *first.shape) if shared else torch.stack(values)
    return stacked


def perturb(tensors: Mapping[str, Tensor], names: Iterable[str], key: str) -> dict[str, Tensor]:
    """Copy a client's tensors with the trainable ones slightly moved: where B is 0, all outputs would be equal."""
    rng = create_generator(0, "verify", key)
    tensors = {name: value.clone() for name, value in tensors.items()}
    for name in names:
        noise = torch.randn(tensors[name].shape, generator=rng) * 0.02
        tensors[name] = tensors[name] + noise.to(tensors[name])
    return tensors
