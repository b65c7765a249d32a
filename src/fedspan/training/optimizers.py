"""Local optimizers over dicts of named tensors: SGD and AdamW, each step equal to that of ``torch.optim``.

Why not ``torch.optim``: methods hand over initial second moments, switch bias correction off per moment, mask entries
and store moments by tensor name across rounds in which different tensors train; and state must be a plain value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedspan.core.values import Group, OptimizerSpec, OptimizerState

__all__ = ["LocalOptimizer", "clip", "join_states"]


@dataclass(frozen=True)
class _Hyper:
    lr: float
    weight_decay: float


class LocalOptimizer:
    """One client's optimizer for one job.

    Args:
        spec: Algorithm and hyperparameters.
        groups: Learning-rate multipliers and weight decay of the trainable tensors.
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
        device = {name: tensor.device for name, tensor in tensors.items()}
        state = state or OptimizerState()
        self._moments = {
            kind: {name: value.to(device.get(name, value.device), copy=True) for name, value in values.items()}
            for kind, values in state.moments.items()
        }
        self._steps = dict(state.steps)
        # If the first moment starts at zero and the second one is handed over, the first is corrected from here on.
        self._before = {n: 0 if n in state.moments.get("exp_avg", {}) else steps for n, steps in state.steps.items()}
        self._masks = {name: mask.to(device[name]) for name, mask in (masks or {}).items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The trainable tensors' names."""
        return tuple(self._hyper)

    def moment(self, kind: str, name: str) -> Tensor:
        """Return a live moment (created as zeros on first use); writing to it changes the optimizer."""
        moments = self._moments.setdefault(kind, {})
        if name not in moments:
            moments[name] = torch.zeros_like(self._tensors[name])
        return moments[name]

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Update every trainable tensor once from its gradient."""
        for name, hyper in self._hyper.items():
            gradient = gradients[name]
            mask = self._masks.get(name)
            if self._spec.name == "sgd" and hyper.weight_decay:
                gradient = gradient.add(self._tensors[name], alpha=hyper.weight_decay)
            if mask is not None:
                gradient = gradient * mask
            self._steps[name] = self._steps.get(name, 0) + 1
            before = self._tensors[name].clone() if mask is not None else None
            if self._spec.name == "sgd":
                self._sgd(name, gradient, hyper)
            else:
                self._adamw(name, gradient, hyper)
            if mask is not None and before is not None:
                self._tensors[name].copy_(torch.where(mask.bool(), self._tensors[name], before))

    def _sgd(self, name: str, gradient: Tensor, hyper: _Hyper) -> None:
        tensor, spec = self._tensors[name], self._spec
        if spec.momentum:
            buffer = self.moment("momentum_buffer", name)
            # Starting from zero, this equals torch's first step (buffer = gradient), since dampening is 0.
            gradient = buffer.mul_(spec.momentum).add_(gradient)
        tensor.add_(gradient, alpha=-hyper.lr)

    def _adamw(self, name: str, gradient: Tensor, hyper: _Hyper) -> None:
        tensor, spec, step = self._tensors[name], self._spec, self._steps[name]
        beta1, beta2 = spec.betas
        first, second = self.moment("exp_avg", name), self.moment("exp_avg_sq", name)
        tensor.mul_(1 - hyper.lr * hyper.weight_decay)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correct1 = 1 - beta1 ** (step - self._before.get(name, 0)) if spec.bias_correction[0] else 1.0
        correct2 = 1 - beta2**step if spec.bias_correction[1] else 1.0
        denominator = (second.sqrt() / math.sqrt(correct2)).add_(spec.eps)
        tensor.addcdiv_(first, denominator, value=-hyper.lr / correct1)

    def state(self) -> OptimizerState:
        """Return moments and step counts, copied to the CPU."""
        return OptimizerState(
            {
                kind: {name: value.detach().to("cpu", copy=True) for name, value in values.items()}
                for kind, values in self._moments.items()
            },
            dict(self._steps),
        )


def join_states(kept: OptimizerState | None, own: OptimizerState | None) -> OptimizerState | None:
    """Merge the stored moments of earlier rounds with those of the job, which take precedence."""
    if kept is None or own is None:
        return own or kept
    kinds = {**kept.moments, **own.moments}
    moments = {kind: {**kept.moments.get(kind, {}), **own.moments.get(kind, {})} for kind in kinds}
    return OptimizerState(moments, {**kept.steps, **own.steps})


def clip(gradients: dict[str, Tensor], max_norm: float) -> None:
    """Scale all gradients together so that their norm is at most ``max_norm``, as ``clip_grad_norm_`` does."""
    norms = torch.stack([gradient.norm() for gradient in gradients.values()])
    factor = torch.clamp(max_norm / (norms.norm() + 1e-6), max=1.0)
    for name in gradients:
        gradients[name] = gradients[name] * factor
