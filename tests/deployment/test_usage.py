"""A node's book: what all runs of a server use of its data together, and that it can't be forgotten."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from fedspan.config.node import NodeConfig, NodeLimits, load_node
from fedspan.core.values import Client
from fedspan.deployment import usage_markers
from fedspan.deployment.audit import AUDIT
from fedspan.deployment.node import NodeService
from fedspan.deployment.usage import DataUse, UsageBook
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Masking, Order, decode_order, decode_reply
from fedspan.logs import AuditLog
from fedspan.training.accounting import Charge, Mechanism
from helpers import refusals, tiny
from helpers.command_line import get_program
from helpers.node_service import introduced, node, served, values
from helpers.refusals import refused

ORDER = Order("train", 0, 0, 0.1, "clinic", None, b"model", run="first", serial=1)
CHARGE = (Charge("clinic", Mechanism(1.0, 5.0), 1),)


def book(
    folder: Path, server: str = "fl.example.org:9092", data: str = "own.csv", name: str = "data", **limits: Any
) -> UsageBook:
    """The book of a node in a folder; its key was created before the first call."""
    given = {"id": "clinic", "server": server, "data": {"train": data}, "data_id": name}
    given = {**given, "folder": str(folder / "state"), "key": str(folder / "node.key"), "limits": limits}
    if not (folder / "node.key").exists():
        (folder / "node.key").touch()
        usage_markers.allow_first_book(folder / "node.key")
    made = UsageBook(NodeConfig.model_validate(given))
    made.begin()
    return made


def other(number: int) -> Order:
    return replace(ORDER, round=number, body=b"%d" % number)


def test_rounds_are_counted_over_all_runs(tmp_path: Path) -> None:
    """Run names are free; the rounds of all of them count together, and a repeated order once."""
    limits = {"rounds": 3}
    for run in ("first", "second", "first"):
        book(tmp_path, **limits).record_order(replace(ORDER, run=run), (), "job")
    book(tmp_path, **limits).record_order(replace(ORDER, serial=9, attempt=2), (), "job")
    assert book(tmp_path, **limits).get_account().rounds == 2
    book(tmp_path, **limits).require_run("third", 1)
    with refusals.refused("limits.rounds"):
        book(tmp_path, **limits).require_run("third", 2)
    book(tmp_path, **limits).record_order(replace(ORDER, body=b"another model"), (), "job")
    assert book(tmp_path, **limits).get_account().rounds == 3
    for order in (replace(ORDER, run="fourth"), replace(ORDER, lr=0.2), ORDER):  # the first body again is not the last
        with refused("limits.rounds"):
            book(tmp_path, **limits).record_order(order, (), "job")


def test_a_second_exchange_is_free_once_a_round(tmp_path: Path) -> None:
    """Differences of two sums of one training tell a single client's reply, so each further sum is a round."""
    limits = {"rounds": 3}
    second = replace(ORDER, task="second", body=b"directions", secure=Masking(session=8, peers=("clinic", "lab")))
    book(tmp_path, **limits).record_order(ORDER, (), "job")
    for order in (second, replace(second, attempt=1, serial=4), ORDER, second):
        book(tmp_path, **limits).record_order(order, (), "job")
        assert book(tmp_path, **limits).get_account().rounds == 1
    assert book(tmp_path, **limits).get_account().evaluations == 0
    book(tmp_path, **limits).record_order(replace(second, body=b"other directions"), (), "job")
    assert book(tmp_path, **limits).get_account().rounds == 2
    session = replace(second, secure=Masking(session=9, peers=("clinic", "lab")))
    book(tmp_path, **limits).record_order(session, (), "job")
    assert book(tmp_path, **limits).get_account().rounds == 3
    for order in (second, replace(session, run="another"), replace(session, secure=None)):
        with refused("limits.rounds"):
            book(tmp_path, **limits).record_order(order, (), "job")


def test_orders_for_keys_and_shares_end(tmp_path: Path) -> None:
    """Fourteen for each round that a run may have; they leave its rounds as they are."""
    limits = {"run_rounds": 1}
    for _ in range(14):
        book(tmp_path, **limits).record_exchange("first")
    with refused("limits.run_rounds"):
        book(tmp_path, **limits).record_exchange("first")
    book(tmp_path, **limits).record_exchange("second")
    book(tmp_path, **limits).record_order(ORDER, (), "job")
    assert book(tmp_path, **limits).get_account().rounds == 1


