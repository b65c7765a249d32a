"""Handing the round's number from ``sync`` to ``finish``, for draws that a client makes when it replies.

``start`` sees the message's scalars but a ``Job`` has no place for one, so it rides as a tensor of a layer that does
not exist: engines install and return it like any other.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fedspan.core.values import Job, Message, Trained

ROUND = "carried/round"


def with_round(message: Message, round: int) -> Message:
    """Server: the message with its round."""
    return replace(message, scalars={**message.scalars, ROUND: round})


def into_job(job: Job, message: Message) -> Job:
    """Client, in ``start``: the job with its message's round."""
    return into_next_phase(job, int(message.scalars[ROUND]))


def out_of_job(job: Job, trained: Trained) -> tuple[int, Job, Trained]:
    """Client, in ``finish``: the round, and job and result as the inner method knows them."""
    round = int(job.tensors[ROUND])
    job = replace(job, tensors={name: value for name, value in job.tensors.items() if name != ROUND})
    return round, job, replace(trained, tensors={n: v for n, v in trained.tensors.items() if n != ROUND})


def into_next_phase(job: Job, round: int) -> Job:
    """Client, in ``finish``: the next phase's job with the round."""
    return replace(job, tensors={**job.tensors, ROUND: torch.tensor(round)})
