"""The start of a federation's head: one exchange of statistics before the first round (``core.heads``).

Every client sends averages over its examples of the features that enter the output layer. Their mean, weighted by
examples, is that of all examples together, so the exchange is a round of its own kind (``statistics``) with the run's
transport, reply validation and secure aggregation, and without training. The features are those of the model that the
method starts from; where that is the pretrained one, orders carry no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedspan.core.base import to_dense
from fedspan.core.heads import HeadKind, HeadStatistics, compute_statistics_shapes, solve_head
from fedspan.core.lowrank import LowRank
from fedspan.core.method import Claims, Memory, Method, Wrapper
from fedspan.core.parametrization import compute_dense_change
from fedspan.core.tensors import group_by_layer, join_extra_name
from fedspan.core.values import Client, Contribution, Group, Job, Message, Reduced, ServerState, Spec, Trained
from fedspan.federation.changes import ChangeSize
from fedspan.federation.config import RoundSettings
from fedspan.federation.federation import Federation, open_clients_stage
from fedspan.federation.progress import ClientData, Failure, Progress, TooFewReplies
from fedspan.federation.round import Round
from fedspan.federation.round_context import RoundContext
from fedspan.models.adapted import AdaptedModel
from fedspan.models.head import OutputLayer

KIND, BOUND = "head/kind", "head/bound"
"""Scalars of an order: the kind of start, and the norm to which features are clipped (0: they are not)."""
_SLACK = 1e-3
"""Relative tolerance of the checks: statistics are transmitted as float32."""
_LONGEST = 2.0
"""Largest mean squared norm of a client's features, as a multiple of the median, at which its statistics count in full.
Features of one encoder have similar norms, and the pooled covariance grows with the square of a false scale."""
_SAME = 1e-5
"""Relative norm of a change up to which a method's first model counts as the pretrained one."""


STATISTICS_CLIP = 2.0
"""Norm to which a client's statistics are clipped in a secure sum; with features of norm 1 it is 3 ** 0.5 at most."""


@dataclass(frozen=True)
class HeadStart:
    """How a run's head starts."""

    kind: HeadKind
    layer: OutputLayer
    bound: float = 0.0
    """Norm to which features are clipped before they are divided by it; 0: they are sent as they are."""
    most_words: int = 1
    """Maximum number of words of an example, if words have a label each; else 1."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors in a client's reply."""
        return compute_statistics_shapes(self.kind, self.layer.outputs, self.layer.features)


@dataclass(frozen=True, kw_only=True)
class StatisticsExchange(Wrapper):
    """The exchange as a method whose replies are averaged."""

    head: HeadStart
    pretrained: bool
    """Whether the method starts from the pretrained model, so that orders need no tensors."""

    @property
    def spec(self) -> Spec:
        """No layers: the statistics are of the features that enter the head."""
        return Spec(())

    def declare_claims(self) -> Claims:
        return Claims(paper="Guiding The Last Layer in Federated Learning (NeurIPS 2023, arXiv:2306.03937)", exact=True)

    def sync(self, state: ServerState, client: Client | None) -> Message:
        message = Message() if self.pretrained else self.inner.sync(state, client)
        return replace(message, scalars={**message.scalars, KIND: self.head.kind, BOUND: self.head.bound})

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        zeros = {name: torch.zeros(shape) for name, shape in self.head.shapes.items()}
        return Job({}, zeros, (Group(tuple(zeros)),))

    def finish(
        self, job: Job, trained: Trained, client: Client, memory: Memory, round: int
    ) -> tuple[Job | Message, Memory]:
        return Message(trained.tensors), memory

    def contribute(self, message: Message, client: Client) -> Contribution:
        return Contribution(sum=message.tensors)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        return state


class _ByExamples(Mapping[str, ClientData]):
    """The clients, weighted by their numbers of examples whatever the run's weights are."""

    def __init__(self, clients: Mapping[str, ClientData]) -> None:
        self._clients = clients

    def __getitem__(self, id: str) -> ClientData:
        data = self._clients[id]
        return replace(data, client=replace(data.client, weight=float(data.client.examples), last_round=None))

    def __iter__(self) -> Iterator[str]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


def _build_settings(settings: RoundSettings) -> RoundSettings:
    """Return the settings of the exchange of statistics, in which all clients participate."""
    changes = {
        "reduction": "mean",
        "clip_ratio": _LONGEST if settings.validates else None,  # trusted replies are folded on arrival
        "secure": settings.secure and settings.secure.model_copy(update={"clip": STATISTICS_CLIP}),
        **dict.fromkeys(("max_norm", "clients_per_round", "privacy", "buffered")),
        "over_select": 0,
    }
    return settings.model_copy(update=changes)


