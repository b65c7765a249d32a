"""From a config to the things that run: data, partition, model, method, federation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import datasets
import numpy as np
import torch

from fedspan.clients.data import LazyMapping
from fedspan.config import RunConfig
from fedspan.core.method import RegisteredMethod
from fedspan.core.values import Client
from fedspan.data.loading import load
from fedspan.data.partition import Partition, partition
from fedspan.errors import FedspanError
from fedspan.federation.evaluation import Evaluator
from fedspan.federation.federation import Federation
from fedspan.federation.progress import ClientData
from fedspan.models.adapted import AdaptedModel
from fedspan.runs.engine_setup import make_engine
from fedspan.runs.model_setup import RunModel, build_model
from fedspan.runs.ranks import client_ranks, client_scaling
from fedspan.runs.task_setup import PROBLEMS, Facts, require_size
from fedspan.tasks.task import Examples, RunTask
from fedspan.training.engine import Engine
from fedspan.transports.in_process import simulate

__all__ = ["Prepared", "choose_device", "max_length", "prepare", "require_private_model"]


@dataclass(frozen=True)
class Prepared:
    """A run, built and ready.

    Args:
        config: what it was built from.
        labels: label names by index; of a language model's data those of its column of labels, if any.
        facts: what its model must be told of the task.
        partition: who holds which training example; None: the examples are elsewhere.
        task: the learning problem.
        engine: with the model on its device.
        federation: method, engine and clients.
        evaluator: of the federation.
        train: encoded examples that the partition divides.
        test: encoded held-out examples, or None.
        test_names: what people know them by.
        model: what the engine trains, with what its export needs.
        remarks: what a user should know of the examples (answers that were cut).
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
    """``auto`` (CUDA, then Apple's MPS, then the CPU) or the named device.

    Raises:
        FedspanError: if it is no device name, or this machine lacks it.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # on "meta" tensors can be made, but hold nothing
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).strip().splitlines()[0].partition(". ")[0]
        raise FedspanError(
            "device", name, f"auto, cpu, cuda, cuda:N or mps, as this machine has them ({reason})"
        ) from None
    return device


def prepare(config: RunConfig, given: Partition | None = None, key: bytes | None = None) -> Prepared:
    """Build a run.

    Args:
        config: the run's.
        given: a partition to use again (of a run that is resumed) instead of drawing it.
        key: of the noise, where it is a secret one.

    Raises:
        FedspanError: for anything in the config that does not fit the data or the model.
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
    federation = simulate(
        config.wrapped(method), engine, _members(config, method, parts), train, config.round_settings(key)
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


def require_private_model(config: RunConfig, adapted: AdaptedModel) -> None:
    """Check that nothing of a model escapes the run's privacy.

    Raises:
        FedspanError: if something does.
    """
    if config.privacy is not None and adapted.buffers:
        expected = f"left out with this model: running statistics ({adapted.buffers[0]}, ...) are of raw examples"
        raise FedspanError("privacy", config.privacy.mechanism, expected)


def _dropped(count: int) -> tuple[str, ...]:
    return (f"{count} rows that lack a text, a label or an answer were left out",) if count else ()


def _names(examples: datasets.Dataset) -> tuple[str, ...]:
    """What people know examples by: their texts, or the files of images."""
    if "text" in examples.column_names:
        return tuple(examples["text"])
    paths = [row["path"] for row in examples.cast_column("image", datasets.Image(decode=False))["image"]]
    return tuple(path or f"image {number}" for number, path in enumerate(paths, start=1))


def max_length(config: RunConfig, tokenizer: object, model: torch.nn.Module) -> int:
    """Tokens of an example, at most: as the config, the tokenizer and the model allow."""
    limits = [
        config.model.max_length,
        getattr(tokenizer, "model_max_length", config.model.max_length),
        getattr(getattr(model, "config", None), "max_position_embeddings", config.model.max_length),
    ]
    for name, module in model.named_modules():  # RoBERTa and its kin count positions from behind the padding's index
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
