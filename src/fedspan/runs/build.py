"""From a config to the things that run: data, partition, model, method, federation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from peft import LoraConfig

from fedspan.config import RunConfig
from fedspan.core.lowrank import LowRank
from fedspan.core.method import RegisteredMethod
from fedspan.core.values import Client
from fedspan.data.loading import load
from fedspan.data.partition import Partition, partition
from fedspan.engines.evaluation import Evaluator
from fedspan.engines.federation import Federation, Member
from fedspan.engines.loop import LoopEngine
from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.models.export import read_adapter
from fedspan.models.loading import load_pretrained, published_name
from fedspan.models.targets import find_extras, find_targets
from fedspan.runs.problems import PROBLEMS, Facts, require_packing
from fedspan.runs.ranks import client_ranks, client_scaling
from fedspan.tasks.task import Examples, TextTask

__all__ = ["Prepared", "choose_device", "lora_config", "prepare"]

_HEAD_NAMES = ("classifier", "score")  # what PEFT saves of a sequence classifier without being asked


@dataclass(frozen=True)
class Prepared:
    """A run, built and ready.

    Args:
        config: what it was built from.
        labels: label names by index; of a language model's data those of its column of labels, if any.
        facts: what its model must be told of the task.
        partition: who holds which training example.
        task: the learning problem.
        engine: with the model on its device.
        federation: method, engine and clients.
        evaluator: of the federation.
        train: encoded examples that the partition divides.
        test: encoded held-out examples, or None.
        test_texts: their texts.
        lora_config: PEFT's description of the target layers, for the export.
        adopted: update of the adapter that the run starts from, by target layer.
        remarks: what a user should know of the examples (answers that were cut).
    """

    config: RunConfig
    labels: tuple[str, ...]
    facts: Facts
    partition: Partition
    task: TextTask
    engine: LoopEngine
    federation: Federation
    evaluator: Evaluator
    train: Examples
    test: Examples | None
    test_texts: tuple[str, ...]
    lora_config: LoraConfig
    adopted: Mapping[str, LowRank]
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


def lora_config(config: RunConfig, modules_to_save: list[str] | None = None) -> LoraConfig:
    """PEFT's config with the run's target modules."""
    model = config.model
    return LoraConfig(
        task_type=PROBLEMS[config.task].peft,
        base_model_name_or_path=published_name(model.name),
        revision=model.revision,
        target_modules=model.target_modules,
        exclude_modules=model.exclude_modules,
        layers_to_transform=model.layers_to_transform,
        layers_pattern=model.layers_pattern,
        modules_to_save=modules_to_save,
    )


def prepare(config: RunConfig, given: Partition | None = None) -> Prepared:
    """Build a run.

    Args:
        config: the run's.
        given: a partition to use again (of a run that is resumed) instead of drawing it.

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
    problem = PROBLEMS[config.task]
    loaded = load_pretrained(
        config.model.name,
        problem.head,
        data.labels,
        revision=config.model.revision,
        dtype=getattr(torch, config.model.dtype),
        attention=_attention(config, device),
        seed=config.seed,
        quantization=config.model.quantization,
        keep=config.model.modules_to_save,
        device=device,
    )
    model = loaded.model
    require_packing(config, model, device)
    new_head = problem.head != "language-model"
    # PEFT's test: pre_classifier too
    heads = [name for name, _ in model.named_modules() if new_head and name.endswith(_HEAD_NAMES)]
    saved = list(dict.fromkeys([*heads, *config.model.modules_to_save, *_uncovered(loaded.new_modules, heads)]))
    try:
        peft_config = lora_config(config, saved)
        targets = find_targets(model, peft_config)
    # PEFT's own checks, and patterns that are no regex; the last two: a{9999999999}, ((((...
    except (ValueError, re.error, OverflowError, RecursionError) as error:
        asked = config.model.target_modules
        raise FedspanError("model.target_modules", asked, f"layers named as PEFT takes them ({error})") from None
    if config.model.gradient_checkpointing:
        try:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        except ValueError as error:
            raise FedspanError("model.gradient_checkpointing", True, f"false for this model ({error})") from None
    adapted = AdaptedModel(model, targets, find_extras(model, saved))
    adopted: Mapping[str, LowRank] = {}
    if config.model.adapter is not None:
        start = read_adapter(config.model.adapter, {layer.name: layer.shape for layer in adapted.spec.layers})
        foreign = sorted(set(start.extras) - set(adapted.extras))
        if foreign:
            raise FedspanError("model.adapter", foreign[0], "saved modules that are the run's model.modules_to_save")
        for path, value in start.extras.items():
            if value.shape != adapted.extras[path].shape:
                shape = tuple(adapted.extras[path].shape)
                expected = f"one of shape {shape} for this model and the {len(data.labels)} labels of the data"
                raise FedspanError("model.adapter", f"{path} of shape {tuple(value.shape)}", expected)
        adapted.adopt(start.factors, start.extras)
        adopted = start.factors
    if config.evaluation.metric == "f1" and len(data.labels) != 2:
        expected = f"macro_f1: there are {len(data.labels)} labels, and f1 is of the second of two"
        raise FedspanError("evaluation.metric", "f1", expected)
    facts = Facts.of(config, data.labels, _max_length(config, loaded.tokenizer, model))
    task = problem.task(loaded.tokenizer, facts, config)
    method = config.build_method(replace(adapted.spec, clients=len(parts.clients)))
    engine = LoopEngine(adapted, task, config.training_settings(), config.seed)
    train = task.encode(data.train)
    federation = Federation(
        config.wrapped(method), engine, _members(config, method, parts), train, config.round_settings()
    )
    return Prepared(
        config=config,
        labels=data.labels,
        facts=facts,
        partition=parts,
        task=task,
        engine=engine,
        federation=federation,
        evaluator=Evaluator(federation, config.evaluation.batch_size),
        train=train,
        test=None if data.test is None else task.encode(data.test),
        test_texts=() if data.test is None else tuple(data.test["text"]),
        lora_config=peft_config,
        adopted=adopted,
        remarks=(*_dropped(data.dropped), *task.remarks(train)),
    )


def _dropped(count: int) -> tuple[str, ...]:
    return (f"{count} rows that lack a text, a label or an answer were left out",) if count else ()


def _attention(config: RunConfig, device: torch.device) -> str | None:
    if config.model.attention != "auto":
        return config.model.attention
    # On a CPU the backward pass of fused attention takes longer than the three small products that it replaces.
    return "eager" if device.type == "cpu" else None


def _uncovered(new_modules: tuple[str, ...], heads: list[str]) -> list[str]:
    """Modules with new weights outside the head (a pooler): an adapter without them would not bring the model back."""
    return [path for path in new_modules if path.split(".")[0] not in heads]


def _max_length(config: RunConfig, tokenizer: object, model: torch.nn.Module) -> int:
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


def _members(config: RunConfig, method: RegisteredMethod, parts: Partition) -> list[Member]:
    ranks = client_ranks(config, method, [part.id for part in parts.clients])
    members: list[Member] = []
    for part in parts.clients:
        client = Client(
            id=part.id,
            rank=ranks[part.id],
            scaling=client_scaling(config, method, ranks[part.id]),
            examples=len(part.train),
            weight=1.0 if config.federation.weights == "uniform" else float(len(part.train)),
        )
        members.append(Member(client, part.train, part.validation, part.test))
    cohort = config.federation.clients_per_round
    if cohort is not None and cohort > len(members):
        raise FedspanError("federation.clients_per_round", cohort, f"at most the {len(members)} clients there are")
    return members
