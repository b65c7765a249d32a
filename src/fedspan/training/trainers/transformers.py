"""A Transformers ``Trainer``, or a trainer derived from it (TRL, sentence-transformers), as a client's trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, set_seed
from transformers.trainer_utils import has_length

from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.models.sharded import reshard
from fedspan.tasks.metrics import METRICS
from fedspan.training.trainers.local import RoundPlan
from fedspan.training.trainers.optimizer import JobOptimizer
from fedspan.training.trainers.sharding import explain_refused_sharding, shard_base
from fedspan.training.trainers.transformers_round import (
    add_callback,
    draw_by_process,
    restore_losses,
    restore_model,
    set_round_arguments,
)

_UNUSED_ARGUMENTS = (
    *("optim", "optim_args", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("max_grad_norm", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_ratio", "warmup_steps"),
    *("num_train_epochs", "max_steps", "seed", "data_seed"),
)
"""Arguments without an effect, because the run's config has what they set."""


class TransformersTrainer:
    """A client's Transformers ``Trainer``.

    A round sets its optimizer, its number of steps or epochs, and its seeds; all else stays as its owner set it.

    Args:
        trainer: The trainer, with the plain model: the run's method adds what trains.

    Attributes:
        unused_arguments: Arguments of the trainer without an effect, which are not at their default.
        unknown_metrics: What the last evaluation measured beside metrics that fedspan knows.

    Raises:
        FedspanError: If the trainer has an adapter, an optimizer or a way of training that a federation cannot honor.
    """

    def __init__(self, trainer: Trainer) -> None:
        _require_supported(trainer)
        self.trainer = trainer
        self.unused_arguments = list_unused_arguments(trainer.args)
        self.unknown_metrics: frozenset[str] = frozenset()

    @property
    def root(self) -> nn.Module:
        """``LocalTrainer.root``."""
        assert isinstance(self.trainer.model, nn.Module)
        return self.trainer.model

    @property
    def model(self) -> nn.Module:
        """``LocalTrainer.model``: of a sentence-transformers model, its Transformers model."""
        inner = getattr(self.root, "transformers_model", None)
        return inner if isinstance(inner, nn.Module) else self.root

    @property
    def processor(self) -> object | None:
        """``LocalTrainer.processor``."""
        return self.trainer.processing_class

    @property
    def examples(self) -> int:
        """``LocalTrainer.examples``."""
        return get_length(self.trainer.train_dataset)

    @property
    def validation_examples(self) -> int:
        """``LocalTrainer.validation_examples``; of several named evaluation sets, all of them."""
        return sum(self._get_evaluation_sizes().values())

    def _get_evaluation_sizes(self) -> dict[str, int]:
        """Return the numbers of examples of the evaluation sets, by what their metrics' names begin with."""
        dataset = self.trainer.eval_dataset
        if isinstance(dataset, dict):
            return {f"eval_{name}_": get_length(part) for name, part in dataset.items()}
        return {} if dataset is None else {"eval_": get_length(dataset)}

    def shard(self, adapted: AdaptedModel) -> None:
        """Shard the frozen weights over the processes if the trainer trains with FSDP; extras stay whole.

        Args:
            adapted: The trainer's model, on which no server state's base is set.
        """
        if self.trainer.is_fsdp_enabled:
            if not adapted.is_sharded:  # by an earlier run
                shard_base(self.trainer, adapted.extras.values())
            adapted.begin_sharded()

    @contextmanager
    def _prepare_sharded(self) -> Generator[None]:
        """Prepare a sharded model within this context as Accelerate does another one, and free gathered weights.

        Accelerate refuses to prepare a model for an evaluation alone, and has no autocast for FSDP: it would convert
        the inputs of blocks, and so of layers that train in float32.
        """
        if not self.trainer.is_fsdp_enabled:
            yield
            return
        try:
            self.trainer.accelerator.prepare_model(self.root, device_placement=False, evaluation_mode=True)
            yield
        finally:
            reshard(self.root)

    def count_passes(self, epochs: int, steps: int | None) -> int:
        """``LocalTrainer.count_passes``, by the length of the trainer's loader."""
        if steps is not None:
            return steps * self.trainer.args.gradient_accumulation_steps
        try:
            loader = self.trainer.get_train_dataloader()
            return epochs * (len(loader) if has_length(loader) else self.examples)
        finally:
            self.trainer.accelerator.free_memory()

    def train(self, plan: RoundPlan, optimizer: JobOptimizer) -> float:
        """``LocalTrainer.train``."""
        trainer, epochs = self.trainer, _StoppedEpochs()
        try:
            with (
                set_round_arguments(trainer, plan),
                restore_model(self.root),
                self._prepare_sharded(),
                restore_losses(trainer, self.root),
                count_examples(trainer, optimizer),
                draw_by_process(trainer, plan.seed),
                add_callback(trainer, epochs),
                add_callback(trainer, _RequiredOptimizer(optimizer)),
            ):
                trainer.optimizer = optimizer
                trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _get_constant_rate)
                set_seed(plan.seed)
                loss = float(trainer.train().training_loss)
                _require_complete(trainer, plan, epochs.count)
                return loss
        finally:
            trainer.optimizer = trainer.lr_scheduler = None
            trainer.callback_handler.optimizer = trainer.callback_handler.lr_scheduler = None
            # The next round has other parameters: what was wrapped around the model holds those of this round.
            trainer.accelerator.free_memory()
            trainer.model_wrapped = trainer.model

    def evaluate(self) -> dict[str, float]:
        """``LocalTrainer.evaluate``: means of the evaluation sets, weighted by their numbers of examples."""
        with restore_model(self.root), self._prepare_sharded(), restore_losses(self.trainer, self.root):
            try:
                measured = self.trainer.evaluate()
            finally:
                self.trainer.accelerator.free_memory()
                self.trainer.model_wrapped = self.trainer.model
        sizes = self._get_evaluation_sizes()
        by_set, unnamed = split_by_set(measured, sizes)
        translated = {prefix: translate_metrics(values) for prefix, values in by_set.items()}
        names = {name for values in translated.values() for name in values}
        self.unknown_metrics = frozenset((names | unnamed) - {*METRICS, *BOOKKEEPING})
        metrics: dict[str, float] = {}
        for name in METRICS:
            values = [(part[name], sizes[prefix]) for prefix, part in translated.items() if name in part]
            if values:
                total = sum(size for _, size in values)
                metrics[name] = float(sum(value * (size / total) for value, size in values))
        return metrics


