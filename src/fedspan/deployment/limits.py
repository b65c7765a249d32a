"""Checks of a node against its operator's limits: a run's config when it joins, and every order afterwards.

A config is agreed on once. Whatever an order repeats of it (learning rate, weight, rank, number of the round) is
compared with what the node computes from that config and from its own examples, so no order can differ from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from transformers import PreTrainedModel

from fedspan.assembly.federation import compute_client_scaling
from fedspan.clients.metric_noise import round_count
from fedspan.clients.order_checks import MOST_ERASED
from fedspan.config import RunConfig
from fedspan.config.method import validate_method_options, validate_wrapper_options
from fedspan.config.node import NodeConfig, NodeLimits
from fedspan.config.validation_errors import convert_validation_errors
from fedspan.core.method import Method, RegisteredMethod
from fedspan.core.values import Client
from fedspan.deployment.columns import require_columns
from fedspan.deployment.handshake import Invitation, explain_version
from fedspan.errors import FedspanError
from fedspan.federation.config import MAX_SECURE_CLIENTS, FederationConfig, FractionRanks, RandomRanks
from fedspan.federation.head_start import STATISTICS_CLIP
from fedspan.federation.protocol import Order
from fedspan.federation.secagg.messages import Agreement, compute_share
from fedspan.models.adapted import AdaptedModel
from fedspan.models.names import get_architecture

_LARGEST_OPTION = 1_000_000
"""Largest whole number that an option of a method or a wrapper may have: they count rounds, ranks or segments."""
_MIN_STEPS = {32: 2**16, 64: 2**40}
"""Fewest steps between 0 and ``clip`` to which a node lets its change be rounded in a secure sum, by bits. With 2^16
steps, a change of a hundredth of that norm with 100,000 entries has about two steps an entry; 64 bits leave more."""
_MODULE, _MAX_NAMES = re.compile(r"[\w.-]{1,256}"), 1000
"""What a server may name modules by, and how many names it may give."""
_PULLS, _SCALES = ("mu", "penalty", "frobenius_decay"), ("b_lr_scale", "sparse_lr_scale")
"""Options that pull back what was trained, as weight decay does, and multipliers on the learning rate."""
_SAME = 1e-9
"""Relative difference up to which two computations of a number agree: a cosine may differ between machines."""


def require_config(node: NodeConfig, invitation: Invitation, config: RunConfig) -> None:
    """Check the config of an invitation against a node's limits, before anything is loaded."""
    if (problem := explain_version(invitation.version)) is not None:
        raise FedspanError("version", invitation.version, problem=f"of the server, {problem}")
    limits, method = node.limits, config.method.name
    if limits.methods is not None and method not in limits.methods:
        raise _build_forbidden_error("limits.methods", method, limits.methods)
    _require_model(node, invitation, config)
    _require_names(config)
    require_columns(node, config)
    _require_examples_per_reply(limits, config)
    for field, value, limit in _list_sizes(config, invitation, node):
        if value > limit:
            problem = f"the run's {field} is {value}, and this node allows at most {limit}"
            raise FedspanError(_LIMIT_OF.get(field, "limits"), value, problem=problem)
    privacy = config.privacy
    if privacy is not None and privacy.randomness != "secret":
        raise FedspanError("federation", privacy.randomness, problem="this node requires privacy.randomness: secret")
    if limits.is_private_only and (privacy is None or privacy.mechanism == "central"):
        mechanism = "no privacy" if privacy is None else privacy.mechanism
        problem = f"this node requires privacy.mechanism local or dp-sgd, and the run has {mechanism}"
        raise FedspanError("limits.private_only", mechanism, problem=problem)
    if limits.secure_only and config.federation.secure is None:
        raise FedspanError("limits.secure_only", None, problem="this node only joins runs with federation.secure")
    selected = _read_federation(invitation).clients_per_round
    if config.federation.secure is not None and selected is not None and selected < node.min_secure_clients:
        problem = f"a sum of {selected} nodes is too small: this node requires {node.min_secure_clients}"
        expected = "at least as many, null, or a lower limits.secure_clients in all owners' node files"
        raise FedspanError("federation.clients_per_round", selected, expected, problem=problem)


