"""Checks across the sections of a config: combinations of options that do not fit together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedspan.config.sections import RunSections
from fedspan.core.method import Claims, Method
from fedspan.core.values import Client, Job, LayerSpec, Reduced, ServerState, Spec
from fedspan.data.files import FROM_TRAINERS, NOWHERE
from fedspan.errors import FedspanError, suggest_nearest
from fedspan.federation.config import MAX_SECURE_CLIENTS, FederationConfig
from fedspan.federation.validation import compute_origin
from fedspan.methods.registry import get_method_class
from fedspan.training.config import PrivacyConfig


def require_combination(config: RunSections) -> None:
    """Check that the options of a run fit together."""
    method = config.wrap_method(config.method.build(Spec(()), config.seed))
    if config.federation.reduction != "mean" and method.declare_claims().reduction != "sum":
        problem = (
            f"{config.federation.reduction} cannot be combined with {config.method.name}, whose server needs "
            "single replies"
        )
        raise FedspanError("federation.reduction", config.federation.reduction, "mean", problem=problem)
    if config.federation.reduction != "mean" and method.declare_claims().second_exchange:
        problem = (
            f"{config.federation.reduction} would combine other clients in each of the two exchanges of a round of "
            f"{config.method.name}, whose results belong together"
        )
        raise FedspanError("federation.reduction", config.federation.reduction, "mean", problem=problem)
    if config.privacy is not None:
        require_privacy_fit(config.method.title, config.privacy, config.federation, method.declare_claims())
        if config.evaluation.diagnostics is not None:
            problem = "it cannot be combined with privacy, because diagnostics inspect updates without noise"
            raise FedspanError("evaluation.diagnostics", config.evaluation.diagnostics, problem=problem)
    _require_simulation_fit(config)
    mechanism = None if config.privacy is None else config.privacy.mechanism
    config.federation.require_late_fit(mechanism, [wrapper.name for wrapper in config.method.wrappers])
    _require_cluster_fit(config)
    _require_head_fit(config)
    config.federation.require_secure_fit(config.method.name, config.method.title, method.declare_claims())
    _require_buffered_fit(config)
    _require_trainers(config)
    _require_training_fit(config)
    _require_final_rounds_fit(config)
    _require_offload_fit(config)
    config.task_definition.parse_options(config.task_options)
    _require_columns(config)
    metrics = config.task_definition.metric_names
    if config.evaluation.metric is not None and config.evaluation.metric not in metrics:
        expected = f"a metric of {config.task}: {', '.join(metrics)}"
        raise FedspanError("evaluation.metric", config.evaluation.metric, expected)


def require_privacy_fit(method: str, privacy: PrivacyConfig, federation: FederationConfig, claims: Claims) -> None:
    """Check that a run's replies can be privatized."""
    reasons = {
        "it transmits nothing": claims.sends == "nothing",
        "what a client chooses to send tells of its data": claims.budgets and privacy.mechanism != "dp-sgd",
        "its server combines replies one by one": claims.reduction != "sum" and privacy.mechanism == "central",
        "its rounds have two exchanges, each of which would need noise of its own": claims.second_exchange
        and privacy.mechanism != "dp-sgd",
        "noise would spoil what it sends beside tensors that all clients start from": claims.sends != "values"
        and privacy.mechanism == "local",
    }
    if reason := next((reason for reason, applies in reasons.items() if applies), None):
        raise FedspanError(
            "privacy.mechanism",
            privacy.mechanism,
            problem=f"{method} cannot be combined with {privacy.mechanism} privacy: {reason}",
        )
    if privacy.mechanism == "central":
        for field, value, right in (
            ("reduction", federation.reduction, "mean"),
            ("weights", federation.weights, "uniform"),
            ("ranks", federation.ranks, None),
            ("over_select", federation.over_select, 0),
            ("clients_per_round", federation.secure and federation.clients_per_round, None),
        ):
            if value != right:
                beside = " and federation.secure" if field == "clients_per_round" else ""
                problem = f"{value!r} cannot be combined with privacy.mechanism: central{beside}"
                remedy = "Leave it out" if right is None else f"Set it to {right}"
                raise FedspanError(f"federation.{field}", value, problem=f"{problem}. {remedy}")


def _require_buffered_fit(config: RunSections) -> None:
    buffered = config.federation.buffered
    if buffered is None:
        return
    side = 4 * config.method.build(Spec(()), config.seed).r
    spec = Spec((LayerSpec("layer", side + 2, side + 1),), clients=1)
    method = config.wrap_method(config.method.build(spec, config.seed))
    config.federation.require_buffered_fit(
        config.method.title, explain_round_dependence(method, config.federation.rounds)
    )
    problem = "it cannot be combined with federation.buffered"
    options: dict[str, tuple[object, str]] = {
        "privacy": (
            None if config.privacy is None else config.privacy.mechanism,
            f"{problem}, because privacy budgets count the clients of synchronous rounds",
        ),
        "cluster": (None if config.cluster is None else config.cluster.workers, problem),
        "simulation.present": ((None if config.simulation is None else config.simulation.present) or None, problem),
        "evaluation.diagnostics": (
            config.evaluation.diagnostics,
            f"{problem}, because diagnostics compare updates that start from one state",
        ),
    }
    for field, (value, text) in options.items():
        if value is not None:
            raise FedspanError(field, value, problem=text)