class _StoppedEpochs(TrainerCallback):
    """Counts the epochs that other callbacks stopped before their last batch.

    An epoch of a sampler that yields fewer batches than its length is none of them.
    """

    def __init__(self) -> None:
        self.count = self._ended = 0

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ended += 1
        self.count += control.should_epoch_stop and state.epoch < self._ended


class _RequiredOptimizer(TrainerCallback):
    """Checks before the first step that a trainer kept the optimizer that was set."""

    def __init__(self, optimizer: JobOptimizer) -> None:
        self._optimizer = optimizer

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        if inner is not self._optimizer:
            problem = (
                "its create_optimizer replaces the round's optimizer, and the run's config decides the optimizer and "
                "its schedule. Leave the method out, or have it return self.optimizer if that is set, as Trainer's own "
                "does"
            )
            raise FedspanError("trainer", type(inner).__name__, problem=problem)


def _require_complete(trainer: Trainer, plan: RoundPlan, stopped_epochs: int) -> None:
    """Check that a round's training did not end early.

    In a round of epochs, a sampler may yield fewer batches than its length: what it yields is an epoch. A round of
    steps would miss some of them, because the ``Trainer`` plans as many epochs as that length needs.
    """
    state = trainer.state
    if plan.steps is not None:
        is_complete = state.global_step == plan.steps
    else:
        is_stopped = trainer.control.should_training_stop and state.global_step < state.max_steps
        is_complete = not is_stopped and not stopped_epochs
    if is_complete:
        return
    problem = (
        f"the training of client {plan.client} in round {plan.round + 1} ended after {state.global_step} of "
        f"{plan.steps or state.max_steps} planned steps. A callback stopped it or its epochs, or its loader yields "
        "fewer batches than its length says. training.local_steps or local_epochs sets the length of a round, and "
        "federation.early_stopping ends a run"
    )
    raise FedspanError("trainer", plan.client, problem=problem)


