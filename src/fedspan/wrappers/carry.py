"""Handing a number from ``sync`` to ``finish``, through a message's and a job's scalars, past the wrapped method."""

from __future__ import annotations

from dataclasses import replace

from fedspan.core.values import Job, Message

__all__ = ["into_job", "into_next_phase", "round_of", "with_round"]

_ROUND = "round of the wrapper"


def with_round(message: Message, round: int) -> Message:
    """Server, in ``sync``: the message with its round."""
    return replace(message, scalars={**message.scalars, _ROUND: round})


def into_job(job: Job, message: Message) -> Job:
    """Client, in ``start``: the job with its message's round."""
    return into_next_phase(job, int(message.scalars[_ROUND]))


def round_of(job: Job) -> int:
    """Client, in ``finish``: the round."""
    return int(job.scalars[_ROUND])


def into_next_phase(job: Job, round: int) -> Job:
    """Client, in ``finish``: the next phase's job with the round."""
    return replace(job, scalars={**job.scalars, _ROUND: round})
