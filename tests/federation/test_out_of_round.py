"""Exchanges of a model outside the rounds: which replies count, and what is recorded of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedspan.federation.out_of_round import exchange_model
from fedspan.federation.progress import Transfer
from fedspan.federation.protocol import Envelope, Reply, decode_order
from fedspan.runs.setup import prepare
from helpers import tiny
from helpers.reply_transport import Replies, ReplyingTransport


class Confused(ReplyingTransport):
    """Its clients answer as asked, another task, another round, and in another client's name."""

    def replies(self, envelopes: Mapping[str, Envelope], seconds: float, *, wait_for_offline: bool = False) -> Replies:
        for number, (id, envelope) in enumerate(envelopes.items()):
            order = decode_order(envelope)
            reply = Reply(order.task, order.round, 0, order.to)
            changed = {"task": "train"}, {"round": order.round + 1}, {"id": "nobody"}
            yield id, (replace(reply, **changed[number - 1]) if number else reply).to_envelope()


def test_an_answer_to_another_order_does_not_count(tiny_folder: Path) -> None:
    federation = prepare(tiny.config(tiny_folder)).federation
    ids, transfers, replies = sorted(federation.clients), list[Transfer](), dict[str, Reply | str]()

    def take(id: str, reply: Reply | str) -> bool:
        replies[id] = reply
        return False

    exchange_model(
        "export",
        federation.method,
        federation.begin().state,
        ids,
        lambda _: None,
        Confused(),
        run="",
        seconds=1.0,
        on_order=transfers.append,
        on_reply=take,
    )
    assert [(transfer.client, transfer.purpose) for transfer in transfers] == [(id, "export") for id in ids]
    assert replies == {
        ids[0]: Reply("export", 0, 0, ids[0], scores={}),
        ids[1]: f"an answer of {ids[1]!r} (train) to round 1",
        ids[2]: f"an answer of {ids[2]!r} (export) to round 2",
        ids[3]: "an answer of 'nobody' (export) to round 1",
    }