def _require_columns(config: RunSections) -> None:
    """Check that the task has the roles and lists of labels that the section ``data`` names."""
    roles = config.task_columns.roles
    for role, column in config.data.roles.items():
        if role not in roles:
            advice = suggest_nearest(role, roles) if roles else f"{config.task} has no further roles."
            problem = f"{config.task} has no columns with the role {role!r}. {advice}"
            raise FedspanError(f"data.roles.{role}", column, problem=problem)
    for option in ("label_separator", "label_columns"):
        value = getattr(config.data, option)
        if value is not None and not config.task_columns.is_multi_label:
            expected = "task: multi-label-classification, or no such option"
            raise FedspanError(f"data.{option}", value, expected, problem=f"{config.task} has no lists of labels")


def explain_random_head(config: RunSections) -> str | None:
    """Return the reason why the head of this run cannot start from statistics; None if it can."""
    reasons = {
        f"statistics of features are not privatized ({'' if config.privacy is None else config.privacy.mechanism})": (
            config.privacy is not None
        ),
        f"federation.reduction: {config.federation.reduction} does not apply to statistics": (
            config.federation.reduction != "mean"
        ),
        "secure aggregation needs bounded numbers, and those of a regression have no bound": (
            config.task_definition.target_type == "number" and config.federation.secure is not None
        ),
        "statistics of words and of several labels are for simulations without secure aggregation": (
            config.task_definition.target_type == "labels"
            and (config.federation.secure is not None or config.data.train == NOWHERE)
        ),
        f"all clients send statistics, and a secure sum has at most {MAX_SECURE_CLIENTS}": (
            config.federation.secure is not None and config.partition.clients > MAX_SECURE_CLIENTS
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _require_head_fit(config: RunSections) -> None:
    if config.model.pooling not in ("auto", "stock") and not config.task_definition.can_pool:
        problem = f"{config.model.pooling} cannot be combined with {config.task}, which pools no texts"
        raise FedspanError("model.pooling", config.model.pooling, "auto", problem=problem)
    if config.model.pooling == "stock" and config.task_definition.is_embedding:
        problem = f"{config.task} has no classifier, and stock is the pooling of the classifier"
        raise FedspanError("model.pooling", "stock", "auto, mean, cls, max or last", problem=problem)
    if config.model.head_rounds not in ("auto", 0):
        _require_head_rounds_fit(config)
    requested = config.model.head_init
    if requested in ("auto", "random"):
        return
    allowed = config.task_definition.head_inits
    if requested not in allowed:
        expected = " or ".join((*allowed, "random", "auto"))
        raise FedspanError("model.head_init", requested, expected, problem=f"{requested} does not fit {config.task}")
    if config.model.is_from_scratch:
        problem = f"{requested} needs a pretrained model, and this one is from scratch"
        raise FedspanError("model.head_init", requested, "random", problem=problem)
    if reason := explain_random_head(config):
        raise FedspanError("model.head_init", requested, "random", problem=f"the head cannot start: {reason}")


def _require_head_rounds_fit(config: RunSections) -> None:
    extras = config.model.extras or get_method_class(config.method.name).claims.extras
    reasons = {
        f"{config.task} has no head for classes": config.task_definition.target_type != "label",
        "a model from scratch has no features to train it on": config.model.is_from_scratch,
        f"the heads are not averaged (model.extras is {extras})": extras != "average",
        "the rounds of federation.buffered are not separate": config.federation.buffered is not None,
        f"no round remains for the method (federation.rounds is {config.federation.rounds})": (
            config.head_rounds >= config.federation.rounds
        ),
    }
    if reason := next((reason for reason, applies in reasons.items() if applies), None):
        problem = f"no round can train the head alone: {reason}"
        raise FedspanError("model.head_rounds", config.model.head_rounds, "0 or auto", problem=problem)


def _require_offload_fit(config: RunSections) -> None:
    if config.model.device_map is None:
        return
    if config.engine.name != "loop":
        problem = (
            f"the engine {config.engine.name} shares a base among threads or processes, and offloaded weights are on "
            "the device only while one call uses them"
        )
        raise FedspanError("model.device_map", "auto", "engine.name: loop", problem=problem)
    if config.privacy is not None and config.privacy.mechanism == "dp-sgd":
        problem = "it cannot be combined with privacy.mechanism: dp-sgd, which stacks examples over the base"
        raise FedspanError("model.device_map", "auto", "null", problem=problem)


def _require_trainers(config: RunSections) -> None:
    """Check that the task is the trainers' only if the examples are, and that nothing needs their examples."""
    if config.data.train != FROM_TRAINERS:
        if config.task == "trainer":
            expected = "a task that fedspan computes itself, or fedspan.simulate(config, folder, trainers=...)"
            raise FedspanError("task", "trainer", expected)
        return
    problem = "it needs examples that fedspan can read, and those of this run are the trainers' own"
    options: dict[str, object] = {
        "training.lr": "auto" if config.training.lr == "auto" else None,
        "baselines": config.baselines or None,
        "federation.final_rounds": config.federation.final_rounds or None,
        "evaluation.diagnostics": config.evaluation.diagnostics,
        "evaluation.by": config.evaluation.by,
        "cluster": None if config.cluster is None else config.cluster.workers,
    }
    for field, value in options.items():
        if value is not None:
            raise FedspanError(field, value, problem=problem)


def _require_training_fit(config: RunSections) -> None:
    training, adjustment = config.training, config.training.logit_adjustment
    if adjustment and config.privacy is not None and config.privacy.mechanism == "dp-sgd":
        problem = "it cannot be combined with dp-sgd, which does not protect a client's class counts"
        raise FedspanError("training.logit_adjustment", adjustment, "0", problem=problem)
    for name in ("checkpoint_steps", "checkpoint_minutes"):
        value = getattr(training, name)
        if value is not None and config.privacy is not None and config.privacy.mechanism == "dp-sgd":
            problem = "a round of dp-sgd has no checkpoints: its noise is drawn again when its training restarts"
            raise FedspanError(f"training.{name}", value, "null", problem=problem)
    _require_loss_fit(config)
    _require_reference_fit(config)
    if training.lr == "auto" and config.privacy is not None:
        problem = "auto cannot be combined with privacy, because every trial would cost privacy budget"
        raise FedspanError("training.lr", "auto", "a number", problem=problem)
    if config.partition.validation:
        return
    problem = "it needs a partition.validation above 0, because it decides by validation scores"
    if training.lr == "auto":
        raise FedspanError("training.lr", "auto", problem=problem)
    if config.federation.early_stopping is not None:
        raise FedspanError("federation.early_stopping", config.federation.early_stopping, problem=problem)


def _require_final_rounds_fit(config: RunSections) -> None:
    reasons = {
        "without partition.validation all examples are trained on in every round": not config.partition.validation,
        "further rounds would cost privacy budget": config.privacy is not None,
        "asynchronous rounds have no best one to continue from": config.federation.buffered is not None,
        "secure aggregation has one session for each round": config.federation.secure is not None,
        "the clients' examples are in the workers of the cluster": config.cluster is not None,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if config.federation.final_rounds and reason is not None:
        problem = f"final rounds cannot be run, because {reason}"
        raise FedspanError("federation.final_rounds", config.federation.final_rounds, "0", problem=problem)


def _require_loss_fit(config: RunSections) -> None:
    """Check that options of the loss fit the task, and that those which cannot be combined fit the rest of the run."""
    definition = config.task_definition
    unfit = f"the loss of {config.task} does not take it"
    if not definition.has_labels:
        unfit = f"{config.task} has no classes"
    reasons = {
        "training.logit_adjustment corrects for shares of classes already, and leaves out classes": (
            config.training.logit_adjustment > 0
        ),
        "dp-sgd computes each example's loss without it": config.privacy is not None
        and config.privacy.mechanism == "dp-sgd",
    }
    for option, off in (("logit_adjustment", 0), ("label_smoothing", 0), ("class_weights", "none")):
        value = getattr(config.training, option)
        applying = {unfit: option not in definition.loss_options}
        if option != "logit_adjustment":
            applying |= reasons
        reason = next((reason for reason, applies in applying.items() if applies), None)
        if reason is not None and value != off:
            raise FedspanError(f"training.{option}", value, str(off), problem=reason)


def _require_reference_fit(config: RunSections) -> None:
    """Check that a task that compares the model with the pretrained one can do so."""
    if not config.task_definition.has_reference:
        return
    reference = f"{config.task} compares the model with its reference, the pretrained model"
    if config.training.lora_dropout:
        problem = f"{reference}, and dropout would change one of the two alone"
        raise FedspanError("training.lora_dropout", config.training.lora_dropout, "0", problem=problem)
    if config.model.adapter is not None:
        expected = "model.name: the folder of the merged model (fedspan export --form merged)"
        problem = f"{reference}, and an adapter would be missing there"
        raise FedspanError("model.adapter", config.model.adapter, expected, problem=problem)


def _require_simulation_fit(config: RunSections) -> None:
    conditions = config.simulation
    if conditions is None:
        return
    if conditions.present and config.privacy is not None and config.privacy.mechanism == "central":
        problem = "central privacy counts on the same number of clients in every round; local and dp-sgd do not"
        raise FedspanError("simulation.present", conditions.present, problem=problem)
    if conditions.present and any(wrapper.name == "scaffold" for wrapper in config.method.wrappers):
        problem = "scaffold averages its control variates over a fixed number of clients"
        raise FedspanError("simulation.present", conditions.present, problem=problem)
    flips = conditions.faults is not None and conditions.faults.kind == "label-flip"
    if flips and not config.task_definition.is_classifier:
        raise FedspanError(
            "simulation.faults.kind", "label-flip", problem=f"label-flip needs labels, and {config.task} has none"
        )


def _require_cluster_fit(config: RunSections) -> None:
    cluster = config.cluster
    if cluster is None:
        return
    if config.evaluation.diagnostics is not None:
        problem = "it cannot be combined with cluster, because no process sees both ends of an update"
        raise FedspanError("evaluation.diagnostics", config.evaluation.diagnostics, problem=problem)
    if cluster.gpus_per_worker and (config.baselines or config.training.lr == "auto"):
        field = "baselines" if config.baselines else "training.lr"
        problem = "it trains in the driver's process, which leaves the GPUs to the workers. Run it without cluster"
        raise FedspanError(field, config.baselines or "auto", problem=problem)
    if config.model.device_map is not None:
        problem = "it cannot be combined with cluster, each of whose workers has the whole base"
        raise FedspanError("model.device_map", config.model.device_map, "null", problem=problem)
    requested = "cuda" if cluster.gpus_per_worker else "cpu"
    if config.device not in ("auto", requested):
        expected = f"auto or {requested}, because cluster.gpus_per_worker is {cluster.gpus_per_worker:g}"
        raise FedspanError("device", config.device, expected)


@dataclass(frozen=True)
class _DiagonalWeights:
    """A pretrained model of diagonal matrices, whose singular values differ, so that every method can decompose it."""

    method: Method

    def get_weight(self, layer: str) -> Tensor:
        rows, columns = next(spec.shape for spec in self.method.spec.layers if spec.name == layer)
        weight = torch.zeros(rows, columns)
        weight.diagonal().copy_(torch.linspace(1.0, 2.0, min(rows, columns)))
        return weight

    def get_extra(self, parameter: str) -> Tensor:
        return torch.zeros(self.method.spec.extras[parameter])


def explain_round_dependence(method: Method, rounds: int) -> str | None:
    """Explain why a reply to an earlier round cannot enter a later one, as a clause; None if it can.

    Claims that rule it out are named first. Otherwise the method's own functions run for all rounds without training:
    from one state a job must be the same in every round, and no round may change the base or re-initialize tensors.

    Args:
        method: The method with its wrappers, bound to a small model.
    """
    claims = method.declare_claims()
    reasons = {
        "its rounds have a second exchange, with the clients that replied in the first": claims.second_exchange,
        "its server needs the single replies of a round, and not their sum": claims.reduction != "sum",
        "its clients send nothing": claims.sends == "nothing",
        "its clients also send something other than new values, or changes, of what they started from": claims.sends
        == "other",
        "its factors are re-initialized in every round, so that changes of two rounds have other coordinates": (
            claims.reinitializes
        ),
        "its rounds move the base, from which changes of earlier rounds do not start": claims.moves_base,
    }
    if reason := next((reason for reason, applies in reasons.items() if applies), None):
        return reason
    client = Client("client", method.get_rank(None), 1.0, 1, 1.0)
    state = method.init(_DiagonalWeights(method))
    first = _start(method, state, client)
    for number in range(rounds):
        after = method.update(
            state, Reduced(compute_origin(method, method.sync(state, client), client, number), count=1)
        )
        if after.generation != state.generation or after.base.round != state.base.round:
            return f"it re-initializes its factors after round {number + 1}"
        if number + 1 < rounds and not _are_alike(_start(method, after, client), first):
            return f"a client trains something else in round {number + 2} than in round 1"
        state = after
    return None


def _start(method: Method, state: ServerState, client: Client) -> Job:
    return method.start(method.sync(state, client), client, {}, state.round)


def _are_alike(left: Job, right: Job) -> bool:
    """Check whether two jobs train the same tensors from the same values in the same way."""
    for ours, theirs in ((left.tensors, right.tensors), (left.masks, right.masks)):
        if ours.keys() != theirs.keys() or not all(torch.equal(value, theirs[name]) for name, value in ours.items()):
            return False
    left, right = (replace(job, tensors={}, masks={}, penalties=(), scalars={}) for job in (left, right))
    return left == right
