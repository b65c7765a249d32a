"""The recorded arrivals of a run, which another run repeats (``federation.buffered.replay``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from fedspan.config.federation import FederationConfig
from fedspan.errors import FedspanError
from fedspan.federation.settings import Arrivals, RoundSettings
from fedspan.logs import read_lines
from fedspan.run_folder import RunFolder


def read_arrivals(federation: FederationConfig, settings: RoundSettings) -> RoundSettings:
    """Return the settings of rounds with the arrivals of the run that the config repeats, if it repeats one.

    Raises:
        FedspanError: If the folder holds no run with asynchronous rounds, it has fewer rounds than the config requests,
            or its metrics were changed.
    """
    if federation.buffered is None or federation.buffered.replay is None:
        return settings
    assert settings.buffered is not None
    run = RunFolder(federation.buffered.replay)
    rows = list(read_lines(run.metrics)) if run.metrics.is_file() else []
    rounds = [row for row in rows if row["round"]]
    if not rounds or not all("arrivals" in row for row in rounds):
        expected = "the folder of a run with federation.buffered"
        raise FedspanError("federation.buffered.replay", str(run.path), expected)
    if len(rounds) < federation.rounds and federation.early_stopping is None:  # with it, the run may end as early
        problem = f"the record has the arrivals of {len(rounds)} rounds, and federation.rounds is {federation.rounds}"
        raise FedspanError("federation.buffered.replay", str(run.path), problem=problem)
    arrivals: Arrivals = tuple(_parse_row(cast(Any, row)) for row in rounds)
    return replace(settings, buffered=replace(settings.buffered, arrivals=arrivals))


def _parse_row(row: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    """Return the clients of a round's arrivals with the round of each one's order, from 0."""
    return tuple((str(id), int(row["round"]) - 1 - int(staleness)) for id, staleness in row["arrivals"])


def require_same_arrivals(run_folder: RunFolder, arrivals: Arrivals) -> None:
    """Store the arrivals that a run repeats, or compare them with those with which it began."""
    rounds = [[list(arrival) for arrival in row] for row in arrivals]
    if not run_folder.arrivals.exists():
        run_folder.write_json(run_folder.arrivals, rounds)
    elif run_folder.read_json(run_folder.arrivals) != rounds:
        problem = f"its arrivals are not those with which the run began ({run_folder.arrivals}). Name the same record"
        raise FedspanError("federation.buffered.replay", None, problem=problem)
