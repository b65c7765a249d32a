"""What of a round's replies counts: every reply is checked before it touches the state.

A reply is compared with that of a client that trained nothing, which the server can make itself: names, shapes and
number formats must be its, all numbers finite, and the distance from it at most a multiple of the cohort's median.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedspan.core.method import Memory, Method
from fedspan.core.values import Client, Job, Message, OptimizerState, Trained
from fedspan.federation import serialization
from fedspan.federation.protocol import Reply

__all__ = [
    "ReplyRules",
    "ValidatedReply",
    "distance",
    "find_outliers",
    "require_requested",
    "untrained_jobs",
    "untrained_reply",
    "validate_reply",
]

_ENOUGH = 3
"""Replies from which on one can be told to be far from the others."""


@dataclass(frozen=True)
class ReplyRules:
    """When a round stands.

    Args:
        min_replies: good replies that it takes; None: more than half of the cohort.
        deadline: seconds that clients have.
        retries: of a round that has too few, before the run stops.
        norm_factor: how many times the cohort's median a reply's distance from an untrained one may be; None: any.
        over_select: clients that are asked beside those that a round wants; the good replies that come first count.
        validate: check replies; without it (clients in this process, whose replies are the run's own) all of the cohort
            reply, none fails, and each reply is folded into the reduction as it comes.
    """

    min_replies: int | None = None
    deadline: float = 3600.0
    retries: int = 2
    norm_factor: float | None = 10.0
    over_select: int = 0
    validate: bool = True

    def quorum(self, cohort: int) -> int:
        """Good replies that a round takes."""
        wanted = cohort // 2 + 1 if self.min_replies is None else self.min_replies
        return min(cohort, wanted)


def untrained_reply(method: Method, sent: Message, client: Client, round: int) -> Message:
    """The reply to a message of a client that remembers nothing, and whose training moved nothing.

    Args:
        method: the run's.
        sent: what the client is sent.
        client: who.
        round: Number of the round, from 0.
    """
    return untrained_jobs(method, sent, client, round)[1]


def untrained_jobs(
    method: Method, sent: Message, client: Client, round: int, memory: Memory | None = None
) -> tuple[list[Job], Message]:
    """The jobs of a client whose training moves nothing, phase by phase, and its reply.

    Args:
        method: the run's.
        sent: what the client is sent.
        client: who.
        round: Number of the round, from 0.
        memory: its own; None: it remembers nothing, and is sent everything.
    """
    memory = memory or {}
    job = method.start(sent, client, memory, round)
    jobs = [job]
    while True:
        zeros = {name: torch.zeros_like(job.tensors[name]) for name in job.trainable_names}
        trained = Trained(
            tensors=dict(job.tensors),
            optimizer_state=OptimizerState({"exp_avg": zeros, "exp_avg_sq": zeros}, dict.fromkeys(zeros, 1)),
            steps=1,
            lr_sum=1.0,
            gradient=zeros,
            metrics={"loss": 0.0, "examples": 1.0},
        )
        result, memory = method.finish(job, trained, client, memory, round)
        if not isinstance(result, Job):
            return jobs, result
        job = result
        jobs.append(job)


@dataclass(frozen=True)
class ValidatedReply:
    """A reply that passed on its own.

    Args:
        message: the reply.
        distance: from the untrained one.
    """

    message: Message
    distance: float


def validate_reply(
    answer: Reply, client: Client, round: int, attempt: int, expected: Message, budget: bool
) -> ValidatedReply:
    """A client's reply, checked by itself.

    Args:
        answer: what came.
        client: who was asked.
        round: that was asked for.
        attempt: likewise.
        expected: the untrained reply.
        budget: whether the client chooses what it sends: shapes may be smaller, and tensors left out.

    Raises:
        ValueError: what is wrong with it.
    """
    require_requested(answer, client.id, round, attempt)
    message = serialization.decode(answer.body)
    if message.base is not None:
        raise ValueError("it holds a change of the base, which only the server sends")
    _require_structure(message, expected, budget)
    for name, value in message.tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ValueError(f"{name} holds numbers that are not finite")
    for name, value in message.scalars.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} is {value}")
    return ValidatedReply(message, distance(message, expected))


def require_requested(answer: Reply, id: str, round: int, attempt: int) -> None:
    """Check that a reply is the one that was asked for.

    Raises:
        ValueError: if not.
    """
    if (answer.task, answer.id, answer.round, answer.attempt) != ("train", id, round, attempt):
        raise ValueError(
            f"a reply of {answer.id!r} to round {answer.round + 1}, attempt {answer.attempt + 1} "
            f"({answer.task}); asked was {id!r} for round {round + 1}, attempt {attempt + 1}"
        )


def _require_structure(message: Message, expected: Message, budget: bool) -> None:
    missing, more = expected.tensors.keys() - message.tensors.keys(), message.tensors.keys() - expected.tensors.keys()
    if more or (missing and not budget):
        what = f"without {sorted(missing)[:3]}" if missing else f"with {sorted(more)[:3]} too"
        raise ValueError(f"tensors are not those of the method: {what}")
    if message.scalars.keys() != expected.scalars.keys():
        raise ValueError(f"scalars {sorted(message.scalars)}, not {sorted(expected.scalars)}")
    for name, value in expected.scalars.items():
        if type(message.scalars[name]) is not type(value):
            raise ValueError(f"{name} is a {type(message.scalars[name]).__name__}, not a {type(value).__name__}")
    for name, value in message.tensors.items():
        wanted = expected.tensors[name]
        smaller = budget and value.ndim == wanted.ndim and value.numel() <= wanted.numel()
        if value.dtype != wanted.dtype or (value.shape != wanted.shape and not smaller):
            found, right = (f"{list(one.shape)} of {one.dtype}" for one in (value, wanted))
            raise ValueError(f"{name} is {found}, not {right}")


def distance(message: Message, expected: Message) -> float:
    """The norm of what training changed in a reply; of tensors of other shapes than the untrained one's, their own."""
    total = 0.0
    for name, value in message.tensors.items():
        wanted = expected.tensors[name]
        if not value.is_floating_point():
            continue
        change = value.double()
        if value.shape == wanted.shape:
            change = change - wanted.double().nan_to_num(0.0, 0.0, 0.0)
        total += float(change.square().sum())
    return math.sqrt(total)


def find_outliers(replies: Mapping[str, ValidatedReply], factor: float | None) -> dict[str, str]:
    """Whose replies are too far from the untrained one, beside the others', with the reason."""
    if factor is None or len(replies) < _ENOUGH:
        return {}
    middle = statistics.median(reply.distance for reply in replies.values())
    limit = factor * middle
    return {
        id: f"its change has a norm of {reply.distance:.3g}; the cohort's median is {middle:.3g}, the limit {limit:.3g}"
        for id, reply in replies.items()
        if reply.distance > limit and middle > 0
    }