def test_the_same_order_under_another_config_counts_again(tmp_path: Path) -> None:
    for job in ("a", "b", "b", "a"):
        book(tmp_path).record_order(ORDER, (), job)
    assert book(tmp_path).get_account().rounds == 3


def test_an_order_with_other_facts_or_of_another_secure_session_counts_again(tmp_path: Path) -> None:
    client = Client("clinic", rank=4, scaling=2.0, examples=9, weight=9.0, last_round=None)
    secure = replace(ORDER, client=client, secure=Masking(session=7, peers=("clinic", "lab")))
    orders = [
        secure,
        replace(secure, secure=Masking(session=8, peers=("clinic", "lab"))),
        replace(secure, secure=None),
        replace(secure, client=replace(client, rank=8)),
        replace(secure, client=replace(client, last_round=0)),
    ]
    for count, order in enumerate(orders, 1):
        for attempt in range(2):  # a repetition, with another serial, attempt or rest of its neighbors, counts once
            peers = None if order.secure is None else Masking(session=order.secure.session, peers=("clinic",))
            repeated = replace(order, serial=10 * count + attempt, attempt=attempt)
            book(tmp_path).record_order(replace(repeated, secure=peers) if attempt else repeated, (), "job")
            assert book(tmp_path).get_account().rounds == count


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
    book(tmp_path).record_order(ORDER, CHARGE, "job")
    for server in ("fl.example.org:1", "FL.Example.org:9092", "fl.example.org.:9092"):  # none is another server
        assert book(tmp_path, server=server).get_account().rounds == 1
    for changes in ({"server": "other.example.org:9092"}, {"name": "second"}):
        assert book(tmp_path, **changes).get_account().rounds == 0
        book(tmp_path, **changes).record_order(ORDER, (), "job")
    assert book(tmp_path).get_account().releases == ((1.0, 5.0, 1),)
    assert [(account.server, account.data) for account in book(tmp_path).list_accounts()] == [
        ("fl.example.org", "data"),
        ("fl.example.org", "second"),
        ("other.example.org", "data"),
    ]


def test_no_other_spelling_copy_or_change_of_the_data_opens_a_new_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    file = tmp_path / "own" / "train.csv"
    file.write_text("text,label\na,b\n")
    first = book(tmp_path, data=str(file))
    content = first.record_run("first").content
    first.record_order(ORDER, CHARGE, "job")
    (tmp_path / "link.csv").symlink_to(file)
    (tmp_path / "linked").symlink_to(file.parent)
    shutil.copy(file, tmp_path / "another name.csv")
    monkeypatch.chdir(tmp_path)
    spellings = ["own/train.csv", "own/../own/train.csv", "link.csv", "linked/train.csv", "another name.csv"]
    for data in (*spellings, str(file), "own", "own/", "own/{part}.csv", os.path.relpath(file)):
        same = book(tmp_path, data=data)
        assert same.record_run(f"by {data}") == DataUse(content)
        assert same.get_account().rounds == 1
    file.write_text(file.read_text() + "c,b\n")  # the owner appends a row: the account goes on
    changed = first.record_run("after")
    assert (changed.is_changed, changed.content != content) == (True, True)
    assert first.record_run("after") == DataUse(changed.content)  # noted once
    assert first.get_account().rounds == 1
    assert first.get_account().contents[1:] == (changed.content,)
    for data in (str(file), "another name.csv"):  # a new name does not separate them from what was used of them
        with refusals.refused("data_id", "these training data have a budget already, as data set 'data'"):
            book(tmp_path, data=data, name="renamed").record_run("renamed")


def _remove(path: Path) -> None:
    path.unlink()


