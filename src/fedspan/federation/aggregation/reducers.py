"""The reducer that a round's settings select."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedspan.core.tensors import Tensors
from fedspan.core.values import Client
from fedspan.federation.aggregation.reduction import PrivateReducer, Reducer
from fedspan.federation.aggregation.robust import (
    CoordinateReducer,
    FlameReducer,
    GeometricMedianReducer,
    MultiKrumReducer,
)
from fedspan.federation.privacy import create_central_privacy
from fedspan.federation.settings import RoundSettings


def create_reducer(
    settings: RoundSettings, cohort: Sequence[Client], clients: int, round: int, origin: Callable[[], Tensors]
) -> Reducer | PrivateReducer:
    """Create the reducer that the settings request, under central privacy if they request that, too.

    Args:
        settings: Round settings of the run.
        cohort: The clients selected for this round.
        clients: Number of clients in the federation.
        round: Number of the round, from 0.
        origin: Returns the contribution of a client that trained nothing.
    """
    reducer = _create_reducer(settings, cohort, round, origin)
    privacy = create_central_privacy(settings, clients, round, origin)
    return reducer if privacy is None else PrivateReducer(reducer, privacy)


def _create_reducer(
    settings: RoundSettings, cohort: Sequence[Client], round: int, origin: Callable[[], Tensors]
) -> Reducer:
    match settings.reduction:
        case "mean":
            return Reducer(cohort)
        case "median" | "trimmed-mean":
            return CoordinateReducer(cohort, settings.reduction, settings.trim)
        case "multi-krum":
            return MultiKrumReducer(cohort, settings.trim)
        case "geometric-median":
            return GeometricMedianReducer(cohort)
        case "flame":
            return FlameReducer(cohort, origin(), settings.seed, round)
