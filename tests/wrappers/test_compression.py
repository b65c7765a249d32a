"""What compressing wrappers share, FedPAQ by hand, masked sums; quantizers and formats of few bits entry by entry."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspan.core.method import Claims, Memory, Method, Wrapper
from fedspan.core.tensors import Tensors, create_generator, join_tensor_name
from fedspan.core.values import Client, Job, Message, Reduced, Trained
from fedspan.federation.serialization import compute_payload_size, encode
from fedspan.methods.fedit import FedIT
from fedspan.methods.flora import FLoRA
from fedspan.methods.local_only import LocalOnly
from fedspan.methods.lora_a2 import LoRAA2
from fedspan.methods.pfedloru import PFedLoRU
from fedspan.methods.rolora import RoLoRA
from fedspan.wrappers.compression import Compression
from fedspan.wrappers.extras import WithExtras
from fedspan.wrappers.fedavgm import FedAvgM
from fedspan.wrappers.fedpaq import FedPAQ, pack_levels, quantize, unpack_levels
from fedspan.wrappers.low_precision import Format, compress, decompress
from fedspan.wrappers.scaffold import Scaffold
from helpers.dense_rounds import require_state
from helpers.refusals import refused
from helpers.toys.oracle import copied, descend
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Double, Federation, sgd

CLIENT = Client("client-0", 2, 2.0, 6, 6.0)
NAMES = {join_tensor_name(layer, slot) for layer in LAYERS for slot in "AB"}


@dataclass(frozen=True, kw_only=True)
class Quarters(Compression):
    """Sends numbers of quarters, flat and with two more entries, and counts the rounds in its memory."""

    key: ClassVar[str] = "quarters"

    def compress(
        self, changes: Tensors, job: Job, client: Client, memory: Memory, round: int
    ) -> tuple[Tensors, Memory]:
        sent = {name: torch.cat([(4 * value).round().flatten(), torch.zeros(2)]) for name, value in changes.items()}
        return sent, {"rounds": memory.get("rounds", torch.zeros(())) + 1}

    def decompress(self, tensors: Tensors) -> Tensors:
        return {name: value / 4 for name, value in tensors.items()}


def begin() -> tuple[Quarters, Job, Mapping[str, Tensor]]:
    """The wrapped FedIT, its first job, and the server's tensors."""
    problem = Problem(clients=1, dtype=torch.float32)
    wrapped = Quarters(inner=FedIT(spec=problem.adapted().spec, r=2))
    state = wrapped.init(problem.adapted())
    return wrapped, wrapped.start(wrapped.sync(state, CLIENT), CLIENT, {}, 0), state.tensors


def finish(wrapped: Quarters, job: Job, tensors: Tensors, memory: Memory | None = None) -> tuple[Message, Memory]:
    reply, memory = wrapped.finish(job, Trained(tensors, 6.0, 0.5), CLIENT, memory or {}, 0)
    return reply, memory


def test_changes_are_compressed_and_added_to_what_the_server_has() -> None:
    """In the tensors' own shapes, without the surplus entries at the end."""
    wrapped, job, before = begin()
    reply, _ = finish(wrapped, job, {name: value + 0.3 for name, value in job.tensors.items()})
    assert reply.tensors.keys() == {f"quarters/{name}" for name in NAMES}
    for name in NAMES:
        assert reply.tensors[f"quarters/{name}"].tolist() == [1.0] * before[name].numel() + [0.0] * 2
    state = wrapped.init(Problem(clients=1, dtype=torch.float32).adapted())
    after = wrapped.update(state, Reduced(mean=wrapped.contribute(reply, CLIENT).sum, count=1))
    for name in NAMES:
        assert torch.allclose(after.tensors[name], before[name] + 0.25)


def test_the_wrapper_s_memory_is_its_own() -> None:
    wrapped, job, _ = begin()
    memory: Memory = {"theirs": torch.ones(1)}
    for number in (1.0, 2.0):
        _, memory = finish(wrapped, job, job.tensors, memory)
        assert float(memory["quarters-memory/rounds"]) == number
    assert not any(name.startswith("quarters-start/") for name in memory)


