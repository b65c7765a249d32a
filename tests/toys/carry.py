"""Handing the round's number from ``sync`` to ``finish`` (``Job.scalars``), for draws made with the reply."""

from __future__ import annotations

from dataclasses import replace

from fedspan.core.values import Job, Message

ROUND = "round of the wrapper"


def with_round(message: Message, round: int) -> Message:
    """Server: the message with its round."""
    return replace(message, scalars={**message.scalars, ROUND: round})


def into_job(job: Job, message: Message) -> Job:
    """Client, in ``start``: the job with its message's round."""
    return into_next_phase(job, int(message.scalars[ROUND]))


def round_of(job: Job) -> int:
    """Client, in ``finish``: the round."""
    return int(job.scalars[ROUND])


def into_next_phase(job: Job, round: int) -> Job:
    """Client, in ``finish``: the next phase's job with the round."""
    return replace(job, scalars={**job.scalars, ROUND: round})