def start_head(federation: Federation, progress: Progress, head: HeadStart) -> Progress:
    """Exchange statistics with all clients and set the head; transfers and failures are noted in the federation.

    Raises:
        TooFewReplies: If too few clients reply, or none of them counts any class.
    """
    state, method = progress.state, federation.method
    pretrained = is_start_pretrained(method, state, federation.engine.adapted)
    exchange, clients = (
        StatisticsExchange(head=head, inner=method, pretrained=pretrained),
        _ByExamples(federation.clients),
    )
    ids = tuple(federation.list_present(state.round))
    context = RoundContext(
        method=exchange,
        settings=_build_settings(federation.settings),
        training=federation.training,
        clients=clients,
        state=state,
        ids=ids,
        draw_order=ids,
        target=len(ids),
        transport=federation.transport,
        run=federation.run,
        task="statistics",
        check=lambda message, client: check_statistics(message, client, head),
        measure=lambda message: _measure_features(message, head.kind),
    )
    counts = {id: clients[id].client.examples for id in ids}
    federation.transport.begin(progress)
    with open_clients_stage(federation.engine.stages, "statistics", counts) as advance:
        round = Round(context, Progress(progress.state), {}, lambda id, _: advance(id))
        try:
            reduced, _ = round.reduce()
        finally:
            aggregation = round.aggregation
            for id, factor in aggregation.clipped.items():
                reason = (
                    f"its features are longer than the others', so its statistics count with a factor of {factor:.3g}"
                )
                round.tally.failures.append(Failure(id, 0, reason, "statistics"))
            for event in (*round.tally.sort_transfers(), *round.tally.sort_failures()):
                federation.record(replace(event, purpose="statistics"))
    # examples count as far as the weights do; those of scaled statistics, as far as their shares of classes
    examples = sum(clients[id].client.examples * aggregation.lowered.get(id, 1) for id in aggregation.replies)
    statistics = HeadStatistics.from_tensors(reduced.mean).rescale(head.bound)
    if not float(statistics.count(head.kind)) > 0:
        raise TooFewReplies("model.head_init", head.kind, "random", problem="no client sent statistics of any class")
    tensors = {**state.tensors, **compute_head_tensors(head, statistics, examples)}
    return replace(progress, state=replace(state, tensors=tensors))


def _measure_features(message: Message, kind: HeadKind) -> ChangeSize:
    """Return the mean squared norm of the features that a reply counts; 0 if it counts none."""
    counted = float(HeadStatistics.from_tensors(message.tensors).count(kind))
    return ChangeSize(float(message.tensors["square"]) / counted if counted > 0 else 0.0, 1)


def compute_head_tensors(head: HeadStart, statistics: HeadStatistics, examples: float) -> dict[str, Tensor]:
    """Compute the output layer, as named tensors of a state."""
    counted = max(1, int(examples * float(statistics.count(head.kind)) + 0.5))
    weights = solve_head(head.kind, statistics.normalize(head.kind), counted, bias=head.layer.bias)
    tensors = {join_extra_name(f"{head.layer.path}.weight"): weights.weight}
    return tensors | ({join_extra_name(f"{head.layer.path}.bias"): weights.bias} if head.layer.bias else {})


def is_start_pretrained(method: Method, state: ServerState, adapted: AdaptedModel) -> bool:
    """Check whether a method's first model computes as the pretrained one, to rounding."""
    job = method.start(method.sync(state, None), None, {}, state.round)
    slots = group_by_layer(job.tensors)
    for layer, parametrization in job.parametrization.items():
        effective = parametrization.compute_effective(slots[layer])
        pair, update = effective.pair, state.base.total.get(layer)
        is_zero = isinstance(pair, LowRank) and not (pair.B.any() and pair.A.any())
        if effective.base and update is None and (is_zero or pair is None):
            continue
        W = adapted.get_weight(layer).double()
        change = compute_dense_change(effective, W.float()).double()
        if update is not None:
            change = change + to_dense(update).double()
        if float(change.norm()) > _SAME * float(W.norm()):
            return False
    return state.base.rho == 1.0


def check_statistics(message: Message, client: Client, head: HeadStart) -> None:
    """Check that a reply can be the statistics of a client's examples.

    Shapes, formats and finite numbers are those of every reply (``validation``).

    Raises:
        ValueError: If it cannot; the message gives the reason.
    """
    for name, value in message.tensors.items():
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"{name} holds numbers that are not finite")
    if {name: tuple(value.shape) for name, value in message.tensors.items()} != head.shapes:
        raise ValueError("its tensors are not those of the statistics")
    statistics = HeadStatistics.from_tensors(message.tensors)
    counts = statistics.shares * client.examples
    most = statistics.shares.max() if head.kind == "by-label" else statistics.shares.sum()
    if bool((counts < -_SLACK).any()) or float(most) > head.most_words + _SLACK:
        raise ValueError("its counts of classes are negative, or more than its examples")
    if float((counts - counts.round()).abs().max()) > max(_SLACK, 1e-6 * client.examples * head.most_words):
        raise ValueError("its counts of classes are not whole numbers")
    squared_norm = float(statistics.square)
    if not float(statistics.count(head.kind)) > 0 and squared_norm > 1e-9:
        raise ValueError("it has features of no example that it counts")
    means = statistics.sums.square().sum(1) / statistics.shares.clamp(min=1e-300)
    longest = means.max() if head.kind == "by-label" else means.sum()  # rows of labels share examples
    if float(longest) > squared_norm * (1 + _SLACK) + 1e-9:
        raise ValueError("its class means are longer than its features")
    if head.bound and squared_norm > 1 + _SLACK:
        raise ValueError("its features are longer than the order allows")
    if statistics.products is not None:
        diagonal = statistics.products.diagonal()
        widest = torch.outer(diagonal.clamp(min=0).sqrt(), diagonal.clamp(min=0).sqrt())
        if float(diagonal.min()) < -1e-6 or bool((statistics.products.abs() > widest * (1 + _SLACK) + 1e-6).any()):
            raise ValueError("its products are not those of any features")
        if abs(float(diagonal.sum()) - squared_norm) > _SLACK * squared_norm + 1e-9:
            raise ValueError("its products do not belong to its features' norms")
    if statistics.targets is not None:
        cross, mean, second = statistics.targets[:-2], float(statistics.targets[-2]), float(statistics.targets[-1])
        if (
            mean**2 > second * (1 + _SLACK) + 1e-9
            or float(cross.norm()) ** 2 > squared_norm * second * (1 + _SLACK) + 1e-9
        ):
            raise ValueError("its products with the targets are larger than features and targets allow")
