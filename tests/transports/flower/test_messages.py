"""Envelopes as Flower's records: every bit arrives, and whatever else comes is refused by a ValueError."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspan.core.values import Message
from fedspan.deployment.handshake import Introduction, Invitation
from fedspan.federation import serialization
from fedspan.federation.protocol import Envelope, Masking, decode_order, decode_reply
from helpers.fuzzed_headers import fuzzed

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

from flwr import app

from fedspan.transports.flower import adapter, messages, signing
from fedspan.transports.flower import messages as codec

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool)


@settings(max_examples=30)
@given(st.text(max_size=50), st.binary(max_size=300))
def test_an_envelope_survives(header: str, body: bytes) -> None:
    sealed = signing.Sealed(Envelope(header, body), bytes(16), b"signature")
    assert codec.from_records(codec.to_records(sealed, codec.draw_salt())) == sealed


def test_equal_bodies_are_equal_objects_within_a_batch_and_unpredictable_ones_beyond_it() -> None:
    """Whoever can guess an object's name can announce it with children, and the SuperLink refuses the real one."""
    ids: list[set[str]] = []
    for size in (0, 100, codec.SMALL + 1):
        for salt in (salt_of := codec.draw_salt(), salt_of, codec.draw_salt()):
            records = records_of(Envelope("{}", bytes(size)), salt)
            ids.append({records["fedspan.body"].object_id})
    assert ids[0] == ids[1]
    assert ids[3] == ids[4]
    assert ids[6] == ids[7]
    assert len(set.union(*ids)) == 6
    headers = {records_of(Envelope("{}"), bytes(16))["fedspan.header"].object_id for _ in range(2)}
    assert len(headers) == 2


def records_of(envelope: Envelope, salt: bytes = bytes(16)) -> Any:
    return codec.to_records(signing.UnsignedSigner().seal(envelope, 1), salt)


