"""Limits on what one client changes: hostile replies, long changes, and weights."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedspan.assembly.run import Prepared, prepare
from fedspan.core.tensors import Tensors, compute_norm, join_extra_name, select, subtract
from fedspan.core.values import Client, Contribution, Message, ServerState
from fedspan.federation.changes import (
    MODEL,
    Change,
    ChangeSize,
    compute_capped_median,
    compute_norm_limits,
    measure_change,
    rebase_change,
    shrink_reply,
)
from fedspan.federation.federation import Federation
from fedspan.federation.plausibility import compute_weight_limit, limit_weights
from fedspan.federation.progress import Progress, RoundResult
from fedspan.federation.protocol import Envelope, Order, decode_order
from fedspan.federation.serialization import encode, encode_state
from fedspan.federation.transport import Orders
from fedspan.federation.validation import build_untrained_reply, find_outliers
from fedspan.methods.registry import METHODS
from fedspan.wrappers.fedpaq import pack_levels, quantize, unpack_levels
from helpers import tiny, tiny_images
from helpers.families import methods_by_family, others_slow
from helpers.reply_transport import Replies, ReplyingTransport
from helpers.round_settings import with_rules
from helpers.watched_rounds import method_config
from helpers.wrapped_configs import wrapped_config

VICTIM = "west"
SENDING = [key for key, cls in METHODS.items() if cls.claims.sends != "nothing"]


@pytest.fixture(scope="module")
def prepared(tiny_folder: Path) -> Prepared:
    return prepare(tiny.config(tiny_folder, model={"target_modules": ["intermediate.dense"]}))


def federated(prepared: Prepared, folder: Path, key: str, **changes: Any) -> Federation:
    config = method_config(folder, key, federation={"clients_per_round": None, **changes})
    return tiny.variant(prepared, config).federation


def attacked(federation: Federation, factor: float) -> tuple[RoundResult, dict[str, Message]]:
    """Run one round in which a client's change is multiplied; return the honest replies, too."""
    host, replies, method = federation.transport.host, dict[str, Message](), federation.method

    def tamper(order: Order, sent: Message, reply: Message) -> Message:
        if order.task == "second":  # in which changes are scaled by the factors of the first exchange
            return reply
        replies[order.to] = reply
        if order.to != VICTIM or factor == 1:
            return reply
        start = build_untrained_reply(method, sent, replace(order.client, last_round=None), order.round)
        return boosted(reply, start, factor, method.declare_claims().directions)

    host.tamper = tamper
    return federation.run_round(federation.begin()), replies


