"""Diagnostics during a run: selected rounds are examined as they are run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fedspan.clients.recording import TrainingRecord
from fedspan.diagnostics.measures import values_of
from fedspan.diagnostics.round_diagnosis import layers_of
from fedspan.diagnostics.updates import alignment
from fedspan.federation.federation import Federation
from fedspan.federation.progress import Progress, RoundResult

__all__ = ["DiagnosticsRecorder"]


class DiagnosticsRecorder:
    """Runner of a federation's rounds that computes diagnostics for some of them.

    Args:
        federation: The federation, in this process.
        every: Interval in rounds between two diagnostics; None: no diagnostics.
    """

    def __init__(self, federation: Federation, every: int | None) -> None:
        self.federation, self.every = federation, every
        self.seconds = 0.0
        """Time of the diagnostics, without the rounds themselves."""

    def run_round(
        self, progress: Progress, on_client: Callable[[str, float], None]
    ) -> tuple[RoundResult, dict[str, Any] | None]:
        """Run a round like ``Federation.run_round`` and compute its diagnostics.

        Returns:
            The result, the same as without diagnostics, and the diagnostics for metrics.jsonl: ``layers``, by path and
            measure, ``alignment`` of all layers as one vector, and ``seconds``; None if the round was not examined.
        """
        federation = self.federation
        if self.every is None or (progress.state.round + 1) % self.every:
            return federation.run_round(progress, on_client), None
        record = TrainingRecord()
        result = federation.run_round(progress, on_client, record)
        began = time.monotonic()
        looked = layers_of(federation, record, progress, result)
        found = {name: values_of(layer) for name, layer in looked.items()}
        together = alignment([layer.updates.products for layer in looked.values()])
        seconds = time.monotonic() - began
        self.seconds += seconds
        return result, {"layers": found, "alignment": together, "seconds": seconds}