def test_a_tensor_that_was_not_sent_is_an_error_where_replies_are_values() -> None:
    wrapped, job, _ = begin()
    kept = {name: value for name, value in job.tensors.items() if name != "fc1/A"}
    with refused("method.wrappers") as caught:
        finish(wrapped, replace(job, tensors=kept), job.tensors)
    assert (caught.value.field, caught.value.value) == ("method.wrappers", "quarters")


def test_changes_of_a_method_that_sends_them_are_compressed_whole_and_integers_not_at_all() -> None:
    """LoRA-A2 trains in two phases, between which the wrapper stores the tensors of the first one's start."""
    problem = Problem(clients=1, dtype=torch.float32)
    wrapped = Quarters(inner=LoRAA2(spec=problem.adapted().spec, r=2))
    state = wrapped.init(problem.adapted())
    job = wrapped.start(wrapped.sync(state, CLIENT), CLIENT, {}, 0)
    reply, memory, between = None, dict[str, Tensor](), list[bool]()
    while not isinstance(reply, Message):
        changed = {name: value + 0.5 for name, value in job.tensors.items()}
        reply, memory = wrapped.finish(job, Trained(changed, 6.0, 0.5), CLIENT, memory, 0)
        between.append(any(name.startswith("quarters-start/") for name in memory))
        job = reply if isinstance(reply, Job) else job
    assert between[-1] is False
    assert all(between[:-1])
    for name, value in reply.tensors.items():
        assert name.startswith("quarters/quarters-whole/") is value.is_floating_point()
    assert {value.is_floating_point() for value in reply.tensors.values()} >= {True}


def test_claims_and_refusals() -> None:
    """Rounded replies are no exact mean, and changes instead of values."""
    spec = Problem(clients=1).adapted().spec
    inner = FedIT(spec=spec, r=2)
    claims = Quarters(inner=inner).declare_claims()
    assert (claims.exact, claims.sends) == (False, "changes")
    assert Quarters(inner=LoRAA2(spec=spec)).declare_claims().sends == LoRAA2(spec=spec).declare_claims().sends
    for method, words in ((FLoRA(spec=spec), "needs single replies"), (LocalOnly(spec=spec), "replies hold nothing")):
        assert words in str(Quarters(inner=inner).explain_refusal(method.declare_claims()))
    assert Quarters(inner=inner).explain_refusal(inner.declare_claims()) is None


LR, SCALING, STEPS, SEED, BITS = 0.3, 2.0, 2, 9, 4
CHANGE = "fedpaq/"
FINE = 16
"""Bits at which a change is rounded to 3e-5 of its norm."""


def _by_hand(value: Tensor, bits: int, draws: Tensor) -> Tensor:
    """Example 1 of the paper, entry by entry, under a norm of 32 bits that no entry exceeds."""
    norm = torch.tensor(math.sqrt(sum(float(x) ** 2 for x in value.flatten())), dtype=torch.float64)
    rounded = norm.float()
    if rounded.double() < norm:
        rounded = torch.nextafter(rounded, torch.tensor(math.inf))
    s, result = 2 ** (bits - 1) - 1, []
    for x, draw in zip(value.flatten().tolist(), draws.flatten().tolist(), strict=True):
        scaled = s * abs(x) / float(rounded)
        level = math.floor(scaled)
        result.append(math.copysign(level + 1 if draw < scaled - level else level, x))
    # The server's arithmetic is float32: level * (norm / s).
    return (torch.tensor(result) * (rounded / s)).double().reshape(value.shape)


def _federation(problem: Problem, inner: Method, bits: int = BITS) -> Federation:
    method = FedPAQ(inner=WithExtras(inner=inner, policy="average"), bits=bits, seed=SEED)
    return Federation(Double(inner=method), problem, sgd(LR, steps=STEPS))


