"""Runs whose clients train with their owners' own trainers, in this process."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import Trainer

from fedspan.assembly.engine import require_private_model
from fedspan.assembly.federation import build_clients, build_simulated_federation
from fedspan.assembly.model import RunModel, adapt_model, adopt_adapter, require_saveable
from fedspan.assembly.run import LocalRun, Prepared
from fedspan.assembly.task import collect_task_settings
from fedspan.config import RunConfig, parse_config
from fedspan.data.config import DataConfig, PartitionConfig
from fedspan.data.partition import ClientPart, ClientParts, Partition
from fedspan.errors import FedspanError
from fedspan.federation.evaluation import ReportedEvaluator
from fedspan.models.head import find_frozen_heads, find_untrained_head
from fedspan.models.sentence_encoders import omit_pooler, read_pooling
from fedspan.tasks.trainer import TrainerExamples, TrainerTask
from fedspan.training.config import EngineConfig
from fedspan.training.stages import Stages
from fedspan.training.trainers.local import LocalTrainer
from fedspan.training.trainers.processes import Processes, count_processes
from fedspan.training.trainers.trainer_engine import Owner, TrainerEngine
from fedspan.training.trainers.transformers import TransformersTrainer

log = logging.getLogger(__name__)

_NAMED_CLIENTS = 5
"""Number of clients that a warning names; it counts the others."""

_TASK_TYPES = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}
"""PEFT's task types by the end of a Transformers class's name."""

_UNUSED: Mapping[str, tuple[str, frozenset[str]]] = {
    "": (
        "the trainers run in this process, on the devices and with the algorithms that they chose",
        frozenset({"cluster", "device", "threads", "deterministic"}),
    ),
    "training": (
        "the trainers draw their own batches and write their own checkpoints (per_device_train_batch_size, "
        "gradient_accumulation_steps, train_sampling_strategy, save_steps of their arguments)",
        frozenset(
            {"batch_size", "gradient_accumulation_steps", "group_by_length", "checkpoint_steps", "checkpoint_minutes"}
        ),
    ),
    "model": (
        "the trainers' models are used as they are, and their examples as they encode them",
        frozenset(
            {"device_map", "max_memory", "attention", "pooling_normalize", "pretrained", "image_size", "max_length"}
        ),
    ),
    "data": ("the examples are the trainers' own", frozenset(DataConfig.model_fields) - {"train", "labels"}),
    "partition": (
        "each trainer has its own training and evaluation examples",
        frozenset(PartitionConfig.model_fields) - {"partitioner", "column"},
    ),
    "evaluation": (
        "the trainers evaluate by themselves",
        frozenset({"batch_size", "generate", "max_new_tokens", "answer_pattern"}),
    ),
    "engine": ("the trainers train in place of an engine", frozenset(EngineConfig.model_fields)),
}
"""Fields without an effect where clients train with their own trainers, by section, and why."""


def require_used(config: RunConfig, is_complete: bool = False) -> None:
    """Check that a config sets no field that has no effect where clients train with their own trainers.

    Args:
        is_complete: Whether the config names all defaults, as that in a run's folder does; they are accepted then.
    """
    for part, (reason, names) in _UNUSED.items():
        section = getattr(config, part) if part else config
        for name in sorted(names & section.model_fields_set):
            value = getattr(section, name)
            if is_complete and value == type(section).model_fields[name].get_default(call_default_factory=True):
                continue
            problem = f"it has no effect on clients with their own trainers, because {reason}; leave it out"
            raise FedspanError(f"{part}.{name}".lstrip("."), value, problem=problem)


def adopt_trainer(trainer: Any, field: str = "trainer") -> LocalTrainer:
    """Return a user's trainer as an engine uses it.

    Args:
        trainer: A Transformers ``Trainer`` or one derived from it, a ``TorchTrainer``, or a function without arguments
            that returns one.
    """
    if _is_factory(trainer):
        trainer = trainer()
    if isinstance(trainer, Trainer):
        trainer = TransformersTrainer(trainer)
    if isinstance(trainer, LocalTrainer):
        _require_no_adapter(trainer)
        return trainer
    expected = (
        "a transformers.Trainer (or one derived from it), a TorchTrainer, or a function without arguments that returns "
        "one"
    )
    raise FedspanError(field, type(trainer).__name__, expected)


def _is_factory(value: Any) -> bool:
    """Check whether a value is a function that can be called without arguments, and neither a class nor a module."""
    if not callable(value) or isinstance(value, type | nn.Module | Trainer | LocalTrainer):
        return False
    try:
        inspect.signature(value).bind()
    except TypeError:
        return False
    except ValueError:  # of a builtin: Python does not know its arguments
        return True
    return True


def _require_no_adapter(trainer: LocalTrainer) -> None:
    for module in trainer.root.modules():
        if isinstance(module, PeftModel | BaseTunerLayer):
            problem = (
                "its model has a PEFT adapter, and the run's method adds its own. Leave peft_config (or "
                f"get_peft_model) out of the script{_describe_adapter(trainer.root)}"
            )
            raise FedspanError("trainer", type(trainer.root).__name__, problem=problem)


def _describe_adapter(model: nn.Module) -> str:
    """Return how a run's config spells a PEFT model's adapter, after ", and ..."; empty if it has no LoRA."""
    configs = model.peft_config if isinstance(model, PeftModel) else {}
    config = next((config for config in configs.values() if isinstance(config, LoraConfig)), None)
    if config is None:
        return ", and name the layers in the run's config (model.target_modules)"
    targets = config.target_modules
    named = targets if isinstance(targets, str) else json.dumps(sorted(targets or ()))
    return (
        f", and set method: {{r: {config.r}, lora_alpha: {config.lora_alpha}}} and model: {{target_modules: {named}}} "
        "in the run's config"
    )


def adopt_trainers(trainers: Mapping[str, Any]) -> dict[str, LocalTrainer]:
    """Return users' trainers by client id (``adopt_trainer``), all of which train in this process."""
    if not isinstance(trainers, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        expected = 'a dict of the clients\' trainers by id: {"a": trainer, "b": other}'
        raise FedspanError("trainers", type(trainers).__name__, expected)
    for id in trainers:
        if not isinstance(id, str) or not id:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise FedspanError("trainers", id, 'ids of clients, which are texts: {"1": trainer}')
    if not trainers:
        raise FedspanError("trainers", dict(trainers), "a trainer, or a function that makes one, for each client")
    if (count := count_processes()) > 1:
        problem = (
            f"the script runs in {count} processes, and fedspan.simulate runs a federation in one. Start it without "
            "torchrun; fedspan.join trains one owner in several processes"
        )
        raise FedspanError("trainers", list(trainers), problem=problem)
    adopted: dict[str, LocalTrainer] = {}
    for id in sorted(trainers):
        try:
            adopted[id] = adopt_trainer(trainers[id])
        except FedspanError as error:
            raise error.relocate(f"trainers[{id!r}]") from None
        trainer = getattr(adopted[id], "trainer", adopted[id])
        for other in list(adopted)[:-1]:
            if getattr(adopted[other], "trainer", adopted[other]) is trainer:
                problem = f"it is the trainer of {other!r} too; every client needs its own (a model may be shared)"
                raise FedspanError(f"trainers[{id!r}]", type(trainer).__name__, problem=problem)
    return adopted


def _report_unused_arguments(trainers: Mapping[str, LocalTrainer]) -> None:
    """Warn of arguments without an effect: once for all clients whose trainers have the same ones."""
    clients: dict[tuple[str, ...], list[str]] = {}
    for id, trainer in trainers.items():
        if isinstance(trainer, TransformersTrainer) and trainer.unused_arguments:
            clients.setdefault(trainer.unused_arguments, []).append(id)
    for names, ids in clients.items():
        shown = ", ".join(ids[:_NAMED_CLIENTS])
        if (rest := len(ids) - _NAMED_CLIENTS) > 0:
            shown += f" and {rest} more"
        log.warning(
            "these trainer arguments of %s have no effect, because the run's config sets them: %s",
            *(shown, ", ".join(names)),
        )


class TrainerRuns:
    """Builds runs whose clients train with their own trainers, and gives their models back when it is closed.

    Args:
        processes: The processes in which the only client's trainer trains (DDP, FSDP); None: all train in this one.
    """

    def __init__(self, trainers: Mapping[str, LocalTrainer], processes: Processes | None = None) -> None:
        self._trainers, self._processes = dict(sorted(trainers.items())), processes
        self._restore = ExitStack()
        if processes is None or processes.is_leader:
            _report_unused_arguments(self._trainers)

    def close(self) -> None:
        """Give the trainers' models back as they were."""
        self._restore.close()

    def prepare(
        self,
        config: RunConfig,
        existing_partition: Partition | None = None,
        key: bytes | None = None,
        stages: Stages | None = None,
    ) -> Prepared:
        """Build a run (``start.Build``); its arguments are those of ``load``."""
        local = self.load(config, existing_partition, key, stages)
        federation = build_simulated_federation(local, local.clients, local.train, key)
        evaluator = ReportedEvaluator(federation, config.evaluation.batch_size, config.evaluation.clients)
        return Prepared(**vars(local), federation=federation, evaluator=evaluator)

    def load(
        self,
        config: RunConfig,
        existing_partition: Partition | None = None,
        key: bytes | None = None,
        stages: Stages | None = None,
    ) -> LocalRun:
        """Build what trains a run, in all processes.

        Args:
            existing_partition: The partition of a resumed run, which the trainers' numbers of examples must match.
        """
        if self._processes is None:
            return self._load(config, existing_partition, key, stages)
        if self._processes.is_leader:
            self._processes.announce("prepare", config=config.model_dump_json(exclude_unset=True))
        return self._load_together(self._processes, lambda: self._load(config, existing_partition, key, stages))

    def load_announced(self, config: str) -> LocalRun:
        """Build, in a process other than rank 0, what rank 0 builds.

        Args:
            config: The run's config as JSON, as rank 0 announced it.
        """
        assert self._processes is not None
        return self._load_together(
            self._processes, lambda: self._load(parse_config(json.loads(config)), None, None, None)
        )

    def _load_together(self, processes: Processes, load: Callable[[], LocalRun]) -> LocalRun:
        """Build a run in all processes; if one of them fails, for whatever reason, all of them do."""
        try:
            local = load()
        except Exception:
            processes.sum(1, "failures")
            processes.finish()
            raise
        if processes.sum(0, "failures"):
            processes.finish()
            problem = "another process of this trainer cannot train the run, for the reason in its output"
            raise FedspanError("trainer", None, problem=problem)
        (trainer,) = self._trainers.values()
        counts = {
            "training": processes.collect(trainer.examples, "training examples"),
            "validation": processes.collect(trainer.validation_examples, "validation examples"),
        }
        processes.finish()
        for kind, values in counts.items():
            if min(values) != max(values):
                problem = f"its processes have {min(values):.0f} to {max(values):.0f} {kind} examples"
                expected = "the whole data set in every process: the Trainer splits it among them"
                raise FedspanError("trainer", None, expected, problem=problem)
        return local

    def _load(
        self, config: RunConfig, existing_partition: Partition | None, key: bytes | None, stages: Stages | None
    ) -> LocalRun:
        stages = stages or Stages()
        self.close()
        parts = _partition(self._trainers)
        if existing_partition is not None and existing_partition.fingerprint != parts.fingerprint:
            problem = "clients, or their numbers of examples, are not those with which the run began"
            raise FedspanError("trainers", list(self._trainers), problem=problem)
        with ExitStack() as restore:
            with stages.stage("model"):
                owners, model = _adapt_models(config, self._trainers, restore)
            require_private_model(config, model.adapted)
            metric = config.evaluation.metric or config.task_definition.metric_names[0]
            root = next(iter(self._trainers.values())).root  # a sentence-transformers model cuts texts itself
            max_length = getattr(root, "max_seq_length", None) or config.model.max_length
            task_settings = collect_task_settings(config, tuple(config.data.labels or ()), max_length, model.pooling)
            task, settings = TrainerTask(metric), config.build_training_settings()
            needed, privacy = config.evaluation.metric, config.build_privacy_settings(key)
            engine = TrainerEngine(owners, task, settings, config.seed, stages, needed, self._processes, privacy)
            method = config.build_method(replace(model.adapted.spec, clients=len(owners)))
            clients = build_clients(config, method, parts)
            self._restore = restore.pop_all()
        return LocalRun(
            config=config,
            labels=(),
            model=model,
            task_settings=task_settings,
            task=task,
            engine=engine,
            method=method,
            base_digest=engine.digest,
            clients=clients,
            train=TrainerExamples(parts.examples),
            partition=parts,
            count_passes=lambda epochs, steps: max(
                trainer.count_passes(epochs, steps) for trainer in self._trainers.values()
            ),
        )


def _adapt_models(
    config: RunConfig, trainers: Mapping[str, LocalTrainer], restore: ExitStack
) -> tuple[dict[str, Owner], RunModel]:
    """Return the clients with their adapted models, each model once, and the first client's model for the export.

    ``restore`` gives the models back as they were: their own weights, forwards and ``requires_grad``.
    """
    built: dict[nn.Module, RunModel] = {}
    owners: dict[str, Owner] = {}
    for root in {trainer.root: None for trainer in trainers.values()}:
        restore.callback(_set_flags, root, {name: value.requires_grad for name, value in root.named_parameters()})
    for id, trainer in trainers.items():
        module = trainer.model
        if module not in built:
            require_saveable(trainer.processor)
            pooling = None if module is trainer.root else read_pooling(trainer.root.children()).pooling
            if pooling is not None:
                restore.enter_context(omit_pooler(module))
            adapted, peft_config = adapt_model(config, module, ())
            restore.callback(adapted.restore)
            if isinstance(trainer, TransformersTrainer):
                trainer.shard(adapted)
            assert peft_config is not None, "the target layers were not named"
            if frozen := find_frozen_heads(adapted):
                names = ", ".join(frozen)
                log.warning(
                    "%s of client %s look untrained and do not train: model.modules_to_save: [%s] trains them whole",
                    *(names, id, names),
                )
            peft_config.task_type = _get_task_type(trainer)
            start = adopt_adapter(config, adapted, tuple(config.data.labels or ()))
            restored = {path.rpartition(".")[0] for path in start.extras}
            new = tuple(path for path in find_untrained_head(adapted) if path not in restored)
            built[module] = RunModel(adapted, trainer.processor, peft_config, start.factors, new, pooling)
        owners[id] = Owner(trainer, built[module].adapted)
    return owners, next(iter(built.values()))


def _set_flags(root: nn.Module, flags: Mapping[str, bool]) -> None:
    for name, value in root.named_parameters():  # FSDP replaces parameters
        value.requires_grad_(flags.get(name, value.requires_grad))


def _get_task_type(trainer: LocalTrainer) -> str | None:
    if trainer.model is not trainer.root:
        return "FEATURE_EXTRACTION"
    name = type(trainer.model).__name__
    return next((kind for suffix, kind in _TASK_TYPES.items() if name.endswith(suffix)), None)


def _partition(trainers: Mapping[str, LocalTrainer]) -> Partition:
    """Return the clients' training and validation examples as rows of one numbering."""
    clients: list[ClientPart] = []
    start, nothing = 0, np.empty(0, np.int64)
    for id in sorted(trainers):
        middle = start + trainers[id].examples
        stop = middle + trainers[id].validation_examples
        clients.append(ClientPart(id, np.arange(start, middle), np.arange(middle, stop), nothing))
        start = stop
    return Partition(ClientParts.from_clients(clients), start)
