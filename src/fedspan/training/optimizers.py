"""Optimizers of local training: one client's, and the same over stacked clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from fedspan.core.smoothing import smooth
from fedspan.core.tensors import Tensors, to_device
from fedspan.core.values import Group, Job, OptimizerSpec, OptimizerState
from fedspan.training.config import TrainingSettings
from fedspan.training.jobs import Assignment


def build_optimizer_spec(assignment: Assignment, settings: TrainingSettings) -> OptimizerSpec:
    """Return the optimizer settings of a job."""
    changes = {"lr": assignment.lr, **assignment.job.optimizer}
    return replace(settings.optimizer_spec, **changes)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class _Hyper:
    lr: float
    weight_decay: float


class LocalOptimizer:
    """One client's optimizer for one job.

    Args:
        tensors: Live tensors by name; the trainable ones are updated in place.
        state: Initial moments; names that do not train are carried through unchanged.
        masks: 0/1 tensors; masked entries neither move nor accumulate moments.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        groups: tuple[Group, ...],
        tensors: Mapping[str, Tensor],
        state: OptimizerState | None = None,
        masks: Mapping[str, Tensor] | None = None,
    ) -> None:
        if spec.name not in ("sgd", "adamw"):
            raise ValueError(f"unknown optimizer {spec.name!r}: sgd or adamw")
        self._spec = spec
        self._tensors = tensors
        self._hyper = {
            name: _Hyper(
                spec.lr * group.lr_scale,
                spec.weight_decay if group.weight_decay is None else group.weight_decay,
            )
            for group in groups
            for name in group.names
        }
        state = state or OptimizerState()
        self.restore(state)
        # If the first moment starts at zero and the second one is handed over, the first is corrected from here on.
        self._before = {n: 0 if n in state.moments.get("exp_avg", {}) else steps for n, steps in state.steps.items()}
        self._masks = {name: mask.to(tensors[name].device) for name, mask in (masks or {}).items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The trainable tensors' names."""
        return tuple(self._hyper)

    def restore(self, state: OptimizerState) -> None:
        """Continue from the state that ``copy_state`` returned for an optimizer of the same job."""
        device = {name: tensor.device for name, tensor in self._tensors.items()}
        self._moments = {
            kind: {name: value.to(device.get(name, value.device), copy=True) for name, value in values.items()}
            for kind, values in state.moments.items()
        }
        self._steps = dict(state.steps)

    def get_moment(self, kind: str, name: str) -> Tensor:
        """Return a live moment (created as zeros on first use); writing to it changes the optimizer."""
        moments = self._moments.setdefault(kind, {})
        if name not in moments:
            moments[name] = torch.zeros_like(self._tensors[name])
        return moments[name]

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Update every trainable tensor once that has a gradient here; others do not change, nor do their moments."""
        for name, hyper in self._hyper.items():
            if name not in gradients:
                continue
            gradient = gradients[name]
            mask = self._masks.get(name)
            if self._spec.name == "sgd" and hyper.weight_decay:
                gradient = gradient.add(self._tensors[name], alpha=hyper.weight_decay)
            if mask is not None:
                gradient = gradient * mask
            self._steps[name] = self._steps.get(name, 0) + 1
            before = self._tensors[name].clone() if mask is not None else None
            if self._spec.name == "sgd":
                self._step_sgd(name, gradient, hyper)
            else:
                self._step_adamw(name, gradient, hyper)
            if mask is not None and before is not None:
                self._tensors[name].copy_(torch.where(mask.bool(), self._tensors[name], before))

    def _step_sgd(self, name: str, gradient: Tensor, hyper: _Hyper) -> None:
        tensor, spec = self._tensors[name], self._spec
        if spec.momentum:
            buffer = self.get_moment("momentum_buffer", name)
            # Starting from zero, this equals torch's first step (buffer = gradient), since dampening is 0.
            gradient = buffer.mul_(spec.momentum).add_(gradient)
        tensor.add_(gradient, alpha=-hyper.lr)

    def _step_adamw(self, name: str, gradient: Tensor, hyper: _Hyper) -> None:
        tensor, spec, step = self._tensors[name], self._spec, self._steps[name]
        beta1, beta2 = spec.betas
        first, second = self.get_moment("exp_avg", name), self.get_moment("exp_avg_sq", name)
        tensor.mul_(1 - hyper.lr * hyper.weight_decay)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correct1 = 1 - beta1 ** (step - self._before.get(name, 0)) if spec.bias_correction[0] else 1.0
        correct2 = 1 - beta2**step if spec.bias_correction[1] else 1.0
        denominator = (second.sqrt() / math.sqrt(correct2)).add_(spec.eps)
        tensor.addcdiv_(first, denominator, value=-hyper.lr / correct1)

    def copy_state(self) -> OptimizerState:
        """Return moments and step counts, copied to the CPU."""
        return OptimizerState(
            {
                kind: {name: value.detach().to("cpu", copy=True) for name, value in values.items()}
                for kind, values in self._moments.items()
            },
            dict(self._steps),
        )


def join_states(stored: OptimizerState | None, current: OptimizerState | None) -> OptimizerState | None:
    """Merge the stored moments of earlier rounds with those of the job, which take precedence."""
    if stored is None or current is None:
        return current or stored
    kinds = {**stored.moments, **current.moments}
    moments = {kind: {**stored.moments.get(kind, {}), **current.moments.get(kind, {})} for kind in kinds}
    return OptimizerState(moments, {**stored.steps, **current.steps})


def clip(gradients: dict[str, Tensor], max_norm: float) -> None:
    """Scale all gradients together so that their norm is at most ``max_norm``, as ``clip_grad_norm_`` does."""
    norms = torch.stack([gradient.norm() for gradient in gradients.values()])
    factor = torch.clamp(max_norm / (norms.norm() + 1e-6), max=1.0)
    for name in gradients:
        gradients[name] = gradients[name] * factor


@dataclass(frozen=True)
class Segment:
    """A range of columns, from ``start`` to ``stop``, that share optimizer settings."""

    start: int
    stop: int
    lr: float
    weight_decay: float
    group: Group
    """The turns of the columns' groups, as a group without names or other settings."""


@dataclass(frozen=True)
class Layout:
    """The position of each trainable tensor in a client's row."""

    names: tuple[str, ...]
    """Names of the tensors, in their order."""
    shapes: tuple[torch.Size, ...]
    segments: tuple[Segment, ...]
    """Learning rates, weight decays and turns; together they cover all columns."""
    dtype: torch.dtype
    groups: tuple[Group, ...]
    """Group of each tensor, without its names."""

    @classmethod
    def build(cls, job: Job, spec: OptimizerSpec) -> Layout | None:
        """Build a job's layout; None if its trainable tensors differ in number format, or if there are none."""
        names = job.trainable_names
        dtypes = {job.tensors[name].dtype for name in names}
        if len(dtypes) != 1:
            return None
        segments: list[Segment] = []
        start = 0
        for group in job.trainable:
            size = sum(job.tensors[name].numel() for name in group.names)
            decay = spec.weight_decay if group.weight_decay is None else group.weight_decay
            turns = Group((), turns=group.turns, turn=group.turn)
            segment = Segment(start, start + size, spec.lr * group.lr_scale, decay, turns)
            start += size
            last = segments[-1] if segments else None
            if last is not None and replace(segment, start=last.start) == replace(last, stop=segment.stop):
                segments[-1] = replace(last, stop=segment.stop)
            else:
                segments.append(segment)
        shapes = tuple(job.tensors[name].shape for name in names)
        groups = tuple(replace(group, names=()) for group in job.trainable for _ in group.names)
        return cls(names, shapes, tuple(segments), dtypes.pop(), groups)

    @property
    def turns(self) -> int:
        """Number of steps after which the turns of all groups repeat."""
        return math.lcm(*(group.turns for group in self.groups))

    def list_active_segments(self, step: int) -> tuple[Segment, ...]:
        """Return the segments that train in a step, counted from 0."""
        return tuple(segment for segment in self.segments if segment.group.is_active(step))

    def find_active_tensors(self, step: int) -> np.ndarray:
        """Return which tensors train in a step, counted from 0: bool, (N,)."""
        return np.array([group.is_active(step) for group in self.groups], dtype=bool)

    def drop_inactive(self, gradients: Tensor, step: int) -> Tensor:
        """Set the gradients (C, P) of tensors that do not train in a step to 0."""
        active = self.list_active_segments(step)
        if len(active) == len(self.segments):
            return gradients
        dropped = torch.zeros_like(gradients)
        for segment in active:
            columns = slice(segment.start, segment.stop)
            dropped[:, columns] = gradients[:, columns]
        return dropped

    def smooth(self, gradients: Tensor) -> Tensor:
        """Smooth the gradients (C, P) of tensors whose group asks for it."""
        if all(group.smoothed_axis is None for group in self.groups):
            return gradients
        parts = self.split_views(gradients)
        smoothed = [
            parts[name] if group.smoothed_axis is None else smooth(parts[name], group.smoothed_axis + 1)
            for name, group in zip(self.names, self.groups, strict=True)
        ]
        return self.join(smoothed, len(gradients), gradients)

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each tensor."""
        return [shape.numel() for shape in self.shapes]

    def copy_rows(self, clients: Sequence[Tensors], device: torch.device, missing: float = 0.0) -> list[Tensor]:
        """Copy clients' tensors into a row (P,) each; missing tensors are filled with ``missing``.

        Clients with the same tensor objects share the copy to the device.
        """
        first = clients[0]
        if any(tensors.get(name) is not first.get(name) for tensors in clients for name in self.names):
            return [row for tensors in clients for row in self.copy_rows([tensors], device, missing)]
        if first.keys().isdisjoint(self.names):
            return [torch.full((sum(self.sizes),), missing, dtype=self.dtype, device=device) for _ in clients]
        parts = [
            first[name].detach().to(self.dtype).reshape(-1)
            if name in first
            else torch.full((size,), missing, dtype=self.dtype)
            for name, size in zip(self.names, self.sizes, strict=True)
        ]
        row = to_device(torch.cat(parts), device)  # in one copy
        return [row, *(row.clone() for _ in clients[1:])]

    def split_views(self, rows: Tensor) -> dict[str, Tensor]:
        """Return views of the tensors inside rows (C, P), each (C, ...), or inside one row (P,)."""
        parts, first = rows.split(self.sizes, -1), rows.shape[:-1]
        return {
            name: part.view(first + shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def join(self, gradients: Sequence[Tensor | None], clients: int, like: Tensor) -> Tensor:
        """Join gradients by tensor, (C, ...) each, into rows (C, P); None is zero."""
        parts = [
            like.new_zeros(clients, size) if gradient is None else gradient.reshape(clients, size)
            for gradient, size in zip(gradients, self.sizes, strict=True)
        ]
        return torch.cat(parts, 1)


def clip_rows(gradients: Tensor, max_norm: float) -> Tensor:
    """Scale each client's gradient (C, P) so that its norm is at most ``max_norm``, like ``clip_grad_norm_``."""
    norms = gradients.norm(dim=1, keepdim=True)
    return gradients * torch.clamp(max_norm / (norms + 1e-6), max=1.0)


def step_rows(
    spec: OptimizerSpec,
    layout: Layout,
    values: Tensor,
    gradients: Tensor,
    moments: Mapping[str, Tensor],
    steps: np.ndarray,
    before: np.ndarray,
    masks: Tensor | None = None,
    segments: Sequence[Segment] | None = None,
) -> None:
    """Update every client's tensors once, in place.

    Args:
        spec: Algorithm; the layout's segments hold its learning rate and weight decay.
        values: Trainable values (C, P), updated in place.
        gradients: Gradients (C, P); not changed.
        moments: Moments by kind, (C, P) each, updated in place.
        steps: Steps taken by each tensor, this one included, int64 (C, N); 0 for one that never trained.
        before: Steps taken before the first moment began, int64 (C, N).
        masks: Masks (C, P) of 0 and 1; masked entries neither move nor accumulate moments.
        segments: The layout's segments that train in this step; None: all of them.
    """
    values_before = None if masks is None else values.clone()
    steps = np.maximum(steps, before + 1)  # of a tensor that never trained, nothing is read
    for segment in layout.segments if segments is None else segments:
        columns = slice(segment.start, segment.stop)
        segment_values, gradient = values[:, columns], gradients[:, columns]
        mask = None if masks is None else masks[:, columns]
        if spec.name == "sgd":
            if segment.weight_decay:
                gradient = gradient.add(segment_values, alpha=segment.weight_decay)
            if mask is not None:
                gradient = gradient * mask
            if spec.momentum:
                gradient = moments["momentum_buffer"][:, columns].mul_(spec.momentum).add_(gradient)
            segment_values.add_(gradient, alpha=-segment.lr)
            continue
        if mask is not None:
            gradient = gradient * mask
        first, second = moments["exp_avg"][:, columns], moments["exp_avg_sq"][:, columns]
        beta1, beta2 = spec.betas
        segment_values.mul_(1 - segment.lr * segment.weight_decay)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        ones = np.ones(steps.shape)
        correct1 = 1 - beta1 ** (steps - before) if spec.bias_correction[0] else ones
        correct2 = 1 - beta2**steps if spec.bias_correction[1] else ones
        root2 = _expand_columns(1 / np.sqrt(correct2), layout, segment_values, segment)
        denominator = second.sqrt().mul_(root2).add_(spec.eps)
        segment_values.sub_(
            first / denominator * _expand_columns(segment.lr / correct1, layout, segment_values, segment)
        )
    if masks is not None and values_before is not None:
        values.copy_(torch.where(masks.bool(), values, values_before))


def run_fused_step(
    spec: OptimizerSpec,
    layout: Layout,
    values: Sequence[Tensor],
    gradients: Tensor,
    moments: Mapping[str, Sequence[Tensor]],
    steps: Sequence[int],
    segments: Sequence[Segment] | None = None,
) -> None:
    """Run ``step_rows`` by PyTorch's fused AdamW, with both bias corrections: one pass over memory, no copies.

    Args:
        spec: Algorithm; the segments hold its learning rate and weight decay.
        values: Trainable values (P,) of each client, updated in place.
        gradients: Gradients (C, P); not changed.
        moments: Moments by kind, (P,) of each client, updated in place.
        steps: Steps taken by each client, this one included; the same for all of its tensors and both moments.
        segments: The layout's segments that train in this step; None: all of them.
    """
    counts = to_device(torch.tensor(steps, dtype=torch.float32) - 1, gradients.device)  # adamw increments them
    for segment in layout.segments if segments is None else segments:
        columns = slice(segment.start, segment.stop)
        adamw(
            [value[columns] for value in values],
            [gradient[columns] for gradient in gradients],
            [moment[columns] for moment in moments["exp_avg"]],
            [moment[columns] for moment in moments["exp_avg_sq"]],
            [],
            list(counts.clone().unbind()),
            fused=True,
            amsgrad=False,
            beta1=spec.betas[0],
            beta2=spec.betas[1],
            lr=segment.lr,
            weight_decay=segment.weight_decay,
            eps=spec.eps,
            maximize=False,
        )


def _expand_columns(factors: np.ndarray, layout: Layout, like: Tensor, segment: Segment) -> Tensor:
    """Expand factors (C, N): to (C, 1) if all tensors of each client share one factor, else to one a column."""
    columns = to_device(torch.from_numpy(factors).to(like.dtype), like.device)
    if (factors == factors[:, :1]).all():
        return columns[:, :1]
    sizes = to_device(torch.tensor(layout.sizes), like.device)
    return columns.repeat_interleave(sizes, 1, output_size=sum(layout.sizes))[:, segment.start : segment.stop]