@pytest.mark.parametrize("name", ["fedit", "rolora"])
def test_rounds_match_quantized_changes_by_hand(name: str) -> None:
    problem = Problem()
    cls = {"fedit": FedIT, "rolora": RoLoRA}[name]
    federation = _federation(problem, cls(spec=problem.adapted().spec, r=2, lora_alpha=4.0))
    W, head = problem.to_dense(*LAYERS), problem.to_dense(*HEAD)
    server = {one: {s: federation.state.tensors[join_tensor_name(one, s)].double() for s in "AB"} for one in LAYERS}
    for number, positions in enumerate([(0, 1, 2, 3), (1, 3), (0, 1, 2), (0, 1, 2, 3)]):
        train = "AB" if name == "fedit" else "BA"[number % 2]
        cohort = [problem.client_ids[position] for position in positions]
        federation.round(cohort)
        shares = problem.shares(cohort)
        after, head_after = copied(server), dict(head)
        for id in cohort:
            mine, own_head = copied(server), dict(head)
            descend(problem, id, W, own_head, mine, SCALING, LR, STEPS, train=train)

            def estimate(key: str, change: Tensor, id: str = id, number: int = number) -> Tensor:
                rng = create_generator(SEED, "fedpaq", number, id, key)
                return _by_hand(change, BITS, torch.rand(change.shape, generator=rng, dtype=torch.float64))

            for one in LAYERS:
                for s in train:
                    change = mine[one][s] - server[one][s]
                    after[one][s] = after[one][s] + shares[id] * estimate(join_tensor_name(one, s), change)
            for parameter in HEAD:
                change = own_head[parameter] - head[parameter]
                head_after[parameter] = head_after[parameter] + shares[id] * estimate(f"extras/{parameter}", change)
            expected = {join_tensor_name(one, s) for one in LAYERS for s in train} | {f"extras/{p}" for p in HEAD}
            assert set(federation.replies[id].tensors) == {CHANGE + key for key in expected}
        server, head = after, head_after
        require_state(federation, head, server, 1e-7)


def _follows(inner: Method, cohorts: list[tuple[str, ...]], problem: Problem) -> tuple[Federation, Federation]:
    """The method with fine quantization beside the method alone; the states differ by what rounding explains."""
    fine = _federation(problem, inner, FINE)
    plain = Federation(Double(inner=WithExtras(inner=inner, policy="average")), problem, sgd(LR, steps=STEPS))
    begun = plain.state.tensors
    for cohort in cohorts:
        fine.round(cohort)
        plain.round(cohort)
    for key, value in plain.state.tensors.items():
        moved = float((value - begun[key]).norm())
        assert moved > 1e-3
        assert float((fine.state.tensors[key] - value).norm()) < 1e-3 * moved
    return fine, plain


def test_a_client_that_was_absent_still_changes_the_common_start() -> None:
    """RoLoRA sends only what a client misses; its change is of the same tensors nevertheless."""
    problem = Problem(clients=2)
    cohorts = [("client-0", "client-1"), ("client-0",), ("client-0",), ("client-0", "client-1")]
    _follows(RoLoRA(spec=problem.adapted().spec, r=2), cohorts, problem)


def test_two_phases_send_the_change_since_the_rounds_start() -> None:
    """The head trains in both of pFedLoRU's phases; its change is that of both."""
    problem = Problem(clients=2)
    inner = PFedLoRU(spec=problem.adapted().spec, r=2, tau=9)
    fine, plain = _follows(inner, [("client-0", "client-1")] * 3, problem)
    assert set(fine.parties["client-0"].memory) == set(plain.parties["client-0"].memory)


@pytest.mark.parametrize("bits", [2, 3, 8, 16])
def test_bytes_on_the_wire_are_the_packed_ones(bits: int) -> None:
    problem = Problem(clients=1, dtype=torch.float32)
    inner = FedIT(spec=problem.adapted().spec, r=2)
    federation = Federation(FedPAQ(inner=inner, bits=bits), problem, sgd(LR))
    federation.round()
    reply = federation.replies["client-0"]
    sizes = {
        join_tensor_name(one, s): 2 * width for one, s, width in [("fc1", "A", 5), ("fc1", "B", 8), ("fc2", "A", 8)]
    }
    sizes[join_tensor_name("fc2", "B")] = 12
    assert {name: len(value) for name, value in reply.tensors.items()} == {
        CHANGE + name: 4 + math.ceil(size * bits / 8) for name, size in sizes.items()
    }
    assert compute_payload_size(reply) == sum(len(value) for value in reply.tensors.values())
    empty = Message({name: value[:0] for name, value in reply.tensors.items()}, reply.scalars)
    assert len(encode(reply)) - len(encode(empty)) <= compute_payload_size(reply) + 64  # the header's longer numbers