def boosted(reply: Message, start: Message, factor: float, kept: tuple[str, ...]) -> Message:
    def changed(name: str, value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point() or name.rpartition("/")[2] in kept:
            return value
        origin = start.tensors[name].double().nan_to_num(0.0, 0.0, 0.0)
        return (origin + factor * (value.double() - origin)).to(value.dtype)

    return replace(reply, tensors={name: changed(name, value) for name, value in reply.tensors.items()})


@pytest.mark.parametrize("key", methods_by_family(SENDING))
def test_a_long_change_counts_as_one_of_the_allowed_norm_in_every_method(
    key: str, tiny_folder: Path, prepared: Prepared
) -> None:
    """One client's change times 1000 moves the state as the same change cut to the limit does."""
    result, replies = attacked(federated(prepared, tiny_folder, key, clip_ratio=2.0), 1000.0)
    assert VICTIM in result.clipped
    federation = federated(prepared, tiny_folder, key, clip_ratio=2.0)
    method, state = federation.method, federation.begin().state
    changes: dict[str, Change] = {}
    for id, reply in replies.items():
        client = federation.clients[id].client
        expected = build_untrained_reply(method, method.sync(state, client), client, 0)
        if id == VICTIM:
            reply = boosted(reply, expected, 1000.0, method.declare_claims().directions)
        changes[id] = measure_change(reply, method.contribute(reply, client), expected, method, client)
    limits, sizes = compute_norm_limits(changes, 2.0)[VICTIM], changes[VICTIM]
    factors = {name: limits[name] / size.norm for name, size in sizes.items() if size.norm > limits[name]}
    assert factors.keys() == {name for name, size in sizes.items() if size.entries}
    assert result.clipped[VICTIM] == pytest.approx(min(factors.values()), rel=1e-3)
    client = federation.clients[VICTIM].client
    expected = build_untrained_reply(method, method.sync(state, client), client, 0)
    long = boosted(replies[VICTIM], expected, 1000.0, method.declare_claims().directions)
    shrunk = shrink_reply(method, long, method.contribute(long, client), expected, client, factors)
    scaled = {**shrunk.sum, **shrunk.stack}
    message = Message({name: scaled.get(name, value) for name, value in long.tensors.items()}, long.scalars)
    after = measure_change(message, shrunk, expected, method, client)
    assert {name: after[name].norm for name in factors} == pytest.approx({n: limits[n] for n in factors}, rel=0.02)
    assert all(bool(value.isfinite().all()) for value in result.progress.state.tensors.values())


@pytest.mark.parametrize(
    "key", others_slow([*SENDING, "local-only"], ["flora", "fedsa-lora", "fedit", "fedgalore", "local-only"])
)
def test_a_limit_that_nothing_exceeds_changes_no_bit(key: str, tiny_folder: Path, prepared: Prepared) -> None:
    states = [
        encode_state(attacked(federated(prepared, tiny_folder, key, clip_ratio=ratio), 1.0)[0].progress.state)
        for ratio in (None, 1e6)
    ]
    assert states[0] == states[1]


def test_by_default_a_boosted_change_counts_as_one_and_a_half_times_the_median(
    tiny_folder: Path, prepared: Prepared
) -> None:
    config = tiny.config(tiny_folder, federation={"clients_per_round": None})
    federation = tiny.variant(prepared, config).federation
    result, replies = attacked(federation, 8.0)
    method, state = federation.method, federation.begin().state
    norms = dict[str, float]()
    for id, reply in replies.items():
        client = federation.clients[id].client
        expected = build_untrained_reply(method, method.sync(state, client), client, 0)
        norms[id] = measure_change(reply, method.contribute(reply, client), expected, method, client)[MODEL].norm
    norms[VICTIM] *= 8
    limit = 1.5 * median(norms.values())
    assert result.clipped == pytest.approx({id: limit / norm for id, norm in norms.items() if norm > limit}, rel=1e-3)
    assert VICTIM in result.clipped


@pytest.mark.parametrize("reduction", ["mean", "flame"])
def test_two_replies_are_not_compared(reduction: str, tiny_folder: Path, prepared: Prepared) -> None:
    """One of them would decide how much the other counts."""
    config = tiny.config(tiny_folder, federation={"clients_per_round": None, "reduction": reduction})
    federation = tiny.variant(prepared, config).federation
    federation.settings = with_rules(federation.settings, min_replies=2)
    start, moved, replies = federation.begin().state.tensors, list[Tensors](), dict[str, Message]()
    other = min(federation.clients.keys() - {VICTIM})
    for factor in (1.0, 1000.0):

        def tamper(order: Order, _: Message, reply: Message, factor: float = factor) -> Message:
            replies[order.to] = reply
            accepted = replace(reply, tensors={name: value * math.nan for name, value in reply.tensors.items()})
            if order.to in (VICTIM, other):
                accepted = boosted(reply, replace(reply, tensors=start), factor if order.to == VICTIM else 1.0, ())
            return accepted

        federation.transport.host.tamper = tamper
        result = federation.run_round(federation.begin())
        assert not result.clipped
        assert {failure.client for failure in result.failures} == federation.clients.keys() - {VICTIM, other}
        moved.append(result.progress.state.tensors)
    weights = {id: federation.clients[id].client.weight if reduction == "mean" else 1.0 for id in (VICTIM, other)}
    share = 999 * weights[VICTIM] / sum(weights.values())
    expected = {name: share * (value - start[name]) for name, value in replies[VICTIM].tensors.items()}
    found = subtract(select(moved[1], expected), moved[0])
    assert compute_norm(subtract(found, expected)) < 0.1 * compute_norm(expected)  # FLAME adds noise


def test_limits_are_multiples_of_the_median_by_number_of_entries() -> None:
    def compute(**sizes: tuple[float, int]) -> dict[str, float]:
        limits = compute_norm_limits({id: {MODEL: ChangeSize(*size)} for id, size in sizes.items()}, 2.0)
        return {id: limit[MODEL] for id, limit in limits.items()}

    assert compute(a=(1.0, 100), b=(2.0, 100), c=(9.0, 100)) == pytest.approx({"a": 4.0, "b": 4.0, "c": 4.0})
    assert compute(a=(1.0, 100), b=(1.0, 100), c=(2.0, 400)) == pytest.approx({"a": 2.0, "b": 2.0, "c": 4.0})
    assert compute(a=(1.0, 100), c=(9.0, 100)) == {}
    assert compute(a=(0.0, 10), b=(0.0, 10), c=(0.0, 10)) == {}


@pytest.mark.parametrize(
    ("values", "capped"),
    [
        ([3.0], 3.0),
        ([1.0, 2.0, 50.0], 2.0),
        ([1.0, 2.0, 3.0, 9.0], 2.5),
        ([1.0, 2.0, 1e9, 1e9], 4.0),
        ([2.0, 1e308], 4.0),
        ([0.0, 0.0, 1e9, 1e9], 0.0),
    ],
)
def test_half_of_a_cohort_at_most_doubles_the_median(values: list[float], capped: float) -> None:
    assert compute_capped_median(values) == capped


def test_two_of_four_do_not_raise_the_limits() -> None:
    def limits(*norms: float) -> dict[str, dict[str, float]]:
        return compute_norm_limits({f"c{n}": {MODEL: ChangeSize(norm, 10)} for n, norm in enumerate(norms)}, 1.5)

    assert limits(1.0, 1.2, 1e9, 1e9)["c0"][MODEL] == pytest.approx(3.6)
    assert limits(1.0, 1.2, 1.3, 1.4)["c0"][MODEL] == pytest.approx(1.5 * 1.25)  # an honest cohort's median


def test_a_quantity_that_most_replies_leave_at_zero_has_no_room_for_the_others() -> None:
    changes = {id: {MODEL: ChangeSize(1.0, 9), "other": ChangeSize(float(id == "c"), 9)} for id in "abc"}
    assert compute_norm_limits(changes, 2.0)["c"] == {MODEL: 2.0, "other": 0.0}
    assert list(find_outliers(changes, 10.0)) == ["c"]


def compare_attack(
    federation: Federation, is_target: Callable[[str], bool]
) -> tuple[ServerState, ServerState, ServerState, list[float]]:
    """Run a round in which a client moves the norm that its whole reply may have into one part of it."""
    states: list[ServerState] = []
    honest, replies = attacked(federation, 1.0)
    method, state, client = federation.method, federation.begin().state, federation.clients[VICTIM].client
    start = build_untrained_reply(method, method.sync(state, client), client, 0)
    names = [name for name in start.tensors if is_target(name)]
    fixed = method.declare_claims().directions

    def measure(reply: Message, names: Collection[str]) -> float:
        measured = [name for name in names if name.rpartition("/")[2] not in fixed]
        return compute_norm(subtract(select(reply.tensors, measured), start.tensors))

    norm = 1.4 * median(measure(reply, start.tensors) for reply in replies.values())
    step = norm / math.sqrt(sum(start.tensors[name].numel() for name in names))
    hostile = {name: value + step if name in names else value for name, value in start.tensors.items()}
    for reply in (replace(start, tensors=hostile), start):
        federation.transport.host.tamper = lambda order, _, honest, reply=reply: reply if order.to == VICTIM else honest
        states.append(federation.run_round(federation.begin()).progress.state)
    return states[0], states[1], honest.progress.state, [measure(reply, names) for reply in replies.values()]


def test_control_variates_hide_no_long_change(tiny_folder: Path, prepared: Prepared) -> None:
    """SCAFFOLD's variates are changes over lr * steps, and in one norm with the changes they would hide them."""
    config = method_config(
        tiny_folder,
        "fedit",
        method={"wrappers": [{"name": "scaffold"}]},
        training={"optimizer": "sgd", "lr": 0.005},
        federation={"clients_per_round": None, "clip_ratio": 1.5},
    )
    federation = tiny.variant(prepared, config).federation
    hostile, without, _, norms = compare_attack(federation, lambda name: not name.startswith("scaffold/"))
    weights = {id: data.client.weight for id, data in federation.clients.items()}
    share = weights[VICTIM] / sum(weights.values())
    assert compute_norm(subtract(hostile.tensors, without.tensors)) <= 1.5 * max(norms) * share


def test_second_moments_have_no_room_for_the_norm_of_a_change(tiny_folder: Path, prepared: Prepared) -> None:
    """FedGaLore's second moments are squares of gradients; a larger one divides the steps of all clients."""
    hostile, _, honest, _ = compare_attack(
        federated(prepared, tiny_folder, "fedgalore", clip_ratio=1.5), lambda name: name.endswith("/v")
    )
    moments = [name for name in honest.memory if name.endswith("/v")]
    totals = [sum(float(state.memory[name].sum()) for name in moments) for state in (hostile, honest)]
    assert totals[0] <= 4 * totals[1]


def normalized(images: Path, method: Mapping[str, Any] | None = None, **limits: None) -> Federation:
    """Federate a residual network whose norms train, with their running statistics."""
    federation = {"clients_per_round": None, **limits}
    return prepare(tiny_images.config(images, "resnet", method=method or {}, federation=federation)).federation


def test_running_statistics_hide_no_long_change(images: Path) -> None:
    """They move much farther than the adapter, and in one norm they would hide a change several times an honest one."""
    federation = normalized(images)
    buffers = {join_extra_name(path) for path in federation.method.spec.buffers}
    hostile, without, _, norms = compare_attack(federation, lambda name: name not in buffers)
    weights = {id: data.client.weight for id, data in federation.clients.items()}
    share = weights[VICTIM] / sum(weights.values())
    assert compute_norm(subtract(hostile.tensors, without.tensors)) <= 1.5 * max(norms) * share


@pytest.mark.parametrize("wrapper", others_slow([None, "fedpaq", "fedavgm"], [None]))
def test_no_client_makes_a_variance_negative(wrapper: str | None, images: Path) -> None:
    """Its norm would give NaN for all clients. Without any limit on changes, whatever form they are sent in."""
    wrappers = {"wrappers": [{"name": wrapper}]} if wrapper else {}
    federation = normalized(images, wrappers, clip_ratio=None, max_norm_ratio=None)
    variances = [name for name in federation.begin().state.tensors if name.endswith("running_var")]
    federation.transport.host.tamper = lambda order, _, reply: lower_variances(reply) if order.to == VICTIM else reply
    progress = federation.begin()
    for _ in range(3):
        result = federation.run_round(progress)
        progress = result.progress
        assert min(float(progress.state.tensors[name].min()) for name in variances) >= 0
        # The sum of changes is checked after they are added to what clients start from, all others one by one.
        assert [failure.client for failure in result.failures] == ([] if wrapper == "fedpaq" else [VICTIM])


def lower_variances(reply: Message) -> Message:
    """Subtract 100 from all variances of a reply, quantized ones included."""
    changed = dict(reply.tensors)
    for name, value in reply.tensors.items():
        if name.startswith("fedpaq/") and name.endswith("running_var"):
            change = torch.full_like(unpack_levels(value, 8), -100.0)
            changed[name] = pack_levels(*quantize(change, 8, torch.Generator()), 8)
        elif name.endswith("running_var"):
            changed[name] = value - 100
    return replace(reply, tensors=changed)


@pytest.mark.parametrize("wrapper", [None, "fedpaq"])
def test_the_names_of_running_statistics_are_those_of_what_is_summed(wrapper: str | None, images: Path) -> None:
    """So that the limits of their quantities reach them in every form in which they are sent."""
    wrappers = {"wrappers": [{"name": wrapper}]} if wrapper else {}
    federation = normalized(images, wrappers)
    method, client = federation.method, federation.clients[VICTIM].client
    untrained = build_untrained_reply(method, method.sync(federation.begin().state, client), client, 0)
    summed = method.contribute(untrained, client).sum
    means, variances = method.declare_claims().quantities
    for quantity, ending in ((means, "running_mean"), (variances, "running_var")):
        assert (
            {name for name in summed if quantity.contains(name)} == {n for n in summed if n.endswith(ending)} != set()
        )


def test_a_fixed_norm_takes_the_place_of_the_median(tiny_folder: Path, prepared: Prepared) -> None:
    result, _ = attacked(federated(prepared, tiny_folder, "fedit", max_norm=1e-3), 1.0)
    assert list(result.clipped) == sorted(tiny.SITES)
    moved = federated(prepared, tiny_folder, "fedit").begin().state.tensors
    change = {name: value - moved[name] for name, value in result.progress.state.tensors.items()}
    assert math.sqrt(sum(float(value.double().square().sum()) for value in change.values())) <= 1.001e-3


def test_a_shorter_tensor_is_compared_with_the_leading_slots() -> None:
    """A client that prunes its rank is as near to the untrained one as if it had kept the other slots unchanged."""
    method: Any = _Passing()
    start = Message({"layer/A": torch.arange(12.0).view(4, 3), "layer/n": torch.tensor([3])})
    reply = Message({"layer/A": start.tensors["layer/A"][:2] + 1.0, "layer/n": torch.tensor([7])})
    client = Client("a", 2, 1.0, 5, 1.0)
    contribution = method.contribute(reply, client)
    assert measure_change(reply, contribution, start, method, client) == {MODEL: ChangeSize(math.sqrt(6), 6)}
    shrunk = shrink_reply(method, reply, contribution, start, client, {MODEL: 0.5}).stack
    assert torch.equal(shrunk["layer/A"], start.tensors["layer/A"][:2] + 0.5)
    assert shrunk["layer/n"].tolist() == [7]


class _Passing:
    """The parts of a method that measure and scale a stacked reply."""

    def declare_claims(self) -> Any:
        return METHODS["hetlora"].claims

    def contribute(self, message: Message, client: Client) -> Any:
        from fedspan.core.values import Contribution

        return Contribution(stack=message.tensors)


def test_a_change_is_scaled_and_counts_from_another_start() -> None:
    """In the reply's format; integers, which count batches, stay as they are."""
    start = {"l/A": torch.full((2, 3), 1.0), "n": torch.tensor([4])}
    target = {"l/A": torch.full((2, 3), 10.0), "n": torch.tensor([9])}
    reply = Contribution(sum={"l/A": torch.tensor([[1.0, 2.0, 3.0], [1.0, 0.0, -1.0]]), "n": torch.tensor([5])})
    moved = rebase_change(reply, start, target, 0.5)
    assert torch.equal(moved.sum["l/A"], torch.tensor([[10.0, 10.5, 11.0], [10.0, 9.5, 9.0]]))
    assert moved.sum["l/A"].dtype == torch.float32
    assert torch.equal(moved.sum["n"], torch.tensor([5]))


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
    federation.transport, federation.settings = transport, with_rules(federation.settings, retries=0)
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
    federation = tiny.variant(prepared, method_config(tiny_folder, key)).federation
    state = federation.begin().state
    replies = [
        encode(build_untrained_reply(federation.method, federation.method.sync(state, one), one, 0))
        for one in (replace(federation.clients[id].client, examples=7, weight=7.0) for id in ("east", VICTIM))
    ]
    assert replies[0] == replies[1]


@pytest.mark.parametrize(
    ("weights", "ratio", "limit"),
    [
        ((100, 90, 2**53 - 1, 110, 80), 4.0, 400),
        ((100, 2**53 - 1), 4.0, 400),
        ((100, 100, 2**53 - 1, 2**53 - 1), 4.0, 400),
        ((100, 90, 5000), None, None),
        ((0, 0, 7), 4.0, None),
        ((), 4.0, None),
    ],
)
def test_a_weight_limit_is_a_multiple_of_the_median(
    weights: tuple[int, ...], ratio: float | None, limit: float | None
) -> None:
    assert compute_weight_limit(weights, ratio) == limit


def weigh(
    folder: Path, weight: float, ratio: float | None = None, most: float | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, float], str | None]:
    """Run a round in which west declares a weight, and may be admitted with a limit; others weigh 1."""
    config = tiny.config(folder, federation={"clients_per_round": None, "max_weight_ratio": ratio})
    federation = prepare(config).federation
    tiny.reweight(federation, {id: weight if id == "west" else 1.0 for id in federation.clients})
    west = replace(federation.clients["west"], max_weight=most)
    tiny.use_clients(federation, {**federation.clients, "west": west})
    result = federation.run_round(federation.begin())
    return dict(result.progress.state.tensors), dict(result.lowered), federation.get_note()


