"""A federated low-rank method: six pure functions over plain values, and the claims that the tests measure.

One round, seen from the server: ``sync`` tells each client what it misses; the client's ``start`` says what to train;
an engine trains; ``finish`` makes the reply (or the next phase); ``contribute`` puts the reply in the form in which
replies combine; the engine reduces; ``update`` is the rest of the server's step. The model to evaluate is that of
``start(sync(state, client), client, memory)``; ``client=None`` is the global model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
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

__all__ = ["Claims", "Memory", "Method", "RegisteredMethod", "Traffic", "bounded", "decay_rate", "scaling_of"]

Memory = Tensors
"""What stays on a client between rounds, by tensor name. It never travels."""


@dataclass(frozen=True)
class Claims:
    """What a method declares of itself; the conformance test measures each for every method.

    Args:
        paper: title, venue and arXiv id.
        exact: the aggregated weight equals the weighted mean of the clients' weights, to rounding.
        personal: clients keep models of their own; there is no one global model to evaluate.
        heterogeneous_ranks: clients may have different ranks.
        reduction: ``sum`` if a weighted mean of replies is enough, else ``stack``.
        extras: default policy for what trains beside the target layers.
        adapter: the update is of low rank, so that ``r`` matters.
        reinitialises: factors start anew every round (so server optimizers have nothing to act on).
        budgets: a client's rank is no shape but a budget, of how many of the model's slots it trains and sends.
        moves_base: every round the base moves by what that round's replies give (so their average alone is no step).
        sends: ``values``: a reply holds new values of tensors that all clients of the round start from alike, under
            their names, and where replies sum, ``contribute`` passes them on as they are; ``other``: it holds anything
            else too (tensors of the client's own, changes, sketches, moments); ``nothing``.
    """

    paper: str
    exact: bool
    personal: bool = False
    heterogeneous_ranks: bool = False
    reduction: Literal["sum", "stack"] = "sum"
    extras: Literal["average", "local", "frozen"] = "average"
    adapter: bool = True
    reinitialises: bool = False
    budgets: bool = False
    moves_base: bool = False
    sends: Literal["values", "other", "nothing"] = "values"


@dataclass(frozen=True)
class Traffic:
    """Elements per layer, client and round.

    Args:
        down: from server to client.
        up: from client to server.
    """

    down: int
    up: int


def bounded(default: float, least: float, most: float = math.inf) -> Any:
    """A method's numeric option whose range includes its ends; without it an option must be above 0."""
    return field(default=default, metadata={"least": least, "most": most})


def decay_rate(default: float) -> Any:
    """A method's numeric option from 0 to below 1: the share of an average that it keeps."""
    return field(default=default, metadata={"least": 0.0, "most": 1.0, "below": True})


def scaling_of(lora_alpha: float, rank: int, use_rslora: bool = False) -> float:
    """PEFT's factor on B A: alpha / r, or alpha / sqrt(r) with rsLoRA."""
    return lora_alpha / (math.sqrt(rank) if use_rslora else rank)


class Method(ABC):
    """The six functions. Instances are immutable: hyperparameters only."""

    spec: Spec

    @abstractmethod
    def declared(self) -> Claims:
        """What the method claims of itself."""

    @abstractmethod
    def rank(self, client: Client | None) -> int:
        """The rank of a client, or of the global model."""

    @abstractmethod
    def init(self, weights: Weights) -> ServerState:
        """Server, once: the state before round 0."""

    @abstractmethod
    def sync(self, state: ServerState, client: Client | None) -> Message:
        """Server: what a client is sent; everything for ``None``."""

    @abstractmethod
    def start(self, message: Message, client: Client | None, memory: Memory) -> Job:
        """Client: what it trains. Also defines the model to evaluate, so it must not depend on who asks."""

    @abstractmethod
    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory) -> tuple[Job | Message, Memory]:
        """Client: the reply and the new memory, or the next phase's job.

        In a later phase ``job.tensors`` are the start of that phase; what must outlast a phase goes into the memory
        that is returned beside the next job, which the next ``finish`` is given.
        """

    @abstractmethod
    def contribute(self, message: Message, client: Client) -> Contribution:
        """Server: a reply in the form in which replies combine. Linear in the message's tensors for ``sum`` methods.

        It sees neither the state nor other replies, so under secure aggregation it can run on the client.
        """

    @abstractmethod
    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        """Server: the state after the round."""

    @abstractmethod
    def traffic(self, layer: LayerSpec, rank: int, cohort: Sequence[int], round: int) -> Traffic:
        """Parameters that travel for one layer, to and from a client that took part in every round before.

        Args:
            layer: the target layer.
            rank: the client's.
            cohort: ranks of the clients that replied in the round before, which what comes down may be made of; in
                round 0, of nobody.
            round: number, from 0.
        """

    def upload(self, elements: int) -> int:
        """Bytes of tensor data that a tensor of so many elements takes in a reply: float32, unless compressed."""
        return 4 * elements


@dataclass(frozen=True, kw_only=True)
class RegisteredMethod(Method):
    """Base of the methods in the registry: their common hyperparameters, which the user's config sets.

    Args:
        spec: the model's target layers and extras.
        seed: of all draws that server and clients share.
        r: rank of the adapter (the default rank of a client).
        lora_alpha: numerator of the scaling.
        use_rslora: scale by alpha / sqrt(r).
    """

    claims: ClassVar[Claims]

    spec: Spec = field(repr=False)
    seed: int = 0
    r: int = 8
    lora_alpha: float = 16.0
    use_rslora: bool = False

    def declared(self) -> Claims:
        return self.claims

    def rank(self, client: Client | None) -> int:
        return self.r if client is None else client.rank

    def scaling(self, client: Client | None) -> float:
        """The factor on B A of a client, or of the global model."""
        return scaling_of(self.lora_alpha, self.r, self.use_rslora) if client is None else client.scaling
