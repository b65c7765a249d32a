"""The paper's statements about its table, as a preset records them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Claim", "Gap", "Measure", "Record"]

Measure = Literal[
    "score",
    "bytes_up",
    "bytes_down",
    "rounds_to",
    "bytes_to",
    "seconds_to",
    "exact_match",
    "alignment",
    "barrier",
    "state_step",
]
"""Measures of claims, defined in ``runs.curves`` and ``measurement``; ``verdicts`` defines which end is better."""


class Record(BaseModel):
    """Part of a preset, without extra fields and immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Gap(Record):
    """A loss of score between two values of an axis, in place of the score itself.

    Args:
        axis: Name of the axis.
        before: Value of the axis at which the score is expected to be higher.
        after: Value of the axis at which the score is expected to have dropped.
    """

    axis: str
    before: str
    after: str


class Claim(Record):
    """A statement of the paper: one row of the table is better than others.

    Args:
        says: The statement in words.
        better: Label of the better method.
        worse: Labels of the methods that it is better than.
        cells: Values to which the claim applies, by axis; an axis left out: all of its values.
        measure: Quantity that is compared: the held-out metric; bytes of a run; the rounds, the bytes in both
            directions or the seconds of its rounds until a score (``runs.curves.target_of`` the two rows); the exact
            matches of generated answers; the alignment of the clients' updates with the global one, the barrier between
            their models, or the last round's step of the server's tensors.
        gap: Comparison of the loss of score between two cells; the smaller loss is better.
        within: Tolerance, in the metric's own unit (shares, not percent), within which the two are level.
        needs: Quantity that is required but not measured; such a claim is never judged.
    """

    says: str
    better: str
    worse: list[str] = Field(min_length=1)
    cells: dict[str, list[str]] = Field(default_factory=dict)
    measure: Measure = "score"
    gap: Gap | None = None
    within: float | None = Field(default=None, gt=0)
    needs: str | None = None
