"""The reductions by the settings that ask for them."""

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
    """The reducer that a run asks for.

    Args:
        settings: the run's.
        cohort: the clients asked this round.
        clients: in the federation.
        round: number.
        origin: gives what a client contributes that trained nothing.
    """
    if settings.privacy is not None and settings.privacy.mechanism == "central":
        return PrivateReducer(cohort, origin(), settings, clients, round)
    if settings.reduction == "clipped-mean":
        return ClippedReducer(cohort, origin(), settings.max_norm)
    return Reducer(cohort) if settings.reduction == "mean" else RobustReducer(cohort, settings.reduction, settings.trim)
