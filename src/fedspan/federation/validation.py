"""Validation of replies against the reply of an untrained client, which both server and client can compute."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from fedspan.core.method import Memory, Method
from fedspan.core.tensors import Tensors, is_extra, join_extra_name
from fedspan.core.values import Client, Contribution, Job, Message, OptimizerState, Trained
from fedspan.errors import FedspanError
from fedspan.federation.changes import MODEL, Change, compute_norm_limits, measure_change
from fedspan.federation.protocol import Reply
from fedspan.training.projector_refresh import build_untrained_tensors

_LARGEST = 1e15
"""Largest number that a reply may hold: far above a trained value, and its square fits into every format."""


def build_untrained_reply(method: Method, sent: Message, client: Client, round: int) -> Message:
    """Return the reply of a client without memory whose training changes nothing."""
    return build_untrained_jobs(method, sent, client, round)[1]


def build_untrained_jobs(
    method: Method, sent: Message, client: Client, round: int, memory: Memory | None = None
) -> tuple[list[Job], Message]:
    """Return the jobs of a client whose training changes nothing, phase by phase, and its reply.

    Args:
        memory: The client's memory; None: the client stores nothing and receives a complete message.
    """
    memory = memory or {}
    job = method.start(sent, client, memory, round)
    jobs = [job]
    while True:
        zeros = {name: torch.zeros_like(job.tensors[name]) for name in job.trainable_names}
        trained = Trained(
            tensors=build_untrained_tensors(job),
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
    """A reply that passed the checks of a single reply."""

    contribution: Contribution
    """The reply in the form in which replies are combined."""
    change: Change


def validate_reply(method: Method, message: Message, client: Client, expected: Message) -> ValidatedReply:
    """Check a client's reply on its own.

    Raises:
        ValueError: If the reply is rejected; the message gives the reason.
    """
    if message.base is not None:
        raise ValueError("it holds a change of the base, which only the server sends")
    _require_structure(message, expected, method.declare_claims().shrinks)
    _require_moderate(message.tensors)
    _require_variances(message.tensors, method.spec.variances)
    try:
        contribution = method.contribute(message, client)
    except (ArithmeticError, FedspanError, LookupError, RuntimeError, TypeError) as error:
        raise ValueError(f"no client of the method sends such contents ({type(error).__name__}: {error})") from error
    combined = {**contribution.sum, **contribution.stack}
    _require_moderate({name: value for name, value in combined.items() if value is not message.tensors.get(name)})
    return ValidatedReply(contribution, measure_change(message, contribution, expected, method, client))


def require_requested(reply: Reply, id: str, round: int, attempt: int, task: str = "train") -> None:
    """Check that a reply matches its order."""
    if (reply.task, reply.id, reply.round, reply.attempt) != (task, id, round, attempt):
        raise ValueError(
            f"a reply of {reply.id!r} to round {reply.round + 1}, attempt {reply.attempt + 1} "
            f"({reply.task}), where the order was to {id!r} for round {round + 1}, attempt {attempt + 1} ({task})"
        )


def _require_moderate(tensors: Tensors) -> None:
    """Check that all numbers are finite, and small enough for the server's arithmetic."""
    for name, value in tensors.items():
        if not value.is_floating_point() or not value.numel():
            continue
        largest = float(value.abs().max())
        if not math.isfinite(largest):
            raise ValueError(f"{name} holds numbers that are not finite")
        if largest > _LARGEST:
            raise ValueError(f"{name} holds numbers up to {largest:.3g}, above {_LARGEST:g}")


def _require_variances(tensors: Tensors, paths: Collection[str]) -> None:
    """Check that variances are not negative: a root of the mean would otherwise be NaN, for all clients."""
    for name in map(join_extra_name, sorted(paths)):
        value = tensors.get(name)
        if value is not None and value.numel() and float(value.min()) < 0:
            raise ValueError(f"{name} holds negative variances")


def _require_structure(message: Message, expected: Message, shrinks: bool) -> None:
    missing, extra = expected.tensors.keys() - message.tensors.keys(), message.tensors.keys() - expected.tensors.keys()
    if extra or missing:
        difference = f"without {sorted(missing)[:3]}" if missing else f"with {sorted(extra)[:3]} too"
        raise ValueError(f"tensors are not those of the method: {difference}")
    if message.scalars.keys() != expected.scalars.keys():
        raise ValueError(f"scalars {sorted(message.scalars)}, not {sorted(expected.scalars)}")
    for name, value in expected.scalars.items():
        received = message.scalars[name]
        if type(received) is not type(value):
            raise ValueError(f"{name} is a {type(received).__name__}, not a {type(value).__name__}")
        if isinstance(received, str) and received != value:
            raise ValueError(f"{name} is {received[:40]!r}, not {value!r}")
        if isinstance(received, int | float) and not abs(received) < 2**53:  # NaN is not below it either
            raise ValueError(f"{name} is not a number below 2^53")
    for name, value in message.tensors.items():
        reference = expected.tensors[name]
        is_valid = value.ndim == reference.ndim and all(map(int.__le__, value.shape, reference.shape))
        may_be_smaller = shrinks and is_valid and not is_extra("/".join(name.split("/")[-2:]))  # without prefixes
        if value.dtype != reference.dtype or (value.shape != reference.shape and not may_be_smaller):
            actual, required = (f"{list(tensor.shape)} of {tensor.dtype}" for tensor in (value, reference))
            raise ValueError(f"{name} is {actual}, not {required}")


def find_outliers(changes: Mapping[str, Change], factor: float | None) -> dict[str, str]:
    """Return the clients whose replies are too far from the untrained one, compared with the others, with reasons."""
    limits = {} if factor is None else compute_norm_limits(changes, factor)
    outliers: dict[str, str] = {}
    for id, allowed in limits.items():
        for quantity, limit in allowed.items():
            norm = changes[id][quantity].norm
            if not norm <= limit:
                subject = "its change has" if quantity == MODEL else f"its {quantity} have"
                outliers[id] = (
                    f"{subject} a norm of {norm:.3g}; the limit is {limit:.3g}, {factor:g} times the cohort's norm"
                )
    return outliers


def compute_origin(method: Method, sent: Message, client: Client, round: int) -> Tensors:
    """Return the contribution of a client that received a message and trained nothing.

    Raises:
        ValueError: If the method stacks replies instead of summing them.
    """
    contribution = method.contribute(build_untrained_reply(method, sent, client, round), client)
    if contribution.stack:
        raise ValueError("replies that are stacked have no sum")
    return contribution.sum
