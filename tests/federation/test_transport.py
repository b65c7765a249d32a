"""Messages and orders: bit-exact, canonical, checked, and encoded and decoded once."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspan.assembly.run import prepare
from fedspan.config import parse_config
from fedspan.core.base import BasePatch, BaseUpdate, Delta, Increment, apply_patch
from fedspan.core.lowrank import LowRank
from fedspan.core.values import Message, ServerState
from fedspan.federation import serialization
from fedspan.federation.evaluation import ReportedEvaluator
from fedspan.federation.progress import OpenOrders, Progress
from fedspan.federation.protocol import Envelope
from fedspan.federation.serialization import compute_payload_size, decode, decode_state, encode, encode_state
from fedspan.federation.transport import AsynchronousTransport, OnReply, Orders, Transport
from fedspan.transports.in_process import InProcess
from helpers import tiny
from helpers.families import others_slow


class Silent(Transport):
    """Whose clients never reply."""

    def exchange(self, orders: Orders, on_reply: OnReply, seconds: float, *, wait_for_offline: bool = False) -> None:
        """Send nothing."""


class SilentLater(AsynchronousTransport, Silent):
    """The same with open orders."""

    def send_orders(self, orders: Orders, seconds: float, *, wait_for_offline: bool = False) -> None:
        """Send nothing."""

    def receive_reply(self) -> None:
        """Receive nothing."""

    def retain_orders(self, ids: Collection[str]) -> frozenset[str]:
        return frozenset(ids)

    def list_training(self) -> frozenset[str]:
        return frozenset()

    def list_stalled(self) -> frozenset[str]:
        return frozenset()

    def assume_training(self, ids: Collection[str]) -> None:
        """Assume nothing."""


def test_an_order_is_created_on_access_and_each_time() -> None:
    created: list[str] = []

    def create(id: str) -> Envelope:
        created.append(id)
        return Envelope(id.upper())

    orders = Orders("train", iter(["b", "a", "b"]), create)
    assert (list(orders), len(orders), "a" in orders, "c" in orders) == (["b", "a"], 2, True, False)
    assert created == []
    assert orders["a"] == Envelope("A")
    assert dict(orders) == {"b": Envelope("B"), "a": Envelope("A")}
    assert created == ["a", "b", "a"]
    with pytest.raises(KeyError, match="c"):
        orders["c"]
    assert created == ["a", "b", "a"]


def test_orders_of_another_function_go_to_the_same_clients_with_the_same_limits() -> None:
    orders = Orders("evaluate", ["a", "b"], Envelope, {"a": 5, "b": 0}.__getitem__)
    changed = orders.replace_make(lambda id: Envelope(f"<{orders[id].header}>"))
    assert dict(changed) == {"a": Envelope("<a>"), "b": Envelope("<b>")}
    assert changed.task == "evaluate"
    assert [changed.compute_reply_bytes(id) for id in "ab"] == [5, 0]
    assert Orders("evaluate", ["a"], Envelope).compute_reply_bytes("a") is None


def test_by_default_a_transport_stores_no_states_has_no_clock_and_leaves_no_order_open() -> None:
    transport = Silent()
    transport.begin(Progress(ServerState()))
    assert transport.accept_replies(["a"]) == {}
    assert transport.get_simulated_seconds() is None
    assert transport.retain_orders(["a"]) == transport.list_training() == transport.list_stalled() == frozenset()
    open = OpenOrders(number=3, states={1: ServerState(1)})
    assert transport.select_resumable(open) is open


def test_clients_of_other_processes_cannot_be_watched() -> None:
    with pytest.raises(ValueError, match="clients in other processes cannot be watched"):
        Silent().begin(Progress(ServerState()), lambda assignment, trained: None)


def test_a_resumed_asynchronous_run_needs_no_states_of_the_server() -> None:
    """The clients' own machines hold those that they train."""
    open = OpenOrders(number=3, clock=2.5, states={1: ServerState(1)})
    assert SilentLater().select_resumable(open) == OpenOrders(number=3, clock=2.5)


CLIENTS = len(tiny.SITES)


