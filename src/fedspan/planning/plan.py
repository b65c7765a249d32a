"""Cost of a run before any download: trainable parameters, bytes, steps, FLOPs, memory and time."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedspan.assembly.federation import compute_client_ranks
from fedspan.assembly.model import build_empty_model
from fedspan.config import RunConfig
from fedspan.core.heads import compute_statistics_shapes
from fedspan.core.values import Job
from fedspan.data.assign import make_client_ids
from fedspan.errors import FedspanError
from fedspan.federation.federation import draw_cohort
from fedspan.models.adapted import AdaptedModel
from fedspan.models.head import NoOutputLayer, find_output_layer
from fedspan.models.quantized import list_unquantized_modules
from fedspan.planning.accelerators import DeviceSpeed, Duration
from fedspan.planning.compute import Compute, PlannedPasses, Trains, compute_training_cost
from fedspan.planning.traffic import RankCounts, count_head_rounds, list_extras, plan_traffic
from fedspan.training.dp_sgd import compute_private_steps

_FLOAT = 4  # bytes: trained and transmitted tensors are float32
_MOMENTS = {"adamw": 2, "sgd": 1}  # moments of a trained number; SGD has one with momentum only


@dataclass(frozen=True)
class ClientMemory:
    """Peak bytes on a client that trains alone."""

    base: int
    """Bytes of the frozen model, in its own format."""
    adapter: int
    """Bytes of the method's tensors of the target layers, and of the extras."""
    gradients: int
    optimizer: int
    activations: int
    """Peak bytes of a forward and backward pass of a batch of examples of the maximum length; fused attention on a GPU
    stores less."""
    cache: int
    """Bytes of its examples' hidden states at the end of the frozen prefix, if ``layers_to_transform`` leaves one."""

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return self.base + self.adapter + self.gradients + self.optimizer + self.activations + self.cache


@dataclass(frozen=True)
class ServerMemory:
    """Bytes on the server."""

    base: int
    """Bytes of the frozen model, which some methods decompose and which the server evaluates."""
    state: int
    """Bytes of the method's initial state. Its additions to the base over the rounds take at most one more float32 copy
    of the target layers."""
    replies: int
    """Bytes of a round's replies: all of them if the method needs them one by one, else one and their sum."""

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return self.base + self.state + self.replies


@dataclass(frozen=True)
class Plan:
    """Estimated cost of a run.

    Args:
        method: Method with its wrappers, as named in tables.
        model: Name of the model.
        parameters: Parameters of the whole model.
        layers: Number of target layers.
        trainable: Numbers that a client trains at a time, including the extras; the largest count if ranks differ.
        clients: Clients of the federation.
        cohort: Clients of a round.
        rounds: Rounds of the run.
        first_down: Bytes of tensor data to a client of the first cohort (the mean, if ranks differ).
        first_up: Bytes of tensor data from a client of the first cohort, likewise.
        later_down: Mean bytes to a client in the later rounds; 0 if there is one round.
        later_up: Mean bytes from a client in the later rounds, likewise.
        bytes_down: Bytes of all messages to clients in the run's training.
        bytes_up: Bytes of all messages from clients in the run's training.
        head_up: Bytes of tensor data from a client before the first round, for the head's start; 0 without one. Not
            part of ``bytes_up``, as in the ledger.
        exact: Whether the bytes equal the ledger's: true if every client participates in every round, and the method's
            ranks do not depend on the replies (those of FLoRIST and of HetLoRA with pruning do: the largest are
            counted). Otherwise, returning clients may be sent more of the base, and one-time transfers are counted for
            the drawn cohorts. Never if the first rounds train the head alone: their orders are planned for a method
            that starts from the pretrained model, and their steps and FLOPs as those of the other rounds.
        steps: Optimizer steps of a client in a round, in a method's main phase; None if the number of examples is
            unknown.
        all_steps: Optimizer steps over cohorts and rounds; None likewise.
        client: Memory of a client.
        server: Memory of the server.
        compute: FLOPs of the clients' training.
        transfer: Mean seconds in which a client receives and sends its messages of a round; None if no bandwidth was
            given.
        time: Duration of the clients' training; None if no device was given.

    Examples:
        >>> report = fedspan.plan("config.yaml")
        >>> report.bytes_down + report.bytes_up
    """

    method: str
    model: str
    parameters: int
    layers: int
    trainable: int
    clients: int
    cohort: int
    rounds: int
    first_down: int
    first_up: int
    later_down: float
    later_up: float
    bytes_down: int
    bytes_up: int
    head_up: int
    exact: bool
    steps: int | None
    all_steps: int | None
    client: ClientMemory
    server: ServerMemory
    compute: Compute
    transfer: float | None = None
    time: Duration | None = None