def _roll_back(path: Path) -> None:
    content = path.read_bytes()
    book(path.parent.parent).record_order(other(7), (), "job")
    book(path.parent.parent).record_order(other(8), (), "job")
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
        (lambda path: path.write_text('{"format": 2, "previous": "", "accounts": {"a": 1}}'), "is damaged"),
        (lambda path: path.write_text('{"format": 1, "previous": "", "accounts": {}}'), "of another version"),
        (lambda path: (path.parent.parent / "node.key.budget").unlink(), "is not the newest"),
        (lambda path: (path.parent.parent / "node.key.budget").write_text(""), "is not the newest"),
        (lambda path: (_remove(path), _remove(path.parent.parent / "node.key.budget")), "is missing"),
        (lambda path: (shutil.rmtree(path.parent), _remove(path.parent.parent / "node.key.budget")), "is missing"),
        (lambda path: shutil.rmtree(path.parent), "is missing"),
    ],
)
def test_a_book_that_is_lost_restores_no_budget(harm: Callable[[Path], object], why: str, tmp_path: Path) -> None:
    for number in range(2):
        book(tmp_path).record_order(other(number), CHARGE, "job")
    harm(tmp_path / "state" / "budget.json")
    for use in (
        lambda: book(tmp_path).record_order(other(9), CHARGE, "job"),
        lambda: book(tmp_path).record_run("another"),
        lambda: book(tmp_path).require_run("another", 1),
    ):
        with pytest.raises(FedspanError) as refused:
            use()
        assert why in str(refused.value)
        assert "fedspan budget NODE --new" in str(refused.value)


def test_a_node_that_has_answered_gets_no_first_book(tiny_folder: Path, tmp_path: Path) -> None:
    """Not even without a key, and if the marker of a new key is put back: the folder shows what the node did."""
    own = node(tiny_folder, tmp_path / "state")
    run, _ = served(tiny_folder, NodeService(own))
    run.federation.run_round(run.federation.begin())
    (tmp_path / "state" / "budget.json").unlink()
    own.budget_marker.unlink()
    with pytest.raises(FedspanError, match="is missing"):
        _begin(own).get_account()
    keyed = own.model_copy(update={"key": str(tmp_path / "node.key")})
    usage_markers.allow_first_book(tmp_path / "node.key")
    for left in (AUDIT, None):  # the folder of a run is enough
        with pytest.raises(FedspanError, match="is missing"):
            _begin(keyed).get_account()
        if left is not None:
            (tmp_path / "state" / left).unlink()
    shutil.rmtree(tmp_path / "state")
    assert _begin(keyed).get_account().rounds == 0


def _begin(own: NodeConfig) -> UsageBook:
    made = UsageBook(own)
    made.begin()
    return made


def test_a_key_that_was_copied_or_not_made_for_this_has_no_budget(tmp_path: Path) -> None:
    book(tmp_path).record_order(ORDER, CHARGE, "job")
    (tmp_path / "copy.key").touch()
    (tmp_path / "link.key").symlink_to(tmp_path / "node.key")
    for key in ("copy.key", "link.key"):
        given = {"id": "clinic", "server": "fl.example.org:9092", "folder": str(tmp_path / key), "data": {}}
        with pytest.raises(FedspanError, match="is missing"):
            _begin(NodeConfig.model_validate({**given, "key": str(tmp_path / key)})).get_account()


def _write_node_file(folder: Path, key: str | None) -> tuple[Path, UsageBook]:
    given = {"id": "clinic", "server": "fl.example.org:9092", "data": {"train": "own.csv"}, "folder": "state"}
    (folder / "own.csv").touch()
    file = folder / "node.yaml"
    file.write_text(yaml.safe_dump(given if key is None else {**given, "key": key}))
    return file, UsageBook(load_node(file))


