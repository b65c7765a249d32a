"""A federated low-rank method: six pure functions over plain values, and the claims that the tests measure.

One round, seen from the server: ``sync`` builds the message with what a client lacks; the client's ``start`` defines
its training job; an engine trains; ``finish`` builds the reply (or the next phase's job); ``contribute`` converts the
reply to a form that can be combined; the engine reduces; ``update`` completes the server's step. A method that claims
``second_exchange`` exchanges messages once more before ``update``: ``build_second_order`` builds the server's message
from the reduction, and ``build_second_reply`` a client's reply from what the client has trained. The model to evaluate
is that of ``start(sync(state, client), client, memory)``; ``client=None`` is the global model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from fedspan.core.tensors import Tensors
from fedspan.core.values import (
    Client,
    Contribution,
    Job,
    LayerSpec,
    Message,
    Reduced,
    ServerState,
    Spec,
    Trained,
    Weights,
)
from fedspan.errors import FedspanError

Memory = Tensors
"""Tensors that stay on a client between rounds, by name. They are never transmitted."""


@dataclass(frozen=True)
class Quantity:
    """A part of replies in a unit of its own, whose size is compared and limited separately from the model's change.

    In one norm, the part with the larger numbers would hide any change of the other one.

    Args:
        name: What it is, in the plural ("second moments").
        prefix: Beginning of the names of its tensors.
        slots: Slots of its tensors; empty: any.
        names: Names of its tensors; empty: any.
        is_squared: Whether it holds squares; its size is then measured, and scaled, in the unit of their roots.
    """

    name: str
    prefix: str = ""
    slots: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    is_squared: bool = False

    def contains(self, tensor_name: str) -> bool:
        """Return whether a tensor of a reply is part of the quantity."""
        has_slot = not self.slots or tensor_name.rpartition("/")[2] in self.slots
        has_name = not self.names or tensor_name in self.names
        return tensor_name.startswith(self.prefix) and has_slot and has_name


@dataclass(frozen=True)
class Claims:
    """The declared properties of a method; the conformance test measures each of them for every method.

    Args:
        paper: Title, venue and arXiv id.
        exact: Whether the aggregated weight equals the weighted mean of the clients' weights, to rounding.
        personal: Whether clients have models of their own, so that there is no single global model to evaluate.
        heterogeneous_ranks: Whether clients may have different ranks.
        reduction: ``sum`` if a weighted mean of replies suffices, else ``stack``.
        extras: Default policy for the parameters that train beside the target layers.
        adapter: Whether the update is of low rank, so that ``r`` matters.
        reinitializes: Whether factors are re-initialized or decomposed again every round (so that moments and control
            variates of a round mean nothing in the next).
        shrinks: Whether a client may reply with fewer slots than it received, for ``contribute`` to check.
        budgets: Whether a client's rank is a budget (of the model's slots that it trains and sends), not a shape.
        moves_base: Whether each round's replies also move the base (so their average alone is not a step).
        sends_base: Whether messages to clients may change the base; clients of other methods refuse such a message.
        sends: ``values``: a reply holds new values of tensors that all clients of the round start from alike, under
            their names, and where replies sum, ``contribute`` passes them on unchanged; ``changes``: ``contribute``
            returns the changes of such tensors, which are 0 of a client that trained nothing; ``other``: it also holds
            anything else (the client's own tensors, sketches, moments); ``nothing``.
        whole: Slots of a reply that compression does not reduce to changes although the job has tensors of their names:
            ``contribute`` converts their values (into Gram matrices, for example), or clients do not start alike.
        directions: Slots of a reply that hold directions of norm 1 at most (projectors), which ``contribute`` checks;
            scaling a reply's change down leaves them as they are.
        quantities: Parts of a reply in other units than those of the model's tensors.
        adaptive_rank: Whether the rank of what clients receive or send depends on values of replies, so that plans,
            which have none, count the largest.
        second_exchange: Whether a round has a second exchange of orders and replies after training
            (``Method.build_second_order``). Its replies are summed, so ``reduction`` must be ``sum``.
    """

    paper: str
    exact: bool
    personal: bool = False
    heterogeneous_ranks: bool = False
    reduction: Literal["sum", "stack"] = "sum"
    extras: Literal["average", "local", "frozen"] = "average"
    adapter: bool = True
    reinitializes: bool = False
    shrinks: bool = False
    budgets: bool = False
    moves_base: bool = False
    sends_base: bool = False
    sends: Literal["values", "changes", "other", "nothing"] = "values"
    whole: tuple[str, ...] = ()
    directions: tuple[str, ...] = ()
    quantities: tuple[Quantity, ...] = ()
    adaptive_rank: bool = False
    second_exchange: bool = False

    def describe_other_replies(self) -> str:
        """Describe the replies of a method that does not send ``values`` alone, for the reason of a refusal."""
        return {
            "changes": "replies hold changes already",
            "nothing": "replies hold nothing",
        }.get(
            self.sends, "replies hold other values, too (such as control variates, sketches or a client's own tensors)"
        )

    def __post_init__(self) -> None:
        """Check that the claims fit together.

        Raises:
            FedspanError: If the replies of a second exchange would not be summed.
        """
        if self.second_exchange and self.reduction != "sum":
            problem = "the server of a method with a second exchange combines sums"
            raise FedspanError("claims.reduction", self.reduction, "sum", problem=problem)


@dataclass(frozen=True)
class Traffic:
    """Bytes of tensor data to and from a client in one round.

    Args:
        down: Bytes from server to client.
        up: Bytes from client to server.
    """

    down: int
    up: int


def declare_bounded(default: float, minimum: float, maximum: float = math.inf) -> Any:
    """Declare a method's numeric option with a closed range; without it, an option must be above 0."""
    return field(default=default, metadata={"minimum": minimum, "maximum": maximum})


def declare_decay_rate(default: float) -> Any:
    """Declare a method's numeric option from 0 to below 1: the share of an average that is retained."""
    return field(default=default, metadata={"minimum": 0.0, "maximum": 1.0, "below": True})


def compute_scaling(lora_alpha: float, rank: int, use_rslora: bool = False) -> float:
    """Compute PEFT's factor on B A: alpha / r, or alpha / sqrt(r) with rsLoRA."""
    return lora_alpha / (math.sqrt(rank) if use_rslora else rank)


def reply(job: Job, trained: Trained, scalars: Mapping[str, int | float | str | bool] | None = None) -> Message:
    """Create a reply with exactly the tensors that were trained."""
    return Message({name: trained.tensors[name] for name in job.trainable_names}, scalars or {})


class Method(ABC):
    """The six functions of a method. Instances are immutable and hold hyperparameters only.

    Arguments that the functions share:

    - ``state``: the server's state between rounds.
    - ``client``: the client with its rank and weight; None: the global model.
    - ``message``: what was received: tensors by name, ``<module path>/A`` (r, I) and ``<module path>/B`` (O, r) for a
      target layer (O, I) under LoRA, and ``extras/<parameter path>`` in the parameter's shape.
    - ``memory``: the client's own tensors from its last round; empty before the first one.
    - ``round``: number of the round, from 0.
    """

    spec: Spec

    @abstractmethod
    def declare_claims(self) -> Claims:
        """Return the claims of the method."""

    @abstractmethod
    def get_rank(self, client: Client | None) -> int:
        """Return the rank of a client, or of the global model."""

    @abstractmethod
    def init(self, weights: Weights) -> ServerState:
        """Create the state before round 0 (server, once).

        Args:
            weights: The pretrained model, whose ``get_weight`` returns W0 of a target layer, (O, I).

        Returns:
            The state, whose tensors are the global model without its base.
        """

    @abstractmethod
    def sync(self, state: ServerState, client: Client | None) -> Message:
        """Build the message for a client (server).

        Returns:
            What the client lacks since ``client.last_round``; for None, everything.
        """

    @abstractmethod
    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        """Define a client's job (client). It also defines the model to evaluate, so it must not depend on callers.

        Returns:
            The job, with all tensors of the client's model and the names of those that train.
        """

    @abstractmethod
    def finish(
        self, job: Job, trained: Trained, client: Client, memory: Memory, round: int
    ) -> tuple[Job | Message, Memory]:
        """Build the reply and the new memory, or the next phase's job (client).

        In a later phase, ``job.tensors`` are the initial values of that phase. Whatever must outlast a phase goes into
        the memory returned with the next job, which the next ``finish`` receives.
        """

    @abstractmethod
    def contribute(self, message: Message, client: Client) -> Contribution:
        """Convert a reply for combination (server). Linear in the message's tensors for ``sum`` methods.

        It sees neither the state nor other replies, so under secure aggregation it can run on the client. Replies of a
        second exchange are converted, too: a method that claims one accepts the names of both.

        Raises:
            ValueError: If a reply with the names, shapes and dtypes of the method's replies has contents that no client
                of the method sends, such as slots that do not exist.
        """

    @abstractmethod
    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        """Compute the state after the round (server).

        Args:
            state: The state before the round.
            reduced: The weighted mean of each ``sum`` tensor, in its shape, and every client's ``stack`` tensors.

        Returns:
            The next state: ``state.advance_round(...)``, which counts the round.
        """

    def build_second_order(self, state: ServerState, reduced: Reduced) -> Message:
        """Build the message of a round's second exchange, which is the same for all clients (server).

        Only methods that claim ``second_exchange`` define it. The message goes to the clients whose first replies were
        accepted; it must not change the base.

        Args:
            state: The state before the round.
            reduced: The reduction of the first replies.
        """
        raise NotImplementedError(f"{type(self).__name__} claims a second exchange and lacks build_second_order")

    def build_second_reply(self, order: Message, tensors: Tensors, client: Client, round: int) -> Message:
        """Build a client's reply in a round's second exchange (client).

        Only methods that claim ``second_exchange`` define it. It uses no data, so it costs no privacy beyond that of
        the training, and an order that is repeated gets the same reply. The replies' tensors are averaged with the same
        weights as the first ones, normalized over the clients that sent one. ``update`` receives these means beside
        those of the first exchange, so the names of both must differ.

        Args:
            order: The message of ``build_second_order``.
            tensors: The target layers' tensors of the client's last job in this round, as trained.
            client: The client.
            round: Number of the round, from 0.
        """
        raise NotImplementedError(f"{type(self).__name__} claims a second exchange and lacks build_second_reply")

    def list_added_epochs(self) -> tuple[int, ...]:
        """Return the local epochs of each phase of a round that the run's own epochs or steps do not set (client).

        A gradient without a step (``Job.steps`` 0) takes one. By their sum a node limits its work. Empty, the default:
        the run sets all phases.
        """
        return ()

    def estimate_messages(self, layer: LayerSpec, rank: int, round: int) -> tuple[Message, Message] | None:
        """Estimate the messages to and from a client for one layer, if their sizes depend on data.

        Only shapes and dtypes of the tensors count. None, the default: sizes follow from shapes alone, so plans count
        them by running the method without values.

        Args:
            layer: The target layer.
            rank: Rank of a client that participated in all earlier rounds.
            round: Round number, from 0.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class Wrapper(Method):
    """A method around a method, to which it delegates everything that it does not change.

    Args:
        inner: The wrapped method.
    """

    inner: Method

    @property
    def spec(self) -> Spec:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Spec of the inner method."""
        return self.inner.spec

    def declare_claims(self) -> Claims:
        return self.inner.declare_claims()

    def get_rank(self, client: Client | None) -> int:
        return self.inner.get_rank(client)

    def init(self, weights: Weights) -> ServerState:
        return self.inner.init(weights)

    def sync(self, state: ServerState, client: Client | None) -> Message:
        return self.inner.sync(state, client)

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        return self.inner.start(message, client, memory, round)

    def finish(
        self, job: Job, trained: Trained, client: Client, memory: Memory, round: int
    ) -> tuple[Job | Message, Memory]:
        return self.inner.finish(job, trained, client, memory, round)

    def contribute(self, message: Message, client: Client) -> Contribution:
        return self.inner.contribute(message, client)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        return self.inner.update(state, reduced)

    def build_second_order(self, state: ServerState, reduced: Reduced) -> Message:
        return self.inner.build_second_order(state, reduced)

    def build_second_reply(self, order: Message, tensors: Tensors, client: Client, round: int) -> Message:
        return self.inner.build_second_reply(order, tensors, client, round)

    def list_added_epochs(self) -> tuple[int, ...]:
        return self.inner.list_added_epochs()

    def estimate_messages(self, layer: LayerSpec, rank: int, round: int) -> tuple[Message, Message] | None:
        return self.inner.estimate_messages(layer, rank, round)


@dataclass(frozen=True, kw_only=True)
class RegisteredMethod(Method):
    """Base of the methods in the registry: their common hyperparameters, which the user's config sets.

    What a method does not define is federated averaging: clients are sent the complete state and what they lack of the
    base, they reply with what they trained, and the mean of the replies (the claimed ``reduction``) is the next state.

    Args:
        spec: The model's target layers and extras.
        seed: Seed of all random draws that server and clients share.
        r: Rank of the adapter (the default rank of a client).
        lora_alpha: Numerator of the scaling.
        use_rslora: Whether to scale by alpha / sqrt(r).
    """

    claims: ClassVar[Claims]

    spec: Spec = field(repr=False)
    seed: int = 0
    r: int = 8
    lora_alpha: float = 16.0
    use_rslora: bool = False

    def declare_claims(self) -> Claims:
        return self.claims

    def get_rank(self, client: Client | None) -> int:
        return self.r if client is None else client.rank

    def get_scaling(self, client: Client | None) -> float:
        """Return the factor on B A of a client, or of the global model."""
        return compute_scaling(self.lora_alpha, self.r, self.use_rslora) if client is None else client.scaling

    def sync(self, state: ServerState, client: Client | None) -> Message:
        known_round = None if client is None else client.last_round
        return Message(state.tensors, base=state.base.build_patch(known_round))

    def finish(
        self, job: Job, trained: Trained, client: Client, memory: Memory, round: int
    ) -> tuple[Job | Message, Memory]:
        return reply(job, trained), memory

    def contribute(self, message: Message, client: Client) -> Contribution:
        if self.declare_claims().reduction == "stack":
            return Contribution(stack=message.tensors)
        return Contribution(sum=message.tensors)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        return state.advance_round(tensors=reduced.mean)