def list_unused_arguments(args: Any) -> tuple[str, ...]:
    """List the arguments that have no effect and are not at their default."""
    defaults = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(args)
        if field.name in _UNUSED_ARGUMENTS
    }
    return tuple(name for name in _UNUSED_ARGUMENTS if name in defaults and getattr(args, name) != defaults[name])


def _get_constant_rate(step: int) -> float:
    return 1.0


def _require_supported(trainer: Trainer) -> None:
    args, model = trainer.args, trainer.model
    loss = getattr(trainer, "loss", None)
    losses = [part for part in (loss.values() if isinstance(loss, Mapping) else [loss]) if isinstance(part, nn.Module)]
    root = {id(value) for value in model.parameters()} if isinstance(model, nn.Module) else set[int]()
    refusals = {
        "it has trained already (trainer.train()), which changed its model and left an optimizer. Load the model "
        "again and make another trainer": trainer.optimizer is not None and trainer.state.global_step > 0,
        "it was made with optimizers=, and the run's config decides the optimizer and its schedule": (
            trainer.optimizer is not None or trainer.lr_scheduler is not None
        ),
        "it was made with optimizer_cls_and_kwargs=, and the run's config decides the optimizer": (
            trainer.optimizer_cls_and_kwargs is not None
        ),
        "it was made with model_init=, which replaces the model. Pass model=": trainer.model_init is not None,
        "load_best_model_at_end rolls the tensors back to an earlier step, to which the reply's steps and moments "
        "would not belong. The run itself exports its best round": bool(args.load_best_model_at_end),
        "bf16_full_eval and fp16_full_eval convert the model in an evaluation, and its frozen weights must not change. "
        "bf16 and fp16 evaluate in mixed precision": args.bf16_full_eval or args.fp16_full_eval,
        "auto_find_batch_size starts a round again in the middle of it": args.auto_find_batch_size,
        "several GPUs in one process (DataParallel) copy the model. Set CUDA_VISIBLE_DEVICES to one GPU": args.n_gpu
        > 1,
        "precompute_ref_log_probs without ref_model= takes the round's model for the reference. Pass ref_model=": (
            bool(getattr(args, "precompute_ref_log_probs", False)) and getattr(trainer, "ref_model", None) is None
        ),
        "sync_ref_model moves the reference by the parameters of the model, and a round has more of them": bool(
            getattr(args, "sync_ref_model", False)
        ),
        "it has an evaluator= without an eval_dataset=, by whose number of examples scores are weighted. Pass an "
        "eval_dataset= too": getattr(trainer, "evaluator", None) is not None and trainer.eval_dataset is None,
        "its loss has parameters of its own, which no other client would receive": any(
            id(value) not in root for part in losses for value in part.parameters()
        ),
    }
    problem = next((reason for reason, holds in refusals.items() if holds), explain_refused_sharding(trainer))
    if problem is not None:
        raise FedspanError("trainer", type(trainer).__name__, problem=problem)