def _require_model(node: NodeConfig, invitation: Invitation, config: RunConfig) -> None:
    """Check that the run's model, and the adapter that it starts from, are allowed."""
    limits, requested = node.limits, dict(invitation.read_values().get("model") or {})
    name, revision, adapter = requested.get("name", config.model.name), config.model.revision, requested.get("adapter")
    patterns = ["builtin:*"] if limits.models is None else limits.models
    full_name = name if revision is None else f"{name}@{revision}"
    fits = ".." not in full_name and any(fnmatchcase(full_name, pattern) for pattern in patterns)
    if name not in node.models and not fits:
        raise _build_forbidden_error("limits.models", full_name, [*patterns, *node.models])
    if adapter is not None and adapter not in node.models:
        raise _build_forbidden_error("limits.models", adapter, list(node.models), "the adapter ")
    if requested.get("device_map") is not None or requested.get("max_memory"):
        problem = "where a node keeps a base is not the server's to decide"
        raise FedspanError("model.device_map", requested.get("device_map"), "null", problem=problem)
    if not config.model.pretrained and get_architecture(name) is None and not limits.from_scratch:
        problem = "this node does not train models from scratch, whose weights all come from the server"
        raise FedspanError("limits.from_scratch", False, problem=problem)


def _require_names(config: RunConfig) -> None:
    """Check that modules are named, by few names: PEFT reads a pattern as a regex, which can take forever to match."""
    for field in ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save"):
        value = getattr(config.model, field)
        names: list[str] = [value] if isinstance(value, str) else value or []
        if len(names) > _MAX_NAMES or not all(_MODULE.fullmatch(name) for name in names):
            expected = f"at most {_MAX_NAMES} names of modules in letters, digits, '_', '-' and '.': no regex on a node"
            raise FedspanError("message.model", field, expected)


def _require_examples_per_reply(limits: NodeLimits, config: RunConfig) -> None:
    """Check that a step and a reply are made of enough examples, so that no change is that of a single one."""
    training, (options, *others) = config.training, _validate_options(config)
    batch, steps = training.batch_size * training.gradient_accumulation_steps, options.get("steps")
    if batch < limits.min_batch:
        problem = f"the run's steps are of {batch} examples, and this node requires {limits.min_batch}"
        raise FedspanError("limits.min_batch", limits.min_batch, problem=problem)
    if (steps := steps or training.local_steps) is not None and (total := steps * batch) < limits.train_examples:
        problem = f"the run's replies are of {total} examples, and this node requires {limits.train_examples}"
        raise FedspanError("limits.train_examples", limits.train_examples, problem=problem)
    values = [one.get(name) for one in (options, *others) for name in _PULLS]
    pulls = [value for value in values if isinstance(value, int | float)]  # LoRA-FAIR's penalty is a word
    pull = training.weight_decay + sum(pulls)
    scales = (config.model.extras_lr_scale, *(float(options.get(name, 1)) for name in _SCALES))
    if (erased := training.optimizer_spec.lr * max(scales) * pull) > MOST_ERASED:
        problem = f"each step would erase {min(1, erased):.0%} of those before, so that a reply is the last examples'"
        expected = f"at most {MOST_ERASED} / training.lr, with {', '.join((*_PULLS, 'extras_lr_scale', *_SCALES))}"
        raise FedspanError("training.weight_decay", training.weight_decay, expected, problem=problem)


def _build_forbidden_error(field: str, value: object, allowed: list[str], subject: str = "") -> FedspanError:
    allows = ", ".join(allowed) or "none"
    return FedspanError(field, value, problem=f"this node does not allow {subject}{value!r}. It allows {allows}")


_LIMIT_OF: Mapping[str, str] = {
    "federation.rounds": "limits.run_rounds",
    "training.batch_size": "limits.batch",
    "evaluation.batch_size": "limits.batch",
    "training.local_steps": "limits.steps",
    "method.steps": "limits.steps",
    "model.max_length": "limits.tokens",
    "model.image_size": "limits.image_size",
    "method.r": "limits.rank",
    "federation.ranks": "limits.rank",
}


def _list_sizes(config: RunConfig, invitation: Invitation, node: NodeConfig) -> Iterator[tuple[str, int, float]]:
    """Yield the fields of a config that decide how much work or memory a run takes, with their limits."""
    training, limits = config.training, node.limits
    yield "federation.rounds", config.federation.rounds, limits.run_rounds
    yield "training.batch_size", training.batch_size, limits.batch
    yield "evaluation.batch_size", config.evaluation.batch_size, limits.batch
    yield "training.local_steps", (training.local_steps or 1) * training.gradient_accumulation_steps, limits.steps
    yield "model.max_length", config.model.max_length, limits.tokens
    yield "model.image_size", config.model.image_size or 0, limits.image_size
    options, *others = _validate_options(config)
    yield "method.r", options.get("r", 1), limits.rank
    yield "federation.ranks", max(list_config_ranks(_read_federation(invitation), 1, node.id)), limits.rank
    for name, value in ((name, value) for validated in (options, *others) for name, value in validated.items()):
        if name != "r" and isinstance(value, int):
            if name == "steps":  # optimizer steps of each round
                yield "method.steps", value * training.gradient_accumulation_steps, limits.steps
            else:
                yield f"method.{name}", value, _LARGEST_OPTION


