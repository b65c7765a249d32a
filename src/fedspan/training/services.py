"""Services of every kind of training: the model, its caches, the loss, dropout and the optimizer's step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedspan.core.parametrization import Projected
from fedspan.core.smoothing import smooth_groups
from fedspan.core.tensors import create_generator, to_device
from fedspan.core.values import Job
from fedspan.errors import FedspanError, suggest_nearest
from fedspan.models.adapted import AdaptedModel
from fedspan.models.direct_uses import forbid_direct_uses
from fedspan.models.head import FeatureTap, find_output_layer
from fedspan.tasks.losses import CLASS_OPTIONS, CLASS_WEIGHTS, OFFSETS, SMOOTHING, bound_loss
from fedspan.tasks.single_label import compute_class_offsets, compute_class_weights
from fedspan.tasks.task import Examples, LabelsWords, Task, get_labels
from fedspan.training.batching import AlikeGroups, ModelInputs, Padding, split_evaluation_batches
from fedspan.training.config import EngineConfig, Privacy, TrainingSettings
from fedspan.training.features import FeatureStore, trains_output_layer
from fedspan.training.jobs import Assignment, convert_out_of_memory, is_explained
from fedspan.training.optimizers import LocalOptimizer, build_optimizer_spec, clip, join_states
from fedspan.training.prefix import PrefixCaches
from fedspan.training.references import References
from fedspan.training.stages import Stages

log = logging.getLogger(__name__)

_FEATURE_BATCH = 64


def _require_loss_options(task: Task, settings: TrainingSettings) -> None:
    """Check that a task's loss takes the options of local training that change a loss."""
    taken, labels = getattr(task, "loss_options", ()), getattr(task, "labels", None)
    for option, off in zip(CLASS_OPTIONS, (0.0, "none", 0.0), strict=True):
        value = getattr(settings, option)
        if value == off:
            continue
        if option not in taken:
            problem = f"the loss of {type(task).__name__} does not take it (its loss_options are {list(taken)})"
            raise FedspanError(f"training.{option}", value, str(off), problem=problem)
        if option != "label_smoothing" and labels is None:
            problem = f"{type(task).__name__} has no `labels`, the names of the classes by index"
            raise FedspanError(f"training.{option}", value, str(off), problem=problem)
    if isinstance(settings.class_weights, str):
        return
    for label, weight in settings.class_weights.items():
        if label not in (labels or ()):
            problem = f"no label is named {label!r}. {suggest_nearest(label, labels or ())}"
            raise FedspanError(f"training.class_weights.{label}", weight, problem=problem)


PLAIN = EngineConfig(name="loop", prefix_cache=False)
"""Padded passes through the whole model, one client after another."""


