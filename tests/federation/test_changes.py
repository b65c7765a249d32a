"""Sizes of changes, limits compared within a cohort, and scaling: of every method's replies, summed or stacked."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from fedspan.core.quantize import pack_levels, quantize, unpack_levels
from fedspan.core.tensors import compute_norm, join_extra_name, select, subtract
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
from fedspan.federation.progress import RoundResult
from fedspan.federation.protocol import Order
from fedspan.federation.serialization import encode_state
from fedspan.federation.validation import build_untrained_reply, find_outliers, validate_reply
from fedspan.methods.registry import METHODS
from fedspan.runs.setup import Prepared, prepare
from helpers import tiny, tiny_images
from helpers.families import methods_by_family, others_slow
from helpers.watched_rounds import method_config

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
    """Run a round in which a client moves the norm that its whole reply may have into one part of it.

    Args:
        federation: The federation.
        is_target: Whether the client adds to a tensor of this name; the others stay untrained.

    Returns:
        The states after it, after a round in which the client sends the untrained reply, and after an honest one, with
        the norms of the honest changes in this part.
    """
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

    def tamper(order: Order, _: Message, reply: Message) -> Message:
        return lower_variances(reply) if order.to == VICTIM else reply

    federation.transport.host.tamper = tamper
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


def test_a_reply_with_a_negative_variance_is_refused(images: Path) -> None:
    federation = normalized(images)
    method, client = federation.method, federation.clients[VICTIM].client
    untrained = build_untrained_reply(method, method.sync(federation.begin().state, client), client, 0)
    validate_reply(method, untrained, client, untrained)
    with pytest.raises(ValueError, match=r"extras/.*running_var holds negative variances"):
        validate_reply(method, lower_variances(untrained), client, untrained)


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