@pytest.mark.usefixtures("identity")
@pytest.mark.parametrize(("over", "objects"), [(0, 4), (1, 6)])
def test_a_small_body_is_one_object_and_a_large_one_is_in_pieces(over: int, objects: int) -> None:
    body = bytes(over + codec.SMALL)
    message = app.Message(records_of(Envelope("{}", body)), dst_node_id=1, message_type="train")
    assert codec.from_records(message.content).envelope == Envelope("{}", body)
    assert len(adapter.deflate_message(message)[1]) == objects


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_messages_of_every_number_format_survive_to_the_bit(dtype: torch.dtype) -> None:
    value = (torch.randn(3, 5, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    sent = serialization.encode(Message({"layer/A": value}, {"round": 3}))
    back = serialization.decode(codec.from_records(records_of(Envelope("{}", sent))).envelope.body)
    assert back.tensors["layer/A"].dtype == dtype
    assert torch.equal(back.tensors["layer/A"], value)


def test_records_that_are_none_of_ours_are_refused() -> None:
    small, large = records_of(Envelope("{}", b"abc")), records_of(Envelope("{}", bytes(codec.SMALL + 1)))
    header, body = large["fedspan.header"], large["fedspan.body"]
    array = app.Array(np.zeros(3, np.uint8))
    for records in (
        app.RecordDict(),
        app.RecordDict({"fedspan.header": header}),
        app.RecordDict({"fedspan.header": header, "fedspan.body": header}),
        app.RecordDict({"fedspan.header": app.ConfigRecord({"header": 3}), "fedspan.body": body}),
        app.RecordDict({"fedspan.header": header, "fedspan.body": app.ArrayRecord({"body": array})}),
        app.RecordDict({"fedspan.header": header, "fedspan.body": app.ArrayRecord()}),
        app.RecordDict({"fedspan.header": small["fedspan.body"], "fedspan.body": body}),
        app.RecordDict({"fedspan.header": header, "fedspan.body": app.ConfigRecord({"body": "abc"})}),
        app.RecordDict({"fedspan.header": header, "fedspan.body": app.ConfigRecord({"body": b"abc", "more": 1})}),
        *(
            app.RecordDict({"fedspan.header": app.ConfigRecord({**header, field: value}), "fedspan.body": body})
            for field, value in (("nonce", "abc"), ("salt", b"abc"), ("signature", bytes(600)), ("more", 1))
        ),
    ):
        with pytest.raises(ValueError, match=r"record|body|header"):
            codec.from_records(records)


def test_records_with_mistakes_raise_nothing_but_a_value_error() -> None:
    rng = random.Random(1)
    names = ["fedspan.header", "fedspan.body", "header", "body", "", "x"]
    values: list[Any] = ["{}", "", 3, 2.5, True, b"abc", [1, 2], ["a"]]

    def array() -> Any:
        data = bytes(rng.randrange(256) for _ in range(rng.choice((0, 3, 17))))
        shape = rng.choice(((len(data),), (), (1, len(data)), (-1,), (2**40,)))
        kinds = ("fedspan.bytes", "numpy.ndarray", "")
        return app.Array(dtype=rng.choice(("uint8", "float32", "")), shape=shape, stype=rng.choice(kinds), data=data)

    def record() -> Any:
        kind = rng.randrange(3)
        if kind == 0:
            return app.ConfigRecord({rng.choice(names): rng.choice(values) for _ in range(rng.randrange(3))})
        if kind == 1:
            return app.ArrayRecord({rng.choice(names): array() for _ in range(rng.randrange(3))})
        return app.MetricRecord({rng.choice(names): rng.choice((1, 2.5)) for _ in range(rng.randrange(3))})

    read, headers = 0, seeds()
    large = app.ArrayRecord({"body": app.Array(dtype="uint8", shape=(3,), stype="fedspan.bytes", data=b"abc")})
    for _ in range(5_000):
        text = rng.choice(headers)
        good = records_of(Envelope(text, b"abc"))
        if rng.random() < 0.5:  # as if it were large
            good = app.RecordDict({"fedspan.header": good["fedspan.header"], "fedspan.body": large})
        records = app.RecordDict({name: good[name] for name in good if rng.random() < 0.8})
        for _ in range(rng.randrange(3)):
            records[rng.choice(names)] = record()
        try:
            made = codec.from_records(records)
        except ValueError:
            continue
        read += 1
        assert isinstance(made.envelope.header, str)
        assert isinstance(made.envelope.body, bytes)
    assert 0 < read < 5_000


def test_headers_with_mistakes_raise_nothing_but_a_value_error() -> None:
    fuzzed(seeds(), 3_000, (decode_order, decode_reply))


def seeds() -> list[str]:
    order = '{"format":1,"task":"train","run":"r","serial":1,"round":2,"attempt":0,"lr":0.1,"to":"a","client":'
    order += '{"id":"a","rank":2,"scaling":2.0,"examples":5,"weight":5.0,"last_round":null},"best":null}'
    answer = '{"format":1,"task":"train","round":2,"attempt":0,"id":"a","parts":[{"loss":1.5,"examples":5.0}],'
    answer += '"scores":{"test":{"accuracy":0.5,"examples":2.0}},"failed":null,"lost":false}'
    assert decode_order(Envelope(order)).client is not None
    assert decode_reply(Envelope(answer)).parts
    masking = Masking(session=7, peers=("a", "b"))
    masked = replace(decode_order(Envelope(order)), secure=masking)
    assert decode_order(masked.to_envelope()) == masked
    invitation = Invitation(run="r", version="1", config="{}").to_envelope().header
    introduction = Introduction(id="a", version="1").to_envelope().header
    return [order, answer, invitation, introduction, "[" * 3000, masked.to_envelope().header]


def _objects(records: Any) -> tuple[str, dict[str, bytes]]:
    """A Flower message's id and objects, as they are transmitted."""
    message = app.Message(records, dst_node_id=1, message_type="train")
    contents = adapter.deflate_message(message)[1]
    return message.metadata.message_id, contents


@pytest.mark.usefixtures("identity")
def test_a_message_is_as_large_as_its_array_however_little_was_transmitted() -> None:
    """Equal pieces are transmitted once: without care a thousandth would pass for the whole."""
    body, records = bytes(50 * 2**20), records_of(Envelope("{}"))
    array = app.Array(dtype="uint8", shape=(len(body),), stype="fedspan.bytes", data=body)
    records["fedspan.body"] = app.ArrayRecord({"body": array})
    id, contents = _objects(records)
    assert sum(map(len, contents.values())) < 12 * 2**20
    assert messages.count_assembled_bytes(contents) >= len(body)
    with pytest.raises(ValueError, match="more than 20 MiB"):
        messages.assemble_message(id, dict(contents), 20 * 2**20)
    whole = messages.assemble_message(id, contents, 51 * 2**20)
    assert len(codec.from_records(whole.content).envelope.body) == len(body)


@pytest.mark.usefixtures("identity")
@pytest.mark.parametrize("small", [codec.SMALL, 0])
def test_wrong_sets_of_objects_raise_nothing_but_a_value_error(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "SMALL", small)
    draw = random.Random(0)
    id, good = _objects(records_of(Envelope('{"a": 1}', bytes(range(200)))))
    names, refused = sorted(good), 0
    for _ in range(2_000):
        contents = dict(good)
        for _ in range(draw.randint(1, 3)):
            name = draw.choice(names)
            data = bytearray(contents.get(name, b""))
            match draw.randrange(5):
                case 0:
                    contents.pop(name, None)
                case 1:
                    contents[name] = contents.get(draw.choice(names), b"")
                case 2:
                    contents[name] = bytes(data[: draw.randint(0, len(data))])
                case _:
                    for _ in range(draw.randint(1, 4)):
                        if data:
                            data[draw.randrange(len(data))] = draw.randrange(256)
                    contents[name] = bytes(data)
        try:
            codec.from_records(messages.assemble_message(id, contents, 2**20).content)
        except ValueError:
            refused += 1
    assert refused > 1_000
