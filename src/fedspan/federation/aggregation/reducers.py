"""Selection of the reducer that the settings request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedspan.core.tensors import Tensors
from fedspan.core.values import Client
from fedspan.federation.aggregation.private import PrivateReducer
from fedspan.federation.aggregation.reduction import Reducer
from fedspan.federation.aggregation.robust import ClippedReducer, RobustReducer
from fedspan.federation.settings import RoundSettings

__all__ = ["reducer_for"]


def reducer_for(
    settings: RoundSettings, cohort: Sequence[Client], clients: int, round: int, origin: Callable[[], Tensors]
) -> Reducer:
    """Create the reducer that the settings request.

    Args:
        settings: Round settings of the run.
        cohort: The clients selected for this round.
        clients: Number of clients in the federation.
        round: Number of the round, from 0.
        origin: Returns the contribution of a client that trained nothing.
    """
    if settings.privacy is not None and settings.privacy.mechanism == "central":
        return PrivateReducer(cohort, origin(), settings, clients, round)
    if settings.reduction == "clipped-mean":
        return ClippedReducer(cohort, origin(), settings.max_norm)
    return Reducer(cohort) if settings.reduction == "mean" else RobustReducer(cohort, settings.reduction, settings.trim)
