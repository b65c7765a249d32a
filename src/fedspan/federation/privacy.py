"""Differential privacy of a federation: where changes are clipped and noised, and the privacy cost of each order.

``central`` (McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018, arXiv 1710.06963):

    X = sum over the cohort of clip(x_i - x, C) + N(0, (z C)^2);    mean = x + X / m,    m = q N clients on average

The cohort is a Poisson sample with rate q, and m does not count replies: a client that does not reply adds nothing, and
adding or removing one client moves X by at most C.

``local``: every client sends x + clip(x_i - x, C) + N(0, (z C)^2). Any two replies are at most 2 C apart, so the ratio
of noise to sensitivity is z / 2. Sampling does not amplify privacy, because the server sees which clients replied.

``dp-sgd`` (Abadi et al., CCS 2016, arXiv 1607.00133): see ``training.dp_sgd.compute_private_steps``.

Deviations: Clients in the papers send changes. Here they send values, and the values of an untrained client are
subtracted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedspan.core.method import Memory, Method
from fedspan.core.noise import add_gaussian, compute_tensor_digest, draw_poisson_sample
from fedspan.core.tensors import Tensors
from fedspan.core.values import Client, Contribution, Message, Reduced, ServerState
from fedspan.errors import FedspanError
from fedspan.federation.changes import apply_change, clip_change, compute_change
from fedspan.federation.config import RoundSettings
from fedspan.federation.validation import build_untrained_jobs
from fedspan.training.accounting import Charge, Mechanism, PrivacySpend, calibrate_noise
from fedspan.training.config import Privacy, TrainingSettings
from fedspan.training.dp_sgd import compute_noise, release_of
from fedspan.training.jobs import NotFiniteError


def compute_sampling_rate(settings: RoundSettings, clients: int) -> float:
    """Return the probability that a client is in a round's cohort."""
    return 1.0 if settings.clients_per_round is None else min(1.0, settings.clients_per_round / max(1, clients))


def draw_poisson_cohort(privacy: Privacy, settings: RoundSettings, clients: int, round: int) -> list[int]:
    """Return the positions of a round's clients, each drawn independently; possibly none."""
    rate = compute_sampling_rate(settings, clients)
    if rate == 1.0:
        return list(range(clients))
    # Of the noise's key: clients know the run's seed, and a known cohort removes the protection of sampling.
    return draw_poisson_sample(privacy.key, rate, clients, "cohort", round).tolist()


def compute_client_noise(privacy: Privacy, rate: float) -> float:
    """Return the noise multiplier of ``central`` or ``local``: the configured one, or the smallest within the budget.

    Args:
        rate: Probability that a client is in a cohort; unused by ``local``, where every client may be in every round.
    """
    if privacy.noise is not None:
        return privacy.noise
    assert privacy.epsilon is not None  # the config guarantees one of the two
    if privacy.mechanism == "local":
        return 2 * calibrate_noise(1.0, privacy.rounds, privacy.epsilon, privacy.delta, privacy.accountant)
    return calibrate_noise(rate, privacy.rounds, privacy.epsilon, privacy.delta, privacy.accountant)


def compute_round_charges(settings: RoundSettings, clients: int) -> tuple[Charge, ...]:
    """Return the privacy cost of a round that all clients share."""
    if settings.central is None:
        return ()
    rate = compute_sampling_rate(settings, clients)
    return (Charge("", Mechanism(rate, compute_client_noise(settings.central, rate)), 1),)


def compute_order_charges(
    privacy: Privacy | None,
    training: TrainingSettings,
    method: Method,
    sent: Message,
    client: Client,
    round: int,
    memory: Memory | None = None,
) -> tuple[Charge, ...]:
    """Return the privacy cost of a training order for the client.

    Args:
        memory: The client's memory, if available; without it, the message must be complete.
    """
    if privacy is None or privacy.mechanism == "central":
        return ()
    if privacy.mechanism == "local":
        return (Charge(client.id, Mechanism(1.0, compute_client_noise(privacy, 1.0) / 2), 1),)
    jobs, _ = build_untrained_jobs(method, sent, client, round, memory)
    mechanism, steps = release_of(privacy, training, jobs, client.examples)
    return (Charge(client.id, mechanism, steps),)


def compute_expected_charges(
    privacy: Privacy | None, training: TrainingSettings, method: Method, state: ServerState, client: Client
) -> tuple[Charge, ...]:
    """Return the privacy cost of a training order as the server knows it, independent of the client's stored state."""
    new_client = replace(client, last_round=None)
    return compute_order_charges(privacy, training, method, method.sync(state, new_client), new_client, state.round)


