"""The transport over Flower's grid: what reaches the nodes, and the reasons why there is no reply."""

import ast
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

import fedspan.transports.flower as package
from fedspan.federation.protocol import Envelope
from fedspan.federation.transport import Orders
from fedspan.transports.flower import server
from fedspan.transports.flower.client import from_records, to_records
from fedspan.transports.flower.server import GridTransport, invite
from helpers.reply_transport import exchanged

NODES = {"a": 11, "b": 12, "c": 13}
Answer = Callable[[Message], Message | None]


@pytest.fixture(autouse=True)
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower makes messages only where it knows of which task they are."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(server, "_POLL", (0.001, 0.01))


def echo(message: Message) -> Message:
    header, body = from_records(message.content)
    return Message(to_records(f"{header} of {message.metadata.dst_node_id}", body), reply_to=message)


class Grid:
    """A grid whose nodes reply by functions; one without a function never does."""

    def __init__(self, answers: dict[int, Answer | None], offline: Iterable[int] = ()) -> None:
        self.answers, self.offline = answers, set(offline)
        self.sent: dict[str, Message] = {}

    def get_node_ids(self) -> list[int]:
        return sorted(self.answers.keys() - self.offline)

    def push_messages(self, messages: list[Message]) -> list[str]:
        ids = list[str]()
        for message in messages:
            ids.append(f"m{len(self.sent)}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            self.sent[ids[-1]] = message
        return ids

    def pull_messages(self, ids: list[str]) -> list[Message]:
        assert len(ids) == 1  # or replies of any size would be in memory at once
        answers = ((self.sent[id], self.answers[self.sent[id].metadata.dst_node_id]) for id in ids)
        replies = [answer(message) for message, answer in answers if answer is not None]
        return [reply for reply in replies if reply is not None]


def send(grid: Any, seconds: float = 30.0, **options: Any) -> dict[str, Envelope | str]:
    orders = {id: Envelope(f"order to {id}", id.encode()) for id in NODES}
    return exchanged(GridTransport(grid, NODES, 0.05), orders, seconds, **options)


def test_every_order_reaches_its_node_and_comes_back() -> None:
    assert send(Grid(dict.fromkeys(NODES.values(), echo))) == {
        id: Envelope(f"order to {id} of {node}", id.encode()) for id, node in NODES.items()
    }


@pytest.mark.parametrize("content", [RecordDict(), RecordDict({"fedspan.header": ArrayRecord(), "x": ConfigRecord()})])
def test_a_node_that_fails_or_sends_something_else_is_named_with_the_reason(content: RecordDict) -> None:
    answers: dict[int, Answer | None] = {
        11: echo,
        12: lambda message: Message(Error(2, "its disk\x1b is full"), reply_to=message),
        13: lambda message: Message(content, reply_to=message),
    }
    replies = send(Grid(answers))
    assert isinstance(replies["a"], Envelope)
    assert replies["b"] == "its node failed (Flower's code 2: its disk\\x1b is full)"
    assert "other records" in str(replies["c"])


@pytest.mark.parametrize("waits", [False, True])
def test_an_offline_node_is_given_up_at_once_or_after_the_time_to_reconnect(waits: bool) -> None:
    grid = Grid(dict.fromkeys(NODES.values(), echo), offline={12})
    assert send(grid, wait_for_offline=waits)["b"] == "its node is not online"
    assert len(grid.sent) == 2


def test_a_node_that_comes_back_in_time_gets_its_order() -> None:
    grid = Grid(dict.fromkeys(NODES.values(), echo), offline={12})
    transport, replies = GridTransport(grid, NODES, 30.0), dict[str, Envelope | str]()  # pyright: ignore

    def on_reply(id: str, reply: Envelope | str) -> bool:
        replies[id] = reply
        grid.offline.clear()
        return False

    orders = Orders("train", NODES, lambda id: Envelope(id))
    transport.exchange(orders, on_reply, 30.0, wait_for_offline=True)
    assert {id for id, reply in replies.items() if isinstance(reply, Envelope)} == set(NODES)


def test_time_or_enough_replies_end_the_wait() -> None:
    grid = Grid({**dict.fromkeys(NODES.values(), echo), 13: None})
    assert send(grid, 0.05)["c"] == "no reply within 0.05 s"
    assert max(message.metadata.ttl for message in grid.sent.values()) < 61
    grid = Grid({**dict.fromkeys(NODES.values(), echo), 13: None})
    assert len(send(grid, enough=2)) == 2


def test_a_reply_above_its_limit_is_refused() -> None:
    transport, replies = GridTransport(Grid({11: echo}), {"a": 11}, 1.0), list[Envelope | str]()  # pyright: ignore
    orders = Orders("train", ["a"], lambda id: Envelope("{}", b"four"), lambda id: 3)
    transport.exchange(orders, lambda id, reply: replies.append(reply) or False, 30.0)
    assert replies == ["its reply has more than 3 bytes, the maximum"]


def test_a_superlink_that_takes_no_message_is_named() -> None:
    grid = Grid(dict.fromkeys(NODES.values(), echo))
    grid.push_messages = lambda messages: []  # as for one that is too large  # pyright: ignore
    assert set(send(grid).values()) == {"the SuperLink did not take its order"}


def test_nodes_are_invited_once_and_those_that_wait_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_REINVITE_SECONDS", 0.05)
    grid, undecided = Grid({11: echo, 12: echo}, offline={12}), set[int]()
    replies = list[int]()
    for node, reply in invite(grid, Envelope("join"), 30.0, undecided):  # pyright: ignore
        assert reply == Envelope(f"join of {node}")
        replies.append(node)
        grid.offline.clear()
        if node == 11:
            undecided.add(node)
        if replies.count(11) == 3:
            break
    assert sorted(replies) == [11, 11, 11, 12]


def test_a_node_that_the_superlink_could_not_send_to_is_invited_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_REINVITE_SECONDS", 0.05)
    grid, refused = Grid({11: echo}), list[Message]()
    push = grid.push_messages

    def refuse_first(messages: list[Message]) -> list[str]:
        if refused:
            return push(messages)
        refused.extend(messages)
        return []

    grid.push_messages = refuse_first  # pyright: ignore
    (reply,) = invite(grid, Envelope("join"), 1.0, set())  # pyright: ignore
    assert reply == (11, Envelope("join of 11"))


def test_an_introduction_with_a_body_is_refused() -> None:
    (reply,) = invite(Grid({11: echo}), Envelope("join", b"body"), 0.1, set())  # pyright: ignore
    assert reply == (11, "its introduction has a body")


def test_only_flower_s_public_interface_is_used() -> None:
    public = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}
    (folder,) = package.__path__
    for path in Path(folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name for name in names if name.split(".")[0] == "flwr"} <= public, path
