"""Headers of secure aggregation, with mistakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedspan.federation.protocol import Envelope, read_header
from fedspan.federation.secagg.messages import (
    Agreement,
    KeysOrder,
    KeysReply,
    PhaseReply,
    PublicKeys,
    SharesOrder,
    SharesReply,
    UnmaskOrder,
    UnmaskReply,
    decode_phase,
)
from helpers.fuzzed_headers import fuzzed


def answer_of(kind: type[PhaseReply]) -> Callable[[Envelope], PhaseReply]:
    return lambda envelope: read_header(kind, envelope)


def test_headers_with_mistakes_raise_nothing_but_a_value_error() -> None:
    fuzzed(phases(), 2_000, (decode_phase, *map(answer_of, (KeysReply, SharesReply, UnmaskReply))))


def phases() -> list[str]:
    session: dict[str, Any] = {"round": 0, "attempt": 0, "to": "a", "session": 7}
    keys = PublicKeys(
        sealing=bytes(range(32)),
        masking=bytes(range(100, 132)),
        own=bytes(range(60, 92)),
        identity="a b",
        signature=b"signed",
    )
    agreement = Agreement(
        config="", task="train", round=0, lr=0.1, model="0" * 64, clients=3, clip=1.5, bits=32, top=2.0, layout="0" * 64
    )
    phases = [
        KeysOrder(**session),
        SharesOrder(**session, threshold=2, peers={"a": keys, "b": keys}, agreement=agreement),
        UnmaskOrder(**session, survivors=("a", "b"), dropped=("c",), sealed={"a": bytes(range(96))}),
        KeysReply(id="a", session=7, keys=keys),
        SharesReply(id="a", session=7, sealed={"b": bytes(range(96))}),
        UnmaskReply(id="a", session=7, shares={"b": bytes(range(34))}),
    ]
    for phase in phases:
        assert read_header(type(phase), phase.to_envelope()) == phase
    return [phase.to_envelope().header for phase in phases]