def compute_planned_charges(
    privacy: Privacy | None,
    training: TrainingSettings,
    method: Method,
    begin: Callable[[], ServerState],
    client: Client,
) -> tuple[Charge, ...]:
    """Return the privacy cost of a run for a client that trains in all of its rounds.

    A run with a noise and an epsilon of its own ends before the round that would exceed the latter, so the rounds are
    those that fit into it.

    Args:
        begin: Builds the server's state before the first round; every round costs as much as this one.
    """
    if privacy is None or privacy.mechanism == "central":
        return ()
    if privacy.mechanism == "local":
        charges = (Charge(client.id, Mechanism(1.0, compute_client_noise(privacy, 1.0) / 2), 1),)
    else:
        charges = compute_expected_charges(privacy, training, method, begin(), client)
    rounds = _count_rounds(privacy, charges)
    return tuple(replace(charge, count=charge.count * rounds) for charge in charges if rounds)


def _count_rounds(privacy: Privacy, charges: tuple[Charge, ...]) -> int:
    """Return the number of a run's rounds, each at the given cost, that fit into its own epsilon."""
    if privacy.epsilon is None or privacy.noise is None:
        return privacy.rounds
    epsilon = privacy.epsilon

    def is_above_epsilon(rounds: int) -> bool:
        total = tuple(replace(charge, count=charge.count * rounds) for charge in charges)
        # ``rdp``, which takes less time, is never below
        return all(
            PrivacySpend(privacy.delta, kind).compute_worst(total) > epsilon for kind in ("rdp", privacy.accountant)
        )

    return bisect_left(range(1, privacy.rounds + 1), True, key=is_above_epsilon)


def compute_training_noise(
    training: TrainingSettings,
    privacy: Privacy,
    method: Method,
    sent: Message,
    client: Client,
    round: int,
    memory: Memory | None = None,
) -> float:
    """Return the DP-SGD noise of an order's jobs (arguments as in ``compute_order_charges``)."""
    return compute_noise(
        privacy, training, build_untrained_jobs(method, sent, client, round, memory)[0], client.examples
    )


def privatize(privacy: Privacy, started: Tensors, client: Client, reply: Message, round: int) -> Message:
    """Clip a reply under local privacy and add its noise, so that it may leave the client.

    Args:
        privacy: Privacy settings of the run, with the mechanism ``local``.
        started: Initial tensors of the client's first job, which all clients share.

    Raises:
        FedspanError: If the reply holds anything that noise cannot hide.
    """
    unexpected = [name for name, value in reply.tensors.items() if not value.is_floating_point() or name not in started]
    if unexpected or reply.scalars:
        problem = (
            f"noise cannot protect {[*unexpected, *reply.scalars][0]}, a value from which clients do not all start"
        )
        raise FedspanError("privacy.mechanism", "local", problem=problem)
    origin = {name: started[name].to("cpu", value.dtype) for name, value in reply.tensors.items()}
    try:
        change, _ = clip_change(compute_change(Contribution(sum=reply.tensors), origin), privacy.clip)
    except ValueError as error:
        raise NotFiniteError("reply", client.id, problem=f"noise cannot protect this reply: {error}") from error
    noisy = _add_noise(change, privacy, compute_client_noise(privacy, 1.0), "local", round, client.id)
    return replace(reply, tensors=apply_change(noisy, origin))


@dataclass(frozen=True)
class CentralPrivacy:
    """Central privacy of a round: what a client adds to the sum of changes, and how the sum is released.

    It does not matter who sums. In plaintext the server clips the changes and a reduction sums them; in secure
    aggregation the clients clip them and the server decodes their sum.
    """

    privacy: Privacy
    origin: Tensors
    """Contribution of a client that trained nothing."""
    rate: float
    """Probability that a client is in a cohort."""
    clients: int
    round: int

    def clip_contribution(self, contribution: Contribution) -> Tensors:
        """Return the contribution's change, with a norm of at most ``privacy.clip``.

        Raises:
            ValueError: If the contribution does not fit the origin or is not finite.
        """
        return clip_change(compute_change(contribution, self.origin), self.privacy.clip)[0]

    def release(self, total: Mapping[str, Tensor]) -> Reduced:
        """Return the noisy sum of clipped changes over the expected number of clients, on top of the origin.

        Args:
            total: Sum of the changes, float64; tensors that no client contributed are zero.
        """
        zeros = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in self.origin.items()}
        noise, expected = compute_client_noise(self.privacy, self.rate), self.rate * self.clients
        noisy = _add_noise({**zeros, **total}, self.privacy, noise, "central", self.round)
        mean = apply_change({name: value / expected for name, value in noisy.items()}, self.origin)
        return Reduced(mean=mean, count=expected)


def create_central_privacy(
    settings: RoundSettings, clients: int, round: int, origin: Callable[[], Tensors]
) -> CentralPrivacy | None:
    """Create a round's central privacy; None: the settings have none."""
    if settings.central is None:
        return None
    return CentralPrivacy(settings.central, origin(), compute_sampling_rate(settings, clients), clients, round)


def _add_noise(change: Mapping[str, Tensor], privacy: Privacy, noise: float, *label: int | str) -> dict[str, Tensor]:
    std = noise * privacy.clip
    if privacy.secret:  # a repeated order yields either the same reply or one with different noise
        label = (*label, compute_tensor_digest(change), repr(std))
    return {name: add_gaussian(value, std, privacy.key, *label, name) for name, value in change.items()}
