"""A round's diagnosis, layer by layer, from a record of its local training."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedspan.core.base import BaseUpdate, Delta, materialize
from fedspan.core.lowrank import LowRank
from fedspan.core.parametrization import DenseChange, LoRA, Parametrization, compute_dense_change
from fedspan.core.tensors import create_generator, is_extra, join_tensor_name, select_slots
from fedspan.core.values import Job, Trained
from fedspan.diagnostics.updates import (
    Shape,
    UpdateComparison,
    combine_deltas,
    compare_updates,
    compute_alignment,
    get_shape,
    measure_moment_mismatch,
    measure_shape,
)
from fedspan.errors import FedspanError

if TYPE_CHECKING:
    from fedspan.federation.federation import Federation
    from fedspan.federation.progress import Progress, RoundResult
    from fedspan.tasks.task import Examples
    from fedspan.training.engine import Engine
    from fedspan.training.jobs import Assignment


@dataclass(frozen=True)
class ClientTraining:
    """One client's training."""

    first: Job
    last: Job
    trained: Trained


class TrainingRecord:
    """Records the jobs of a round (as the ``on_trained`` callback)."""

    def __init__(self) -> None:
        self.by_client: dict[str, ClientTraining] = {}

    def __call__(self, assignment: Assignment, trained: Trained) -> None:
        before = self.by_client.get(assignment.client)
        self.by_client[assignment.client] = ClientTraining(
            before.first if before else assignment.job, assignment.job, trained
        )

    @property
    def has_layers(self) -> bool:
        """Whether any target layer trained; in rounds that train the head alone, none did."""
        jobs = [job for training in self.by_client.values() for job in (training.first, training.last)]
        return not all(is_extra(name) for job in jobs for name in job.trainable_names)


STEPS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Positions between one client's model and another's."""


@dataclass(frozen=True)
class LayerDiagnosis:
    """The diagnosis of a target layer."""

    updates: UpdateComparison
    """Comparison of the clients' updates of the round."""
    moments: float | None
    """Mismatch of the clients' second moments (``diagnostics.updates.moment_mismatch``), mean over the layer's tensors;
    None where the optimizer has none."""
    accumulated: Shape | None
    """Change of the global model since the start of the run; None where there is no global model."""