def test_a_client_that_declares_2_to_the_53_examples_weighs_as_much_as_the_limit(tiny_folder: Path) -> None:
    limited, lowered, note = weigh(tiny_folder, 2.0**53 - 1, 4.0)
    expected, unchanged, silent = weigh(tiny_folder, 4.0)
    assert all(torch.equal(value, expected[name]) for name, value in limited.items())
    assert lowered == {"west": 4.0 / (2.0**53 - 1)}
    assert note.startswith("west declared so many examples")
    assert "4 times the cohort's median" in note
    assert (unchanged, silent) == ({}, None)


@pytest.mark.parametrize("liars", [("west",), ("south", "west")])
def test_liars_that_are_half_of_all_clients_weigh_no_more_than_the_limit(
    liars: tuple[str, ...], tiny_folder: Path
) -> None:
    """One of two, or two of four, whose lie would raise the mean of the middle two numbers."""
    federation = prepare(tiny.config(tiny_folder, federation={"clients_per_round": None})).federation
    ids = ("north", "west") if len(liars) == 1 else tuple(federation.clients)
    tiny.use_clients(federation, {id: federation.clients[id] for id in ids})
    tiny.reweight(federation, {id: 2.0**53 - 1 if id in liars else 100.0 for id in ids})
    result = federation.run_round(federation.begin())
    assert result.lowered == dict.fromkeys(liars, 400 / (2.0**53 - 1))
    weights = limit_weights(federation.clients, 4.0)
    assert sum(weights[id] for id in liars) / sum(weights.values()) == pytest.approx(0.8)


