"""Hostile replies: whatever one client sends, the round continues with the others, and that client alone fails."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedspan.core.tensors import Tensors
from fedspan.core.values import Message
from fedspan.federation.federation import Federation
from fedspan.federation.progress import Progress
from fedspan.federation.protocol import Envelope, Order, decode_order
from fedspan.federation.serialization import encode
from fedspan.federation.transport import Orders
from fedspan.federation.validation import ReplyRules, build_untrained_reply
from fedspan.methods.registry import METHODS
from fedspan.runs.setup import Prepared, prepare
from helpers import tiny
from helpers.families import methods_by_family
from helpers.reply_transport import Replies, ReplyingTransport
from helpers.watched_rounds import method_config
from helpers.wrapped_configs import wrapped_config

VICTIM = "west"
ROUNDS = 2

Mutation = tuple[str, Message]


class Recorded(ReplyingTransport):
    """Sends each order's honest reply, which is made once a round; ``altered`` takes the place of one client's."""

    def __init__(self, federation: Federation) -> None:
        self.inner, self.host = federation.transport, federation.transport.host
        self.known: dict[tuple[str, str], Envelope] = {}
        self.before: Progress | None = None
        self.altered: Message | None = None
        self.task = "train"
        self.honest: dict[str, Message] = {}
        self.host.tamper = self._record

    def _record(self, order: Order, sent: Message, reply: Message) -> Message:
        if order.to == VICTIM:
            self.honest[order.task] = reply
        return reply

    def begin(self, progress: Progress, on_trained: Any = None) -> None:
        if progress is not self.before:
            self.inner.begin(progress, on_trained)
            self.before = progress
            self.known.clear()

    def accept_replies(self, accepted: Any) -> Any:
        return self.inner.accept_replies(accepted)

    def replies(self, envelopes: Any, seconds: float, *, wait_for_offline: bool = False) -> Replies:
        assert isinstance(envelopes, Orders)
        task = envelopes.task
        for id in envelopes:
            # what others answer in a second exchange depends on the victim's first reply
            if (id, task) not in self.known or (task == "second" and self.task == "train"):
                order = decode_order(envelopes[id])
                if task == "second":  # an attack repeats the exchange, and honest clients answer one message only
                    first = self.host.store.load_trained(id, order.round)
                    self.host.store.store_trained(id, order.round, replace(first, order=""))
                self.known[id, task] = self.host.reply(order)
            back, is_altered = self.known[id, task], self.altered is not None and task == self.task
            yield id, replace(back, body=encode(self.altered)) if id == VICTIM and is_altered else back


def mutations(honest: Message) -> Iterator[Mutation]:
    tensors, scalars = dict(honest.tensors), dict(honest.scalars)
    yield "nothing at all", Message()
    yield "no tensors", replace(honest, tensors={})
    yield "another tensor", replace(honest, tensors={**tensors, "strange/A": torch.ones(2)})
    for name, value in _one_of_each_slot(tensors).items():
        yield f"without {name}", replace(honest, tensors={n: v for n, v in tensors.items() if n != name})
        for what, other in _altered(value):
            yield f"{name}: {what}", replace(honest, tensors={**tensors, name: other})
    for name, value in scalars.items():
        yield f"without {name}", replace(honest, scalars={n: v for n, v in scalars.items() if n != name})
        for other in (10**400, -(10**400), 2**63, -1, -1e30, 1e30, True, "", "B", "a" * 500):
            if other != value:
                yield f"{name}: {str(other)[:9]}", replace(honest, scalars={**scalars, name: other})
    yield "another scalar", replace(honest, scalars={**scalars, "round": 3})


def _one_of_each_slot(tensors: Tensors) -> dict[str, Tensor]:
    """The last tensor of every slot: layers are treated alike, one after another."""
    return {name: tensors[name] for name in {name.rpartition("/")[2]: name for name in tensors}.values()}


def _altered(value: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "empty", value[:0]
    yield "no dimensions", value.new_zeros(())
    yield "one row more", torch.cat([value, value[:1]]) if value.ndim and len(value) else value.new_zeros(3)
    yield "one row less", value[:-1] if value.ndim and len(value) else value.new_zeros(2)
    yield "turned", value.T.contiguous() if value.ndim == 2 and value.shape[0] != value.shape[1] else value[None]
    if value.is_floating_point():
        yield "NaN", torch.full_like(value, math.nan)
        yield "infinite", torch.full_like(value, -math.inf)
        yield "huge", torch.full_like(value, 3e38)
        yield "integers", value.to(torch.int64)
    else:
        yield "negative", torch.full_like(value, -1) if value.dtype.is_signed else torch.full_like(value, 255)
        yield "out of range", torch.full_like(value, torch.iinfo(value.dtype).max)
        yield "floating", value.double()


def _attacked(federation: Federation) -> int:
    """Attack every round with every mutation; return how many were refused."""
    transport = Recorded(federation)
    federation.transport, federation.rules = transport, ReplyRules(retries=0)
    progress, refused = federation.begin(), 0
    for _ in range(ROUNDS):
        transport.altered = None
        result = federation.run_round(progress)
        assert result.failures == ()
        for task, honest in dict(transport.honest).items():
            transport.task = task
            for what, message in mutations(honest):
                transport.altered = message
                hostile = federation.run_round(progress)
                assert {failure.client for failure in hostile.failures} <= {VICTIM}, what
                state = hostile.progress.state
                assert all(bool(value.double().isfinite().all()) for value in state.tensors.values()), what
                refused += len(hostile.failures)
        progress = result.progress
    return refused


@pytest.fixture(scope="module")
def prepared(tiny_folder: Path) -> Prepared:
    """With two target layers, as thousands of rounds are run."""
    return prepare(tiny.config(tiny_folder, model={"target_modules": ["intermediate.dense"]}))


@pytest.mark.parametrize("key", methods_by_family(quick=["flora"]))
def test_a_hostile_reply_fails_its_client_alone(key: str, tiny_folder: Path, prepared: Prepared) -> None:
    config = method_config(tiny_folder, key, federation={"clients_per_round": None}, model={"extras": "average"})
    refused = _attacked(tiny.variant(prepared, config).federation)
    assert refused > 20 or METHODS[key].claims.sends == "nothing"


@pytest.mark.parametrize(
    "wrappers",
    [*(pytest.param([key], marks=pytest.mark.slow) for key in ("fedpaq", "scaffold")), ["fedavgm", "fedpaq"]],
    ids=str,
)
def test_a_hostile_reply_to_a_wrapper_fails_its_client_alone(
    wrappers: list[str], tiny_folder: Path, prepared: Prepared
) -> None:
    config = wrapped_config(tiny_folder, "fedit", wrappers, federation={"clients_per_round": None})
    assert _attacked(tiny.variant(prepared, config).federation) > 20


@pytest.mark.parametrize("key", [key for key, cls in METHODS.items() if not cls.claims.heterogeneous_ranks])
def test_clients_of_one_rank_have_one_untrained_reply(key: str, tiny_folder: Path, prepared: Prepared) -> None:
    """Validation computes it once for all of them."""
    federation = tiny.variant(prepared, method_config(tiny_folder, key)).federation
    state = federation.begin().state
    replies = [
        encode(build_untrained_reply(federation.method, federation.method.sync(state, one), one, 0))
        for one in (replace(federation.clients[id].client, examples=7, weight=7.0) for id in ("east", VICTIM))
    ]
    assert replies[0] == replies[1]
