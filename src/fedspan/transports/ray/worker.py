"""A worker: an actor with a host, which carries out orders for the clients of a stack."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch
from torch import Tensor

from fedspan.clients.host import Host
from fedspan.clients.second_exchange import TRAINED
from fedspan.clients.state_files import STATE
from fedspan.clients.store import OverlayClientStore
from fedspan.core.base import BaseUpdate, apply_patch
from fedspan.core.recent import RecentValues
from fedspan.core.values import Job
from fedspan.federation import serialization
from fedspan.federation.progress import ClientState
from fedspan.federation.protocol import Envelope, Order, Reply, decode_order
from fedspan.tasks.task import Examples
from fedspan.training.batched import BatchedEngine
from fedspan.training.references import copy_reference
from fedspan.training.stacking import StackingPlan

if TYPE_CHECKING:
    from fedspan.clients.secagg_store import Session


@dataclass(frozen=True)
class BaseVersion:
    """The base with which orders are carried out.

    Args:
        number: Number of the version, which increases with every base that the driver sets.
        known: Number of the version that the patch continues from; None: the pretrained base.
    """

    number: int
    known: int | None


@dataclass(frozen=True)
class StackedOrder:
    """An order to one client of a stack.

    Args:
        body: Position of its encoded message among those that are sent with the stack.
        state: The client's stored state, encoded; None: it has none.
        session: The client's session of secure aggregation; None: there is none.
    """

    header: str
    body: int
    state: bytes | None
    session: Session | None


@dataclass(frozen=True)
class Outcome:
    """A client's reply with what the client stores.

    Args:
        state: The client's new state, encoded; None: it stores nothing.
        trained: What it trained for the round's second exchange, encoded; None: there is none.
        session: The client's session of secure aggregation; None: there is none.
        refusal: The reason why the worker's clients train one by one; None: they do not, or were not meant to stack.
    """

    id: str
    envelope: Envelope
    state: bytes | None
    trained: bytes | None
    session: Session | None
    refusal: str | None


class ClusterWorker:
    """Carries out orders on a host of its own."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._host: Host | None = None
        self._base, self._version = BaseUpdate(), -1
        self._bodies = RecentValues[bytes]()
        self._data: dict[ray.ObjectRef[Examples], Examples] = {}

    def build(self, build: Callable[[Any], Host], kit: object) -> None:
        """Build the host, in place of an earlier run's."""
        self._host = None  # frees the memory that the next one needs
        self._base, self._version, self._bodies, self._data = BaseUpdate(), -1, RecentValues[bytes](), {}
        self._host = build(kit)

    def check(self) -> None:
        """Answer, which only a living worker does."""

    def has_cache(self) -> bool:
        """Return whether the hidden states of frozen layers are cached."""
        host = self._get_host()
        return host.engine.prefixes.get_cache(host.examples) is not None

    def prepare(self, ids: Sequence[str]) -> None:
        """Compute what passes over some clients' training examples can then skip."""
        self._get_host().prepare(ids)

    def choose_plan(
        self,
        version: BaseVersion,
        patch: bytes | None,
        bodies: Sequence[ray.ObjectRef[bytes]],
        stack: Sequence[StackedOrder],
        clients: int,
    ) -> StackingPlan:
        """Measure how many clients train at once in a round of ``clients`` clients for each worker."""
        host = self._get_host()
        self._set_base(host, version, patch)
        assert isinstance(host.engine, BatchedEngine)
        orders = self._open_orders(host, bodies, stack)
        host.prepare([order.to for order in orders])  # or the first passes that are measured fill the caches
        return host.engine.choose_plan(host.make_first_assignments(orders), clients, host.examples)

    def carry_out(
        self,
        version: BaseVersion,
        patch: bytes | None,
        bodies: Sequence[ray.ObjectRef[bytes]],
        stack: Sequence[StackedOrder],
        plan: StackingPlan | None,
    ) -> list[Outcome]:
        """Carry out the orders of a stack.

        Args:
            patch: Encoded message with the change of the base since the known version; None: there is none.
            bodies: The encoded messages of the orders, in the object store.
            plan: The stacking plan; None: nothing is trained, or the engine has none.
        """
        host = self._get_host()
        self._set_base(host, version, patch)
        if isinstance(host.engine, BatchedEngine):
            host.engine.stacking = plan
        orders = self._open_orders(host, bodies, stack)
        if orders[0].task == "train":
            replies: list[Reply] = []
            host.train({order.to: order for order in orders}, replies.append)
        else:
            host.prepare([order.to for order in orders])
            replies = [host.answer(order) for order in orders]
        return [_build_outcome(host, reply) for reply in replies]

    def predict(
        self,
        version: BaseVersion,
        patch: bytes | None,
        plan: StackingPlan | None,
        data: Sequence[ray.ObjectRef[Examples]],
        parts: Sequence[np.ndarray],
        jobs: Sequence[Job],
        indices: Sequence[np.ndarray],
        batch_size: int,
        generate: bool,  # as Ray passes it
        shared: bool,
    ) -> list[Tensor]:
        """Predict with some models, each on examples of its own.

        Args:
            patch: Encoded message with the change of the base since the known version; None: there is none.
            plan: The stacking plan; None: the engine has none.
            data: The data set, in the object store; empty: the host's own.
            parts: Indices of parts of the data set that are prepared together (``Engine.prepare``).
            shared: Whether all models predict the same examples.
        """
        host = self._get_host()
        self._set_base(host, version, patch)
        engine = host.engine
        if isinstance(engine, BatchedEngine):
            engine.stacking = plan
        examples = host.examples
        for ref in data:
            if ref not in self._data:
                self._data = {ref: copy_reference(engine.task, ray.get(ref))}
            examples = self._data[ref]
        engine.prepare(examples, parts)
        if len(jobs) == 1:
            return [engine.predict(jobs[0], examples, indices[0], batch_size, generate=generate)]
        if shared:
            return list(engine.predict_shared_examples(jobs, examples, indices[0], batch_size))
        return list(engine.predict_each(zip(jobs, indices, strict=True), examples, batch_size))

    def release_memory(self) -> None:
        """Drop an exchange's messages, and return unused memory to the system, where the C library can (glibc)."""
        self._bodies.clear()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def _get_host(self) -> Host:
        assert self._host is not None, "the driver sends work only to workers whose host is built"
        return self._host

    def _set_base(self, host: Host, version: BaseVersion, patch: bytes | None) -> None:
        if version.number == self._version:
            return
        assert version.known is None or version.known == self._version, "the driver knows what this host has"
        if version.known is None:
            self._base = BaseUpdate()
        if patch is not None:
            self._base = apply_patch(self._base, serialization.decode(patch).base)
        self._version = version.number
        host.share_base(self._base)

    def _open_orders(
        self, host: Host, bodies: Sequence[ray.ObjectRef[bytes]], stack: Sequence[StackedOrder]
    ) -> list[Order]:
        """Decode orders, and give the host a store with the states of their clients."""
        # A message that several stacks share stays one object, which the host decodes once.
        contents = [self._bodies.get_or_compute(ref, partial(_fetch, ref)) for ref in bodies]
        orders = [decode_order(Envelope(stacked.header, contents[stacked.body])) for stacked in stack]
        states: dict[str, ClientState] = {}
        for order, stacked in zip(orders, stack, strict=True):
            if stacked.state is not None:
                assert order.client is not None
                assert order.client.last_round is not None
                states[order.to] = STATE.decode(stacked.state, order.to, order.client.last_round)
            if stacked.session is not None and host.secure is not None:
                host.secure[order.to].sessions.store(order.to, stacked.session)
        host.store = OverlayClientStore(states)
        return orders


def _fetch(ref: ray.ObjectRef[bytes]) -> tuple[bytes, int]:
    """Return a message from the object store and its size in bytes."""
    body = ray.get(ref)
    return body, len(body)


def _build_outcome(host: Host, reply: Reply) -> Outcome:
    store, id = host.store, reply.id
    assert isinstance(store, OverlayClientStore)
    return Outcome(
        id,
        reply.to_envelope(),
        STATE.encode(id, reply.round, store.stored[id]) if id in store.stored else None,
        TRAINED.encode(id, *store.trained[id]) if id in store.trained else None,
        None if host.secure is None else host.secure[id].sessions.load(id),
        host.engine.refusal if isinstance(host.engine, BatchedEngine) else None,
    )