@dataclass(frozen=True)
class Barrier:
    """The loss on the straight line between two clients' models."""

    clients: tuple[str, str]
    losses: tuple[float, ...]
    """Losses on held-out examples, at ``STEPS``."""

    @property
    def height(self) -> float:
        """Largest excess of the loss over the straight line between its ends (Frankle et al., 2020); at least 0."""
        first, last = self.losses[0], self.losses[-1]
        return max(
            loss - (1 - position) * first - position * last for position, loss in zip(STEPS, self.losses, strict=True)
        )


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a round.

    Args:
        method: Registry key of the method, with those of its wrappers.
        round: Number of the diagnosed round, counted from 1.
        clients: The cohort.
        layers: Diagnoses of the layers, by path.
        alignment: Mean over clients of the cosine of a client's update with the global one (the mean update, where
            there is none), all target layers as one vector (FedLoRU, figure 8).
        barriers: Barriers between some pairs of clients' models; empty where none was requested.
        examples: Number of examples on which losses were measured; 0 without barriers.
        seconds: Time of the diagnosis, without the round itself.

    Examples:
        >>> report = fedspan.diagnose("runs/first")
        >>> {path: layer.updates.drift for path, layer in report.layers.items()}
    """

    method: str
    round: int
    clients: tuple[str, ...]
    layers: Mapping[str, LayerDiagnosis]
    alignment: float
    barriers: tuple[Barrier, ...]
    examples: int
    seconds: float


def diagnose_round(
    federation: Federation,
    progress: Progress,
    held_out: Examples,
    *,
    title: str,
    seed: int,
    batch_size: int,
    pairs: int = 3,
    examples: int = 500,
) -> Diagnosis:
    """Run the next round and diagnose it; ``progress`` remains unchanged.

    Args:
        federation: The run's. After its last round, one more is run as if the run were longer.
        held_out: Examples from which those for the losses are drawn.
        pairs: Largest number of client pairs whose models are joined by a line.
        examples: Largest number of held-out examples on which the losses are measured.

    Raises:
        FedspanError: If no client participates in the round (a Poisson sample may be empty), or no target layer trains
            in it.
    """
    federation = copy.copy(federation)
    engine, record = federation.engine, TrainingRecord()
    round = progress.state.round
    settings = federation.settings
    federation.settings = settings.model_copy(update={"rounds": max(settings.rounds, round + 1)})
    if not federation.draw_cohort(round):
        problem = f"no client participates in round {round + 1}, because the sample drawn for privacy is empty"
        raise FedspanError("round", round, "another checkpoint", problem=problem)
    result = federation.run_round(progress, on_trained=record)
    if not record.has_layers:
        problem = f"round {round + 1} trains the head alone, and target layers are what is measured"
        raise FedspanError("round", round, "a later checkpoint", problem=problem)
    began = time.monotonic()
    models = _make_round_models(federation, record, progress, result)
    layers = models.diagnose_layers()
    engine.adapted.set_base(progress.state.base)
    rng = create_generator(seed, "diagnosis")
    indices = np.sort(torch.randperm(len(held_out), generator=rng)[:examples].numpy())
    ids = sorted(record.by_client)
    barriers = tuple(
        Barrier(pair, models.losses(pair, held_out, indices, batch_size))
        for pair in islice(combinations(ids, 2), pairs)
    )
    return Diagnosis(
        method=title,
        round=round + 1,
        clients=result.cohort,
        layers=layers,
        alignment=compute_alignment([layer.updates.products for layer in layers.values()]),
        barriers=barriers,
        examples=len(indices) if barriers else 0,
        seconds=time.monotonic() - began,
    )


def diagnose_layers(
    federation: Federation, record: TrainingRecord, before: Progress, result: RoundResult
) -> dict[str, LayerDiagnosis]:
    """Diagnose a completed round, by layer."""
    return _make_round_models(federation, record, before, result).diagnose_layers()


def _make_round_models(
    federation: Federation, record: TrainingRecord, before: Progress, result: RoundResult
) -> _RoundModels:
    weights = {id: federation.clients[id].client.weight for id in result.cohort}
    engine = federation.engine
    engine.adapted.set_base(result.progress.state.base)
    end = None
    if not federation.method.declare_claims().personal:
        end = federation.method.start(
            federation.method.sync(result.progress.state, None), None, {}, result.progress.state.round
        )
    return _RoundModels(engine, record.by_client, before.state.base, result.progress.state.base, weights, end)


class _RoundModels:
    """Weights of a round's models, layer by layer.

    Args:
        end: The job of the global model after the round; None where there is none.
    """

    def __init__(
        self,
        engine: Engine,
        training: Mapping[str, ClientTraining],
        before: BaseUpdate,
        after: BaseUpdate,
        weights: Mapping[str, float],
        end: Job | None,
    ) -> None:
        self.engine, self.training = engine, training
        self.before, self.after, self.end = before, after, end
        total = sum(weights[id] for id in training)
        self.weights = {id: weights[id] / total for id in sorted(training)}

    def diagnose_layers(self) -> dict[str, LayerDiagnosis]:
        return {layer.name: self._diagnose_layer(layer.name) for layer in self.engine.adapted.spec.layers}

    def _diagnose_layer(self, name: str) -> LayerDiagnosis:
        shape = self.engine.adapted.operators[name].shape
        starts = {id: self._start(id, name) for id in self.weights}
        updates = {id: combine_deltas([(1.0, self._compute_own(id, name)), (-1.0, starts[id])], shape) for id in starts}
        total = accumulated = None
        if self.end is not None:
            end = self._compute_change(self.end.parametrization[name], self.end.tensors, name, self.after)
            # relative to the clients' mean start: the global model, unless the clients' ranks are smaller
            negative_starts = [(-self.weights[id], start) for id, start in starts.items()]
            total = combine_deltas([(1.0, end), *self._compute_base_change(name), *negative_starts], shape)
            parts: list[tuple[float, Delta]] = [(1.0, end)]
            if name in self.after.total:
                parts.append((1.0, self.after.total[name]))
            if self.after.rho != 1.0:
                parts.append((self.after.rho - 1.0, self.engine.adapted.get_weight(name)))
            accumulated = measure_shape(combine_deltas(parts, shape))
        return LayerDiagnosis(
            compare_updates(updates, self.weights, total), self._compute_moment_mismatch(name), accumulated
        )

    def losses(
        self, pair: tuple[str, str], examples: Examples, indices: np.ndarray, batch_size: int
    ) -> tuple[float, ...]:
        """Measure the losses of the models between two clients' models, at ``STEPS``."""
        operators = self.engine.adapted.operators
        changes = [{name: self._compute_own(id, name) for name in operators} for id in pair]
        extras = [
            {name: value for name, value in self.training[id].trained.tensors.items() if is_extra(name)} for id in pair
        ]
        losses: list[float] = []
        for position in STEPS:
            parametrization: dict[str, Parametrization] = {}
            tensors = {
                name: torch.lerp(value, extras[1][name], position) if value.is_floating_point() else value
                for name, value in extras[0].items()
            }
            for name, operator in operators.items():
                mixed = combine_deltas([(1 - position, changes[0][name]), (position, changes[1][name])], operator.shape)
                parametrization[name] = LoRA(mixed.scale) if isinstance(mixed, LowRank) else DenseChange()
                slots = {"A": mixed.A, "B": mixed.B} if isinstance(mixed, LowRank) else {"D": mixed.float()}
                tensors |= {join_tensor_name(name, slot): value for slot, value in slots.items()}
            predictions = self.engine.predict(Job(parametrization, tensors, ()), examples, indices, batch_size)
            losses.append(self.engine.task.compute_metrics(predictions, examples, indices.tolist())["loss"])
        return tuple(losses)

    def _start(self, id: str, name: str) -> Delta:
        """Return a client's layer before its training, relative to the base at the start of the round."""
        first = self.training[id].first
        return self._compute_change(first.parametrization[name], first.tensors, name, self.before)

    def _compute_own(self, id: str, name: str) -> Delta:
        """Return a client's layer after its training, relative to the base at the start of the round."""
        local = self.training[id]
        change = self._compute_change(local.last.parametrization[name], local.trained.tensors, name, self.before)
        decay = local.trained.decay
        if decay == 1.0:
            return change
        return combine_deltas([(1.0, change), (decay - 1.0, self._compute_base(name, self.before))], get_shape(change))

    def _compute_change(
        self, parametrization: Parametrization, tensors: Mapping[str, Tensor], name: str, base: BaseUpdate
    ) -> Delta:
        with torch.no_grad():
            effective = parametrization.compute_effective(select_slots(tensors, name))
            if not effective.base or effective.weight is not None:
                return compute_dense_change(effective, self._compute_base(name, base))
        return torch.zeros(self.engine.adapted.operators[name].shape) if effective.pair is None else effective.pair

    def _compute_base(self, name: str, base: BaseUpdate) -> Tensor:
        return materialize(self.engine.adapted.get_weight(name), base, name)

    def _compute_base_change(self, name: str) -> list[tuple[float, Delta]]:
        """Return the change of the base in the round, as terms of a linear combination."""
        new = [increment for increment in self.after.recent if increment.round > self.before.round]
        if all(increment.decay == 1.0 for increment in new):
            return [(1.0, increment.deltas[name]) for increment in new if name in increment.deltas]
        return [(1.0, self._compute_base(name, self.after)), (-1.0, self._compute_base(name, self.before))]

    def _compute_moment_mismatch(self, name: str) -> float | None:
        """Return the mean mismatch of the second moments of a layer's tensors; None where there are none."""
        seconds = {
            id: local.trained.optimizer_state.moments.get("exp_avg_sq", {})
            for id, local in sorted(self.training.items())
        }
        slots = [select_slots(moments, name) for moments in seconds.values()]
        shared = set.intersection(*(set(moments) for moments in slots)) if slots else set[str]()
        gaps = [
            measure_moment_mismatch(
                {id: select_slots(moments, name)[slot] for id, moments in seconds.items()}, self.weights
            )
            for slot in sorted(shared)
            if len({moments[slot].shape for moments in slots}) == 1
        ]
        return sum(gaps) / len(gaps) if gaps else None