def test_a_new_key_continues_the_budget_of_the_one_that_it_replaces(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra fedspan[deploy] is not installed")
    (tmp_path / "keys").mkdir()
    call = partial(CliRunner().invoke, get_program())
    made = call(["join", "--new-key", str(tmp_path / "old.key")])
    assert made.exit_code == 0, made.output
    _, old = _write_node_file(tmp_path, "old.key")
    old.begin()
    old.record_order(ORDER, CHARGE, "job")
    for arguments in (["--new-key", str(tmp_path / "new.key")], []):  # another key, and no new one
        refused = call(["join", *arguments, "--replaces", str(tmp_path / "none.key")])
        assert (refused.exit_code, "--replaces" in refused.output) == (2, True)
    assert not (tmp_path / "new.key").exists()
    new_key = tmp_path / "keys" / "new.key"
    made = call(["join", "--new-key", str(new_key), "--replaces", str(tmp_path / "old.key")])
    assert made.exit_code == 0, made.output
    for number in (1, 2, 3):  # the node runs with the old key until the new one is admitted
        old.record_order(other(number), (), "job")
    file, new = _write_node_file(tmp_path, "keys/new.key")
    assert new.get_account().rounds == 4
    new.begin()
    (tmp_path / "old.key").unlink()
    (tmp_path / "old.key.budget").unlink()
    new.record_order(other(4), (), "job")
    assert (new.get_account().rounds, new.get_account().releases) == (5, ((1.0, 5.0, 1),))
    assert call(["budget", str(file), "--replaces", str(tmp_path / "old.key")]).exit_code == 2


def test_a_new_key_that_meets_the_book_of_another_one_is_told_the_command(tmp_path: Path) -> None:
    for key, before in (("first.key", tmp_path / "state"), ("second.key", tmp_path / "first.key")):
        if key == "first.key":  # a trial without a key
            _, trial = _write_node_file(tmp_path, None)
            trial.begin()
            trial.record_order(ORDER, (), "job")
        usage_markers.allow_first_book(tmp_path / key)
        file, keyed = _write_node_file(tmp_path, key)
        keyed.begin()
        with pytest.raises(FedspanError) as refused:
            keyed.get_account()
        assert f"run `fedspan budget NODE --replaces {before}`" in str(refused.value)
        stale = CliRunner().invoke(get_program(), ["budget", str(file), "--replaces", str(tmp_path / "other.key")])
        assert (stale.exit_code, "other.key.budget" in stale.output) == (2, True)
        continued = CliRunner().invoke(get_program(), ["budget", str(file), "--replaces", str(before)])
        assert (continued.exit_code, "rounds 1 of 200" in continued.output) == (0, True), continued.output
        keyed.begin()
        assert keyed.get_account().rounds == 1
    events = [row["event"] for row in AuditLog(tmp_path / "state" / AUDIT).read()]
    assert events == ["key replaced", "key replaced"]


def test_an_older_book_is_not_continued_by_a_new_key(tmp_path: Path) -> None:
    _, old = _write_node_file(tmp_path, "old.key")
    usage_markers.allow_first_book(tmp_path / "old.key")
    old.begin()
    content = old.path.read_bytes()
    for number in range(3):
        old.record_order(other(number), (), "job")
    old.path.write_bytes(content)
    usage_markers.allow_first_book(tmp_path / "new.key")
    _, new = _write_node_file(tmp_path, "new.key")
    with pytest.raises(FedspanError, match="is not the newest"):
        new.replace_key(tmp_path / "old.key")
    usage_markers.continue_book(tmp_path / "third.key", tmp_path / "old.key")
    _, third = _write_node_file(tmp_path, "third.key")
    with pytest.raises(FedspanError, match="is not the newest"):
        _ = (third.begin(), third.get_account())


def test_the_operator_sees_the_budget_and_starts_a_new_one_deliberately(tmp_path: Path) -> None:
    (tmp_path / "own.csv").touch()
    given = {"id": "clinic", "server": "fl.example.org:9092", "data": {"train": "own.csv"}, "folder": "state"}
    file = tmp_path / "node.yaml"
    file.write_text(yaml.safe_dump({**given, "key": "node.key", "limits": {"epsilon": None, "runs": 7}}))
    book(tmp_path).record_order(ORDER, (), "job")
    call = partial(CliRunner().invoke, get_program())
    shown = call(["budget", str(file)])
    expected = "invitations 0 of 100, runs 1 of 7, rounds 1 of 200, evaluations 0 of 120, epsilon 0 of no limit"
    assert (shown.exit_code, shown.output) == (0, f"fl.example.org, data set data: {expected}\n")
    (row,) = json.loads(call(["budget", str(file), "--json"]).output)
    assert row["rounds"] == [1, 200]
    (tmp_path / "state" / "budget.json").unlink()
    lost = call(["budget", str(file)])
    assert (lost.exit_code, "is missing" in lost.output) == (2, True)
    assert call(["budget", str(file), "--new"]).exit_code == 2  # without a reason
    assert call(["budget", str(file), "--new", "--reason", "the disk failed"]).exit_code == 0
    assert call(["budget", str(file)]).output == "no server has used this node's data yet\n"
    (entry,) = AuditLog(tmp_path / "state" / AUDIT).read()
    assert (entry["event"], entry["reason"]) == ("budget restarted", "the disk failed")


def test_changed_data_are_in_the_audit_log(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    shutil.copy(tiny_folder / "corpus.csv", file)
    own = node(tiny_folder, tmp_path / "state", data={"train": str(file)}, examples=50)
    assert introduced(NodeService(own), values(tiny_folder)).refused is None
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines, lines[-1]]))
    assert introduced(NodeService(own), values(tiny_folder), run="second").refused is None
    events = [row["event"] for row in AuditLog(tmp_path / "state" / AUDIT).read()]
    assert events == ["joined", "data changed", "joined"]
    assert len(UsageBook(own).get_account().runs) == 2
    run, transport = served(tiny_folder, NodeService(own))
    run.federation.run_round(run.federation.begin())
    for number in range(2):  # the same order: its replies before and after differ by what the added example does
        order = replace(decode_order(transport.sent[-1]), serial=2**52 + number)
        assert not decode_reply(NodeService(own).answer(order.to_envelope())).failed
        assert UsageBook(own).get_account().rounds == 1 + number
        file.write_text("".join([*lines, *lines[-2:]]))


