"""First rounds that train a randomly initialized head alone, before those of the method.

Kumar et al., "Fine-Tuning can Distort Pretrained Features and Underperform Out-of-Distribution", ICLR 2022,
arXiv:2202.10054 (LP-FT: the head is trained on fixed features first, then everything).

    round 0, ..., n - 1:  client i trains the head on the features f of the model that the method starts from;
                          head <- sum_i p_i head_i, with head = 0 before round 0
    round n, ...:         the method's rounds 0, 1, ..., from that head

The head W f + b is trained by SGD at the rate 3 C^(1/2) / |f|^2 for W, with C classes, and at 3 C^(1/2) / 400 for b:
the rates of outputs 20 V f / |f| + b, 20 being the scale of cosines with which a head from statistics starts
(``core.heads``). The curvature in W is at most |f|^2 / C where all classes are equally probable, else |f|^2 / 2:
larger rates overshoot where feature vectors are nearly parallel. Many epochs replace them, because those on stored
features take little time. On few examples, SGD generalizes better than AdamW, which weighs all features alike.
Gradients are not clipped, because their norms grow with |f|. The loss is convex in the head, and random weights would
stay where features vary little.

The state of the server decides whether the rounds take place (``HeadRounds.request``), because only the server learns
whether the clients send statistics. The method sees its own rounds only, counted from 0, and in its first one clients
that store nothing. If it starts from the pretrained model, orders hold the extras alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

import torch

from fedspan.core.heads import SCALE
from fedspan.core.method import Memory, Wrapper
from fedspan.core.tensors import Tensors, is_extra, join_extra_name, split_extras
from fedspan.core.values import Client, Contribution, Group, Job, Message, Reduced, Scalar, ServerState, Trained
from fedspan.errors import FedspanError

ROUNDS, SHORT = "head-rounds/rounds", "head-rounds/short"
"""Scalars of a state that requests the rounds: their number, and whether orders hold the extras alone."""
HEAD_PHASE = "head"
RATE = 3 / SCALE**2


@dataclass(frozen=True)
class NewHead:
    """A randomly initialized output layer.

    Args:
        path: Path of the module.
        bias: Whether it has a bias.
        norm: Norm of the features that enter it.
        is_alone: Whether no other module is new, so that its features are stored.
    """

    path: str
    bias: bool
    norm: float
    is_alone: bool


@final
@dataclass(frozen=True, kw_only=True)
class HeadRounds(Wrapper):
    """Adds rounds that train the head alone.

    Args:
        rounds: Number of these rounds.
        head: The head.
        epochs: Local epochs in each of them; None: the run's epochs or steps.
    """

    rounds: int
    head: NewHead
    epochs: int | None = None

    def request(self, state: ServerState, *, is_short: bool) -> ServerState:
        """Return a state before the first round in which the rounds take place, with a head of zeros.

        Args:
            state: The state.
            is_short: Whether orders hold the extras alone, because the method starts from the pretrained model.
        """
        zeros = {name: torch.zeros_like(state.tensors[name]) for name in self._names}
        scalars = {**state.scalars, ROUNDS: self.rounds, SHORT: is_short}
        return replace(state, tensors={**state.tensors, **zeros}, scalars=scalars)

    def sync(self, state: ServerState, client: Client | None) -> Message:
        inner, own = _split_state(state)
        if not own:
            return self.inner.sync(inner, client)
        if state.round < self.rounds and own[SHORT] and client is not None:
            return Message(split_extras(state.tensors)[1], {ROUNDS: self.rounds})
        known = self._shift(client)
        message = self.inner.sync(inner, known)
        if known is not client and known is not None and known.last_round is None:
            # It has the base with which the method starts, and nothing else.
            message = replace(message, base=inner.base.build_patch(0))
        return replace(message, scalars={**message.scalars, ROUNDS: self.rounds})

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        scalars, is_requested = self._split_scalars(message.scalars)
        if not is_requested:
            return self.inner.start(message, client, memory, round)
        message = replace(message, scalars=scalars)
        if client is None or round >= self.rounds:
            job = self.inner.start(message, self._shift(client), memory, max(0, round - self.rounds))
            return replace(job, scalars={**job.scalars, ROUNDS: self.rounds})
        job = Job({}, message.tensors, ())
        if message.base is not None or not all(map(is_extra, message.tensors)):
            job = self.inner.start(message, self._shift(client), memory, 0)
        weight, *bias = self._names
        scale, rate = (SCALE / self.head.norm) ** 2, RATE * len(job.tensors[weight]) ** 0.5
        return Job(
            job.parametrization,
            job.tensors,
            (Group((weight,), lr_scale=scale), *(Group((name,)) for name in bias)),
            epochs=self.epochs,
            optimizer={"name": "sgd", "lr": rate, "momentum": 0.0, "weight_decay": 0.0},
            clips=False,
            phase=HEAD_PHASE,
            scalars={ROUNDS: self.rounds},
        )

    def finish(
        self, job: Job, trained: Trained, client: Client, memory: Memory, round: int
    ) -> tuple[Job | Message, Memory]:
        scalars, is_requested = self._split_scalars(job.scalars)
        if not is_requested:
            return self.inner.finish(job, trained, client, memory, round)
        if round < self.rounds:
            return Message({name: trained.tensors[name] for name in self._names}), memory
        known = self._shift(client)
        assert known is not None
        result, memory = self.inner.finish(replace(job, scalars=scalars), trained, known, memory, round - self.rounds)
        if isinstance(result, Job):
            result = replace(result, scalars={**result.scalars, ROUNDS: self.rounds})
        return result, memory

    def contribute(self, message: Message, client: Client) -> Contribution:
        if message.tensors.keys() <= set(self._names):  # of a method's reply, too, they would be the new values
            return Contribution(sum=message.tensors)
        return self.inner.contribute(message, client)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        inner, own = _split_state(state)
        if own and state.round < self.rounds:
            return state.advance_round(tensors={**state.tensors, **reduced.mean})
        after = self.inner.update(inner, reduced)
        return replace(after, round=state.round + 1, scalars={**after.scalars, **own})

    def build_second_order(self, state: ServerState, reduced: Reduced) -> Message:
        inner, own = _split_state(state)
        if not own:
            return self.inner.build_second_order(inner, reduced)
        order = Message() if state.round < self.rounds else self.inner.build_second_order(inner, reduced)
        return replace(order, scalars={**order.scalars, ROUNDS: self.rounds})

    def build_second_reply(self, order: Message, tensors: Tensors, client: Client, round: int) -> Message:
        scalars, is_requested = self._split_scalars(order.scalars)
        if not is_requested:
            return self.inner.build_second_reply(order, tensors, client, round)
        known = self._shift(client)
        assert known is not None
        if round < self.rounds:
            return Message()
        return self.inner.build_second_reply(replace(order, scalars=scalars), tensors, known, round - self.rounds)

    @property
    def _names(self) -> tuple[str, ...]:
        weight = join_extra_name(f"{self.head.path}.weight")
        return (weight, join_extra_name(f"{self.head.path}.bias")) if self.head.bias else (weight,)

    def _shift(self, client: Client | None) -> Client | None:
        """Return a client as the method knows it: one that replied in the head's rounds alone stores nothing."""
        if client is None or client.last_round is None:
            return client
        known = client.last_round - self.rounds
        return replace(client, last_round=known if known >= 0 else None)

    def _split_scalars(self, scalars: Mapping[str, Scalar]) -> tuple[dict[str, Scalar], bool]:
        """Split scalars into ``(the method's, whether the rounds take place)``."""
        inner = dict(scalars)
        rounds = inner.pop(ROUNDS, None)
        if rounds is not None and rounds != self.rounds:
            raise FedspanError("model.head_rounds", rounds, f"{self.rounds}, as in the run's config")
        return inner, rounds is not None


def _split_state(state: ServerState) -> tuple[ServerState, dict[str, Scalar]]:
    """Split a state into ``(the method's, the scalars of the head's rounds)``; without these, there are no rounds."""
    own = {name: value for name, value in state.scalars.items() if name in (ROUNDS, SHORT)}
    if not own:
        return state, own
    scalars = {name: value for name, value in state.scalars.items() if name not in own}
    return replace(state, round=max(0, state.round - int(own[ROUNDS])), scalars=scalars), own
