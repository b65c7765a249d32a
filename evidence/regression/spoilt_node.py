"""A node that misbehaves: ``fedspan join`` with a hook between what its holder answers and what it sends.

    python -m evidence.regression.spoilt_node NODE.yaml KIND_FILE

What it does is read again from the file for every order of the second round; nothing there: as it should. With the
variable SPOILT_VERSION it runs another version of fedspan.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event

import fedspan

if version := os.environ.get("SPOILT_VERSION"):  # at the top: the process that trains imports this file, too
    fedspan.__version__ = version

ROUND = 1
"""Number of the state with which the second round begins."""


def main() -> None:
    """Join."""
    import logging

    import torch

    from fedspan.clients.refusals import refuse
    from fedspan.core.values import Message
    from fedspan.deployment.deploy import join
    from fedspan.deployment.supervisor import Supervisor
    from fedspan.federation import serialization
    from fedspan.federation.protocol import Envelope, Order, decode_order, decode_reply

    def tensors(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Order, Envelope], Envelope]:
        def spoil(_: Order, reply: Envelope) -> Envelope:
            answer = decode_reply(reply)
            message = serialization.decode(answer.body)
            changed = {name: change(value) for name, value in message.tensors.items()}
            return replace(answer, body=serialization.encode(replace(message, tensors=changed))).to_envelope()

        return spoil

    def more(_: Order, reply: Envelope) -> Envelope:
        answer = decode_reply(reply)
        message = serialization.decode(answer.body)
        extra = {**message.tensors, "backdoor/A": torch.ones(4, 4)}
        return replace(answer, body=serialization.encode(Message(extra, message.scalars))).to_envelope()

    def raises(order: Order, reply: Envelope) -> Envelope:
        raise RuntimeError("a patient's name, which must not leave this machine")

    spoils: dict[str, Callable[[Order, Envelope], Envelope]] = {
        "declines": lambda order, _: refuse(order, RuntimeError("no")).to_envelope(),
        "raises": raises,
        "nan": tensors(lambda value: value * float("nan")),
        "shapes": tensors(lambda value: value[:1]),
        "extra": more,
        "huge": tensors(lambda value: value + 1000),
        "stale": lambda _, back: replace(decode_reply(back), round=ROUND - 1).to_envelope(),
        "too-large": lambda _, back: replace(decode_reply(back), body=bytes(3 << 20)).to_envelope(),
        "no-header": lambda _, back: Envelope('{"task": "train"', back.body),
    }
    kind_file, honest = Path(sys.argv[2]), Supervisor.answer

    def answer(self: Supervisor, envelope: Envelope) -> Envelope:
        reply = honest(self, envelope)
        kind = kind_file.read_text().strip() if kind_file.exists() else ""
        try:
            order = decode_order(envelope)
        except ValueError:
            return reply
        if not kind or order.task != "train" or order.round != ROUND:
            return reply
        return honest(self, envelope) if kind == "replay" else spoils[kind](order, reply)

    Supervisor.answer = answer
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    for quiet in ("httpx", "flwr"):
        logging.getLogger(quiet).setLevel(logging.WARNING)
    join(sys.argv[1], stop=Event())


if __name__ == "__main__":
    main()