@dataclass(frozen=True)
class PlannedModel:
    """A run's model without weights, and what is the same for all methods on it."""

    adapted: AdaptedModel
    """The model, on the meta device."""
    base: int
    """Bytes of the frozen model in its format."""
    passes: PlannedPasses


def prepare_model(config: RunConfig, labels: int, architecture: Mapping[str, Any] | None = None) -> PlannedModel:
    """Build the model of a run without its weights.

    Args:
        labels: Number of classes in the data; ignored by other tasks.
        architecture: A Transformers config as plain values, in place of the named model's.
    """
    names = config.data.labels or [str(number) for number in range(labels)]
    adapted = build_empty_model(config, tuple(names), architecture)
    base = sum(
        value.numel() * value.element_size() for value in (*adapted.model.parameters(), *adapted.model.buffers())
    )
    return PlannedModel(
        adapted, base - _compute_quantizing_savings(config, adapted.model), PlannedPasses(config, adapted)
    )


def _compute_quantizing_savings(config: RunConfig, model: torch.nn.Module) -> int:
    """Return the bytes that quantization saves; the scales of the blocks, about 1 %, are ignored."""
    bits = {None: None, "nf4": 4, "int8": 8}[config.model.quantization]
    if bits is None:
        return 0
    unquantized = re.compile("|".join(list_unquantized_modules(config.model.modules_to_save)))
    weights = [
        module.weight
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not unquantized.fullmatch(path)
    ]
    return sum(weight.numel() * (8 * weight.element_size() - bits) // 8 for weight in weights)


def plan_run(
    config: RunConfig,
    planned: PlannedModel,
    clients: int | None = None,
    examples: int | None = None,
    *,
    length: int | None = None,
    mbit: float | None = None,
) -> Plan:
    """Plan a run.

    Args:
        clients: Clients of the federation; None: those of ``partition.clients``.
        examples: Examples of the training set; None: unknown.
        length: Mean tokens of a text of an example; None: as many as the config and the model allow.
        mbit: Megabits a second between a client and the server; None: no transfer is planned.

    Raises:
        FedspanError: If a natural partition lacks ``clients``, a rank is larger than the layers allow, no example can
            have this length, or the bandwidth is not a positive finite number.
    """
    if mbit is not None and not (0 < mbit < math.inf):
        raise FedspanError("--mbit", mbit, "a number of megabits a second above 0")
    if clients is None and config.partition.partitioner == "natural":
        raise FedspanError(
            "clients", None, "the number of values of partition.column, which a natural partition does not name"
        )
    count = clients or config.partition.clients
    spec = replace(planned.adapted.spec, clients=count)
    method = config.build_method(spec)
    ids = make_client_ids(count)
    by_client = compute_client_ranks(config, method, ids)
    ranks = [by_client[id] for id in ids]
    counts = {rank: RankCounts.count(method, rank) for rank in sorted(set(ranks))}
    rounds = plan_traffic(config, planned.adapted, method, ranks)
    first, later = rounds[0], rounds[1:]
    messages = sum(traffic.clients for traffic in later) or 1
    largest, extras = counts[max(counts)], list_extras(config, planned.adapted, method)
    trainable = largest.trained + (0 if extras.policy == "frozen" else extras.trained)
    moments = _MOMENTS[config.training.optimizer]
    if config.training.optimizer == "sgd" and not config.training.momentum:
        moments = 0
    own_examples = _count_own_examples(config, count, examples)
    steps = _compute_steps(config, own_examples)
    trains = Trains(largest.computations, extras.policy != "frozen" and bool(planned.adapted.extras))
    cohorts = [
        draw_cohort(config.seed, number, count, config.federation.clients_per_round)
        for number in range(config.federation.most_rounds)
    ]
    local = compute_training_cost(config, planned.passes, trains, own_examples, length, cohorts)
    bytes_down, bytes_up = sum(traffic.down for traffic in rounds), sum(traffic.up for traffic in rounds)
    orders = sum(traffic.clients for traffic in rounds)
    transfer = None if mbit is None else 8 * (bytes_down + bytes_up) / orders / (mbit * 1e6)
    replies_in_memory = 1 if method.declare_claims().reduction == "sum" else first.clients
    return Plan(
        method=config.method.title,
        model=config.model.name,
        parameters=sum(parameter.numel() for parameter in planned.adapted.model.parameters()),
        layers=len(spec.layers),
        trainable=trainable,
        clients=count,
        cohort=first.clients,
        rounds=config.federation.most_rounds,
        first_down=first.down // first.clients,
        first_up=first.up // first.clients,
        later_down=sum(traffic.down for traffic in later) / messages,
        later_up=sum(traffic.up for traffic in later) / messages,
        bytes_down=bytes_down,
        bytes_up=bytes_up,
        head_up=_compute_head_bytes(config, planned.adapted),
        exact=first.clients == count
        and not method.declare_claims().adaptive_rank
        and not count_head_rounds(config, extras),
        steps=steps,
        all_steps=None if steps is None else steps * orders,
        client=ClientMemory(
            base=planned.base,
            adapter=_FLOAT * largest.held + extras.bytes,
            gradients=_FLOAT * trainable,
            optimizer=_FLOAT * moments * trainable,
            activations=local.activations,
            cache=local.cache,
        ),
        server=ServerMemory(
            base=planned.base,
            state=_FLOAT * largest.stored + extras.bytes,
            replies=max(traffic.up // traffic.clients for traffic in rounds) * max(2, replies_in_memory),
        ),
        compute=local.compute,
        transfer=transfer,
    )


def add_time(plan: Plan, speed: DeviceSpeed, config: RunConfig) -> Plan:
    """Add the time that training takes on a device of this speed to a plan."""
    return replace(plan, time=speed.compute_duration(plan.compute, plan.client.base, config, plan.transfer))


def _compute_head_bytes(config: RunConfig, adapted: AdaptedModel) -> int:
    """Return the bytes of a client's statistics for the head's start; 0 if the head starts at random."""
    kind, _ = config.head_kind
    if kind is None:
        return 0
    try:
        layer = find_output_layer(adapted)
    except NoOutputLayer:
        return 0
    return _FLOAT * sum(
        math.prod(shape) for shape in compute_statistics_shapes(kind, layer.outputs, layer.features).values()
    )


def _count_own_examples(config: RunConfig, clients: int, examples: int | None) -> int | None:
    """Return the training examples of the mean client; None: unknown."""
    if examples is None:
        return None
    training_share = 1 - config.partition.validation - config.partition.test
    return max(1, round(examples * training_share / clients))


def _compute_steps(config: RunConfig, own_examples: int | None) -> int | None:
    """Return the optimizer steps of a client in a round; with epochs, of a client with this many examples."""
    settings = config.build_training_settings()
    if settings.local_steps is not None:
        return settings.local_steps
    return None if own_examples is None else compute_private_steps(settings, Job({}, {}, ()), own_examples)
