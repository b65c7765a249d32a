"""Differential privacy of a federation: what is clipped and made noisy where, and what each order costs.

``central`` (McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018, arXiv 1710.06963):

    X = sum over the cohort of clip(x_i - x, C) + N(0, (z C)^2);    mean = x + X / m,    m = q N clients on average

The cohort is a Poisson sample with rate q, and m is no count of replies: a client that does not reply adds nothing, and
one client more or less moves X by at most C.

``local``: every client sends x + clip(x_i - x, C) + N(0, (z C)^2). Any two replies are at most 2 C apart, so the noise
over the sensitivity is z / 2, and no sampling helps against a server that sees who replied.

``dp-sgd`` (Abadi et al., CCS 2016, arXiv 1607.00133): see ``private_steps``.

Deviations: the papers' clients send changes; here they send values, less those of a client that trained nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedspan.core.method import Memory, Method
from fedspan.core.noise import digest_of, gaussian
from fedspan.core.tensors import Tensors, generator
from fedspan.core.values import Client, Contribution, Message, ServerState
from fedspan.errors import FedspanError
from fedspan.federation.changes import apply_change, change_of, clip_change
from fedspan.federation.settings import RoundSettings
from fedspan.federation.validation import untrained_jobs
from fedspan.training.accounting import Charge, Mechanism, calibrate_noise
from fedspan.training.poisson import noise_for, release_of
from fedspan.training.settings import Privacy, TrainingSettings

__all__ = [
    "expected_charges",
    "order_charges",
    "poisson_cohort",
    "private_mean",
    "privatize",
    "round_charges",
    "sampling_rate",
    "training_noise",
]


def sampling_rate(settings: RoundSettings, clients: int) -> float:
    """The probability with which a client is in a round's cohort."""
    return 1.0 if settings.cohort is None else min(1.0, settings.cohort / max(1, clients))


def poisson_cohort(privacy: Privacy, settings: RoundSettings, clients: int, round: int) -> list[int]:
    """The places of a round's clients, each drawn by itself; there may be none.

    Args:
        privacy: central.
        settings: the run's.
        clients: in the federation.
        round: number.
    """
    rate = sampling_rate(settings, clients)
    if rate == 1.0:
        return list(range(clients))
    # Clients know the run's seed, and who knows the cohort has nothing of the sampling's protection.
    seed = int.from_bytes(privacy.key, "big") if privacy.secret else settings.seed
    rng = generator(seed, "cohort", round)
    return (torch.rand(clients, generator=rng, dtype=torch.float64) < rate).nonzero().flatten().tolist()


def client_noise(privacy: Privacy, rate: float) -> float:
    """The noise over the clipping norm of ``central`` or ``local``: the run's, or as little as its budget allows.

    Args:
        privacy: of the run.
        rate: with which a client is in a cohort; of ``local``, every client may be in every round.
    """
    if privacy.noise is not None:
        return privacy.noise
    assert privacy.epsilon is not None  # the config has one of the two
    if privacy.mechanism == "local":
        return 2 * calibrate_noise(1.0, privacy.rounds, privacy.epsilon, privacy.delta, privacy.accounting)
    return calibrate_noise(rate, privacy.rounds, privacy.epsilon, privacy.delta, privacy.accounting)


def round_charges(settings: RoundSettings, clients: int) -> tuple[Charge, ...]:
    """What a round costs all clients together."""
    privacy = settings.privacy
    if privacy is None or privacy.mechanism != "central":
        return ()
    rate = sampling_rate(settings, clients)
    return (Charge("", Mechanism(rate, client_noise(privacy, rate)), 1),)


