"""The parts of a run, built from its config: data, partition, model, method, federation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import datasets
import numpy as np
import torch

from fedspan.clients.data import LazyMapping
from fedspan.config import RunConfig
from fedspan.core.method import RegisteredMethod
from fedspan.core.values import Client
from fedspan.crypto import require
from fedspan.data.loading import load
from fedspan.data.partition import Partition, partition
from fedspan.errors import FedspanError
from fedspan.federation.aggregation.aggregation import AggregationFactory
from fedspan.federation.aggregation.plaintext import PlaintextAggregation
from fedspan.federation.conditions import Conditions
from fedspan.federation.evaluation import Evaluator
from fedspan.federation.federation import Federation
from fedspan.federation.progress import ClientData
from fedspan.models.adapted import AdaptedModel
from fedspan.runs.engine_setup import make_engine
from fedspan.runs.model_setup import RunModel, build_model
from fedspan.runs.ranks import client_ranks, client_scaling
from fedspan.runs.task_setup import PROBLEMS, Facts, require_size
from fedspan.tasks.encoding import EncodedText
from fedspan.tasks.images import EncodedImages
from fedspan.tasks.task import Examples, RunTask
from fedspan.training.engine import Engine
from fedspan.transports.in_process import simulate

if TYPE_CHECKING:
    from fedspan.clients.secagg import SecureClient

__all__ = ["Prepared", "choose_device", "max_length", "prepare", "require_private_model"]


@dataclass(frozen=True)
class Prepared:
    """A run that is built and ready to start.

    Args:
        config: The config that the run was built from.
        labels: Label names by index; for a language model, those of the data's column of labels, if any.
        facts: Facts about the task that the model needs.
        partition: The training examples of each client; None: the examples are on remote nodes.
        task: The learning problem.
        engine: The engine, with the model on its device.
        federation: Method, engine and clients.
        evaluator: Evaluator of the federation.
        train: Encoded examples that the partition assigns to clients.
        test: Encoded held-out examples, or None.
        test_names: Display names of the held-out examples.
        model: The model that the engine trains, with the data that its export needs.
        remarks: Notes for the user about the examples (truncated answers).
    """

    config: RunConfig
    labels: tuple[str, ...]
    facts: Facts
    partition: Partition | None
    task: RunTask
    engine: Engine
    federation: Federation
    evaluator: Evaluator
    train: Examples
    test: Examples | None
    test_names: tuple[str, ...]
    model: RunModel
    remarks: tuple[str, ...] = ()


def choose_device(name: str) -> torch.device:
    """Return the named device; ``auto``: CUDA, then Apple's MPS, then the CPU.

    Raises:
        FedspanError: If the name is not a device name, or this machine lacks the device.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # on "meta", tensors can be created but hold no values
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).strip().splitlines()[0].partition(". ")[0]
        raise FedspanError(
            "device", name, f"auto, cpu, cuda, cuda:N or mps, as this machine has them ({reason})"
        ) from None
    return device