class TrainingServices:
    """A model with everything that an engine needs to train a job on it.

    Args:
        seed: Seed of every random draw (batches, dropout).
        options: Whether passes have padding, and the storage of the hidden states that leave the model's frozen prefix.
        prefixes: The caches of hidden states of another engine on this model and task; None: the engine has its own.
        privacy: Privacy of the run; with ``dp-sgd``, batches are Poisson samples of ``batch_size *
            gradient_accumulation_steps`` examples on average, and ``max_grad_norm`` has no effect.
        hidden_batch_size: Number of examples in the forward passes that compute hidden states.
    """

    def __init__(
        self,
        adapted: AdaptedModel,
        task: Task,
        settings: TrainingSettings,
        seed: int,
        options: EngineConfig = PLAIN,
        prefixes: PrefixCaches | None = None,
        stages: Stages | None = None,
        privacy: Privacy | None = None,
        hidden_batch_size: int = 32,
    ) -> None:
        self.stages = stages or Stages()
        self.adapted = adapted
        self.task = task
        self.settings, self.privacy = settings, privacy
        self.splits_alike = privacy is not None and privacy.mechanism == "dp-sgd" and privacy.secret
        """Whether only examples of equal shapes share a pass: one changes, but for rounding, its own gradient alone."""
        self.alike = AlikeGroups(task)
        self.seed, self.options = seed, options
        _require_loss_options(task, settings)
        self._labels: tuple[str, ...] = tuple(getattr(task, "labels", None) or ())
        self._is_checked = False
        self.references = References(adapted, task, self.stages, settings.batch_size)
        self.features = FeatureStore()
        refusals = {
            "it was not asked for": options.name == "loop" or not options.padding_free,
            "dropout masks have the shape of padded batches": settings.lora_dropout > 0,
            "packed batches have none": getattr(task, "packing", False),
            "a batch takes several passes of the model": getattr(task, "has_several_passes", False),
        }
        self.padding = Padding(adapted, task, next((reason for reason, holds in refusals.items() if holds), None))
        self.prefixes = prefixes or PrefixCaches(adapted, task, options, hidden_batch_size, self.stages, self.padding)

    def prepare(
        self,
        examples: Examples,
        parts: Sequence[np.ndarray],
        run: Callable[[Callable[[PrefixCaches], None]], None] | None = None,
    ) -> None:
        """``Engine.prepare``; ``run`` is that of ``PrefixCaches.ensure``."""
        if self.splits_alike:
            parts = [group for part in parts for group in self.alike.split(examples, part)]
        self.references.ensure(examples, parts, survives=self.splits_alike)
        try:
            self._require_calls(examples, parts)
            self.padding.ensure(examples)
            self.prefixes.ensure(examples, parts, run)
        except Exception as error:
            if is_explained(error) or not self.splits_alike:
                raise
            log.warning("hidden states are not stored: the model fails on an example: %s", error)
            self.prefixes.drop(examples)  # in passes through the whole model, each example fails alone

    def prepare_job(self, job: Job, examples: Examples, indices: np.ndarray) -> None:
        """Precompute what a job's passes can skip. The model loses its job."""
        self.prepare(examples, [indices])
        if not trains_output_layer(job, self.adapted):
            self.features.clear()
            return
        compute = partial(self.compute_features, job, examples, indices, _FEATURE_BATCH)
        self.features.ensure(examples, indices, compute)

    def feed(self, job: Job, examples: Examples, rows: Sequence[int]) -> AbstractContextManager[None]:
        """Let forward passes of a batch of a prepared job skip what does not change within this context."""
        if trains_output_layer(job, self.adapted):
            return self.features.feed(self.adapted, examples, rows)
        return self.prefixes.feed(examples, rows)

    @torch.no_grad()
    def _require_calls(self, examples: Examples, parts: Sequence[np.ndarray]) -> None:
        """Check once, on one example, that the model uses the weights of its target layers only by calling them."""
        first = next((int(part[0]) for part in parts if len(part)), None)
        if self._is_checked or first is None:
            return
        self.adapted.install({}, {}, frozenset())
        batch = self.task.collate(examples, [first], self.adapted.device)
        with forbid_direct_uses(self.adapted):
            self.task.predict(self.adapted.model, batch)
        self._is_checked = True

    def make_batch(
        self, examples: Examples, parts: Sequence[tuple[Assignment, int, Sequence[int]]]
    ) -> Mapping[str, Tensor]:
        """Collate a batch of training. A task with ``collate_for_training`` draws a random part of its inputs for it.

        Args:
            parts: Assignments whose examples share the batch, each with the number of its batch and its examples.
        """
        rows = [index for _, _, indices in parts for index in indices]
        draw = getattr(self.task, "collate_for_training", None)
        if draw is None:
            batch = self.task.collate(examples, rows, self.adapted.device)
        else:
            keys = [
                (self.seed, assignment.round, assignment.client, assignment.job.phase, number)
                for assignment, number, indices in parts
                for _ in indices
            ]
            batch = draw(examples, rows, self.adapted.device, keys)
        if self.settings.label_smoothing:
            smoothing_B = torch.full((len(rows),), self.settings.label_smoothing, dtype=torch.float64)
            return {**batch, SMOOTHING: smoothing_B}
        return batch

    def compute_class_terms(self, assignment: Assignment, examples: Examples) -> dict[str, Tensor]:
        """Compute per-class inputs of the loss (weights, logit offsets), (labels,), by the key of a batch's rows.

        It is the same for all batches of a job.
        """
        settings, terms = self.settings, dict[str, Tensor]()
        classes, balance = np.empty(0, dtype=np.int64), getattr(self.task, "compute_balanced_weights", None)
        if settings.logit_adjustment or (settings.class_weights == "balanced" and balance is None):
            list_classes = getattr(self.task, "list_classes", get_labels)
            classes = list_classes(examples, assignment.indices)  # one for each example or word
        if settings.logit_adjustment:
            terms[OFFSETS] = compute_class_offsets(classes, len(self._labels), settings.logit_adjustment)
        if settings.class_weights == "balanced" and balance is not None:
            terms[CLASS_WEIGHTS] = balance(examples, assignment.indices)
        elif settings.class_weights == "balanced":
            terms[CLASS_WEIGHTS] = compute_class_weights(classes, len(self._labels))
        elif settings.class_weights != "none":
            weights = dict(settings.class_weights)
            terms[CLASS_WEIGHTS] = torch.tensor([weights.get(label, 1.0) for label in self._labels])
        return {name: to_device(value, self.adapted.device) for name, value in terms.items()}

    def make_optimizer(self, assignment: Assignment, live: Mapping[str, Tensor]) -> LocalOptimizer:
        """Make the optimizer of a job whose tensors are installed."""
        job = assignment.job
        return LocalOptimizer(
            build_optimizer_spec(assignment, self.settings),
            job.trainable,
            live,
            join_states(assignment.moments, job.optimizer_state),
            job.masks,
        )

    @torch.no_grad()
    def decay_frozen(self, assignment: Assignment, live: Mapping[str, Tensor]) -> float:
        """Apply the job's decoupled weight decay to what does not train: the frozen base and finished segments."""
        job, spec = assignment.job, build_optimizer_spec(assignment, self.settings)
        if not job.decay_base or job.steps == 0:
            return 1.0
        factor = 1 - spec.lr * spec.weight_decay
        for layer in self.adapted.layers.values():
            layer.shrink *= factor
        for layer, parametrization in job.parametrization.items():
            if isinstance(parametrization, Projected) and (name := f"{layer}/{parametrization.finished[0]}") in live:
                live[name].mul_(factor)
        return factor

    def set_frozen_decay(self, job: Job, decay: float) -> None:
        """Set the factor by which ``decay_frozen`` has scaled the frozen base so far."""
        if job.decay_base:
            for layer in self.adapted.layers.values():
                layer.shrink = decay

    def set_dropout(self, assignment: Assignment, step: int) -> None:
        """Draw the adapters' dropout of a forward pass."""
        client, round, phase = assignment.client, assignment.round, assignment.job.phase
        rate = self.settings.lora_dropout
        if not rate:
            return

        def dropout(x: Tensor, layer: str) -> Tensor:
            mask = draw_dropout_mask(x.shape, rate, self.seed, round, client, phase, step, layer)
            return x * to_device(mask, x.device).to(x.dtype) / (1 - rate)

        self.adapted.set_dropout(dropout)

    def apply(
        self,
        job: Job,
        live: Mapping[str, Tensor],
        optimizer: LocalOptimizer,
        gradients: Mapping[str, Tensor],
        step: int,
        clipping: bool = True,
    ) -> None:
        """Take an optimizer step: penalties, masks, clipping, smoothing and offsets, then the update.

        Args:
            gradients: Gradients of the tensors that are active in the step; others are not used.
            step: Number of the step in the job, from 0.
        """
        names = job.list_active_names(step)
        if not names:
            return
        gradients = {name: gradients[name] for name in names}
        if job.penalties:
            penalty = torch.stack([penalty.compute_value(live) for penalty in job.penalties]).sum()
            penalty_gradients = torch.autograd.grad(penalty, [live[name] for name in names], allow_unused=True)
            for name, extra in zip(names, penalty_gradients, strict=True):
                gradients[name] = gradients[name] if extra is None else gradients[name] + extra
        for name, mask in job.masks.items():
            if name in gradients:
                gradients[name] = gradients[name] * mask.to(gradients[name])
        if self.settings.max_grad_norm and clipping and job.clips:
            clip(gradients, self.settings.max_grad_norm)
        gradients = smooth_groups(job.trainable, gradients)
        for name in names:
            if name in job.gradient_offset:
                gradients[name] = gradients[name] + job.gradient_offset[name].to(gradients[name].device)
        optimizer.step(gradients)

    def predict(
        self,
        job: Job,
        examples: Examples,
        indices: np.ndarray,
        batch_size: int,
        *,
        generate: bool = False,
        parts: Sequence[np.ndarray] | None = None,
    ) -> Tensor:
        """Predict some examples: one row each, in the order of ``indices``, float32 on the CPU.

        Args:
            parts: The indices, in parts that share no pass; None: all may.
        """
        parts = [indices] if parts is None else parts
        self.references.ensure(examples, parts)
        if not generate:  # generated answers have other lengths
            self.prefixes.ensure(examples, parts)
        batches = [batch for part in parts for batch in split_evaluation_batches(part, examples.lengths, batch_size)]
        rows = self.compute_rows(job, examples, batches, generate=generate)
        return torch.stack([rows[index] for index in indices.tolist()])

    def predict_each(self, models: Iterable[ModelInputs], examples: Examples, batch_size: int) -> Iterator[Tensor]:
        """Predict with one model after another (``Engine.predict_each``)."""
        for job, indices in models:
            yield self.predict(job, examples, indices, batch_size)

    def predict_shared_examples(
        self, jobs: Iterable[Job], examples: Examples, indices: np.ndarray, batch_size: int
    ) -> Iterator[Tensor]:
        """Predict with one model after another (``Engine.predict_shared_examples``)."""
        for job in jobs:
            yield self.predict(job, examples, indices, batch_size)

    def evaluate(
        self, client: str, job: Job, examples: Examples, indices: np.ndarray, batch_size: int, *, bounded: bool = False
    ) -> dict[str, float]:
        """``Engine.evaluate``."""
        parts = self.alike.split(examples, indices) if bounded else [indices]
        self.prepare(examples, parts)
        predictions = self.predict(job, examples, indices, batch_size, parts=parts)
        metrics = self.task.compute_metrics(predictions, examples, indices.tolist())
        return bound_loss(self.task, metrics, predictions, examples, indices.tolist()) if bounded else metrics

    @torch.no_grad()
    def compute_rows(
        self,
        job: Job | None,
        examples: Examples,
        batches: Iterable[np.ndarray],
        *,
        generate: bool = False,
        features: bool = False,
    ) -> dict[int, Tensor]:
        """Compute predictions, or features, of some batches by example, float32 on the CPU.

        Args:
            job: The model; None: the pretrained one.
            examples: The data set that the batches' indices point into; their cached hidden states are computed.
            batches: Indices of each batch; threads may share an iterator.
            generate: Whether predictions include generated text (``Task.predict``).
            features: Whether the features of each pass are returned in place of its predictions.

        Raises:
            FedspanError: If the device has too little memory for a batch.
        """
        adapted = self.adapted
        tap = FeatureTap(adapted.model, find_output_layer(adapted)) if features else None
        if len(examples.lengths):
            self.padding.ensure(examples)
        if not generate:
            self.prefixes.get_cache(examples)  # a replica's own
        adapted.model.eval()
        if job is None:
            adapted.install({}, {}, frozenset())
        else:
            adapted.install(job.parametrization, job.tensors, frozenset())
        rows: dict[int, Tensor] = {}
        with nullcontext() if tap is None else tap.record():
            for indices in batches:
                batch, size = self.task.collate(examples, indices.tolist(), adapted.device), len(indices)
                memory = convert_out_of_memory(adapted.device, "evaluation.batch_size", size, "examples in a batch")
                with memory, nullcontext() if generate else self._feed_unpadded(batch, examples, indices):
                    outputs = self.task.predict(adapted.model, batch, generate=generate)
                if tap is not None and isinstance(self.task, LabelsWords):
                    outputs = [row.cpu() for row in self.task.select_words(tap.features, batch)]
                else:
                    outputs = (outputs if tap is None else tap.take(outputs)).float().cpu()
                rows.update(zip(indices.tolist(), outputs, strict=True))
                self.stages.advance("evaluation" if tap is None else "statistics", len(indices))
        return rows

    @contextmanager
    def _feed_unpadded(self, batch: Mapping[str, Tensor], examples: Examples, indices: np.ndarray) -> Generator[None]:
        """Let forward passes of a batch skip the frozen prefix and its padding within this context."""
        padding = self.padding.remove_padding(batch, examples.lengths[indices], same_attention=True)
        with padding, self.prefixes.feed(examples, indices.tolist()):
            yield

    def compute_features(self, job: Job | None, examples: Examples, indices: np.ndarray, batch_size: int) -> Tensor:
        """``Engine.compute_features``."""
        self.prefixes.ensure(examples, [indices])
        batches = split_evaluation_batches(indices, examples.lengths, batch_size)
        return join_features(self.compute_rows(job, examples, batches, features=True), indices)


def join_features(rows: Mapping[int, Tensor], indices: np.ndarray) -> Tensor:
    """Return the features of some examples, or of their words, one below the other."""
    return torch.cat([rows[index].reshape(-1, rows[index].shape[-1]) for index in indices.tolist()])


def draw_dropout_mask(shape: Sequence[int], rate: float, *key: int | str) -> Tensor:
    """Draw the dropout mask of a layer's input; true: the entry is kept.

    The key identifies the draw (seed, round, client, phase, micro-batch, layer), and the mask is drawn on the CPU, so
    every engine draws the same mask.
    """
    seed, *label = key
    rng = create_generator(int(seed), "dropout", *label)
    return torch.rand(tuple(shape), generator=rng) >= rate