def test_the_same_data_for_a_server_of_another_name_are_in_the_audit_log(tiny_folder: Path, tmp_path: Path) -> None:
    own = node(tiny_folder, tmp_path / "state", data={"train": str(tiny_folder / "corpus.csv")})
    assert introduced(NodeService(own), values(tiny_folder)).refused is None
    renamed = own.model_copy(update={"server": "192.0.2.1:9092"})
    for run in ("second", "third"):  # noted once
        assert introduced(NodeService(renamed), values(tiny_folder), run=run).refused is None
    rows = list(AuditLog(tmp_path / "state" / AUDIT).read())
    assert [row["event"] for row in rows] == ["joined", "data used by another server", "joined", "joined"]
    assert rows[1]["servers"] == [own.server.rpartition(":")[0] or own.server]
    assert (len(UsageBook(own).get_account().runs), len(UsageBook(renamed).get_account().runs)) == (1, 2)


def test_by_default_every_total_ends(tmp_path: Path) -> None:
    limits = NodeLimits()
    assert limits.epsilon is not None
    with refused("limits.rounds"):
        book(tmp_path).require_run("long", limits.rounds + 1)
    book(tmp_path).require_run("long", limits.rounds)


def test_a_node_whose_book_is_lost_refuses_orders_and_tells_no_path(tiny_folder: Path, tmp_path: Path) -> None:
    own = node(tiny_folder, tmp_path / "state")
    run, transport = served(tiny_folder, NodeService(own))
    run.federation.run_round(run.federation.begin())
    (tmp_path / "state" / "budget.json").unlink()
    order = replace(decode_order(transport.sent[-1]), serial=2**52)
    assert decode_reply(NodeService(own).answer(order.to_envelope())).failed == "an error; see the client's own log"
    assert introduced(NodeService(own), values(tiny_folder), run="new").refused == "an error; see the client's own log"


def test_a_crash_between_the_two_files_stops_nothing(tmp_path: Path) -> None:
    book(tmp_path).record_order(ORDER, (), "job")
    marker = tmp_path / "node.key.budget"
    before = marker.read_bytes()
    book(tmp_path).record_order(other(1), (), "job")
    marker.write_bytes(before)  # the book was written, the marker not yet
    book(tmp_path).record_order(other(2), (), "job")
    assert book(tmp_path).get_account().rounds == 3
    content = (tmp_path / "state" / "budget.json").read_bytes()
    assert marker.read_text() == hashlib.sha256(content).hexdigest()
    assert {path.stat().st_mode & 0o777 for path in (marker, tmp_path / "state" / "budget.json")} == {0o600}