class Counts:
    """The bodies that were encoded and decoded, and those that clients replied with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.encoded, self.decoded, self.replies = Counter[bytes](), Counter[bytes](), list[bytes]()
        encode, decode, carry_out = serialization.encode, serialization.decode, InProcess.carry_out

        def count_encoding(message: Message) -> bytes:
            body = encode(message)
            self.encoded[body] += 1
            return body

        def count_decoding(body: bytes) -> Message:
            self.decoded[body] += 1
            return decode(body)

        def watch(
            transport: InProcess, orders: Orders, ids: Sequence[str], on_reply: Callable[[str, Envelope | str], object]
        ) -> None:
            def pass_on(id: str, reply: Envelope | str) -> object:
                assert isinstance(reply, Envelope)
                self.replies.append(reply.body)
                return on_reply(id, reply)

            carry_out(transport, orders, ids, pass_on)

        monkeypatch.setattr(serialization, "encode", count_encoding)
        monkeypatch.setattr(serialization, "decode", count_decoding)
        monkeypatch.setattr(InProcess, "carry_out", watch)

    def clear(self) -> None:
        self.encoded.clear()
        self.decoded.clear()
        self.replies.clear()


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="replies that wait for the clipping"),
        pytest.param({"federation": {"clip_ratio": None}}, id="replies that are folded"),
        pytest.param({"simulation": {"speed": {"median": 10.0}}}, id="replies that are compared"),
        pytest.param({"method": {"name": "flora"}}, id="changes of the base"),
        pytest.param({"method": {"wrappers": [{"name": "low-precision"}]}}, id="low precision"),
        pytest.param({"federation": {"secure": {}}}, id="masked replies"),
    ],
)
def test_a_round_encodes_its_order_and_each_reply_once(
    changes: Mapping[str, Any], tiny_folder: Path, counts: Counts
) -> None:
    if "secure" in changes.get("federation", {}):
        pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")
    changes = {**changes, "federation": {"clients_per_round": None, **changes.get("federation", {})}}
    federation = prepare(tiny.config(tiny_folder, **changes)).federation
    progress = federation.begin()
    for _ in range(2):
        counts.clear()
        result = federation.run_round(progress)
        progress = result.progress
        assert not result.failures
        assert len(set(counts.replies)) == CLIENTS
        assert counts.encoded == counts.decoded
        # Nodes under secure aggregation check that an order is in its one accepted encoding: all of this process once.
        order = 2 if "secure" in changes["federation"] else 1
        assert sorted(counts.encoded.values()) == [1] * CLIENTS + [order]


@pytest.mark.parametrize("method", others_slow(["hetlora", "flexlora", "fedhm"], ["hetlora", "flexlora"]))
def test_a_message_is_encoded_once_for_all_clients_of_a_rank(method: str, tiny_folder: Path, counts: Counts) -> None:
    """Also where clients of one rank do not follow one another."""
    settings = tiny.settings(tiny_folder, method={"name": method})
    settings["partition"] = {"partitioner": "iid", "clients": 12}
    settings["federation"] = {"rounds": 2, "clients_per_round": None, "ranks": [1, 2, 4]}
    federation = prepare(parse_config(settings)).federation
    progress = federation.begin()
    for _ in range(2):
        counts.clear()
        result = federation.run_round(progress)
        progress = result.progress
        assert not result.failures
        assert len(counts.replies) == 12
        orders = {body: count for body, count in counts.encoded.items() if body not in counts.replies}
        assert sum(orders.values()) == (1 if method == "flexlora" and progress.state.round == 1 else 3)
        assert {body: counts.decoded[body] for body in orders} == orders


def test_asynchronous_rounds_decode_each_reply_once(tiny_folder: Path, counts: Counts) -> None:
    """Also where some replies are rejected, so that the round takes further ones."""
    changes: dict[str, Any] = {
        "federation": {"clients_per_round": 2, "buffered": {"concurrency": 4}},
        "simulation": {"speed": {"median": 10.0}, "faults": {"share": 0.25, "kind": "nan"}},
    }
    federation = prepare(tiny.config(tiny_folder, **changes)).federation
    progress, rejected = federation.begin(), 0
    for _ in range(3):
        counts.clear()
        result = federation.run_round(progress)
        progress = result.progress
        rejected += len(result.failures)
        assert {body: counts.encoded[body] for body in counts.replies} == dict.fromkeys(counts.replies, 1)
        assert {body: counts.decoded[body] for body in counts.replies} == dict.fromkeys(counts.replies, 1)
    assert rejected


def test_an_evaluation_of_one_model_encodes_and_decodes_it_once(tiny_folder: Path, counts: Counts) -> None:
    federation = prepare(tiny.config(tiny_folder)).federation
    progress = federation.begin()
    scores, _ = ReportedEvaluator(federation, 8).evaluate_clients(progress)
    assert len(scores.by_client) == CLIENTS
    assert counts.encoded == counts.decoded
    assert sum(counts.encoded.values()) == 1


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
]
quick = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
NAMES = st.text(max_size=12) | st.sampled_from(["__metadata__", "a/B", "0", "", "ключ", "\x00", 'q"\\', "\udc80"])
SCALARS = st.dictionaries(NAMES, st.booleans() | st.integers() | st.floats() | st.text(max_size=8), max_size=4)


def raw(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def of_bits(dtype: torch.dtype, shape: tuple[int, ...], data: bytes) -> Tensor:
    """A tensor of arbitrary bits (NaN payloads and denormals included)."""
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    flat = torch.tensor(list(data), dtype=torch.uint8)
    return (flat.view(dtype) if data else torch.empty(0, dtype=dtype)).reshape(shape)


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    if shape is None:
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = dtype.itemsize * torch.Size(shape).numel()
    tensor = of_bits(dtype, shape, draw(st.binary(min_size=size, max_size=size)))
    return tensor.transpose(0, -1).contiguous().transpose(0, -1) if draw(st.booleans()) and shape else tensor


@st.composite
def deltas(draw: st.DrawFn) -> Delta:
    rows, columns, rank = draw(st.integers(0, 3)), draw(st.integers(0, 3)), draw(st.integers(0, 2))
    if draw(st.booleans()):
        return draw(tensors((rows, columns)))
    return LowRank(draw(tensors((rows, rank))), draw(tensors((rank, columns))), draw(st.floats()))


NAMED = st.dictionaries(NAMES, tensors(), max_size=4)
DELTAS = st.dictionaries(NAMES, deltas(), max_size=3)
INCREMENTS = st.lists(st.builds(Increment, st.integers(), DELTAS, st.floats()), max_size=2).map(tuple)
MESSAGES = st.builds(
    Message,
    NAMED,
    SCALARS,
    st.none() | st.builds(BasePatch, st.integers(0), INCREMENTS, st.booleans(), st.floats(), DELTAS),
)
STATES = st.builds(
    ServerState,
    st.integers(0, 9),
    NAMED,
    st.builds(BaseUpdate, st.integers(0), st.floats(), DELTAS, INCREMENTS, st.integers(0)),
    NAMED,
    SCALARS,
    st.integers(0, 9),
)


def bits(value: object) -> object:
    """Any of the values as nested plain data with types, for comparing exactly: tensors as bits, floats as hex."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), raw(value)
    if isinstance(value, Mapping):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [bits(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return type(value).__name__, bits(vars(value))
    return type(value).__name__, value.hex() if isinstance(value, float) else value


@quick
@given(MESSAGES)
def test_a_message_comes_back_bit_for_bit(message: Message) -> None:
    data = encode(message)
    assert bits(decode(data)) == bits(message)
    assert encode(decode(data)) == data
    assert compute_payload_size(message) <= len(data)


@quick
@given(STATES)
def test_a_state_comes_back_bit_for_bit_and_in_order(state: ServerState) -> None:
    back = decode_state(encode_state(state))
    assert bits(back) == bits(state)
    assert list(back.tensors) == list(state.tensors)
    assert list(back.base.total) == list(state.base.total)
    assert encode_state(back) == encode_state(decode_state(encode_state(back)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout(dtype: torch.dtype) -> None:
    whole = of_bits(dtype, (4, 6), bytes(range(100, 124)) * dtype.itemsize)
    named = {
        "whole": whole,
        "again": whole,
        "row": whole[1],
        "view": whole[1:3],
        "transposed": whole.T,
        "strided": whole[::2, 1::3],
        "expanded": whole[:1].expand(3, 6),
        "scalar": whole[0, 0],
        "empty": whole[:, :0],
    }
    back = decode(encode(Message(named))).tensors
    assert bits(back) == bits(named)
    assert all(tensor.is_contiguous() for tensor in back.values())
    back["whole"].view(torch.uint8).zero_()
    assert raw(back["again"]) == raw(whole), "tensors of a decoded message share no memory"


def test_conjugated_negated_and_trainable_tensors() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    named = {"conj": z.conj(), "neg": z.conj().imag, "parameter": torch.nn.Parameter(torch.ones(2))}
    back = decode(encode(Message(named))).tensors
    assert all(torch.equal(back[name], named[name]) for name in named)
    assert not back["parameter"].requires_grad


@quick
@given(MESSAGES, st.randoms())
def test_equal_messages_give_equal_bytes(message: Message, random: object) -> None:
    def shuffled(mapping: object) -> dict:
        items = list(dict(mapping).items())
        random.shuffle(items)
        return dict(items)

    other = Message(
        {name: tensor.clone() for name, tensor in shuffled(message.tensors).items()},
        shuffled(message.scalars),
        message.base and replace(message.base, total=shuffled(message.base.total)),
    )
    assert encode(other) == encode(message)


def test_scalars_keep_their_types() -> None:
    scalars = {"i": 1, "f": 1.0, "b": True, "s": "1", "big": 2**80, "tiny": 5e-324, "minus": -0.0, "inf": float("-inf")}
    back = decode(encode(Message(scalars=scalars))).scalars
    assert bits(back) == bits(scalars)


@pytest.mark.parametrize(
    "message",
    [
        Message({"x": torch.ones(1, dtype=torch.complex128)}),
        Message({"x": torch.ones(2).to_sparse()}),
        Message({"x": torch.ones(2, device="meta")}),
        Message(scalars={"x": None}),
        Message(scalars={"x": torch.ones(())}),
    ],
    ids=["complex128", "sparse", "meta", "none", "tensor as scalar"],
)
def test_what_cannot_be_stored_is_refused_by_name(message: Message) -> None:
    with pytest.raises(ValueError, match="'x'"):
        encode(message)


def test_payload_counts_tensor_data_only() -> None:
    factors = LowRank(torch.ones(4, 2), torch.ones(2, 3))
    patch = BasePatch(3, (Increment(3, {"l": torch.ones(4, 3)}),), total={"l": factors})
    message = Message({"a": torch.ones(5, dtype=torch.bfloat16), "b": torch.ones(())}, {"s": 1.0}, patch)
    assert compute_payload_size(message) == 10 + 4 + 4 * 12 + 4 * 14
    stored = safetensors.torch.load(encode(message))
    assert sum(tensor.numel() * tensor.element_size() for tensor in stored.values()) == compute_payload_size(message)


def test_a_replayed_base_has_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    base = BaseUpdate()
    for round in range(1, 4):
        pair = LowRank(torch.randn(8, 1, generator=generator), torch.randn(1, 8, generator=generator), 0.3)
        base = base.add(Increment(round, {"l": pair}, decay=0.9))
    for held in (None, 1, 2):
        sent = decode(encode(Message(base=base.build_patch(held)))).base
        assert bits(sent) == bits(base.build_patch(held))
    whole = apply_patch(BaseUpdate(), decode(encode(Message(base=base.build_patch(None)))).base)
    assert bits(whole.total) == bits(base.total)


def test_a_state_stores_a_tensor_object_once() -> None:
    pair = LowRank(torch.ones(500, 4), torch.ones(4, 500))
    state = ServerState(base=BaseUpdate().add(Increment(1, {"l": pair})))
    assert state.base.total["l"] is pair
    assert len(encode_state(state)) < 1.2 * pair.numel() * 4
    assert bits(decode_state(encode_state(state))) == bits(state)


def with_structure(text: str, tensors: dict[str, Tensor] | None = None) -> bytes:
    return safetensors.torch.save(tensors or {}, {"fedspan": text})


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not a fedspan message"),
        (b"\x80\x04\x95.", "not a fedspan message"),
        (b"\xff" * 64, "not a fedspan message"),
        (safetensors.torch.save({"x": torch.ones(1)}), "not a fedspan message"),
        (with_structure("[" * 100_000), "not a fedspan message"),
        (with_structure("[]"), "kind"),
        (with_structure('{"kind":"message","format":2}'), "format 2"),
        (encode_state(ServerState()), "a fedspan state, not a message"),
    ],
    ids=["empty", "pickle", "ff", "plain safetensors", "deep", "list", "future", "state"],
)
def test_what_is_no_message_says_why(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decode(data)


def test_bools_of_other_bits_are_refused() -> None:
    data = bytearray(encode(Message({"x": torch.tensor([True])})))
    data[-1] = 7
    with pytest.raises(ValueError, match="neither true nor false"):
        decode(bytes(data))


def test_a_header_is_no_larger_than_a_message_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    many = Message({f"layer.{number}/A": torch.zeros(1) for number in range(300)})
    assert len(decode(encode(many)).tensors) == 300
    monkeypatch.setattr("fedspan.federation.serialization.MESSAGE_HEADER", 1000)
    with pytest.raises(ValueError, match=r"a header of .* bytes, of 1000 at most"):
        decode(encode(many))
