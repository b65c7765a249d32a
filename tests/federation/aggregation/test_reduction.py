"""Reducers: independent of the order of arrival, and equal to reductions written out; and the buffers of replies."""

import itertools
import math
import shutil
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspan.core.values import Client, Contribution, LayerSpec, Message, Reduced, Spec
from fedspan.federation import serialization
from fedspan.federation.aggregation.plaintext import PlaintextAggregation, create_reducer
from fedspan.federation.aggregation.reduction import MessageBuffer, PrivateReducer, Reducer, ReplyBuffer
from fedspan.federation.aggregation.robust import compute_geometric_median, find_largest_cluster, select_by_multi_krum
from fedspan.federation.progress import ClientData
from fedspan.federation.round_context import RoundContext, Tally
from fedspan.methods.lora_a2 import LoRAA2
from fedspan.training.config import Privacy, TrainingSettings
from helpers.refusals import refused
from helpers.round_settings import make_settings

IDS = ("a", "b", "c", "d")


def _client(id: str, weight: float) -> Client:
    return Client(id, rank=2, scaling=1.0, examples=3, weight=weight)


@st.composite
def cohorts(draw: st.DrawFn) -> dict[str, tuple[Client, Contribution | None]]:
    """Clients with weights of very different size; replies of both kinds, some with their own weight, some failed."""
    cohort: dict[str, tuple[Client, Contribution | None]] = {}
    for id in IDS[: draw(st.integers(1, 4))]:
        client = _client(id, draw(st.sampled_from([0.1, 1.0, 3.0, 1e4])))
        rng = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
        reply: Contribution | None = None
        if id == "a" or draw(st.integers(0, 3)):
            reply = Contribution(
                sum={
                    "l/A": torch.randn((2, 3), generator=rng),
                    "l/B": torch.randn((4, 2), generator=rng, dtype=torch.float64) * 1e6,
                },
                stack={"l/U": torch.randn((3, draw(st.integers(1, 3))), generator=rng)},
                weight=draw(st.sampled_from([None, 0.0, 0.7])) if id != "a" else 2.5,
            )
        cohort[id] = client, reply
    return cohort


def _reduce(cohort: dict[str, tuple[Client, Contribution | None]], order: tuple[str, ...]) -> Reduced:
    reducer = Reducer([cohort[id][0] for id in order])
    for id in order:
        reducer.add(id, cohort[id][1])
    return reducer.compute_result()


@given(cohorts())
@settings(max_examples=25, deadline=None)
def test_weighted_mean_and_stack_match_the_oracle(cohort: dict[str, tuple[Client, Contribution | None]]) -> None:
    reduced = _reduce(cohort, tuple(cohort))
    replies = {id: reply for id, (_, reply) in cohort.items() if reply is not None}
    weights = {id: cohort[id][0].weight if reply.weight is None else reply.weight for id, reply in replies.items()}
    total = math.fsum(weights.values())
    for name, tolerance in (("l/A", 1e-6), ("l/B", 1e-12)):
        expected = sum((weights[id] / total * replies[id].sum[name].double() for id in replies), torch.zeros(()))
        assert isinstance(expected, Tensor)
        assert torch.allclose(reduced.mean[name].double(), expected, rtol=tolerance, atol=tolerance * 1e6)
        assert reduced.mean[name].dtype == replies["a"].sum[name].dtype
    assert [item.client.id for item in reduced.stack] == sorted(replies)
    assert reduced.count == len(replies)
    assert sum(item.weight for item in reduced.stack) == pytest.approx(1.0, rel=1e-12)
    for item in reduced.stack:
        assert item.weight == pytest.approx(weights[item.client.id] / total, rel=1e-12)
        assert item.tensors["l/U"] is replies[item.client.id].stack["l/U"]


