"""The client half of a round, on the data owner's side: carries out a server's orders.

A client's stored state (memory, moments, its base) is versioned by round. An order names the round whose reply was
accepted last (``Client.last_round``). Training continues from that version and writes a new one, so a retried round or
a lost reply never advances the state twice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from fedspan.clients.job_checkpoints import JobCheckpoints
from fedspan.clients.metric_noise import MetricLimits, measure, score_parts
from fedspan.clients.open_training import OpenTraining, normalize
from fedspan.clients.order_checks import compute_min_batch, require_agreed, require_known
from fedspan.clients.refusals import refuse
from fedspan.clients.second_exchange import FirstExchange, build_second_reply
from fedspan.clients.statistics import StatisticsLimits, compute_client_statistics, parse_statistics_order
from fedspan.clients.store import ClientStore, compute_state_digest
from fedspan.core.base import BaseUpdate, apply_patch
from fedspan.core.method import Method
from fedspan.core.recent import RecentValues
from fedspan.core.tensors import Tensors, split_extras
from fedspan.core.values import Client, Contribution, Job, Message, Trained
from fedspan.errors import FedspanError
from fedspan.federation import serialization
from fedspan.federation.privacy import compute_order_charges, compute_planned_charges, compute_training_noise, privatize
from fedspan.federation.progress import ClientData, ClientState
from fedspan.federation.protocol import Envelope, Order, Part, Reply, ScoredPart
from fedspan.federation.secagg.messages import Phase
from fedspan.federation.validation import build_untrained_jobs
from fedspan.models.head import find_output_layer
from fedspan.tasks.task import Examples
from fedspan.training.accounting import Charge
from fedspan.training.engine import Engine
from fedspan.training.jobs import Assignment, build_not_finite_error, is_explained

if TYPE_CHECKING:
    from fedspan.clients.secagg import SecureClient

A = TypeVar("A")

log = logging.getLogger("fedspan.node")


class Host:
    """The client half of rounds: carries out orders for its local clients.

    A host has one client (a node of a deployment) or many (the simulator). It trains as many clients in parallel as its
    engine supports.

    Args:
        examples: The data set that the clients' indices point into.
        export: Function that writes the model of a job, given a base and a round; None: the clients export nothing.
        secure: Each client's half of secure aggregation; None: the run has none.
        reveals_losses: Whether training losses, which are computed from raw data, are reported under local privacy.
        limits: The data owner's limits on statistics for the head's initialization; None: no limits.
        checkpoints: Stores the progress of a client's training within a round; None: an interrupted round starts over.
        agreed: Digest of the config to which the clients agreed; empty: the host belongs to the server's process.
        metric_limits: The data owner's limits on metrics and losses; None: they are reported as measured.
        train_examples: Minimum number of training examples whose labels a client knows.
        min_batch: Minimum number of examples of a step.
    """

    def __init__(
        self,
        method: Method,
        engine: Engine,
        clients: Mapping[str, ClientData],
        examples: Examples,
        store: ClientStore,
        batch_size: int,
        export: Callable[[Job, BaseUpdate, int], None] | None = None,
        secure: Mapping[str, SecureClient] | None = None,
        *,
        reveals_losses: bool = False,
        limits: StatisticsLimits | None = None,
        checkpoints: JobCheckpoints | None = None,
        agreed: str = "",
        metric_limits: MetricLimits | None = None,
        train_examples: int = 0,
        min_batch: int = 1,
    ) -> None:
        self.method, self.engine, self.clients = method, engine, clients
        self.examples, self.store, self.batch_size, self.export = examples, store, batch_size, export
        self.secure, self.reveals_losses, self.limits = secure, reveals_losses, limits or StatisticsLimits()
        self.checkpoints, self.agreed = checkpoints, agreed
        self.metric_limits, self.train_examples = metric_limits or MetricLimits(), train_examples
        self.min_batch = min_batch
        self.tamper: Callable[[Order, Message, Message], Message] | None = None
        """Simulated fault of clients: function of an order, its decoded message and the honest reply, which returns
        the reply to send."""
        self.on_trained: Callable[[Assignment, Trained], None] | None = None
        """A callback that is called with every trained job."""
        self._shared: BaseUpdate | None = None
        self._round, self._decoded = -1, RecentValues[tuple[bytes, Message]]()

    def share_base(self, base: BaseUpdate) -> None:
        """Use the server's base, which is in this process, for all further orders, for clients of any version."""
        self._shared = base
        self.engine.adapted.set_base(base)

    def count_examples(self, id: str) -> int:
        """Count the examples on which a client trains in a round, including repeated uses."""
        added = sum(self.method.list_added_epochs())
        return self.engine.settings.compute_workload(len(self.clients[id].train), added)

    def count_tokens(self, id: str) -> int:
        """Estimate the number of tokens on which a client trains in a round, including repeated uses."""
        indices = self.clients[id].train
        return round(self.count_examples(id) * float(self.examples.lengths[indices].mean())) if len(indices) else 0

    def make_first_assignments(self, orders: Iterable[Order]) -> list[Assignment]:
        """Return the first jobs of orders to train, without carrying them out."""
        keep = self.engine.settings.optimizer_state == "keep"
        return [training.make_assignment(training.job, keep) for training in map(self._open_training, orders)]

    def prepare(self, ids: Iterable[str]) -> None:
        """Precompute the cached part of passes over the clients' training examples, separately for each client."""
        self.engine.prepare(self.examples, [self.clients[id].train for id in ids])

    def reply(self, order: Order | Phase) -> Envelope:
        """Carry out an order of any kind."""
        if isinstance(order, Order):
            return self.answer(order).to_envelope()
        return self._get_secure_client(order.to, order.task).answer(order).to_envelope()

    def answer(self, order: Order) -> Reply:
        """Carry out an order.

        Raises:
            FedspanError: If the loss stops being finite, or (``LostStateError``) if the client's state is missing.
            ValueError: If the order is not addressed to a client of this host.
        """
        self._get_data(order)
        if order.task != "train" and self.checkpoints is not None:
            self.checkpoints.clear()  # the round is over
        if order.task not in ("train", "second") and self.method.declare_claims().second_exchange:
            self.store.store_trained(order.to, order.round, None)  # the second exchange is over
        if order.task == "evaluate":
            return self._evaluate(order)
        if order.task == "statistics":
            return self._compute_statistics(order)
        if order.task == "second":
            return self._reply_second(order)
        if order.task == "export":
            return self._export(order)
        replies: list[Reply] = []
        self.train({order.to: order}, replies.append)
        return replies[0]

    def train(self, orders: Mapping[str, Order], on_reply: Callable[[Reply], None]) -> None:
        """Train several clients, as many in parallel as the engine supports.

        Args:
            orders: Orders to train by client id; each is read when its client's training begins.
        """
        keeps_moments, running = self.engine.settings.optimizer_state == "keep", dict[str, OpenTraining]()
        finished, failed = set[str](), list[str]()

        def make_assignment(training: OpenTraining, job: Job) -> Assignment:
            if self.on_trained is not None:
                job = replace(job, want_moments=True)
            assignment = training.make_assignment(job, keeps_moments)
            if not self._is_private:  # noise hides single examples
                least = compute_min_batch(job, self.engine.settings, self.min_batch, self.train_examples)
                assignment = replace(assignment, min_batch=least)
            if assignment.client in failed:
                return replace(assignment, indices=assignment.indices[:0], ignored=assignment.count)
            if self.checkpoints is None:
                return assignment
            return replace(assignment, checkpoint=self.checkpoints.open(training.order, len(training.parts)))

        def open_job(id: str) -> Assignment:
            order = orders[id]
            if self.method.declare_claims().second_exchange:
                self.store.store_trained(order.to, order.round, None)
            training = running[id] = self._open_training(order)
            return make_assignment(training, training.job)

        def finish_job(assignment: Assignment, trained: Trained) -> Assignment | None:
            training = running[assignment.client]
            if self.hides_failures and not all(bool(value.isfinite().all()) for value in trained.tensors.values()):
                raise build_not_finite_error(assignment, math.nan)
            if self.on_trained is not None:
                self.on_trained(assignment, trained)
            if keeps_moments:
                training.moments[assignment.job.phase] = (trained.optimizer_state, assignment.job.generation)
            result, training.memory = self.method.finish(
                assignment.job, trained, training.client, training.memory, assignment.round
            )
            training.parts.append(Part(loss=trained.metrics["loss"], examples=trained.metrics["examples"]))
            if isinstance(result, Job):
                return make_assignment(training, result)
            reply = self._finish_training(training, trained, result)
            del running[assignment.client]
            finished.add(assignment.client)
            on_reply(reply)
            return None

        sizes = {id: int(self.examples.lengths[self.clients[id].train].sum()) for id in orders}
        if sizes:  # a Poisson sample may be empty
            try:
                self.prepare(sizes)  # before any client trains, in one thread and as a separate stage
                self.engine.train_all(self.examples, sizes, open_job, finish_job)
            except Exception as error:  # on one of the examples, by the model that the server chose
                if not self.hides_failures or is_explained(error):
                    raise
                log.warning("nothing of what was trained is sent: %s", error, exc_info=error)
                failed += [id for id in orders if id not in finished]
                if self.engine.privacy is not None and self.engine.privacy.mechanism == "dp-sgd":
                    # An untrained reply would have no noise. Without examples, no further failure tells of them.
                    self.engine.train_all(self.examples, dict.fromkeys(failed, 0), open_job, finish_job)
                    return
                for id in failed:
                    on_reply(self._finish_untrained(running[id] if id in running else self._open_training(orders[id])))

    def _get_data(self, order: Order) -> ClientData:
        return _select_local(self.clients, order.to)

    def _load_state(self, id: str, last_round: int | None) -> ClientState:
        return ClientState() if last_round is None else self.store.load(id, last_round)

    def _decode_message(self, order: Order) -> Message:
        """Return the message of an order; one to several clients is decoded once (``OrderEncoder``)."""
        if order.round != self._round:
            self._round = order.round
            self._decoded.clear()

        def compute() -> tuple[tuple[bytes, Message], int]:
            decoded = serialization.decode(order.body)
            if self.agreed:
                require_known(decoded, self.method.spec)
            return (order.body, decoded), 2 * len(order.body)  # encoded and decoded

        _, message = self._decoded.get_or_compute(id(order.body), compute)
        return replace(message, tensors=dict(message.tensors))

    def _start_job(self, order: Order, message: Message) -> tuple[Job, ClientState]:
        """Return the job of an order, and the client's state with the model's current base."""
        if message.base is not None and not self.method.declare_claims().sends_base:
            problem = "messages of this run's method change no base (its claims have no sends_base)"
            raise FedspanError("message.base", message.base.round, problem=problem)
        stored = self._load_state(order.to, None if order.client is None else order.client.last_round)
        if self._shared is None:
            # The message of a secure sum is the same for all clients, so its patch is one of the pretrained base.
            base = apply_patch(stored.base if order.secure is None else BaseUpdate(), message.base)
            self.engine.adapted.set_base(base)
        else:
            base = self._shared
        memory = stored.memory if order.client is not None else {}
        job = self.method.start(message, order.client, memory, order.round)
        if self.agreed:
            rank = self.method.get_rank(None)
            if order.client is not None:
                rank = max(order.client.rank, rank)  # a client may train some slots
            elif not self.method.declare_claims().adapter:
                rank = None  # the global model has the rank of its weights
            require_agreed(job, message, rank, float(self.engine.settings.lr), self.engine.adapted)
        return job, replace(stored, base=base)

    def _open_training(self, order: Order) -> OpenTraining:
        data, client, privacy = self._get_data(order), _require_client(order), self.engine.privacy
        if len(data.train) < self.train_examples and not self._is_private:
            problem = "this node has fewer training examples with labels of the run than it needs to train"
            raise FedspanError("limits.train_examples", self.train_examples, problem=problem)
        self._require_secure(order)
        message = self._decode_message(order)
        job, stored = self._start_job(order, message)
        noise, origin = 0.0, ""
        if privacy is not None and privacy.mechanism == "dp-sgd":
            trusted = _set_true_examples(client, data)
            noise = compute_training_noise(
                self.engine.settings, privacy, self.method, message, trusted, order.round, stored.memory
            )
            if privacy.secret:
                origin = f"{self.agreed} {order.key} {compute_state_digest(stored)}"
        return OpenTraining(order, client, data, stored, job, noise, origin, stored.memory, dict(stored.moments))

    @property
    def _is_private(self) -> bool:
        """Whether replies have noise, so that nothing else may tell the server of the examples: no error may."""
        privacy = self.engine.privacy
        return privacy is not None and privacy.mechanism != "central"

    @property
    def hides_failures(self) -> bool:
        """Whether failed training has a reply, with noise only: the server may choose a model that fails on some."""
        return bool(self.agreed) and self._is_private

    def _finish_untrained(self, training: OpenTraining) -> Reply:
        order, memory = training.order, training.stored.memory
        message = self._decode_message(order)
        _, reply = build_untrained_jobs(self.method, message, training.client, order.round, memory)
        training.memory = memory
        return self._finish_training(training, None, reply)

    def _finish_training(self, training: OpenTraining, trained: Trained | None, reply: Message) -> Reply:
        order, privacy = training.order, self.engine.privacy
        if privacy is not None and privacy.mechanism == "local":
            reply = privatize(privacy, training.job.tensors, training.client, reply, order.round)
        if (self._is_private and not self.reveals_losses) or self.metric_limits.epsilon is not None:
            training.parts.clear()  # a loss is computed from the raw data
        if self.tamper is not None:
            reply = self.tamper(order, self._decode_message(order), reply)
        needed = frozenset(round for round in (training.client.last_round, order.best) if round is not None)
        state = ClientState(training.memory, training.moments, training.stored.base)
        self.store.store(order.to, order.round, state, needed)
        try:
            body, factor = self._encode_reply(order, reply, training.job.tensors)
        except FedspanError as error:
            if self.tamper is None:
                raise
            return refuse(order, error)  # a simulated fault that cannot be masked fails its client, as on a node
        if trained is not None and self.method.declare_claims().second_exchange:
            first = FirstExchange(split_extras(trained.tensors)[0], factor)
            self.store.store_trained(order.to, order.round, first)
        return Reply("train", order.round, order.attempt, order.to, tuple(training.parts), body=body)

    def _get_secure_client(self, id: str, value: object) -> SecureClient:
        if self.secure is None:
            raise FedspanError("federation.secure", value, problem="the run's config has no secure aggregation")
        return _select_local(self.secure, id)

    def _require_secure(self, order: Order) -> None:
        """Check, before any training, that a reply enters a secure sum if and only if the run uses them."""
        if order.secure is not None:
            self._get_secure_client(order.to, order.secure.session).require_maskable(order, order.secure)
        elif self.secure is not None:
            raise FedspanError("federation.secure", None, problem="this run sends replies only under masks")

    def _encode_reply(self, order: Order, reply: Message, started: Tensors, factor: float = 1.0) -> tuple[bytes, float]:
        """Encode a reply, or its masked contribution to a secure sum.

        Args:
            factor: Factor on the change before the sum's clipping.

        Returns:
            The encoded message, and the factor by which the sum's clipping scaled the change; 1 in plaintext.
        """
        if order.secure is None:
            return serialization.encode(reply), 1.0
        assert order.client is not None
        return self._encode_masked(order, self.method.contribute(normalize(reply), order.client), started, factor)

    def _encode_masked(
        self, order: Order, contribution: Contribution, started: Tensors, factor: float = 1.0
    ) -> tuple[bytes, float]:
        assert order.secure is not None
        secure = self._get_secure_client(order.to, order.secure.session)
        masked, clip_factor = secure.mask(order, order.secure, contribution, started, factor)
        return serialization.encode(masked), clip_factor

    def compute_charges(self, order: Order | Phase) -> tuple[Charge, ...]:
        """Compute the privacy cost of an order for its client."""
        if not isinstance(order, Order) or order.task != "train" or order.client is None:
            return ()
        settings, privacy = self.engine.settings, self.engine.privacy
        if privacy is None:
            return ()
        client = _set_true_examples(order.client, self._get_data(order))
        memory = self._load_state(client.id, client.last_round).memory
        return compute_order_charges(
            privacy, settings, self.method, self._decode_message(order), client, order.round, memory
        )

    def compute_planned_charges(self, id: str) -> tuple[Charge, ...]:
        """Compute the privacy cost of all rounds of the run for a client that trains in each of them."""
        engine, data = self.engine, self.clients[id]
        client, begin = _set_true_examples(data.client, data), partial(self.method.init, engine.adapted)
        return compute_planned_charges(engine.privacy, engine.settings, self.method, begin, client)

    def _export(self, order: Order) -> Reply:
        if self.export is None:
            raise FedspanError("export", order.to, "a client with its own adapter")
        job, stored = self._start_job(order, self._decode_message(order))
        self.export(job, stored.base, order.round)
        return Reply("export", order.round, order.attempt, order.to)

    def _reply_second(self, order: Order) -> Reply:
        """Carry out an order of a round's second exchange, from what the client trained in the first."""
        client = _require_client(order)
        self._require_secure(order)
        message = self._decode_message(order)
        reply, factor = build_second_reply(self.store, self.method, order, client, message)
        if self.tamper is not None:
            reply = self.tamper(order, message, reply)
        try:
            body, _ = self._encode_reply(order, reply, {}, factor)
        except FedspanError as error:
            if self.tamper is None:
                raise
            return refuse(order, error)
        return Reply("second", order.round, order.attempt, order.to, body=body)

    def require_statistics(self, order: Order) -> None:
        """Check, before anything is computed, that the owner lets the statistics of an order leave this client.

        Raises:
            ValueError: If the order is not one for statistics of a local client.
        """
        data, layer = self._get_data(order), find_output_layer(self.engine.adapted)
        kind, _, _ = parse_statistics_order(self._decode_message(order))
        self.limits.require(kind, order.round, len(data.train), layer.features)

    def _compute_statistics(self, order: Order) -> Reply:
        data = self._get_data(order)
        _require_client(order)
        self._require_secure(order)
        self.require_statistics(order)
        kind, bound, message = parse_statistics_order(self._decode_message(order))
        if self.engine.privacy is not None:
            problem = "statistics of features are not privatized"
            raise FedspanError("training.privacy", kind, "model.head_init: random", problem=problem)
        if message.tensors or message.base is not None:
            job, _ = self._start_job(order, message)
        else:  # the pretrained model, whatever base the server's state has
            job = None
            self.engine.adapted.set_base(BaseUpdate())
        min_examples = self.limits.class_examples
        try:
            statistics = compute_client_statistics(
                self.engine, job, self.examples, data.train, kind, bound, min_examples
            )
        finally:
            if self._shared is not None:
                self.engine.adapted.set_base(self._shared)
        if order.secure is None:
            body = serialization.encode(Message(statistics))
        else:
            zeros = {name: torch.zeros_like(value) for name, value in statistics.items()}
            body, _ = self._encode_masked(order, Contribution(sum=statistics), zeros)
        return Reply("statistics", order.round, order.attempt, order.to, body=body)

    def _evaluate(self, order: Order) -> Reply:
        data = self._get_data(order)
        job, _ = self._start_job(order, self._decode_message(order))

        def evaluate(indices: np.ndarray, bounded: bool) -> dict[str, float]:
            return self.engine.evaluate(order.to, job, self.examples, indices, self.batch_size, bounded=bounded)

        parts: Mapping[ScoredPart, np.ndarray] = {"validation": data.validation, "test": data.test}
        scores = score_parts(parts, partial(measure, evaluate), self.metric_limits, self.engine.task)
        return Reply("evaluate", order.round, order.attempt, order.to, scores=scores)


def _select_local(clients: Mapping[str, A], id: str) -> A:
    if id not in clients:
        local_clients = ", ".join(map(repr, list(clients)[:3]))
        raise ValueError(f"the order is addressed to {id!r}, and the local clients are {local_clients}")
    return clients[id]


def _require_client(order: Order) -> Client:
    """Return the client as an order describes it, or raise ``ValueError`` if it names another one, or none."""
    if order.client is None or order.client.id != order.to:
        raise ValueError(f"an order of kind {order.task!r} names another client, or none")
    return order.client


def _set_true_examples(client: Client, data: ClientData) -> Client:
    """Set a client's true number of examples; a wrong number from a server could lead to less noise."""
    return replace(client, examples=len(data.train) + data.ignored)