def _validate_options(config: RunConfig) -> list[dict[str, Any]]:
    """Return the options of the method, then those of its wrappers, with defaults."""
    wrappers = enumerate(config.method.wrappers)
    others = [validate_wrapper_options(position, wrapper.name, wrapper.options) for position, wrapper in wrappers]
    return [validate_method_options(config.method.name, config.method.options), *others]


def _read_federation(invitation: Invitation) -> FederationConfig:
    """Return how a run selects its clients and their ranks, which a node's own config leaves out."""
    with convert_validation_errors("federation"):
        return FederationConfig.model_validate(invitation.read_values().get("federation") or {})


def require_frozen_words(limits: NodeLimits, config: RunConfig, adapted: AdaptedModel) -> None:
    """Check that no matrix with a row for each word trains: its change tells the words, also in a sum of many nodes.

    Raises:
        FedspanError: If an embedding of words does, or the output layer of a language model.
    """
    if limits.words or not config.model.pretrained:
        return
    models = [module for module in adapted.model.modules() if isinstance(module, PreTrainedModel)]
    matrices = [get() for model in models for get in (model.get_input_embeddings, model.get_output_embeddings)]
    words = {id(weight) for matrix in matrices if (weight := getattr(matrix, "weight", None)) is not None}
    targets = ((path, weight) for path in adapted.layers for weight in adapted.model.get_submodule(path).parameters())
    for path, weight in (*adapted.extras.items(), *targets):
        if id(weight) in words:
            problem = f"this node trains no words' vectors ({path}), whose changes tell the words of its texts"
            raise FedspanError("limits.words", False, problem=problem)


def require_workload(
    config: RunConfig,
    examples: int,
    limits: NodeLimits,
    method: Method,
    count_passes: Callable[[int, int | None], int] | None = None,
) -> None:
    """Check the work of one order on this node's examples, which only the node knows.

    Args:
        count_passes: Returns the number of passes by the owner's own trainer, which draws its own batches, in some
            steps, or in some epochs if these are None. None: the config's batches are used.
    """
    if examples < limits.train_examples:
        problem = "this node has fewer training examples than it needs to participate"
        raise FedspanError("limits.train_examples", limits.train_examples, problem=problem)
    training, field = config.training, "local_epochs" if config.training.local_steps is None else "local_steps"
    steps, added = training.local_steps, sum(method.list_added_epochs())
    epochs = added if steps is not None else training.local_epochs + added
    if count_passes is None:
        group = training.gradient_accumulation_steps  # passes of a step, which ends with its epoch
        passes = group * (epochs * math.ceil(_bound_count(examples) / (training.batch_size * group)) + (steps or 0))
    else:
        passes = epochs * _bound_count(count_passes(1, None)) if epochs else 0
        passes += 0 if steps is None else count_passes(0, steps)
    if passes > limits.steps:
        # The number of passes would show the server that of the examples.
        problem = f"training.{field}: {getattr(training, field)} takes more passes than this node allows"
        if added:
            problem = (
                f"training.{field}: {getattr(training, field)} and the method's own epochs ({added}) take more passes "
                "than this node allows"
            )
        raise FedspanError("limits.steps", limits.steps, problem=f"{problem} ({limits.steps})")


def _bound_count(count: int) -> int:
    """Return the largest number that is rounded like a count, which refusals for several epochs would tell a server."""
    return round_count(count) + 10 ** max(0, len(str(count)) - 2) - 1


def refuse_statistics(limits: NodeLimits, config: RunConfig) -> FedspanError | None:
    """Return why this node sends a run no statistics for its head; None: it may."""
    if limits.head_statistics == "off":
        return FedspanError("limits.head_statistics", "off", problem="no statistics of examples leave this node")
    if config.task_definition.target_type == "labels":  # no limit on their classes is enforced
        problem = "statistics of words and of several labels are for simulations"
        return FedspanError("model.head_init", config.model.head_init, "random", problem=problem)
    if (length := config.model.max_length) < (least := limits.statistics_max_length):
        problem = f"the run's model.max_length is {length}, and this node sends statistics only from {least} on"
        return FedspanError("limits.statistics_max_length", least, problem=problem)
    return None


