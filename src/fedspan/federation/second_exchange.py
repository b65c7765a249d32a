"""The second exchange of a round, for methods whose server asks again before it updates its state.

After the first replies are reduced, ``Method.build_second_order`` builds one message for the clients whose replies were
accepted, and each answers with ``Method.build_second_reply``: a function of that message and of what it trained in this
round. No client trains again and no data is read. The exchange is a round of its own kind (``second``) with the run's
transport, reply validation, retries and secure aggregation.

A change that the first exchange scaled down is scaled by the same factor in the second, and a weight that it lowered is
the same in both, so that both means belong to the same changes. Beyond that, ``federation.clip_ratio`` and
``federation.max_norm_ratio`` act at twice their values, because the norms of two sketches of a change differ.

A client that drops out between the exchanges is in the first reduction and not in the second, whose weights are
normalized over the clients that replied in it. Its state stays that before the round, as after any reply that does not
count, so ``federation.max_missed_rounds`` applies to it: such a client is not waited for in either exchange. With fewer
replies than ``federation.min_replies`` (default: more than half of those accepted first) the round fails as a whole,
and the state before it stays. Each exchange has a ``federation.deadline`` of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from fedspan.core.method import Claims, Memory, Wrapper
from fedspan.core.tensors import split_extras
from fedspan.core.values import Client, Job, Message, Reduced, ServerState, Trained
from fedspan.federation.round_context import RoundContext
from fedspan.federation.validation import build_untrained_jobs
from fedspan.training.projector_refresh import build_untrained_tensors


@dataclass(frozen=True, kw_only=True)
class SecondExchange(Wrapper):
    """A round's second exchange as a method whose replies are averaged; it is the server's half alone."""

    order: Message
    state: ServerState

    def declare_claims(self) -> Claims:
        return replace(self.inner.declare_claims(), shrinks=False, sends="other")

    def sync(self, state: ServerState, client: Client | None) -> Message:
        return self.order

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        return Job({}, {}, ())  # nothing trains; in secure aggregation, the change of a reply is the reply itself

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory, round: int) -> tuple[Message, Memory]:
        """Build the reply of a client that trained nothing in the first exchange, from which changes count."""
        jobs, _ = build_untrained_jobs(self.inner, self.inner.sync(self.state, client), client, round)
        tensors = split_extras(build_untrained_tensors(jobs[-1]))[0]
        return self.inner.build_second_reply(self.order, tensors, client, round), memory

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        return state


def build_second_context(
    first: RoundContext, order: Message, ids: Collection[str], factors: Mapping[str, float]
) -> RoundContext:
    """Build the definition of a round's second exchange.

    Args:
        order: The message to all clients of the second exchange.
        factors: Factors by which their changes were scaled down, by client.
    """
    selected, clip_ratio = tuple(id for id in first.ids if id in ids), first.settings.clip_ratio
    max_norm_ratio = first.settings.max_norm_ratio
    changes = {
        "privacy": None,  # under DP-SGD, the only one of such methods, replies follow from training that is private
        "over_select": 0,
        "clip_ratio": None if clip_ratio is None else 2 * clip_ratio,
        "max_norm_ratio": None if max_norm_ratio is None else 2 * max_norm_ratio,
    }
    return replace(
        first,
        method=SecondExchange(inner=first.method, order=order, state=first.state),
        settings=first.settings.model_copy(update=changes),
        ids=selected,
        draw_order=tuple(id for id in first.draw_order if id in ids),
        target=len(selected),
        task="second",
        check=None,
        absent=first.absent & frozenset(selected),
        factors=factors,
        weights=first.limit_weights(),
    )