def test_refused_where_a_change_is_not_what_is_transmitted() -> None:
    spec = Problem(clients=1).adapted().spec
    cases = {
        "this method's server needs single replies": FLoRA(spec=spec),
        "hold other values, too": Scaffold(inner=FedIT(spec=spec)),
        "as control variates": LoRAA2(spec=spec),
        "hold nothing": LocalOnly(spec=spec),
    }
    for words, method in cases.items():
        refusal = FedPAQ(inner=method).explain_refusal(method.declare_claims())
        assert words in refusal
    optimized = FedAvgM(inner=FedIT(spec=spec))
    assert FedPAQ(inner=optimized).explain_refusal(optimized.declare_claims()) is None


@dataclass(frozen=True, kw_only=True)
class _ClaimsValues(Wrapper):
    def declare_claims(self) -> Claims:
        return replace(self.inner.declare_claims(), sends="values")


def test_a_reply_of_changes_that_were_claimed_to_be_values_is_an_error() -> None:
    """LoRA-A2's replies are changes, whatever its claims say."""
    problem = Problem(clients=1)
    inner = _ClaimsValues(inner=LoRAA2(spec=problem.adapted().spec, r=2))
    federation = Federation(Double(inner=FedPAQ(inner=inner)), problem, sgd(LR))
    with refused("method.wrappers"):
        federation.round()


def by_hand(value: Tensor, levels: int, draws: Tensor) -> list[int]:
    """Signed levels of FedPAQ's example 1."""
    norm, result = float(value.double().norm()), []
    for x, draw in zip(value.flatten().tolist(), draws.flatten().tolist(), strict=True):
        scaled = levels * abs(x) / norm
        level = math.floor(scaled)
        result.append(int(math.copysign(level + (draw < scaled - level), x)))
    return result


@pytest.mark.parametrize("bits", [2, 3, 5, 8, 12, 16])
def test_levels_are_the_definitions(bits: int) -> None:
    rng = torch.Generator().manual_seed(bits)
    x = torch.randn(6, 4, generator=rng, dtype=torch.float64)
    draws = torch.rand(x.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    levels, norm = quantize(x, bits, torch.Generator().manual_seed(9))
    assert abs(float(norm) - float(x.norm())) < 1e-6
    assert levels.flatten().tolist() == by_hand(x, 2 ** (bits - 1) - 1, draws)


def test_it_is_unbiased_and_within_the_papers_variance() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, generator=rng, dtype=torch.float64)
    s, draws = 3, 2000
    norm, total, squared = float(x.norm()), torch.zeros_like(x), 0.0
    for _ in range(draws):
        levels, rounded = quantize(x, 3, rng)
        estimate = levels * rounded.double() / s
        total += estimate
        squared += float((estimate - x).square().sum())
    # An entry's standard deviation is at most half a step, norm / s / 2: five standard errors.
    assert ((total / draws - x).abs() <= 5 * norm / s / 2 / math.sqrt(draws)).all()
    bound = min(x.numel() / s**2, math.sqrt(x.numel()) / s) * norm**2
    assert 0.1 * bound < squared / draws <= bound


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 16), st.integers(1, 70), st.integers(0, 2**32), st.sampled_from([1.0, 1e-30, 1e30]))
def test_packed_bits_come_back(bits: int, elements: int, seed: int, scale: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    levels, norm = quantize(torch.randn(elements, generator=rng) * scale, bits, rng)
    most = 2 ** (bits - 1) - 1
    assert int(levels.abs().max()) <= most
    packed = pack_levels(levels, norm, bits)
    assert packed.dtype == torch.uint8
    assert len(packed) == 4 + math.ceil(elements * bits / 8)
    assert torch.equal(unpack_levels(packed, bits)[:elements], levels.float() * (norm / most))


@pytest.mark.parametrize("bits", [3, 16])
def test_more_entries_than_are_spread_out_at_once(bits: int) -> None:
    rng = torch.Generator().manual_seed(1)
    levels = torch.randint(-3, 4, (2**18 + 5,), generator=rng)
    found = unpack_levels(pack_levels(levels, torch.tensor(1.0), bits), bits)[: levels.numel()]
    assert torch.equal((found * (2 ** (bits - 1) - 1)).round().to(torch.int64), levels)


@pytest.mark.parametrize("value", [torch.zeros(3, 2), torch.tensor([0.1]), torch.tensor(-5.0)])
def test_zeros_and_single_numbers_are_exact(value: Tensor) -> None:
    """One entry is its own norm: the highest level, whatever is drawn and however the norm is rounded."""
    levels, norm = quantize(value, 4, torch.Generator())
    assert torch.equal(unpack_levels(pack_levels(levels, norm, 4), 4)[: value.numel()].view_as(value), value)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(get_args(Format)),
    st.lists(st.integers(0, 7), max_size=3),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 1.0, 1e-30, 1e3]),
)
def test_names_and_shapes_come_back_and_errors_are_bounded(
    format: Format, shape: list[int], seed: int, scale: float
) -> None:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    name, restored = decompress(*compress("layer/A", value, format))
    assert (name, restored.shape, restored.dtype) == ("layer/A", value.shape, torch.float32)
    largest = float(value.abs().max()) if value.numel() else 0.0
    # bfloat16 has 8 significant bits, float16 has 11 and a smallest step of 2^-24, int8 127 levels a row or column.
    bound = {"float32": 0.0, "bfloat16": largest / 2**8, "float16": largest / 2**11 + 2**-24, "int8": largest / 253}
    assert float((restored - value).abs().max() if value.numel() else 0.0) <= bound[format]