@given(cohorts())
@settings(max_examples=20, deadline=None)
def test_any_order_of_arrival_gives_the_same_bits(cohort: dict[str, tuple[Client, Contribution | None]]) -> None:
    first = _reduce(cohort, tuple(cohort))
    for order in itertools.permutations(cohort):
        other = _reduce(cohort, order)
        for name, value in first.mean.items():
            assert torch.equal(other.mean[name], value)
        assert [(item.client.id, item.weight) for item in other.stack] == [
            (item.client.id, item.weight) for item in first.stack
        ]


def test_a_failed_client_counts_for_nothing() -> None:
    clients = [_client("a", 1.0), _client("b", 5.0), _client("c", 3.0)]
    reducer = Reducer(clients)
    reducer.add("c", Contribution(sum={"l/A": torch.tensor([4.0])}))
    reducer.add("b", None)
    reducer.add("a", Contribution(sum={"l/A": torch.tensor([0.0])}))
    reduced = reducer.compute_result()
    assert reduced.mean["l/A"].item() == 3.0  # weights 1 and 3
    assert reduced.count == 2


def test_a_missing_client_is_named() -> None:
    reducer = Reducer([_client("a", 1.0), _client("b", 1.0)])
    reducer.add("b", Contribution(sum={"l/A": torch.zeros(1)}))
    with pytest.raises(ValueError, match="'a'"):
        reducer.compute_result()


def test_strangers_and_repetitions_are_refused() -> None:
    reducer = Reducer([_client("a", 1.0), _client("b", 1.0)])
    reply = Contribution(sum={"l/A": torch.zeros(1)})
    with pytest.raises(ValueError, match="'z'"):
        reducer.add("z", reply)
    for id in ("b", "a"):  # one that waits, and one that was folded at once
        reducer.add(id, reply)
        with pytest.raises(ValueError, match=f"'{id}'"):
            reducer.add(id, reply)


@pytest.mark.parametrize("replies", [{"a": None}, {"a": Contribution(sum={"l/A": torch.ones(1)}, weight=0.0)}])
def test_a_round_without_weight_is_refused(replies: dict[str, Contribution | None]) -> None:
    reducer = Reducer([_client("a", 1.0)])
    for id, reply in replies.items():
        reducer.add(id, reply)
    with pytest.raises(ValueError, match="positive weight"):
        reducer.compute_result()


def test_a_tensor_that_some_leave_out_counts_as_zero_for_them() -> None:
    """What LoRA-A2's masks and FedGaLore's segments rely on: sums of changes, absent ones being none."""
    reducer = Reducer([_client("a", 1.0), _client("b", 3.0)])
    reducer.add("a", Contribution(sum={"l/dA": torch.tensor([8.0])}))
    reducer.add("b", Contribution(sum={"l/dB": torch.tensor([4.0])}))
    mean = reducer.compute_result().mean
    assert (mean["l/dA"].item(), mean["l/dB"].item()) == (2.0, 3.0)


def test_contributions_are_not_written_to() -> None:
    value = torch.ones(2, dtype=torch.float64)
    reducer = Reducer([_client("a", 1.0), _client("b", 1.0)])
    for id in ("a", "b"):
        reducer.add(id, Contribution(sum={"l/A": value}))
    assert torch.equal(reducer.compute_result().mean["l/A"], torch.ones(2, dtype=torch.float64))
    assert torch.equal(value, torch.ones(2, dtype=torch.float64))


def test_small_addends_survive_large_ones() -> None:
    """The sum is in float64 even where replies are float32."""
    values = [1e8, 1.0, -1e8, 1.0]
    reducer = Reducer([_client(id, 1.0) for id in IDS])
    for id, value in zip(IDS, values, strict=True):
        reducer.add(id, Contribution(sum={"l/A": torch.tensor([value])}))
    mean = reducer.compute_result().mean["l/A"]
    assert mean.item() == 0.5
    assert mean.dtype == torch.float32


def test_integers_are_not_averaged_silently() -> None:
    reducer = Reducer([_client("a", 1.0), _client("b", 1.0)])
    for id, value in (("a", 2), ("b", 3)):
        reducer.add(id, Contribution(sum={"l/n": torch.tensor([value])}))
    assert reducer.compute_result().mean["l/n"].item() == 2.5


