"""A node's book: what all runs of a server use of its data together, and that it can't be forgotten."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedspan.config.node import NodeConfig
from fedspan.deployment.node import NodeService
from fedspan.deployment.usage import UsageBook
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Order, decode_order, decode_reply
from fedspan.training.accounting import Charge, Mechanism
from helpers.node_service import introduced, node, served, values

ORDER = Order("train", 0, 0, 0.1, "clinic", None, b"model", run="first", serial=1)
CHARGE = (Charge("clinic", Mechanism(1.0, 5.0), 1),)


def book(folder: Path, server: str = "fl.example.org:9092", data: str = "own.csv", **limits: Any) -> UsageBook:
    given = {"id": "clinic", "server": server, "data": {"train": data}, "folder": str(folder / "state")}
    return UsageBook(NodeConfig.model_validate({**given, "key": str(folder / "node.key"), "limits": limits}))


def other(number: int) -> Order:
    return replace(ORDER, round=number, body=b"%d" % number)


def test_rounds_are_counted_over_all_runs(tmp_path: Path) -> None:
    """Run names are free; the rounds of all of them count together, and a repeated order once."""
    limits = {"rounds": 3}
    for run in ("first", "second", "first"):
        book(tmp_path, **limits).record_order(replace(ORDER, run=run), ())
    book(tmp_path, **limits).record_order(replace(ORDER, serial=9, attempt=2), ())
    assert book(tmp_path, **limits).get_account().rounds == 2
    book(tmp_path, **limits).require_run("third", 1)
    with pytest.raises(FedspanError, match="this server has used 2 rounds of this node's data, and 2 more exceed"):
        book(tmp_path, **limits).require_run("third", 2)
    book(tmp_path, **limits).record_order(replace(ORDER, body=b"another model"), ())
    for order in (replace(ORDER, run="fourth"), replace(ORDER, lr=0.2), ORDER):  # the first body again is not the last
        with pytest.raises(FedspanError, match=r"`limits\.rounds`: this server has used 3 rounds"):
            book(tmp_path, **limits).record_order(order, ())


def test_a_server_s_runs_and_evaluations_end(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node(tiny_folder, tmp_path, limits={"runs": 1, "evaluations": 2}))
    run, transport = served(tiny_folder, service)
    begin = run.federation.begin()
    for _ in range(2):
        assert run.evaluator.evaluate_clients(begin)[0] is not None
    assert run.evaluator.evaluate_clients(begin)[0] is None
    (failure,) = run.federation.pop_events().failures
    assert "this server has used 2 evaluations of this node's data" in failure.reason
    export = replace(decode_order(transport.sent[-1]), task="export", serial=2**52)
    assert "limits.evaluations" in (decode_reply(service.answer(export.to_envelope())).failed or "")
    told = introduced(service, values(tiny_folder), run="another")
    assert "`limits.runs`: this server has used 1 runs" in (told.refused or "")
    assert introduced(service, values(tiny_folder)).refused is None  # the same run again


def test_accounts_are_of_one_server_and_one_data_set(tmp_path: Path) -> None:
    book(tmp_path).record_order(ORDER, CHARGE)
    assert book(tmp_path, server="fl.example.org:1").get_account().rounds == 1  # a port is not another server
    for changes in ({"server": "other.example.org:9092"}, {"data": "other.csv"}):
        assert book(tmp_path, **changes).get_account().rounds == 0
        book(tmp_path, **changes).record_order(ORDER, ())
    assert book(tmp_path).get_account().releases == ((1.0, 5.0, 1),)


def _remove(path: Path) -> None:
    path.unlink()


def _roll_back(path: Path) -> None:
    content = path.read_bytes()
    book(path.parent.parent).record_order(other(7), ())
    book(path.parent.parent).record_order(other(8), ())
    path.write_bytes(content)


def _edit(path: Path) -> None:
    content = json.loads(path.read_text())
    for account in content["accounts"].values():
        account["releases"] = []
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (_remove, "is missing"),
        (_roll_back, "is not the newest"),
        (_edit, "is not the newest"),
        (lambda path: path.write_text("{"), "is damaged"),
        (lambda path: path.write_text('{"format": 1, "previous": "", "accounts": {"a": 1}}'), "is damaged"),
        (lambda path: (path.parent.parent / "node.key.budget").unlink(), "is not the newest"),
    ],
)
def test_a_book_that_is_lost_restores_no_budget(harm: Callable[[Path], object], why: str, tmp_path: Path) -> None:
    for number in range(2):
        book(tmp_path).record_order(other(number), CHARGE)
    harm(tmp_path / "state" / "budget.json")
    for use in (
        lambda: book(tmp_path).record_order(other(9), CHARGE),
        lambda: book(tmp_path).record_run("another"),
        lambda: book(tmp_path).require_run("another", 1),
    ):
        with pytest.raises(FedspanError) as refused:
            use()
        assert why in str(refused.value)


def test_a_node_whose_book_is_lost_refuses_orders_and_tells_no_path(tiny_folder: Path, tmp_path: Path) -> None:
    own = node(tiny_folder, tmp_path / "state")
    run, transport = served(tiny_folder, NodeService(own))
    run.federation.run_round(run.federation.begin())
    (tmp_path / "state" / "budget.json").unlink()
    order = replace(decode_order(transport.sent[-1]), serial=2**52)
    assert decode_reply(NodeService(own).answer(order.to_envelope())).failed == "an error; see the client's own log"
    assert introduced(NodeService(own), values(tiny_folder), run="new").refused == "an error; see the client's own log"


def test_a_crash_between_the_two_files_stops_nothing(tmp_path: Path) -> None:
    book(tmp_path).record_order(ORDER, ())
    marker = tmp_path / "node.key.budget"
    before = marker.read_bytes()
    book(tmp_path).record_order(other(1), ())
    marker.write_bytes(before)  # the book was written, the marker not yet
    book(tmp_path).record_order(other(2), ())
    assert book(tmp_path).get_account().rounds == 3
    content = (tmp_path / "state" / "budget.json").read_bytes()
    assert marker.read_text() == hashlib.sha256(content).hexdigest()
    assert {path.stat().st_mode & 0o777 for path in (marker, tmp_path / "state" / "budget.json")} == {0o600}


def test_epsilon_is_spent_before_the_order_is_carried_out(tmp_path: Path) -> None:
    pytest.importorskip("opacus", reason="the extra fedspan[privacy] is not installed")
    limited = book(tmp_path, epsilon=1.5)
    limited.record_order(ORDER, CHARGE)
    limited.record_order(ORDER, CHARGE)  # a repeated order is charged again, although it tells the same
    assert limited.get_account().releases == ((1.0, 5.0, 2),)
    with pytest.raises(FedspanError, match=r"`limits\.epsilon`"):
        limited.record_order(other(1), tuple(replace(one, count=50) for one in CHARGE))
    assert limited.get_account().releases == ((1.0, 5.0, 2),)
