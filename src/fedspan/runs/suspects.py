"""Clients whose replies or weights were limited often, for a run's report."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from statistics import mean
from typing import Any

_OFTEN = 0.5
"""Share of a client's rounds beyond which its changes are named."""
_ROUNDS = 3
"""Rounds that a client's changes must have been limited in to be named."""


def find_limited(rows: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Find clients whose changes were scaled down in more than half of their rounds, or whose weight was lowered.

    Returns:
        Sentences for the user, by client.
    """
    selected, lowered, factors = Counter[str](), Counter[str](), defaultdict[str, list[float]](list)
    for row in rows:
        selected.update(row.get("cohort", ()))
        for id, factor in row.get("clipped", {}).items():
            factors[id].append(factor)
        lowered.update(list(row.get("lowered_weights", ())))
    changes = tuple(
        f"The changes of {id} were scaled down in {len(client_factors)} of its {selected[id]} rounds, "
        f"to {mean(client_factors):.0%} on average (federation.clip_ratio): it has more examples, other data or "
        "another training than most clients, or it is hostile."
        for id, client_factors in sorted(factors.items())
        if len(client_factors) >= _ROUNDS and len(client_factors) > _OFTEN * selected[id]
    )
    weights = tuple(
        f"The weight of {id} was lowered in {count} of its {selected[id]} rounds: it declares more examples than it "
        "was admitted with, or many more than the median client (federation.max_weight_ratio)."
        for id, count in sorted(lowered.items())
    )
    return changes + weights