@pytest.mark.parametrize("mechanism", [pytest.param("local", marks=pytest.mark.slow), "dp-sgd"])
def test_a_run_that_would_exceed_epsilon_is_refused_at_its_start(
    mechanism: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """What the node plans is what the orders of all rounds cost it."""
    pytest.importorskip("opacus", reason="the extra fedspan[privacy] is not installed")
    privacy = {"mechanism": mechanism, "noise": 4.0, "randomness": "secret"}
    service = NodeService(node(tiny_folder, tmp_path / "first", limits={"epsilon": None}))
    run, _ = served(tiny_folder, service, privacy=privacy)
    tiny.run_all_rounds(run)
    account = UsageBook(service.node).get_account()
    assert sum(count for *_, count in account.releases) >= run.federation.settings.rounds
    cost = account.compute_epsilon(1e-5)
    for epsilon, is_refused in ((cost * 0.999, True), (cost * 1.001, False)):
        limited = NodeService(node(tiny_folder, tmp_path / str(epsilon), limits={"epsilon": epsilon}))
        refused = introduced(limited, values(tiny_folder, privacy=privacy)).refused
        assert (refused is not None) == is_refused, refused
        assert not is_refused or f"would cost an epsilon of {cost:.4g}" in str(refused)
    # Another run of the same rounds does not fit into what one order has left.
    rate, noise, count = account.releases[0]
    UsageBook(limited.node).record_order(ORDER, (Charge("clinic", Mechanism(rate, noise), count // 3),), "job")
    again = introduced(limited, values(tiny_folder, privacy=privacy), run="second").refused
    assert again is not None
    assert "that this server has spent" in again
    assert introduced(limited, values(tiny_folder, privacy=privacy)).refused is None  # it was joined before


def test_a_run_with_an_epsilon_of_its_own_or_a_selection_of_nodes_is_not_refused(
    tiny_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("opacus", reason="the extra fedspan[privacy] is not installed")
    service = NodeService(node(tiny_folder, tmp_path, limits={"epsilon": 5.0, "run_rounds": 60}))
    privacy = {"mechanism": "local", "noise": 4.0, "randomness": "secret"}

    def refused(run: str, federation: dict[str, Any], **changes: Any) -> str | None:
        config = {**values(tiny_folder, privacy={**privacy, **changes}), "federation": {"rounds": 60, **federation}}
        return introduced(service, config, run=run).refused

    assert "all rounds of the run would cost an epsilon of 24.83" in str(refused("all", {}))
    assert refused("own", {}, epsilon=3.0) is None
    assert "would cost an epsilon of 5." in str(refused("larger", {}, epsilon=6.0))
    assert refused("some", {"clients_per_round": 1}) is None


def test_epsilon_is_spent_before_the_order_is_carried_out(tmp_path: Path) -> None:
    pytest.importorskip("opacus", reason="the extra fedspan[privacy] is not installed")
    with refused("limits.epsilon"):  # the default
        book(tmp_path).record_order(ORDER, tuple(replace(one, count=500) for one in CHARGE), "job")
    limited = book(tmp_path, epsilon=1.5)
    limited.record_order(ORDER, CHARGE, "job")
    limited.record_order(ORDER, CHARGE, "job")  # a repeated order is charged again, although it tells the same
    assert limited.get_account().releases == ((1.0, 5.0, 2),)
    with refused("limits.epsilon"):
        limited.record_order(other(1), tuple(replace(one, count=50) for one in CHARGE), "job")
    assert limited.get_account().releases == ((1.0, 5.0, 2),)


def test_a_new_key_may_create_its_first_book(tmp_path: Path) -> None:
    key = tmp_path / "east.pem"
    with refused("--replaces"):
        usage_markers.require_book(key)
    usage_markers.allow_first_book(key)
    usage_markers.require_book(key)
    marker = tmp_path / "east.pem.budget"
    assert usage_markers.read_marker(marker) == usage_markers.FIRST
    assert marker.stat().st_mode & 0o777 == 0o600


def test_a_key_that_replaces_another_continues_its_book(tmp_path: Path) -> None:
    """Also one in another folder, and both may be moved together."""
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    first, second = tmp_path / "old" / "a.pem", tmp_path / "new" / "b.pem"
    with refusals.refused("--replaces"):
        usage_markers.continue_book(second, first)
    assert not (tmp_path / "new" / "b.pem.budget").exists()
    usage_markers.write_marker(tmp_path / "old" / "a.pem.budget", "digest of the book")
    usage_markers.continue_book(second, first)
    assert usage_markers.read_marker(tmp_path / "new" / "b.pem.budget") == "digest of the book"
    assert usage_markers.read_marker_text(tmp_path / "new" / "b.pem.budget") == "continues ../old/a.pem.budget"
    usage_markers.write_marker(tmp_path / "old" / "a.pem.budget", "a later digest")
    assert usage_markers.read_marker(tmp_path / "new" / "b.pem.budget") == "a later digest"
    (tmp_path / "moved").mkdir()
    for folder in ("old", "new"):
        (tmp_path / folder).rename(tmp_path / "moved" / folder)
    assert usage_markers.read_marker(tmp_path / "moved" / "new" / "b.pem.budget") == "a later digest"


def test_a_chain_ends_in_a_book_or_in_nothing(tmp_path: Path) -> None:
    usage_markers.write_marker(tmp_path / "0.budget", "digest")
    for number in range(1, 80):
        usage_markers.link_marker(tmp_path / f"{number}.budget", tmp_path / str(number - 1))
    assert usage_markers.read_marker(tmp_path / "63.budget") == "digest"
    assert usage_markers.read_marker(tmp_path / "79.budget") is None  # longer than any owner's
    usage_markers.link_marker(tmp_path / "0.budget", tmp_path / "1")
    assert usage_markers.read_marker(tmp_path / "1.budget") is None  # a circle
    assert usage_markers.read_marker(tmp_path / "missing.budget") is None
    assert usage_markers.read_marker_text(tmp_path / "missing.budget") is None


def test_a_marker_that_cannot_be_written_names_the_cure(tmp_path: Path) -> None:
    with refusals.refused("run folder", "Free some space on the node"):
        usage_markers.write_marker(tmp_path / "missing" / "a.budget", "digest")


AUTO = {"approve": "auto"}


def test_the_defaults_are_tens() -> None:
    limits = NodeLimits()
    assert limits.approve == "ask"
    assert limits.head_statistics == "off"
    assert max(limits.run_rounds, limits.run_evaluations, limits.runs) < 100
    assert max(limits.rounds, limits.evaluations, limits.invitations) <= 200


def test_a_run_s_evaluations_end_before_those_of_the_server(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node(tiny_folder, tmp_path, limits={**AUTO, "run_evaluations": 1, "evaluations": 3}))
    run, _ = served(tiny_folder, service)
    begin = run.federation.begin()
    assert run.evaluator.evaluate_clients(begin)[0] is not None
    assert run.evaluator.evaluate_clients(begin)[0] is None
    (failure,) = run.federation.pop_events().failures
    assert "`limits.run_evaluations`: this run has used 1 evaluations of this node's data" in failure.reason


def test_refusals_cost_invitations(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node(tiny_folder, tmp_path, limits={**AUTO, "invitations": 3, "rank": 2}))
    for lr in (0.1, 0.2):
        refused = introduced(service, values(tiny_folder, method={"name": "fedit", "r": 64}, training={"lr": lr}))
        assert "limits.rank" in (refused.refused or "")
    for _ in range(2):  # a repeated one has the same answer
        assert introduced(service, values(tiny_folder, method={"name": "fedit", "r": 2})).refused is None
    over = introduced(service, values(tiny_folder, method={"name": "fedit", "r": 2}, training={"lr": 0.5}), run="next")
    assert "`limits.invitations`: this server has used 3 invitations" in (over.refused or "")


def test_a_waiting_job_costs_one_invitation(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node(tiny_folder, tmp_path, limits={"approve": "ask", "invitations": 1}))
    for _ in range(3):
        assert introduced(service, values(tiny_folder)).waiting
    assert not introduced(service, values(tiny_folder), run="another").waiting
