"""Aggregation of replies that the server sees individually."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from fedspan.core.tensors import Tensors
from fedspan.core.values import Client, Contribution, Message, Reduced, ServerState
from fedspan.errors import FedspanError
from fedspan.federation import serialization
from fedspan.federation.aggregation.reduction import MessageBuffer, PrivateReducer, Reducer
from fedspan.federation.aggregation.robust import (
    CoordinateReducer,
    FlameReducer,
    GeometricMedianReducer,
    MultiKrumReducer,
)
from fedspan.federation.changes import MODEL, Change, compute_norm_limits, measure_change, rebase_change, shrink_reply
from fedspan.federation.config import RoundSettings
from fedspan.federation.privacy import create_central_privacy
from fedspan.federation.progress import Failure, TooFew, Transfer
from fedspan.federation.protocol import Masking, OrderEncoder, Reply
from fedspan.federation.round_context import RoundContext, Tally
from fedspan.federation.validation import (
    build_untrained_reply,
    compute_origin,
    find_outliers,
    require_requested,
    validate_reply,
)

_SCALAR_BYTES = 64
"""Size in bytes by which a number, or the padding of the header, may be larger than in an untrained reply."""


class PlaintextAggregation:
    """Aggregation of replies that the server sees individually.

    If a rule compares replies with each other, or the cohort is not known before they arrive, all of them are held
    until the attempt ends: decoded in memory, beyond 256 MiB encoded in a temporary file. Otherwise each reply is
    folded into the reduction on arrival. A later attempt sends orders only to clients without an accepted reply.
    """

    def __init__(self, context: RoundContext, tally: Tally) -> None:
        self.context, self.tally = context, tally
        self.quorum = context.settings.compute_quorum(context.target)
        self.replies: dict[str, Reply] = {}
        self.clipped: Mapping[str, float] = {}
        self._changes: dict[str, Change] = {}
        self._measures: dict[str, Change] = {}
        self._factors: Mapping[str, Mapping[str, float]] = {}
        self._buffer = MessageBuffer()
        self._expected: dict[tuple[str, int], Message] = {}
        self._reply_bytes = dict[int, int]()
        settings = context.settings
        is_compared = settings.validates or settings.over_select > 0 or settings.clips
        self._folds = not is_compared and settings.buffered is None
        self.lowered: Mapping[str, float]
        self.lowered, self._reducer = self._begin_reduction()

    def _begin_reduction(self) -> tuple[dict[str, float], Reducer | PrivateReducer]:
        """Return the factors by which the cohort's weights are lowered, and the reducer of its replies."""
        context = self.context
        selected = {id: context.clients[id] for id in context.ids}
        weights = context.limit_weights()
        lowered = {
            id: weights[id] / data.client.weight for id, data in selected.items() if weights[id] < data.client.weight
        }
        clients = [replace(data.client, last_round=None, weight=weights[id]) for id, data in selected.items()]
        count, round = len(context.clients), context.state.round
        return lowered, create_reducer(context.settings, clients, count, round, self._compute_origin)

    def change_cohort(self, context: RoundContext) -> None:
        """Continue with another cohort, in a round whose cohort is not known before its replies arrive.

        Args:
            context: The round with the clients that may reply, or have replied; replies of others are dropped.
        """
        assert not self._folds
        self.context = context
        for id in self.replies.keys() - set(context.ids):
            self._drop(id)

    def get_missing(self) -> tuple[str, ...]:
        return tuple(id for id in self.context.ids if id not in self.replies)

    def open(self, clients: Mapping[str, Client], attempt: int, encoder: OrderEncoder) -> Mapping[str, Masking | None]:
        return dict.fromkeys(clients)

    def compute_reply_bytes(self, client: Client) -> int:
        """``Aggregation.compute_reply_bytes``: a reply has the names of an untrained one, and no larger tensors.

        Where sizes depend on the client's data, the limit is the reply of a client with the model's whole rank.
        """
        client = self._widen(client)
        if client.rank not in self._reply_bytes:
            untrained = self._build_untrained_reply(client, self.context.state)
            size = len(serialization.encode(untrained)) + _SCALAR_BYTES * (1 + len(untrained.scalars))
            self._reply_bytes[client.rank] = size
        return self._reply_bytes[client.rank]

    def _widen(self, client: Client) -> Client:
        """Return the client with the model's whole rank where the sizes of its replies depend on its data."""
        method, layers = self.context.method, self.context.method.spec.layers
        if layers and method.estimate_messages(layers[0], client.rank, self.context.state.round) is not None:
            return replace(client, rank=method.get_rank(None))
        return client

    def add(self, client: Client, reply: Reply, attempt: int) -> bool:
        context = self.context
        require_requested(reply, client.id, context.get_sent_state(client.id).round, attempt, context.task)
        message = serialization.decode(reply.body)
        if context.check is not None:
            context.check(message, client)
        if self._folds:
            self._reducer.add(client.id, self._rebase(context.method.contribute(message, client), client))
        else:
            self._changes[client.id] = self._measure_change(message, client)
            if context.measure is not None:
                self._measures[client.id] = {MODEL: context.measure(message)}
            self._buffer.store(client.id, message, reply.body)
        self.replies[client.id] = replace(reply, body=b"")
        size, payload = len(reply.body), serialization.compute_payload_size(message)
        self.tally.transfers.append(Transfer(client.id, "up", size, payload, context.purpose))
        return not self._folds and len(self.get_counted()) >= context.target

    def _measure_change(self, message: Message, client: Client) -> Change:
        """Validate a reply, if the settings ask for it, and return the sizes of its change."""
        method = self.context.method
        expected = self._get_untrained_reply(client, self._get_sent_state(client))
        if self.context.settings.validates:
            return validate_reply(method, message, client, expected).change
        change = measure_change(message, method.contribute(message, client), expected, method, client)
        settings = self.context.settings
        scales = settings.clips or settings.reduction == "flame"  # which clips changes to their median
        if scales and not all(math.isfinite(size.norm) for size in change.values()):
            raise ValueError("the norm of its change is not finite, so the change cannot be scaled down")
        return change

    def _get_sent_state(self, client: Client) -> ServerState:
        return self.context.get_sent_state(client.id)

    def _get_untrained_reply(self, client: Client, state: ServerState) -> Message:
        """Return the reply of the client to a state if its training changed nothing.

        It is one for all clients with the same state where ranks do not differ.
        """
        owner = client.id if self.context.method.declare_claims().heterogeneous_ranks else ""
        if (owner, state.round) not in self._expected:
            if any(other != owner for other, _ in self._expected):
                self._expected.clear()  # replies come one by one
            self._expected[owner, state.round] = self._build_untrained_reply(self._widen(client), state)
        return self._expected[owner, state.round]

    def _rebase(self, contribution: Contribution, client: Client) -> Contribution:
        """Return a contribution as one to the current state: of a reply to an earlier one, its change counts."""
        context, buffered = self.context, self.context.settings.buffered
        sent = self._get_sent_state(client)
        if sent.round == context.state.round:
            return contribution
        assert buffered is not None
        start, target = (
            context.method.contribute(self._get_untrained_reply(client, state), client).sum
            for state in (sent, context.state)
        )
        return rebase_change(contribution, start, target, buffered.compute_factor(context.state.round - sent.round))

    def _build_untrained_reply(self, client: Client, state: ServerState) -> Message:
        method, new_client = self.context.method, replace(client, last_round=None)
        return build_untrained_reply(method, method.sync(state, new_client), new_client, state.round)

    def _find_outliers(self) -> dict[str, str]:
        settings = self.context.settings
        if not settings.validates or settings.central is not None:
            return {}  # under central privacy one client must not decide whether others count; replies are clipped
        return find_outliers(self._get_scaled_changes(), settings.max_norm_ratio)

    def _get_scaled_changes(self) -> dict[str, Change]:
        """Return the sizes of the changes; in a second exchange, after scaling by the first one's factors."""
        factors = self.context.factors
        return {
            id: {name: replace(size, norm=factors.get(id, 1.0) * size.norm) for name, size in change.items()}
            for id, change in self._changes.items()
        }

    def close(self, attempt: int) -> Reduced:
        context, changes = self.context, self._changes
        if self._folds:
            if len(self.replies) < self.quorum:
                raise TooFew
            return self._reduce({})
        for id, reason in self._find_outliers().items():
            self._drop(id)
            self.tally.failures.append(Failure(id, attempt, reason, context.purpose))
        if len(changes) < self.quorum:
            raise TooFew
        for id in [id for id in context.draw_order if id in changes][context.target :]:
            self._drop(id)
        if context.settings.buffered is not None:  # the cohort is known only now
            self.lowered, self._reducer = self._begin_reduction()
        self._factors = self._clip_factors()
        self.clipped = {id: min(factors.values()) for id, factors in self._factors.items()}
        reduced = self._reduce(changes)
        self._buffer.close()
        return reduced

    def _clip_factors(self) -> dict[str, dict[str, float]]:
        """Return the factors below 1 by which changes have to be scaled down, by client and quantity."""
        settings = self.context.settings
        if not settings.clips:
            return {}
        changes = self._get_scaled_changes() if self.context.measure is None else self._measures
        limits = {} if settings.clip_ratio is None else compute_norm_limits(changes, settings.clip_ratio)
        if settings.max_norm is not None:  # in the model's unit
            limits = {id: {**limits.get(id, {}), MODEL: settings.max_norm} for id in changes}
        factors: dict[str, dict[str, float]] = {}
        for id, change in changes.items():
            for name, size in change.items():
                limit, factor = limits.get(id, {}).get(name, math.inf), self.context.factors.get(id, 1.0)
                if limit < size.norm:
                    factor *= limit / size.norm
                if factor < 1:
                    factors.setdefault(id, {})[name] = factor
        return factors

    def _build_contribution(self, id: str) -> Contribution:
        """Return a buffered reply's contribution, scaled down if its change is too large."""
        context = self.context
        client = replace(context.clients[id].client, last_round=None)
        message = self._buffer.load(id)
        contribution = context.method.contribute(message, client)
        if id in self._factors:
            expected = self._get_untrained_reply(client, self._get_sent_state(client))
            contribution = shrink_reply(context.method, message, contribution, expected, client, self._factors[id])
        return self._rebase(contribution, client)

    def _reduce(self, ids: Collection[str]) -> Reduced:
        """Add the buffered replies of clients, skip the clients without a reply, and return the reduction."""
        try:
            for id in self.context.ids:
                if id in ids or id not in self.replies:
                    self._reducer.add(id, self._build_contribution(id) if id in ids else None)
            return replace(self._reducer.compute_result(), max_weight_ratio=self.context.settings.max_weight_ratio)
        except ValueError as error:
            reduction = self.context.settings.reduction
            raise FedspanError(
                "federation.reduction", reduction, problem=f"{reduction} cannot reduce these replies: {error}"
            ) from error

    def _drop(self, id: str) -> None:
        del self._changes[id]
        self._measures.pop(id, None)
        del self.replies[id]
        self._buffer.discard(id)

    def get_counted(self) -> Collection[str]:
        """``Aggregation.get_counted``: the outliers among the replies so far do not."""
        return self.replies.keys() - self._find_outliers().keys()

    def get_succeeded(self) -> Collection[str]:
        return self.replies

    def get_note(self) -> str | None:
        """``Aggregation.get_note``: the clients whose weights are lowered."""
        if not self.lowered:
            return None
        clients, ratio = self.context.clients, self.context.settings.max_weight_ratio
        own_limits = {id: most for id in sorted(self.lowered) if (most := clients[id].max_weight) is not None}
        limits = [f"{most:g} for {id} (as it was admitted)" for id, most in own_limits.items()]
        if ratio is not None and len(own_limits) < len(self.lowered):
            limits.append(f"{ratio:g} times the cohort's median (federation.max_weight_ratio)")
        lowered_clients = ", ".join(sorted(self.lowered))
        return f"{lowered_clients} declared so many examples that the weight is lowered. Limits: {', '.join(limits)}"

    def _compute_origin(self) -> Tensors:
        context = self.context
        new_client = replace(context.clients[next(iter(context.clients))].client, last_round=None)
        return compute_origin(
            context.method, context.method.sync(context.state, new_client), new_client, context.state.round
        )


def create_reducer(
    settings: RoundSettings, cohort: Sequence[Client], clients: int, round: int, origin: Callable[[], Tensors]
) -> Reducer | PrivateReducer:
    """Create the reducer that the settings request, under central privacy if they request that, too."""
    reducer = _create_reducer(settings, cohort, round, origin)
    privacy = create_central_privacy(settings, clients, round, origin)
    return reducer if privacy is None else PrivateReducer(reducer, privacy)


def _create_reducer(
    settings: RoundSettings, cohort: Sequence[Client], round: int, origin: Callable[[], Tensors]
) -> Reducer:
    match settings.reduction:
        case "mean":
            return Reducer(cohort)
        case "median" | "trimmed-mean":
            return CoordinateReducer(cohort, settings.reduction, settings.trim)
        case "multi-krum":
            return MultiKrumReducer(cohort, settings.trim)
        case "geometric-median":
            return GeometricMedianReducer(cohort)
        case "flame":
            return FlameReducer(cohort, origin(), settings.seed, round)