def test_a_client_that_declares_more_than_it_was_admitted_with_weighs_as_much_as_that(tiny_folder: Path) -> None:
    limited, lowered, note = weigh(tiny_folder, 2.0**53 - 1, most=2.0)
    expected, unchanged, silent = weigh(tiny_folder, 2.0, most=2.0)
    assert all(torch.equal(value, expected[name]) for name, value in limited.items())
    assert lowered == {"west": 2.0 / (2.0**53 - 1)}
    assert note.endswith("the weight is lowered. Limits: 2 for west (as it was admitted)")
    assert weigh(tiny_folder, 2.0**53 - 1, 4.0, 2.0)[2] == note  # the common limit lowers no other weight
    assert (unchanged, silent) == ({}, None)


def test_the_common_limit_is_for_declared_numbers(tiny_folder: Path) -> None:
    federation = prepare(tiny.config(tiny_folder)).federation
    tiny.reweight(federation, {"east": 9.0, "north": 1.0, "south": 1.0, "west": 9.0})
    no_data = np.zeros(0, np.int64)
    declared = {id: replace(data, train=no_data) for id, data in federation.clients.items()}
    own = {**declared, "east": replace(declared["east"], max_weight=1.0)}
    # the median of 1, 1, 1 and 9 is 1; with what east declares it would be 5
    assert limit_weights(own, 2.0) == {"east": 1.0, "north": 1.0, "south": 1.0, "west": 2.0}
    admitted = {**own, "west": replace(declared["west"], max_weight=7.0)}
    assert limit_weights(admitted, 2.0) == {"east": 1.0, "north": 1.0, "south": 1.0, "west": 7.0}
    assigned = {**own, "west": replace(declared["west"], train=np.arange(9))}
    assert limit_weights(assigned, 2.0) == {"east": 1.0, "north": 1.0, "south": 1.0, "west": 9.0}
    more = {**own, "west": replace(declared["west"], train=np.arange(8))}  # it declares more than it was assigned
    assert limit_weights(more, 2.0) == {"east": 1.0, "north": 1.0, "south": 1.0, "west": 2.0}