def prepare(config: RunConfig, given: Partition | None = None, key: bytes | None = None) -> Prepared:
    """Build a run.

    Args:
        config: Config of the run.
        given: An existing partition (of a resumed run) to use instead of drawing one.
        key: Secret key of the noise, if it has one.

    Raises:
        FedspanError: If anything in the config does not fit the data or the model.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = choose_device(config.device)
    data = load(config.data, seed=config.data_seed, task=config.task)
    parts = given or partition(data.train, config.partition, config.data_seed)
    if parts.examples != len(data.train):
        raise FedspanError("data.train", len(data.train), f"the {parts.examples} examples that the run was begun with")
    built = build_model(config, data.labels, device)
    adapted = built.adapted
    require_private_model(config, adapted)
    if config.evaluation.metric == "f1" and len(data.labels) != 2:
        expected = f"macro_f1: there are {len(data.labels)} labels, and f1 is of the second of two"
        raise FedspanError("evaluation.metric", "f1", expected)
    facts = Facts.of(config, data.labels, max_length(config, built.processor, adapted.model))
    task = PROBLEMS[config.task].task(built.processor, facts, config)
    method = config.build_method(replace(adapted.spec, clients=len(parts.clients)))
    engine = make_engine(config, adapted, task, config.training_settings(key))
    train = task.encode(data.train)
    require_size(config, adapted.model, task, train, device)
    members, conditions = _members(config, method, parts), None
    if config.simulation is not None:
        conditions = config.simulation.conditions(config.seed)
    federation = simulate(
        config.wrapped(method),
        engine,
        members,
        _flipped(train, members, conditions, len(data.labels)),
        config.round_settings(key),
        config.simulation_rules(),
        aggregation_of(config),
        _secure_clients(config, members),
        conditions,
    )
    return Prepared(
        config=config,
        labels=data.labels,
        facts=facts,
        partition=parts,
        task=task,
        engine=engine,
        federation=federation,
        evaluator=Evaluator(federation, config.evaluation.batch_size, config.evaluation.clients),
        train=train,
        test=None if data.test is None else task.encode(data.test),
        test_names=() if data.test is None else _names(data.test),
        model=built,
        remarks=(*_dropped(data.dropped), *task.remarks(train)),
    )


def aggregation_of(config: RunConfig) -> AggregationFactory:
    """Return the aggregation that a config selects.

    Raises:
        FedspanError: If the config selects secure aggregation and its libraries are not installed.
    """
    secure = config.federation.secure_settings()
    if secure is None:
        return PlaintextAggregation
    require()
    from fedspan.federation.aggregation.secure import SecureAggregation  # needs fedspan[secagg]

    return partial(SecureAggregation, secure=secure)


def _secure_clients(config: RunConfig, members: Mapping[str, ClientData]) -> Mapping[str, SecureClient] | None:
    """Each simulated client's half of secure aggregation, with its state in memory; None: the run has none."""
    if config.federation.secure is None:
        return None
    require()
    from fedspan.clients.secagg import MemorySessionStore, SecureClient  # needs fedspan[secagg]

    ids, sessions = tuple(members), MemorySessionStore()
    return LazyMapping(ids, lambda at: SecureClient(ids[at], sessions))


def _flipped(
    train: Examples, members: Mapping[str, ClientData], conditions: Conditions | None, labels: int
) -> Examples:
    """The training examples; those of clients that train on flipped labels have label K - 1 - k in place of k."""
    faults = None if conditions is None else conditions.faults
    if conditions is None or faults is None or faults.kind != "label-flip":
        return train
    assert isinstance(train, EncodedText | EncodedImages)
    flipped = train.labels.copy()
    for id in conditions.faulty(sorted(members)):
        own = members[id].train
        flipped[own] = labels - 1 - flipped[own]
    return replace(train, labels=flipped)


def require_private_model(config: RunConfig, adapted: AdaptedModel) -> None:
    """Check that the run's privacy covers all parts of a model.

    Raises:
        FedspanError: If it does not.
    """
    if config.privacy is not None and adapted.buffers:
        expected = f"left out with this model: running statistics ({adapted.buffers[0]}, ...) are of raw examples"
        raise FedspanError("privacy", config.privacy.mechanism, expected)


def _dropped(count: int) -> tuple[str, ...]:
    return (f"{count} rows that lack a text, a label or an answer were left out",) if count else ()


def _names(examples: datasets.Dataset) -> tuple[str, ...]:
    """Return the display names of examples: their texts, or the files of images."""
    if "text" in examples.column_names:
        return tuple(examples["text"])
    paths = [row["path"] for row in examples.cast_column("image", datasets.Image(decode=False))["image"]]
    return tuple(path or f"image {number}" for number, path in enumerate(paths, start=1))


def max_length(config: RunConfig, tokenizer: object, model: torch.nn.Module) -> int:
    """Return the maximum number of tokens of an example that the config, the tokenizer and the model allow."""
    limits = [
        config.model.max_length,
        getattr(tokenizer, "model_max_length", config.model.max_length),
        getattr(getattr(model, "config", None), "max_position_embeddings", config.model.max_length),
    ]
    for name, module in model.named_modules():  # RoBERTa-like models count positions from after the padding index
        padding = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding) and padding is not None:
            limits.append(module.num_embeddings - padding - 1)
    return int(min(limits))


def _members(config: RunConfig, method: RegisteredMethod, parts: Partition) -> LazyMapping[ClientData]:
    ids = parts.parts.ids
    cohort = config.federation.clients_per_round
    if cohort is not None and cohort > len(ids):
        raise FedspanError("federation.clients_per_round", cohort, f"at most the {len(ids)} clients there are")
    ranks = np.fromiter(client_ranks(config, method, ids).values(), np.int64, len(ids))

    def member(at: int) -> ClientData:
        part, rank = parts.parts[at], int(ranks[at])
        weight = 1.0 if config.federation.weights == "uniform" else float(len(part.train))
        client = Client(part.id, rank, client_scaling(config, method, rank), len(part.train), weight)
        return ClientData(client, part.train, part.validation, part.test)

    return LazyMapping(ids, member)
