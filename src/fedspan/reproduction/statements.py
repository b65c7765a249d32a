"""What a paper says of its table, as a preset writes it down."""

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
"""What claims compare: ``runs.judging`` says which end is better, ``runs.curves`` and ``api.measuring`` what it is."""


class Record(BaseModel):
    """Part of a preset: nothing else stands in it, and nothing changes it."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Gap(Record):
    """A loss of score between two values of an axis, in place of the score itself.

    Args:
        axis: which.
        before: its value where the score is expected to be higher.
        after: its value where it is expected to have dropped.
    """

    axis: str
    before: str
    after: str


class Claim(Record):
    """A statement of the paper: one row of the table is better than others.

    Args:
        says: in words.
        better: label of a method.
        worse: labels of those that it is better than.
        cells: by axis, the values in which; an axis left out: in all.
        measure: what is compared: the held-out metric; bytes of a run; the rounds, the bytes both ways or the seconds
            of its rounds until a score (``runs.curves.target_of`` the two rows); the exact matches of generated
            answers; the alignment of the clients' updates with the global one, the barrier between their models, or
            the last round's step of the server's tensors.
        gap: compare the loss of score between two cells; the smaller is the better.
        within: the two are level, up to this much of the metric's own unit (shares, not percent).
        needs: what would have to be measured and is not; such a claim is never judged.
    """

    says: str
    better: str
    worse: list[str] = Field(min_length=1)
    cells: dict[str, list[str]] = Field(default_factory=dict)
    measure: Measure = "score"
    gap: Gap | None = None
    within: float | None = Field(default=None, gt=0)
    needs: str | None = None