def test_a_client_that_declares_2_to_the_53_examples_weighs_as_much_as_all_agreed_in_a_secure_sum(
    tiny_folder: Path,
) -> None:
    """The mean is that of plain aggregation with the same limit, up to the rounding of masked integers."""
    pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")
    pytest.importorskip("cryptography", reason="the extra fedspan[secagg] is not installed")

    def run(weight: float, **federation: Any) -> tuple[dict[str, torch.Tensor], Mapping[str, float], str]:
        settings = {"clients_per_round": None, "clip_ratio": None, **federation}
        made = prepare(tiny.config(tiny_folder, federation=settings)).federation
        tiny.reweight(made, {id: weight if id == "west" else 1.0 for id in made.clients})
        result = made.run_round(made.begin())
        return dict(result.progress.state.tensors), result.lowered, made.get_note() or ""

    secure, lowered, note = run(2.0**53 - 1, secure={"bits": 64})
    plain, same, _ = run(2.0**53 - 1)
    assert lowered == same == {"west": pytest.approx(4 / (2.0**53 - 1))}
    for name, value in plain.items():
        torch.testing.assert_close(secure[name], value, rtol=0, atol=1e-6)
    assert "west declared more examples than federation.max_weight_ratio allows" in note
    assert "agreed that 4 count" in note
    _, unchanged, silent = run(3.0, secure={})
    assert not unchanged
    assert "declared" not in silent
