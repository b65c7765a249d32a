"""GaLore-AdamW as fedspan trains it, step for step against the package ``galore-torch``.

    pip install --no-deps galore-torch
    python benchmarks/galore.py

A network with a tall, a wide and a square layer is trained by the loop engine (``Projected``, ``LocalOptimizer``,
projectors renewed from the gradient) and by ``galore_torch.GaLoreAdamW`` on dense weights, from the same start on the
same batches. Both define the same thing for ``proj_type="std"``, moments that a refresh leaves alone and no weight
decay (ours acts before the update, as in torch and in FedGaLore's appendix A.1, theirs after it). Singular vectors are
unique up to sign, and moments that stay depend on it: theirs get our signs. Weights must agree to 1e-6 after every step
(both take singular vectors in float32, which is where they differ); they move by 2 % of their norm and more.
"""

from __future__ import annotations

import argparse
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedspan.core.base import to_dense
from fedspan.core.parametrization import Projected
from fedspan.core.projectors import choose_side, draw_random_projector
from fedspan.core.tensors import join_tensor_name, select_slots
from fedspan.core.values import Group, Job, OptimizerSpec, Refresh, Trained
from fedspan.models.adapted import AdaptedModel
from fedspan.training.batching import draw_training_batches
from fedspan.training.jobs import Assignment, TrainingSettings
from fedspan.training.loop import LoopEngine

TOLERANCE = 1e-6
SHAPES = {"tall": (48, 32), "wide": (24, 48), "square": (24, 24)}
LR, RANK, EXAMPLES, BATCH = 0.01, 4, 96, 8


@dataclass(frozen=True)
class Points:
    """Inputs and targets of a regression."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)

    @property
    def lengths(self) -> np.ndarray:
        return np.ones(len(self), dtype=np.int64)


class Squares:
    """Mean squared error."""

    def collate(self, examples: Points, indices: Sequence[int], device: torch.device) -> Mapping[str, Tensor]:
        chosen = list(indices)
        return {"x": examples.x[chosen], "y": examples.y[chosen]}

    def compute_loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return (model(batch["x"]) - batch["y"]).square().mean()


def create_network() -> nn.Sequential:
    """The same weights every time, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [
            (name, nn.Linear(columns, rows, bias=False, dtype=torch.float64))
            for name, (rows, columns) in SHAPES.items()
        ]
    return nn.Sequential(OrderedDict([(n, nn.Sequential(OrderedDict(linear=one, act=nn.Tanh()))) for n, one in layers]))