RULES = ("median", "trimmed-mean", "multi-krum", "geometric-median", "flame")
WEIGHTLESS = ("median", "trimmed-mean", "multi-krum", "flame")


def reducer_of(clients: list[Client], origin: torch.Tensor | None = None, **settings: Any) -> Reducer:
    return create_reducer(
        make_settings(1, **settings),
        clients,
        len(clients),
        0,
        lambda: {"layer/A": torch.zeros(2) if origin is None else origin},
    )


def reduced(
    values: list[torch.Tensor], order: list[int] | None = None, origin: torch.Tensor | None = None, **settings: Any
) -> Reduced:
    clients = [Client(f"c{number:03}", 2, 1.0, 5, float(number + 1)) for number in range(len(values))]
    reducer = reducer_of(clients, torch.zeros_like(values[0]) if origin is None else origin, **settings)
    for number in order or range(len(values)):
        reducer.add(clients[number].id, Contribution(sum={"layer/A": values[number]}))
    return reducer.compute_result()


def drawn(rng: Any, count: int, *shape: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(rng.randrange(2**30))
    return [torch.randn(shape, generator=draw) for _ in range(count)]


@given(st.integers(1, 9), st.floats(0.01, 0.49), st.randoms(use_true_random=False))
def test_coordinates_are_reduced_one_by_one_in_any_order(count: int, trim: float, rng: Any) -> None:
    values = drawn(rng, count, 3, 2)
    order = list(range(count))
    rng.shuffle(order)
    stacked = torch.stack(values).double().numpy()
    median = reduced(values, order, reduction="median")
    assert median.count == count
    assert np.allclose(median.mean["layer/A"].numpy(), np.median(stacked, axis=0), atol=1e-6)
    dropped = min(int(np.ceil(trim * count)), (count - 1) // 2)
    expected = scipy.stats.trim_mean(stacked, dropped / count + 1e-9, axis=0)
    found = reduced(values, order, reduction="trimmed-mean", trim=trim).mean["layer/A"]
    assert found.dtype == torch.float32
    assert np.allclose(found.numpy(), expected, atol=1e-6)


@given(st.integers(1, 9), st.integers(0, 4), st.randoms(use_true_random=False))
def test_multi_krum_selects_by_the_definition(count: int, hostile: int, rng: Any) -> None:
    rows = torch.stack(drawn(rng, count, 4)).double()
    known = min(hostile, (count - 3) // 2)
    expected = list(range(count))
    if known > 0:
        scores = [
            sum(sorted(float((rows[i] - rows[j]).square().sum()) for j in range(count) if j != i)[: count - known - 2])
            for i in range(count)
        ]
        expected = sorted(sorted(range(count), key=scores.__getitem__)[: count - known])
    assert select_by_multi_krum(rows, hostile) == expected


@given(st.integers(1, 7), st.randoms(use_true_random=False))
@settings(max_examples=8, deadline=None)
def test_the_geometric_median_minimizes_the_weighted_distances(count: int, rng: Any) -> None:
    rows = torch.stack(drawn(rng, count, 3)).double()
    weights = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(rng.randrange(2**30)))
    weights = weights / weights.sum()

    def cost(at: Any) -> float:
        return float(weights @ (rows - torch.as_tensor(at)).norm(dim=1))

    starts = [rows.mean(0).numpy(), *rows.numpy()]
    best = min(scipy.optimize.minimize(cost, start, method="Nelder-Mead", tol=1e-9).fun for start in starts)
    assert cost(compute_geometric_median(rows, weights)) <= best * (1 + 1e-3) + 1e-9


def test_the_geometric_median_of_two_is_the_heavier_one_and_of_a_line_the_weighted_median() -> None:
    rows = torch.tensor([[1.5410, -0.2934, -2.1788], [0.5684, -1.0845, -1.3986]], dtype=torch.float64)
    assert torch.equal(compute_geometric_median(rows, torch.tensor([0.4973, 0.5027], dtype=torch.float64)), rows[1])
    rows = torch.tensor([[0.0], [1.0], [10.0], [1e9]], dtype=torch.float64)
    weights = torch.tensor([0.2, 0.4, 0.2, 0.2], dtype=torch.float64)
    assert float(compute_geometric_median(rows, weights)) == pytest.approx(1.0, abs=1e-4)
    same = torch.ones(3, 2, dtype=torch.float64)
    assert torch.equal(compute_geometric_median(same, torch.full((3,), 1 / 3, dtype=torch.float64)), same[0])


def test_flame_keeps_the_majority_by_direction_clips_to_the_median_norm_and_adds_little_noise() -> None:
    rng = torch.Generator().manual_seed(0)
    main, origin = torch.randn(200, generator=rng), torch.randn(200, generator=rng)
    honest = [main + 0.1 * torch.randn(200, generator=rng) for _ in range(6)]
    honest[0] = 50 * honest[0]  # a long one in the same direction
    hostile = [-honest[1], -honest[2]]
    rows = torch.stack([*honest, *hostile]).double()
    kept = find_largest_cluster(rows)
    assert set(kept) <= set(range(6))
    assert len(kept) >= 5
    norms = sorted(rows.norm(dim=1).tolist())
    limit = (norms[3] + norms[4]) / 2
    clipped = [honest[at] * min(1.0, limit / float(honest[at].norm())) for at in kept]
    found = reduced([origin + change for change in (*honest, *hostile)], origin=origin, reduction="flame")
    difference = found.mean["layer/A"] - origin - torch.stack(clipped).mean(0)
    assert float(difference.std()) == pytest.approx(0.001 * limit, rel=0.3)
    assert find_largest_cluster(rows[:2]) == [0, 1]  # too few to compare


@pytest.mark.parametrize("rule", RULES)
def test_a_hostile_minority_cannot_move_them_far(rule: str) -> None:
    rng = torch.Generator().manual_seed(1)
    good = [torch.ones(30) + 0.1 * torch.randn(30, generator=rng) for _ in range(8)]
    bad = [torch.full((30,), -1e6), torch.full((30,), 1e6)]
    found = reduced([*good, *bad], reduction=rule, trim=0.2).mean["layer/A"]
    assert float((found - 1).abs().max()) < 0.3
    assert float((reduced([*good, *bad]).mean["layer/A"] - 1).abs().max()) > 1e4


@given(rule=st.sampled_from(RULES), rng=st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_moving_all_replies_moves_the_result_alike(rule: str, rng: Any) -> None:
    values, step = drawn(rng, 7, 4), drawn(rng, 1, 4)[0]
    here = reduced(values, origin=torch.zeros(4), reduction=rule, trim=0.2).mean["layer/A"]
    there = reduced([value + step for value in values], origin=step, reduction=rule, trim=0.2).mean["layer/A"]
    assert torch.allclose(there - step, here, atol=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_arrival_changes_no_bit(rule: str) -> None:
    values = [torch.randn(4, generator=torch.Generator().manual_seed(number)) for number in range(4)]
    first = reduced(values, reduction=rule).mean["layer/A"]
    for order in itertools.permutations(range(4)):
        assert torch.equal(first, reduced(values, list(order), reduction=rule).mean["layer/A"])


@pytest.mark.parametrize("rule", WEIGHTLESS)
def test_weights_do_not_count(rule: str) -> None:
    values = [torch.randn(4, generator=torch.Generator().manual_seed(number)) for number in range(5)]
    found: list[torch.Tensor] = []
    for heavy in (1.0, 1e6):
        clients = [Client(f"c{number}", 2, 1.0, 5, heavy if not number else 1.0) for number in range(5)]
        reducer = reducer_of(clients, torch.zeros(4), reduction=rule)
        for client, value in zip(clients, values, strict=True):
            reducer.add(client.id, Contribution(sum={"layer/A": value}))
        found.append(reducer.compute_result().mean["layer/A"])
    assert torch.equal(*found)


def test_a_tensor_that_a_client_leaves_out_counts_as_zero_and_a_stack_is_refused() -> None:
    clients = [Client(id, 2, 1.0, 5, 1.0) for id in "abc"]
    reducer = reducer_of(clients, reduction="median")
    for id, value in (("a", 4.0), ("b", 2.0)):
        reducer.add(id, Contribution(sum={"x": torch.tensor([value])}))
    with pytest.raises(ValueError, match="no contribution yet of client 'c'"):
        reducer.compute_result()
    reducer.add("c", Contribution(sum={"y": torch.ones(1)}))
    assert reducer.compute_result().mean["x"].tolist() == [2.0]
    assert reducer.compute_result().mean["y"].tolist() == [0.0]
    for rule in RULES:
        other = reducer_of(clients[:1], reduction=rule)
        with pytest.raises(ValueError, match="not summed"):
            other.add("a", Contribution(stack={"x": torch.ones(1)}))
        other.add("a", None)
        with pytest.raises(ValueError, match="no reply in this round"):
            other.compute_result()
    assert type(reducer_of(clients)) is Reducer


CLIENTS = [Client(f"c{number}", 2, 1.0, 5, 1.0 + (number == 0)) for number in range(5)]
VALUES = (0.0, 1.0, 2.0, 5.0, 100.0)


def reduce(*, round: int = 0, **settings: Any) -> torch.Tensor:
    reducer = create_reducer(
        make_settings(1, **settings), CLIENTS, len(CLIENTS), round, lambda: {"fc/A": torch.zeros(1, 2)}
    )
    for client, value in zip(CLIENTS, VALUES, strict=True):
        reducer.add(client.id, Contribution(sum={"fc/A": torch.tensor([[value, -value]])}))
    return reducer.compute_result().mean["fc/A"]


def test_rules_trim_seed_and_round_decide_the_result() -> None:
    assert reduce() == pytest.approx(torch.tensor([[108 / 6, -108 / 6]]))  # the first client counts twice
    assert reduce(reduction="median").tolist() == [[2.0, -2.0]]
    assert reduce(reduction="trimmed-mean", trim=0.2) == pytest.approx(torch.tensor([[8 / 3, -8 / 3]]))
    assert reduce(reduction="trimmed-mean", trim=0.4).tolist() == [[2.0, -2.0]]
    assert float(reduce(reduction="multi-krum", trim=0.2)[0, 0]) < 5
    first = reduce(reduction="flame", seed=1)
    assert torch.equal(reduce(reduction="flame", seed=1), first)
    assert not torch.equal(reduce(reduction="flame", seed=2), first)
    assert not torch.equal(reduce(reduction="flame", seed=1, round=1), first)


def test_central_privacy_surrounds_the_mean() -> None:
    """Clipped to 1 about an untrained reply of zeros, the last reply moves the sum by 1 and not by 141."""
    privacy = Privacy(mechanism="central", clip=1.0, noise=1e-6)
    settings = make_settings(1, privacy=privacy)
    reducer = create_reducer(settings, CLIENTS, 5, 0, lambda: {"fc/A": torch.zeros(1, 2)})
    assert isinstance(reducer, PrivateReducer)
    half = 0.5**0.5
    assert reduce(privacy=privacy) == pytest.approx(torch.tensor([[4 * half / 5, -4 * half / 5]]), abs=1e-4)


BODIES = {id: serialization.encode(Message({"x": torch.full((1024,), number)})) for number, id in enumerate("abc")}


def store(held: MessageBuffer, id: str, sent: str) -> Message:
    message = serialization.decode(BODIES[sent])
    held.store(id, message, BODIES[sent])
    return message


@pytest.mark.parametrize("in_memory", [1, 14_000, 1 << 20])
def test_messages_beyond_the_budget_are_decoded_again_and_the_last_one_counts(in_memory: int) -> None:
    held = MessageBuffer(in_memory)  # one has 8 KiB of numbers, its structure, and 1 KiB for its tensor
    messages = {id: store(held, id, id) for id in "abc"}
    assert [held.load(id) is messages[id] for id in "abc"] == [
        in_memory > 10_000,
        in_memory > 20_000,
        in_memory > 30_000,
    ]
    store(held, "a", "c")
    for id, sent in zip("abc", "cbc", strict=True):
        assert serialization.encode(held.load(id)) == BODIES[sent]
    with pytest.raises(KeyError):
        held.load("d")


def test_a_message_that_is_discarded_makes_room() -> None:
    held = MessageBuffer(14_000)
    store(held, "a", "a")
    held.discard("a")
    held.discard("b")
    message = store(held, "b", "b")
    assert held.load("b") is message


@pytest.mark.parametrize("in_memory", [4, 1 << 20], ids=["file", "memory"])
def test_replies_come_back_in_any_order_and_the_last_one_counts(in_memory: int) -> None:
    held = ReplyBuffer(in_memory)
    held.store("a", b"first")
    held.store("b", b"")
    held.store("c", b"third reply")
    assert held.load("c") == b"third reply"
    held.store("a", b"again, and longer")
    assert [held.load(id) for id in "abc"] == [b"again, and longer", b"", b"third reply"]
    with pytest.raises(KeyError):
        held.load("d")
    held.close()
    with pytest.raises(KeyError):
        held.load("a")


def test_replies_beyond_their_budget_on_the_disk_end_the_round_with_a_reason() -> None:
    held = ReplyBuffer(in_memory=8, on_disk=3 << 20)
    held.store("a", bytes(2 << 20))
    with refused("TMPDIR", r"take 4 MiB, and their budget in .* is 3 MiB. Set the environment variable"):
        held.store("b", bytes(2 << 20))
    with pytest.raises(KeyError):
        held.load("b")
    assert held.load("a") == bytes(2 << 20)
    ReplyBuffer(in_memory=8, on_disk=0).store("a", bytes(8))  # in memory, which the budget is not for


def test_the_budget_leaves_some_of_the_disk_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=(1 << 30) + 9))
    held = ReplyBuffer(in_memory=4)
    held.store("a", bytes(9))
    with refused("TMPDIR", "budget"):
        held.store("b", bytes(1))


RANK, NONE = 8, np.array([], dtype=np.int64)


@pytest.mark.parametrize("round", [0, 1])
def test_a_reply_whose_size_depends_on_data_is_within_its_limit(round: int) -> None:
    narrow, wide = LayerSpec("narrow", 4, 3), LayerSpec("wide", 700, 900)
    method = LoRAA2(spec=Spec(layers=(narrow, wide)), seed=1, r=RANK, lora_alpha=RANK)
    client = Client("a", rank=4, scaling=1.0, examples=5, weight=5.0)
    context = RoundContext(
        method=method,
        settings=make_settings(2),
        training=TrainingSettings(),
        clients={"a": ClientData(client, NONE, NONE, NONE)},
        state=method.init({}).advance_round() if round else method.init({}),
        ids=("a",),
        draw_order=("a",),
        target=1,
        transport=cast(Any, None),
        run="",
    )
    limit = PlaintextAggregation(context, Tally()).compute_reply_bytes(client)

    # The client's budget, 4 slots for each of two layers, is spent on the wide one, as its data may have it.
    active, shape = ("B", (wide.out_features, RANK)) if round == 0 else ("A", (RANK, wide.in_features))
    empty = (narrow.out_features, 0) if round == 0 else (0, narrow.in_features)
    tensors = {
        "narrow/slots": torch.zeros(0, dtype=torch.int32),
        f"narrow/d{active}": torch.zeros(empty),
        "wide/slots": torch.arange(RANK, dtype=torch.int32),
        f"wide/d{active}": torch.ones(shape),
    }
    reply = Message(tensors, {"active": active})
    method.contribute(reply, client)  # it is one that the server accepts
    assert len(serialization.encode(reply)) <= limit < 2 * len(serialization.encode(reply))