def list_config_ranks(federation: FederationConfig, r: int, id: str) -> frozenset[int]:
    """Return the ranks that a config can give to a client, by default that of the method.

    Others' ranks cost a node nothing: it refuses factors of a larger rank than its own and the method's.
    """
    match federation.ranks:
        case None:
            return frozenset({r})
        case dict() as by_client:
            return frozenset({by_client.get(id, r)})
        case RandomRanks() | FractionRanks() as drawn:
            return frozenset(drawn.of)
        case turns:
            return frozenset(turns or (r,))


@dataclass(frozen=True)
class OrderTerms:
    """What every order of a run must agree with.

    Args:
        digest: Digest of the config as it was received.
    """

    config: RunConfig
    method: RegisteredMethod
    client: Client
    ranks: frozenset[int]
    digest: str

    def require(self, order: Order) -> None:
        """Check an order."""
        rounds = self.config.federation.rounds
        last = {"train": rounds - 1, "second": rounds - 1, "statistics": 0}.get(order.task, rounds)
        if order.round > last:
            problem = f"an order for round {order.round + 1} of a run with {rounds} rounds"
            raise FedspanError("limits.rounds", order.round + 1, problem=problem)
        if order.task in ("train", "second", "statistics"):
            self.require_rate(order.lr, order.round)
        if order.client is not None:
            self._require_client(order.client, order.task)

    def require_agreement(self, agreement: Agreement) -> None:
        """Check what the clients of a secure sum are to agree on.

        Number of clients and largest weight decide the steps to which changes are rounded. A node whose own steps are
        so coarse that the rounding would hide its change does not participate.

        Raises:
            FedspanError: If it differs from the run's config, or the node's own change would be rounded too coarsely.
        """
        from fedspan.crypto.masks import Ring  # needs fedspan[secagg]

        federation, privacy = self.config.federation, self.config.privacy
        assert federation.secure is not None
        secure, clients = federation.secure, agreement.clients
        if clients > MAX_SECURE_CLIENTS:
            raise FedspanError("message.agreement.clients", clients, f"at most {MAX_SECURE_CLIENTS}")
        clip = secure.clip
        if agreement.task == "statistics":
            clip = STATISTICS_CLIP
        elif privacy is not None and privacy.mechanism == "central":
            clip = privacy.clip
        agreements = {"config": self.digest, "clip": clip, "bits": secure.bits}
        for name, value in agreements.items():
            if getattr(agreement, name) != value:
                raise FedspanError(f"message.agreement.{name}", getattr(agreement, name), f"the run's, {value}")
        self.require_rate(agreement.lr, agreement.round)
        share = compute_share(self.get_weight(agreement.task), agreement.top)
        steps = share * Ring(agreement.bits, agreement.clip, clients).levels
        if steps < (fewest := _MIN_STEPS[agreement.bits]):
            problem = (
                f"with {clients} clients and weights up to {agreement.top:g}, this node's change would be rounded to "
                f"{steps:.3g} steps between 0 and federation.secure.clip, and it needs {fewest}"
            )
            expected = "more equal weights (federation.weights, --max-examples)"
            if agreement.bits == 32:
                expected = f"federation.secure.bits: 64, or {expected}"
            raise FedspanError("message.agreement.top", agreement.top, expected, problem=problem)

    def require_rate(self, lr: float, round: int) -> None:
        """Check that a learning rate is that of the schedule."""
        _require_same("lr", lr, self.config.build_training_settings().compute_lr(round, self.config.federation.rounds))

    def get_weight(self, task: str) -> float:
        """Return the client's weight in an average."""
        uniform = self.config.federation.weights == "uniform" and task != "statistics"
        return 1.0 if uniform else float(self.client.examples)

    def _require_client(self, client: Client, task: str) -> None:
        _require_same("client.examples", client.examples, self.client.examples)
        _require_same("client.weight", client.weight, self.get_weight(task))
        if client.rank not in self.ranks:
            raise FedspanError("message.client.rank", client.rank, f"a rank of the run's config: {sorted(self.ranks)}")
        _require_same("client.scaling", client.scaling, compute_client_scaling(self.config, self.method, client.rank))


def _require_same(name: str, value: float, expected: float) -> None:
    if not math.isclose(value, expected, rel_tol=_SAME):
        problem = f"the order has {name} {value!r}, and by the run's config and this node's data it is {expected!r}"
        raise FedspanError(f"message.{name}", value, problem=problem)
