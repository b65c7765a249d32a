"""Two readers of one grid, and limits on what they read."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope
from helpers.pretend_grid import NODES, Grid
from helpers.reply_transport import exchanged

transport = pytest.importorskip(
    "fedspan.transports.flower.transport", reason="the extra fedspan[flower] is not installed"
)
grid_module = pytest.importorskip("fedspan.transports.flower.grid")


pytestmark = pytest.mark.usefixtures("identity")


def test_after_the_object_that_exceeds_the_limit_no_other_is_fetched() -> None:
    adapter = pytest.importorskip("fedspan.transports.flower.adapter")
    messages = pytest.importorskip("fedspan.transports.flower.messages")
    tree = adapter.ObjectTree(object_id="a", children=[adapter.ObjectTree(object_id=f"{n}") for n in range(99)])
    pulled: list[str] = []

    def pull(id: str) -> bytes:
        pulled.append(id)
        return bytes(2**20)

    assert len(messages.fetch_objects(tree, pull, 100 * 2**20, {})) == len(pulled) == 100
    pulled.clear()
    with pytest.raises(messages.TooLarge, match="more than 2 MiB") as raised:
        messages.fetch_objects(tree, pull, 2 * 2**20, {})
    assert adapter.pull_failure(raised.value) == "more than 2 MiB, the maximum"
    assert len(pulled) < 30  # the third, and those that other threads had asked for


def test_two_readers_of_one_grid_get_their_own_replies() -> None:
    grid = Grid([1, 2, 3], {3: 1})
    shared = grid_module.SharedGrid(grid)
    invitations = transport.Invitations(shared.side, Envelope("hello"), known=[1, 2])
    assert list(invitations.send(60.0)) == []
    assert list(invitations.receive()) == []
    assert exchanged(transport.GridTransport(shared, NODES), {"a": Envelope("order")}, 10.0) == {"a": Envelope("order")}
    assert invitations.pending_nodes == {3}
    assert list(shared.pull_messages(())) == []
    assert [node for node, _ in invitations.receive()] == [3]
    assert not invitations.pending_nodes
    grid.online = [1, 2, 3, 4]
    assert list(invitations.send(60.0)) == []
    assert grid.sent["m2"].metadata.dst_node_id == 4  # each node is invited once
    grid.online = [1, 2, 4]
    assert list(invitations.send(60.0)) == []
    grid.online = [1, 2, 3, 4]
    assert list(invitations.send(60.0)) == []
    assert [message.metadata.dst_node_id for message in list(grid.sent.values())[-2:]] == [4, 3]  # 3 came back
    grid.online = [1, 2, 3]
    assert list(invitations.send(60.0)) == []
    assert invitations.pending_nodes == {3}  # who is offline is not waited for


def test_a_reply_that_is_held_for_the_other_reader_is_not_requested_again() -> None:
    grid = Grid([1, 2], {2: 2})
    shared = grid_module.SharedGrid(grid)
    invitations = transport.Invitations(shared.side, Envelope("hello"), known=[2])
    assert list(invitations.send(60.0)) == []
    assert list(invitations.receive()) == []
    assert exchanged(transport.GridTransport(shared, NODES), {"b": Envelope("order")}, 10.0) == {"b": Envelope("order")}
    assert grid.requests == [["m0", "m1"], ["m1"], ["m1"]]
    assert [node for node, _ in invitations.receive()] == [1]


@pytest.mark.parametrize(("size", "is_read"), [(1000, True), (1001, False)])
def test_a_server_reads_no_more_than_the_order_allows(
    size: int, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = pytest.importorskip("fedspan.transports.flower.adapter")
    head = adapter.ReplyHead("reply", "order", adapter.ObjectTree(object_id="reply"), {"reply": bytes(size)})
    grid = object.__new__(grid_module.LimitedGrid)
    for name, value in {
        "push_messages": lambda self, messages: ["order" for _ in messages],
        "take_replies": lambda self, ids, seconds: [head],
        "make_error": lambda self, order, reason: reason,
    }.items():
        monkeypatch.setattr(adapter.TaskGrid, name, value)
    monkeypatch.setattr(grid_module.LimitedGrid, "limit", 2000)
    monkeypatch.setattr(grid_module, "assemble_message", lambda id, contents, limit: f"{id} within {limit}")
    order = SimpleNamespace(metadata=SimpleNamespace(group_id="reply-bytes:1000"))
    assert grid.push_messages([order]) == ["order"]
    partial = grid_module.LimitedGrid._continue
    results: list[Any] = []

    def keep(self: Any, reply: Any) -> None:
        results.append(partial(self, reply))

    monkeypatch.setattr(grid_module.LimitedGrid, "_continue", keep)
    assert grid.pull_messages(["order"]) == []
    (result,) = results
    assert result == ("reply within 1000" if is_read else "the reply has more than 0.000953674 MiB, the maximum")


@pytest.mark.parametrize(
    ("status", "said"),
    [(500, "failed with status 500, perhaps because its disk is full.*--resume"), (401, "does not know this run")],
)
def test_the_end_of_a_run_has_the_reason_that_the_superlink_gave(
    status: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    httpx = pytest.importorskip("httpx")

    class Ended:
        def __init__(self, *_: object) -> None:
            pass

        def serve_task(self) -> Any:
            return nullcontext()

    monkeypatch.setattr(grid_module, "call_flower", lambda *_: {"run-id": "1"})
    monkeypatch.setattr(grid_module, "_take_over", lambda *_: "token")
    monkeypatch.setattr(grid_module, "LimitedGrid", Ended)
    link = SimpleNamespace(address="127.0.0.1:1", authority=None, secret=tmp_path / "secret")
    with pytest.raises(FedspanError, match=said), grid_module.attach(link, 1):
        raise httpx.HTTPStatusError("", request=httpx.Request("POST", "http://a"), response=httpx.Response(status))
