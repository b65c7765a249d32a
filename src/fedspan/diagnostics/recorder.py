"""Diagnostics on the way: rounds of a run that are looked at while they are played."""

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
    """Plays a federation's rounds, and looks at some.

    Args:
        federation: in this process.
        every: rounds between two looks; None: none is looked at.
    """

    def __init__(self, federation: Federation, every: int | None) -> None:
        self.federation, self.every = federation, every
        self.seconds = 0.0
        """What looking took, beside the rounds themselves."""

    def run_round(
        self, progress: Progress, on_client: Callable[[str, float], None]
    ) -> tuple[RoundResult, dict[str, Any] | None]:
        """A round, as ``Federation.run_round``, and what was seen.

        Returns:
            The result, the same as without a look, and for metrics.jsonl ``layers``, by path and measure, ``alignment``
            of all of them as one vector, and ``seconds``; None where the round was not looked at.
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