def order_charges(
    privacy: Privacy | None,
    training: TrainingSettings,
    method: Method,
    sent: Message,
    client: Client,
    round: int,
    memory: Memory | None = None,
) -> tuple[Charge, ...]:
    """What an order to train costs the client.

    Args:
        privacy: of the run.
        training: local training.
        method: the run's.
        sent: with the order.
        client: who.
        round: Number of the round, from 0.
        memory: its own, where that is at hand; else it must be sent everything.
    """
    if privacy is None or privacy.mechanism == "central":
        return ()
    if privacy.mechanism == "local":
        return (Charge(client.id, Mechanism(1.0, client_noise(privacy, 1.0) / 2), 1),)
    jobs, _ = untrained_jobs(method, sent, client, round, memory)
    mechanism, steps = release_of(privacy, training, jobs, client.examples)
    return (Charge(client.id, mechanism, steps),)


def expected_charges(
    privacy: Privacy | None, training: TrainingSettings, method: Method, state: ServerState, client: Client
) -> tuple[Charge, ...]:
    """The privacy cost of an order to train as the server knows it; the same whatever the client holds.

    Args:
        privacy: Privacy of the run.
        training: Settings of local training.
        method: The run's method.
        state: The server's state.
        client: The client.
    """
    fresh = replace(client, held=None)
    return order_charges(privacy, training, method, method.sync(state, fresh), fresh, state.round)


def training_noise(
    training: TrainingSettings, method: Method, sent: Message, client: Client, round: int, memory: Memory | None = None
) -> float:
    """The noise of DP-SGD in an order's jobs, arguments as in ``order_charges``; 0 without it."""
    privacy = training.privacy
    if privacy is None or privacy.mechanism != "dp-sgd":
        return 0.0
    return noise_for(privacy, training, untrained_jobs(method, sent, client, round, memory)[0], client.examples)


def privatize(privacy: Privacy | None, started: Tensors, client: Client, reply: Message, round: int) -> Message:
    """A reply as it may leave the client: with ``local``, clipped and noisy, else as it is.

    Args:
        privacy: of the run.
        started: tensors of the job that the client began with: all clients began alike.
        client: who.
        reply: what the method made.
        round: number.

    Raises:
        FedspanError: if the reply holds anything that noise can't hide.
    """
    if privacy is None or privacy.mechanism != "local":
        return reply
    strange = [name for name, value in reply.tensors.items() if not value.is_floating_point() or name not in started]
    if strange or reply.scalars:
        expected = f"nothing beside tensors that all clients start from, not {[*strange, *reply.scalars][0]}"
        raise FedspanError("privacy.mechanism", "local", expected)
    origin = {name: started[name].to("cpu", value.dtype) for name, value in reply.tensors.items()}
    try:
        change = clip_change(change_of(Contribution(sum=reply.tensors), origin), privacy.clip)
    except ValueError as error:
        raise FedspanError("reply", client.id, f"numbers that noise can hide; {error}") from error
    noisy = _noisy(change, privacy, client_noise(privacy, 1.0), "local", round, client.id)
    return replace(reply, tensors=apply_change(noisy, origin))


def private_mean(
    total: Mapping[str, Tensor], origin: Tensors, privacy: Privacy, rate: float, expected: float, round: int
) -> dict[str, Tensor]:
    """What becomes of the sum of a round's clipped changes: noise on it, and the number of clients under it.

    Args:
        total: the sum, each change of norm ``privacy.clip`` at most.
        origin: what a client contributes that trained nothing.
        privacy: of the run, central.
        rate: with which a client is in a cohort.
        expected: clients of a cohort, on average.
        round: number.
    """
    noisy = _noisy(total, privacy, client_noise(privacy, rate), "central", round)
    return apply_change({name: value / expected for name, value in noisy.items()}, origin)


def _noisy(change: Mapping[str, Tensor], privacy: Privacy, noise: float, *label: int | str) -> dict[str, Tensor]:
    """A change with noise on every entry."""
    if privacy.secret:  # whoever makes a client answer twice gets the same answer, or one with other noise
        label = (*label, digest_of(change))
    std = noise * privacy.clip
    return {name: value + std * gaussian(privacy.key, value.shape, *label, name) for name, value in change.items()}
