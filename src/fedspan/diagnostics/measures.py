"""The diagnostic measures by name, with their interpretation and source, and their values during a run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fedspan.diagnostics.round_diagnosis import Diagnosis, LayerDiagnosis, TrainingRecord, diagnose_layers
from fedspan.diagnostics.updates import compute_alignment
from fedspan.federation.federation import Federation
from fedspan.federation.progress import Progress, RoundResult
from fedspan.federation.round import OnCharge, OnClient, OnFailure


@dataclass(frozen=True)
class Measure:
    """A diagnostic measure of every target layer."""

    key: str
    title: str
    worst: Literal["high", "low"] | None
    """The end of the scale that indicates a problem; None: neither."""
    reads: str
    source: str
    value: Callable[[LayerDiagnosis], float | None]
    """Function that computes the value of a layer; None where the layer has none."""


MEASURES = (
    Measure(
        "aggregation_error",
        "aggregation error",
        "high",
        "Relative distance of the global update from the mean of the clients' updates: the error of averaging; 0 if "
        "exact.",
        "RoLoRA, arXiv:2502.01755, section 3.2 (interference)",
        lambda layer: layer.updates.aggregation_error,
    ),
    Measure(
        "drift",
        "client drift",
        "high",
        "Relative spread of the clients' updates around their mean. Above 1, clients disagree more than they agree.",
        "SCAFFOLD, arXiv:1910.06378",
        lambda layer: layer.updates.drift,
    ),
    Measure(
        "alignment",
        "client and global",
        "low",
        "Mean cosine of a client's update with the global update: near 0 the round averages unrelated steps.",
        "FedLoRU, arXiv:2409.12371, figure 8",
        lambda layer: layer.updates.alignment,
    ),
    Measure(
        "agreement",
        "client and client",
        "low",
        "Mean cosine of two clients' updates: below 0 they cancel each other.",
        "FedLoRU, arXiv:2409.12371, theorem 3.3",
        lambda layer: layer.updates.agreement,
    ),
    Measure(
        "angle_out",
        "angle, outputs",
        "high",
        "Mean principal angle between two clients' column spaces, in degrees (0: the same subspace, 90: "
        "orthogonal subspaces).",
        "Bjorck and Golub, 1973",
        lambda layer: layer.updates.angle_out,
    ),
    Measure(
        "angle_in",
        "angle, inputs",
        "high",
        "Mean principal angle between two clients' row spaces, in degrees; 0 if all clients train with one frozen A.",
        "Bjorck and Golub, 1973",
        lambda layer: layer.updates.angle_in,
    ),
    Measure(
        "moments",
        "second moments",
        "high",
        "Relative spread of the clients' AdamW second moments around their mean: the error of one shared state.",
        "FedGaLore, arXiv:2602.01746, section 1",
        lambda layer: layer.moments,
    ),
    Measure(
        "stable_rank",
        "stable rank",
        None,
        "Stable rank of the global model's accumulated change, from its largest singular value: near 1 it has one "
        "direction.",
        "Rudelson and Vershynin, 2007",
        lambda layer: None if layer.accumulated is None else layer.accumulated.stable_rank,
    ),
    Measure(
        "effective_rank",
        "effective rank",
        None,
        "Effective rank of the same change, from the entropy of all singular values; at most the rank of the sum of "
        "all updates.",
        "Roy and Vetterli, 2007",
        lambda layer: None if layer.accumulated is None else layer.accumulated.effective_rank,
    ),
)


@dataclass(frozen=True)
class MeasureSummary:
    """A measure summarized over all target layers."""

    measure: Measure
    mean: float
    minimum: float
    maximum: float
    worst: str | None
    """Name of the layer at the problematic end; None for a measure without such an end."""


def summarize_measures(diagnosis: Diagnosis) -> tuple[MeasureSummary, ...]:
    """Return every measure that has a value in at least one layer."""
    result: list[MeasureSummary] = []
    for measure in MEASURES:
        all_values = {name: measure.value(layer) for name, layer in diagnosis.layers.items()}
        values = {name: value for name, value in all_values.items() if value is not None and not math.isnan(value)}
        if values:
            extremes = {"high": max, "low": min}
            worst = None if measure.worst is None else extremes[measure.worst](values, key=lambda name: values[name])
            numbers = list(values.values())
            result.append(MeasureSummary(measure, sum(numbers) / len(numbers), min(numbers), max(numbers), worst))
    return tuple(result)


def get_values(layer: LayerDiagnosis) -> dict[str, float]:
    """Return the available measures of a layer, by key."""
    values = {measure.key: measure.value(layer) for measure in MEASURES}
    return {key: value for key, value in values.items() if value is not None and not math.isnan(value)}


class DiagnosticsRecorder:
    """Runner of a federation's rounds that computes diagnostics for some of them."""

    def __init__(self, federation: Federation, interval: int) -> None:
        self.federation, self.interval = federation, interval
        self.seconds = 0.0
        """Time of the diagnostics, without the rounds themselves."""

    def run_round(
        self,
        progress: Progress,
        on_client: OnClient,
        on_charge: OnCharge | None = None,
        on_failure: OnFailure | None = None,
    ) -> tuple[RoundResult, dict[str, Any] | None]:
        """Run a round like ``Federation.run_round`` and compute its diagnostics.

        Returns:
            The result, unaffected by the diagnostics, and the diagnostics for metrics.jsonl: ``layers``, by path and
            measure, ``alignment`` of all layers as one vector, and ``seconds``; None if the round was not diagnosed, or
            trained no target layer.
        """
        federation = self.federation
        if (progress.state.round + 1) % self.interval:
            return federation.run_round(progress, on_client, on_charge=on_charge, on_failure=on_failure), None
        record = TrainingRecord()
        result = federation.run_round(progress, on_client, record, on_charge, on_failure)
        if not record.has_layers:
            return result, None
        began = time.monotonic()
        with federation.engine.stages.stage("diagnostics"):
            layers = diagnose_layers(federation, record, progress, result)
        measures = {name: get_values(layer) for name, layer in layers.items()}
        cosine = compute_alignment([layer.updates.products for layer in layers.values()])
        seconds = time.monotonic() - began
        self.seconds += seconds
        return result, {"layers": measures, "alignment": cosine, "seconds": seconds}