@pytest.mark.parametrize(("shape", "prefix", "size"), [((3, 7), "rows/", 3 * 11), ((7, 3), "columns/", 11 * 3)])
def test_int8_has_one_scale_for_each_row_or_for_each_column_where_columns_are_longer(
    shape: tuple[int, int], prefix: str, size: int
) -> None:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    name, codes = compress("B", value, "int8")
    assert (name, codes.dtype, codes.numel()) == (f"{prefix}B", torch.int8, size)
    lines = value.tolist() if prefix == "rows/" else value.T.tolist()
    expected = []
    for line in lines:
        scale = torch.tensor(max(abs(x) for x in line)) / 127
        expected.append([float(round(float(torch.tensor(x) / scale)) * scale) for x in line])
    restored = decompress(name, codes)[1]
    assert (restored if prefix == "rows/" else restored.T).tolist() == expected


def test_stochastic_rounding_is_unbiased() -> None:
    rng = torch.Generator().manual_seed(3)
    value = torch.randn(4, 5, generator=rng)
    draws = 4000
    mean = sum(decompress(*compress("A", value, "int8", rng))[1].double() for _ in range(draws)) / draws
    steps = (value.abs().amax(1, keepdim=True) / 127).double()
    # The standard deviation of a rounded entry is at most half a step: five standard errors.
    assert bool(((mean - value).abs() <= 5 * steps / 2 / math.sqrt(draws)).all())
    nearest = decompress(*compress("A", value, "int8"))[1]
    assert bool(((mean - value).abs() < (nearest - value).abs().max()).all())


def test_counters_and_scalars_are_not_rounded_and_float16_refuses_what_it_cannot_hold() -> None:
    count, scalar = torch.tensor([3, 2**40]), torch.tensor(0.1)
    assert compress("count", count, "int8")[1] is count
    assert decompress("count", count)[1] is count
    assert torch.equal(decompress(*compress("scale", scalar, "int8"))[1], scalar)
    codes = torch.tensor([3, -4], dtype=torch.int8)
    assert decompress("own int8 buffer", codes)[1] is codes
    with pytest.raises(OverflowError, match="largest, 65504"):
        compress("A", torch.tensor([1.0, 7e4]), "float16")
