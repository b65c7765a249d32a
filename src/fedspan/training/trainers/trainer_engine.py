"""The engine of users' own trainers: one client slot, in which the client's trainer trains a job on its own model."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Generator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedspan.core.values import Job, Trained
from fedspan.errors import FedspanError, suggest_nearest
from fedspan.models.adapted import AdaptedModel, hash_frozen
from fedspan.models.calls import replace_forward
from fedspan.models.direct_uses import forbid_direct_uses
from fedspan.tasks.metrics import is_metric_name
from fedspan.tasks.task import Examples, Task
from fedspan.training.config import Privacy, TrainingSettings
from fedspan.training.engine import FinishJob, OpenJob, train_one_by_one
from fedspan.training.jobs import Assignment, NotFiniteError, build_not_finite_error
from fedspan.training.services import TrainingServices
from fedspan.training.stages import Stages
from fedspan.training.trainers.install import FrozenBase, checksum_frozen, install_job
from fedspan.training.trainers.local import LocalTrainer, plan_round
from fedspan.training.trainers.optimizer import JobOptimizer
from fedspan.training.trainers.processes import Processes
from fedspan.training.trainers.transformers import TransformersTrainer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owner:
    """A client with its own trainer."""

    trainer: LocalTrainer
    adapted: AdaptedModel
    """The trainer's model, with the method's target layers; clients that share a model share this object."""


class TrainerEngine(TrainingServices):
    """Trains each client's jobs with the client's own trainer, one client after another.

    The trainer computes gradients as it likes, on examples that only it can read. Everything that a method adds to
    local training is in the optimizer that it steps (``JobOptimizer``).

    Args:
        owners: The clients by id, at least one; equal frozen weights.
        settings: Settings of local training; batch size and accumulation are the trainers' own.
        metric: Metric that every evaluation must have; None: evaluations have what the trainers measure.
        processes: The processes in which the only owner's trainer trains (DDP, FSDP); None: it trains in this one.

    Raises:
        FedspanError: If a trainer cannot honor the settings, or models differ.
    """

    def __init__(
        self,
        owners: Mapping[str, Owner],
        task: Task,
        settings: TrainingSettings,
        seed: int,
        stages: Stages | None = None,
        metric: str | None = None,
        processes: Processes | None = None,
        privacy: Privacy | None = None,
    ) -> None:
        first = next(iter(owners.values()))
        _require_supported(settings, privacy)
        super().__init__(first.adapted, task, settings, seed, stages=stages, privacy=privacy)
        self.owners = dict(owners)
        _require_equal_models(self.owners)
        self._frozen = {
            owner.trainer.root: FrozenBase(owner.trainer.root, owner.adapted) for owner in self.owners.values()
        }
        self._metric, self._processes = metric, processes
        self._round: int | None = None
        self._unknown_metrics: set[str] = set()
        self._violations: dict[nn.Module, str] = {}
        self._checked: set[nn.Module] = set()
        self._unobserved: set[nn.Module] = set()

    def prepare(self, examples: Examples, parts: Sequence[np.ndarray], run: object = None) -> None:
        """``Engine.prepare``: nothing, because examples are the trainers' own."""

    def train_all(self, examples: Examples, sizes: Mapping[str, int], open_job: OpenJob, finish_job: FinishJob) -> None:
        """Train one client after another (``Engine.train_all``)."""
        train_one_by_one(sizes, open_job, self.train, finish_job)

    def train(self, assignment: Assignment) -> Trained:
        """Have a client's trainer train a job.

        Raises:
            FedspanError: If the trainer cannot honor the job, took no step, changed the frozen base, or ended with
                values that are not finite; if the model uses a target layer's weight without calling the layer; or if
                an earlier order changed the frozen base.
        """
        job = assignment.job
        if job.refresh is not None:
            problem = "its projectors are renewed from gradients within a round, which needs fedspan's own engines"
            raise FedspanError("method", "refresh", problem=problem)
        owner = self._get_owner(assignment.client)
        self._round = assignment.round
        services = self._build_services(owner)
        plan = plan_round(self.settings, self.seed, assignment)
        with install_job(owner.trainer.root, owner.adapted, job) as live:
            before = self._require_frozen(owner, live, f"before round {assignment.round + 1}")
            self._set_dropout(owner.adapted)
            optimizer = JobOptimizer(services, assignment, live, self._processes, owner.adapted.is_sharded)
            with (
                self._run_in_processes("train", assignment.client, job, round=assignment.round, lr=assignment.lr),
                self._check_first_pass(assignment, owner.adapted),
            ):
                loss = owner.trainer.train(plan, optimizer)
                if self._processes is not None:
                    loss = self._processes.compute_mean(loss, "loss of a round")
                self._require_frozen(owner, live, f"in round {assignment.round + 1}", before)
                _require_trained(assignment, optimizer, loss, live)
            self.stages.advance("training", optimizer.examples)
            steps = 0 if optimizer.is_probe else optimizer.steps
            return Trained(
                tensors={name: value.detach().to("cpu", copy=True) for name, value in live.items()},
                optimizer_state=optimizer.copy_moments(),
                steps=steps,
                lr_sum=assignment.lr * steps,
                gradient=optimizer.compute_mean_gradient(),
                decay=optimizer.decay,
                metrics={"loss": loss, "examples": float(optimizer.examples)},
            )

    def evaluate(
        self, client: str, job: Job, examples: Examples, indices: np.ndarray, batch_size: int, *, bounded: bool = False
    ) -> dict[str, float]:
        """``Engine.evaluate``, by the client's own trainer on its own evaluation examples; never ``bounded``."""
        owner = self._get_owner(client)
        owner.adapted.set_base(self.adapted.base)
        with (
            install_job(owner.trainer.root, owner.adapted, job) as live,
            self._run_in_processes("evaluate", client, job),
        ):
            try:
                measured = owner.trainer.evaluate()
            except FedspanError:
                raise
            except Exception as error:
                when = "before the first round" if self._round is None else f"after round {self._round + 1}"
                problem = f"the evaluation of client {client} failed {when} ({type(error).__name__}: {error})"
                raise FedspanError("trainer", client, problem=problem) from error
            self._require_frozen(owner, live, "in an evaluation")
        metrics = {name: value for name, value in measured.items() if math.isfinite(value)}
        # Only rank 0 refuses the order, as a single process would: the others have finished it and wait for the next.
        is_leader = self._processes is None or self._processes.is_leader
        if is_leader and isinstance(owner.trainer, TransformersTrainer):
            self._report_unknown_metrics(client, owner.trainer.unknown_metrics)
        if is_leader and self._metric is not None and self._metric not in metrics:
            problem = (
                f"the evaluation of client {client} has no finite {self._metric}; it has "
                f"{', '.join(metrics) or 'none'}. A Trainer needs compute_metrics= that "
                "returns it, a TorchTrainer evaluate="
            )
            raise FedspanError("evaluation.metric", self._metric, problem=problem)
        self.stages.advance("evaluation", len(indices))
        return metrics

    def _report_unknown_metrics(self, client: str, names: Set[str]) -> None:
        """Warn of metrics that are not in the report: once each, for the first client that measures it."""
        new = sorted(names - self._unknown_metrics)
        self._unknown_metrics.update(new)
        reasons = {
            "fedspan does not know them (fedspan.register_metrics)": [name for name in new if is_metric_name(name)],
            "their names are no identifiers in lower case": [name for name in new if not is_metric_name(name)],
        }
        for reason, unknown in reasons.items():
            if unknown:
                log.warning(
                    "metrics of the evaluation of client %s that are not in the report, because %s: %s",
                    *(client, reason, ", ".join(unknown)),
                )

    def predict(self, *_: object, **__: object) -> Tensor:
        """``Engine.predict``: refused, because examples are the trainers' own."""
        raise FedspanError("trainer", None, problem="fedspan cannot predict the examples of an owner's own trainer")

    def compute_features(self, job: Job | None, examples: Examples, indices: np.ndarray, batch_size: int) -> Tensor:
        """``Engine.compute_features``: refused, because examples are the trainers' own."""
        problem = "statistics of features need examples that fedspan can read, and those of a trainer are its own"
        raise FedspanError("model.head_init", None, "random", problem=problem)

    def digest(self) -> str:
        """Return the SHA-256 of the owners' frozen weights, before a server state's base was set."""
        first = next(iter(self.owners.values()))
        if first.adapted.is_sharded:  # its trainer's root is the model
            return first.adapted.hash_frozen().hexdigest()
        return hash_frozen(first.trainer.root, first.adapted.get_values()).hexdigest()

    @contextmanager
    def _run_in_processes(self, task: str, client: str, job: Job, **header: object) -> Generator[None]:
        """Run a task within this context in all of the trainer's processes, to which rank 0 announces it."""
        if self._processes is None:
            yield
            return
        if self._processes.is_leader:
            self._processes.announce_job(task, job, self.adapted.base, client=client, **header)
        with self._processes.run_together():
            yield

    @contextmanager
    def _check_first_pass(self, assignment: Assignment, adapted: AdaptedModel) -> Generator[None]:
        """Check within this context, in its first pass, that a model calls its target layers (``forbid_direct_uses``).

        The pass is repeated in evaluation mode, which changes neither its own numbers nor the order of random draws. A
        training that never calls the model itself has no such pass: it may be right, so it is only reported. The
        model's ``forward`` is observed, because sentence-transformers calls it without the model's hooks.
        """
        model, device = adapted.model, adapted.device
        if model in self._checked:
            yield
            return
        forward, is_first = model.forward, True

        def check(args: Any, options: Any) -> None:
            nonlocal is_first
            is_first = False
            devices, kind = ([], "cuda") if device.type == "cpu" else ([device], device.type)
            # Accelerate may have wrapped forward in autocast, which is active now and must not be entered twice: the
            # inner exit of the same context would leave it active for good.
            with (
                replace_forward(model, forward),
                torch.random.fork_rng(devices, device_type=kind),
                forbid_direct_uses(adapted),
            ):
                model.forward(*args, **options)
            self._checked.add(model)

        uncompiled: Any = torch.compiler.disable(check)

        @functools.wraps(forward)
        def run(*args: Any, **options: Any) -> Any:
            if is_first:
                uncompiled(args, options)
            return forward(*args, **options)

        with replace_forward(model, run):
            yield
        if model not in self._checked and model not in self._unobserved:
            self._unobserved.add(model)
            log.warning(
                "the training of client %s in round %d did not call the model itself (model(...)), so it is not known "
                "whether target layers have an effect: a layer whose weight is used without calling it has none",
                *(assignment.client, assignment.round + 1),
            )

    def _get_owner(self, client: str) -> Owner:
        if client not in self.owners:
            raise FedspanError(
                "trainers", client, problem=f"no trainer of {client!r}. {suggest_nearest(client, self.owners)}"
            )
        owner = self.owners[client]
        if owner.trainer.root in self._violations:
            problem = f"no order is accepted any more, because {self._violations[owner.trainer.root]}"
            raise FedspanError("trainer", client, problem=problem)
        return owner

    def _require_frozen(
        self, owner: Owner, live: Mapping[str, Tensor], when: str, before: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """Check that a model has the run's frozen weights (``before``; None: not known), and return their checksums."""
        root = owner.trainer.root
        checksums = checksum_frozen(root, live)
        changed = self._frozen[root].list_changed(checksums)
        changed += [
            name
            for name in {**(before or checksums), **checksums}
            if (before or checksums).get(name) != checksums.get(name)
        ]
        if changed:
            id = next(id for id, other in self.owners.items() if other is owner)
            self._violations[root] = problem = (
                f"the frozen base of client {id} changed {when} ({changed[0]}). Only the job's tensors may change; a "
                "callback or an optimizer of the trainer's own may have done it. Load the model again and restart"
            )
            raise FedspanError("trainer", id, problem=problem)
        return checksums

    def _build_services(self, owner: Owner) -> TrainingServices:
        owner.adapted.set_base(self.adapted.base)
        if owner.adapted is self.adapted:
            return self
        return TrainingServices(owner.adapted, self.task, self.settings, self.seed, stages=self.stages)

    def _set_dropout(self, adapted: AdaptedModel) -> None:
        """Set the adapters' dropout, drawn as torch draws it: a trainer's passes cannot be counted from outside.

        Gradient checkpointing computes a layer twice and restores torch's random state, which keyed masks would ignore.
        """
        rate, model = self.settings.lora_dropout, adapted.model
        if rate:
            adapted.set_dropout(lambda x, layer: functional.dropout(x, rate, model.training))


def _require_supported(settings: TrainingSettings, privacy: Privacy | None) -> None:
    if privacy is not None and privacy.mechanism == "dp-sgd":
        problem = "dp-sgd needs every example's own gradient, which a foreign trainer does not compute"
        raise FedspanError("privacy.mechanism", "dp-sgd", "central or local", problem=problem)
    if settings.logit_adjustment:
        problem = "it changes the logits within the loss, and the loss is the trainer's own"
        raise FedspanError("training.logit_adjustment", settings.logit_adjustment, "0", problem=problem)
    for option, off in (("label_smoothing", 0.0), ("class_weights", "none")):
        if getattr(settings, option) != off:
            problem = "it changes the loss, which is the trainer's own"
            raise FedspanError(f"training.{option}", getattr(settings, option), str(off), problem=problem)


def _require_equal_models(owners: Mapping[str, Owner]) -> None:
    """Check that all owners' models have the same target layers, extras and frozen weights."""
    first = next(iter(owners.values()))
    expected, compared = None, {first.trainer.root}
    for id, owner in list(owners.items())[1:]:
        if owner.adapted.spec != first.adapted.spec:
            problem = f"the model of {id!r} has other layers than that of {next(iter(owners))!r}"
            raise FedspanError("trainers", id, problem=problem)
        if owner.trainer.root in compared:
            continue
        compared.add(owner.trainer.root)
        expected = expected or hash_frozen(first.trainer.root, first.adapted.get_values()).digest()
        if hash_frozen(owner.trainer.root, owner.adapted.get_values()).digest() != expected:
            problem = f"the frozen weights of the model of {id!r} differ from those of {next(iter(owners))!r}"
            raise FedspanError("trainers", id, problem=problem)


def _require_trained(assignment: Assignment, optimizer: JobOptimizer, loss: float, live: Mapping[str, Tensor]) -> None:
    context = f"of client {assignment.client} in round {assignment.round + 1}"
    if not optimizer.steps:
        raise FedspanError("trainer", assignment.client, problem=f"the trainer {context} took no optimizer step")
    if not optimizer.examples:
        raise FedspanError("trainer", assignment.client, problem=f"the trainer {context} counted no examples")
    if not math.isfinite(loss):
        raise build_not_finite_error(assignment, loss)
    for name in assignment.job.trainable_names:
        if not bool(torch.isfinite(live[name]).all()):
            problem = f"{name} {context} holds values that are not finite after training"
            raise NotFiniteError("trainer", assignment.client, problem=problem)