BOOKKEEPING = (
    *("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "jit_compilation_time"),
    *("epoch", "num_tokens", "num_input_tokens_seen"),
)
"""What an evaluation returns beside metrics."""
_TRL_METRICS = {
    "token_accuracy": "mean_token_accuracy",
    "reward_accuracy": "rewards/accuracies",
    "reward_margin": "rewards/margins",
}
"""What TRL's trainers call the metrics of fedspan's tasks."""
_EVALUATOR_METRICS = {
    "spearman": "spearman_cosine",
    "recall_at_10": "cosine_recall@10",
    "ndcg_at_10": "cosine_ndcg@10",
}
"""What sentence-transformers' evaluators call them, after the evaluator's own name if it has one."""


def split_by_set(measured: Mapping[str, Any], prefixes: Iterable[str]) -> tuple[dict[str, dict[str, float]], set[str]]:
    """Split the measured numbers by evaluation set.

    Returns:
        Numbers by name without prefix, by prefix, and names of the numbers that have none of the prefixes.
    """
    longest_first = sorted(prefixes, key=len, reverse=True)
    by_set: dict[str, dict[str, float]] = {prefix: {} for prefix in longest_first}
    unnamed: set[str] = set()
    for name, value in measured.items():
        if not isinstance(value, int | float):
            continue
        prefix = next((prefix for prefix in longest_first if name.startswith(prefix)), None)
        if prefix is None:
            unnamed.add(name)
        else:
            by_set[prefix][name.removeprefix(prefix)] = value
    return by_set, unnamed


def translate_metrics(values: Mapping[str, float]) -> dict[str, float]:
    """Give metrics of TRL and of sentence-transformers' evaluators the names that fedspan's tasks have for them.

    A metric that has fedspan's own name already, or that several evaluators measure, keeps its name.
    """
    translated = dict(values)
    for name, other in _TRL_METRICS.items():
        if other in values and name not in values:
            translated[name] = translated.pop(other)
    for name, other in _EVALUATOR_METRICS.items():
        names = [key for key in values if key == other or key.endswith(f"_{other}")]
        if len(names) == 1 and name not in values:
            translated[name] = translated.pop(names[0])
    return translated


_EXAMPLES = "fedspan_examples"
"""The entry of a batch with one element for each example: a tensor, which Accelerate can concatenate and slice."""


class _CountingCollator:
    """A collator that adds the number of examples to a batch: its tensors may have other numbers of rows (DPO)."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, rows: list[Any]) -> Any:
        batch = self._collate(rows)
        if isinstance(batch, MutableMapping):
            batch[_EXAMPLES] = torch.ones(len(rows), dtype=torch.bool)
        return batch


class _CountingLoaders(TrainerCallback):
    """Makes the loader of a training add its numbers of examples, and undoes it."""

    def __init__(self) -> None:
        self._wrapped: list[tuple[Any, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        loader = getattr(train_dataloader, "base_dataloader", train_dataloader)  # Accelerate's own wraps torch's
        collate = getattr(loader, "collate_fn", None)
        if collate is not None:
            self._wrapped.append((loader, collate))
            loader.collate_fn = _CountingCollator(collate)

    def undo(self) -> None:
        for loader, collate in self._wrapped:
            loader.collate_fn = collate


@contextmanager
def count_examples(trainer: Trainer, optimizer: JobOptimizer) -> Generator[None]:
    """Count the examples of each optimizer step within this context, before the step.

    The loader is the owner's, with any sampler: what it yields is counted. The trainer's method is replaced within the
    context, because no callback of Transformers receives the batches.
    """
    loaders, inner, own_method = _CountingLoaders(), trainer.get_batch_samples, vars(trainer).get("get_batch_samples")

    def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
        batches, items = inner(*args, **kwargs)
        optimizer.count_examples(sum(_pop_examples(batch, trainer) for batch in batches))
        return batches, items

    trainer.get_batch_samples = get_batch_samples
    try:
        with add_callback(trainer, loaders):
            yield
    finally:
        loaders.undo()
        del trainer.get_batch_samples
        if own_method is not None:
            trainer.get_batch_samples = own_method


def _pop_examples(batch: Any, trainer: Trainer) -> int:
    """Remove and return a batch's number of examples; of a loader without a collator, the rows of its first tensor."""
    if isinstance(batch, MutableMapping) and _EXAMPLES in batch:
        return len(batch.pop(_EXAMPLES))
    values = batch.values() if isinstance(batch, Mapping) else batch
    rows = next((len(value) for value in values if isinstance(value, torch.Tensor) and value.ndim), None)
    if rows is None:
        problem = (
            f"its batches ({type(batch).__name__}) hold no tensor, by whose rows examples are counted. Trainers that "
            "generate their own examples, such as TRL's GRPOTrainer, are not supported"
        )
        raise FedspanError("trainer", type(trainer).__name__, problem=problem)
    return rows


def get_length(dataset: Any) -> int:
    """Return the number of examples of a data set, or of several ones by name.

    Raises:
        FedspanError: If there is none, or its number is unknown.
    """
    if dataset is None:
        raise FedspanError("trainer", None, problem="the trainer has no train_dataset")
    if isinstance(dataset, Mapping):  # of sentence-transformers: several data sets by name
        return sum(get_length(part) for part in dataset.values())
    if not has_length(dataset):
        problem = "the number of examples of an IterableDataset is unknown, and replies are weighted by it"
        raise FedspanError("trainer", type(dataset).__name__, "a data set with a length", problem=problem)
    return len(dataset)