def draw_points() -> Points:
    """Inputs of falling variances, and targets of another network."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randn((EXAMPLES, 32), generator=rng, dtype=torch.float64) / torch.arange(1, 33).sqrt()
    return Points(x, torch.tanh(x @ torch.randn((32, 24), generator=rng, dtype=torch.float64)))


def build_spec(bias_correction: bool) -> OptimizerSpec:
    # With bias correction the two add eps in different places, so it is made too small to matter.
    eps = 1e-14 if bias_correction else 1e-8
    return OptimizerSpec("adamw", LR, eps=eps, bias_correction=(bias_correction, bias_correction))


def build_settings(bias_correction: bool) -> TrainingSettings:
    return TrainingSettings(build_spec(bias_correction), batch_size=BATCH, max_grad_norm=0.0, group_by_length=False)


def train_ours(steps: int, period: int, scale: float, bias_correction: bool) -> dict[str, Tensor]:
    """The weights after some steps of the loop engine."""
    model, data = create_network(), draw_points()
    targets = {f"{name}.linear": getattr(model, name).linear for name in SHAPES}
    start = {name: module.weight.detach().clone() for name, module in targets.items()}
    adapted = AdaptedModel(model, targets, {})
    tensors: dict[str, Tensor] = {}
    for name, module in targets.items():
        rows, columns = module.weight.shape
        side = choose_side((rows, columns))
        shape = (rows, RANK) if side == "right" else (RANK, columns)
        tensors[join_tensor_name(name, "acc")] = torch.zeros(shape, dtype=torch.float64)
        tensors[join_tensor_name(name, "P")] = draw_random_projector(
            (rows, columns), RANK, side, torch.Generator()
        ).double()
    job = Job(
        parametrization={name: Projected(choose_side(tuple(start[name].shape)), scale) for name in targets},
        tensors=tensors,
        trainable=(Group(tuple(join_tensor_name(name, "acc") for name in targets)),),
        steps=steps,
        refresh=Refresh(period, rule="svd", moments="keep"),
    )
    engine = LoopEngine(adapted, Squares(), build_settings(bias_correction), seed=0)  # type: ignore[arg-type]
    trained: Trained = engine.train(Assignment("one", 0, job, np.arange(EXAMPLES), LR), data)  # type: ignore[arg-type]
    weights: dict[str, Tensor] = {}
    for name in targets:
        pair = job.parametrization[name].compute_effective(select_slots(trained.tensors, name)).pair
        assert pair is not None
        weights[name] = start[name] + to_dense(pair)
    return weights


def train_theirs(steps: int, period: int, scale: float, bias_correction: bool) -> dict[str, Tensor]:
    """The weights after some steps of ``galore_torch.GaLoreAdamW``."""
    from galore_torch import GaLoreAdamW, galore_projector

    model, data = create_network(), draw_points()
    parameters = {f"{name}.linear": getattr(model, name).linear.weight for name in SHAPES}
    group = {"params": list(parameters.values()), "rank": RANK, "update_proj_gap": period, "scale": scale}
    spec = build_spec(bias_correction)
    optimizer = GaLoreAdamW(
        [{**group, "proj_type": "std"}], lr=LR, eps=spec.eps, correct_bias=bias_correction, no_deprecation_warning=True
    )
    original = galore_projector.GaLoreProjector.get_orthogonal_matrix

    def signed(self: object, weights: Tensor, rank: int, type: str) -> Tensor:
        P = original(self, weights, rank, type)
        left = weights.detach() @ P.T if type == "right" else P
        signs = left.gather(0, left.abs().argmax(0)[None]).sign()
        return P * signs.T if type == "right" else P * signs

    galore_projector.GaLoreProjector.get_orthogonal_matrix = signed
    try:
        batches = draw_training_batches(
            np.arange(EXAMPLES), data.lengths, batch_size=BATCH, epochs=1, batches=steps, seed=0,
            key=(0, "one", "train"), group_by_length=False,
        )  # fmt: skip
        task = Squares()
        for indices in batches:
            optimizer.zero_grad()
            task.compute_loss(model, task.collate(data, indices.tolist(), torch.device("cpu"))).backward()
            optimizer.step()
    finally:
        galore_projector.GaLoreProjector.get_orthogonal_matrix = original
    return {name: parameter.detach() for name, parameter in parameters.items()}


def compute_distance(steps: int, period: int, scale: float = 1.0, bias_correction: bool = False) -> float:
    """The largest relative difference (Frobenius) of a layer's weight after some steps."""
    mine, other = train_ours(steps, period, scale, bias_correction), train_theirs(steps, period, scale, bias_correction)
    return max(float((mine[name] - other[name]).norm() / other[name].norm()) for name in other)


def main() -> None:
    parser = argparse.ArgumentParser(description="GaLore-AdamW against galore-torch.")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    for period, scale, bias_correction in ((1000, 1.0, False), (1000, 0.25, True), (5, 1.0, True), (5, 0.25, False)):
        begin, worst = time.perf_counter(), 0.0
        for steps in range(1, args.steps + 1):
            worst = max(worst, compute_distance(steps, period, scale, bias_correction))
        corrected = "with" if bias_correction else "without"
        print(f"refresh every {period} steps, scale {scale}, {corrected} bias correction: ", end="")
        print(f"apart by at most {worst:.1e} over {args.steps} steps ({time.perf_counter() - begin:.1f} s)")
        start = {f"{name}.linear": getattr(create_network(), name).linear.weight.detach() for name in SHAPES}
        moved = train_ours(args.steps, period, scale, bias_correction)
        assert min(float((moved[name] - start[name]).norm() / start[name].norm()) for name in start) > 0.02
        assert worst < TOLERANCE, f"galore-torch differs by {worst}"


if __name__ == "__main__":
    main()
