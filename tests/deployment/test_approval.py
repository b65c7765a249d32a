"""What an operator approves, which columns a run may read, audit logs of both sides, and what leaves a node."""

import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from fedspan.assembly.run import Prepared
from fedspan.clients.secagg_store import DiskSessionStore, Session
from fedspan.config import RunConfig, parse_config
from fedspan.config.node import NodeConfig
from fedspan.data.files import FROM_TRAINERS
from fedspan.deployment import handshake
from fedspan.deployment.approval import SHOWN, SILENT, Approvals, JobRequest, NotApprovedError, compute_job_digest
from fedspan.deployment.audit import AUDIT, AuditedTransport, describe_envelope
from fedspan.deployment.base_offers import BaseFile, compute_offer_digest
from fedspan.deployment.columns import describe_columns, require_columns
from fedspan.deployment.handshake import Invitation, build_node_values
from fedspan.deployment.node import NodeService
from fedspan.deployment.node_folder import LAST_REPLY, SESSIONS, STATE, TRAINING, get_run_folder, remove_old_states
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope, HeaderPart, Reply, decode_order, decode_reply
from fedspan.federation.transport import Orders
from fedspan.logs import AuditLog
from helpers import refusals, tiny, tiny_decoders
from helpers.captured_log import CapturedLog
from helpers.node_service import CLIENT, introduced, invitation, node, served, values

ASK = {"approve": "ask"}


@pytest.fixture
def approvals(tmp_path: Path) -> Approvals:
    return Approvals(tmp_path, AuditLog(tmp_path / AUDIT))


def events(folder: Path) -> list[str]:
    return [str(row["event"]) for row in AuditLog(folder / AUDIT).read()]


def test_a_new_job_waits_for_its_operator(
    tiny_folder: Path, tmp_path: Path, approvals: Approvals, caplog: CapturedLog
) -> None:
    own = node(tiny_folder, tmp_path, limits=ASK)
    service = NodeService(own)
    for _ in range(2):
        introduction = introduced(service, values(tiny_folder))
        assert introduction.waiting
        assert "has to approve job" in (introduction.refused or "")
        assert (introduction.refused or "").endswith("(on the node: fedspan approve).")
    assert events(tmp_path) == ["job requested"]  # asked twice, one job
    (request,) = approvals.list_requests()
    assert caplog.messages == [f"job {request.job[:12]} waits for approval: fedspan approve shows it and approves it"]
    summary = request.summarize(own)
    facts = {"columns": "text, label", "decision": "waits for fedspan approve"}
    assert {name: summary[name] for name in facts} == facts
    assert summary["method"].startswith("name fedit")
    assert "local_steps 2" in summary["training"]
    assert "local_epochs" not in summary["training"], "steps replace epochs"
    approvals.decide(request.job[:8], "approved")
    introduction = introduced(service, values(tiny_folder))
    assert (introduction.refused, introduction.waiting) == (None, False)
    assert introduction.examples > 0


def test_an_approval_outlives_a_patch_release_of_the_server_and_a_changed_config_is_another_job(
    tiny_folder: Path, tmp_path: Path, approvals: Approvals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "__version__", "0.1.2")
    service, given = NodeService(node(tiny_folder, tmp_path, limits=ASK)), values(tiny_folder)
    assert introduced(service, given, version="0.1.0").waiting
    approvals.decide(approvals.list_requests()[0].job, "approved")
    assert introduced(service, values(tiny_folder, training={"lr": 0.5})).waiting
    assert introduced(service, given, run="another").waiting
    told = introduced(service, given, version="0.1.9")
    assert (told.waiting, told.refused) == (False, None)
    assert "it runs fedspan 0.2.0" in (introduced(service, given, version="0.2.0").refused or "")
    assert len(approvals.list_requests()) == 3


def test_an_offer_of_other_weights_is_another_job(tiny_folder: Path, tmp_path: Path, approvals: Approvals) -> None:
    own = node(tiny_folder, tmp_path, limits=ASK)

    def offer(digit: str) -> Invitation:
        files = (
            BaseFile(name="config.json", size=2**20, sha256="f" * 64),
            BaseFile(name="model.safetensors", size=3 * 2**20, sha256=digit * 64),
        )
        return invitation(values(tiny_folder), base_files=files)

    with pytest.raises(NotApprovedError):
        approvals.require(offer("0"))
    (request,) = approvals.list_requests()
    shown = request.summarize(own)["offered model"]
    assert "4.0 MiB" in shown
    assert compute_offer_digest(offer("0").base_files) in shown
    approvals.decide(request.job, "approved")
    approvals.require(offer("0"))
    for other in (offer("1"), invitation(values(tiny_folder))):
        assert other.config_digest == offer("0").config_digest
        assert other.digest != offer("0").digest  # so that clients of a secure sum have the same model
        with pytest.raises(NotApprovedError):
            approvals.require(other)
    offers = [one.summarize(own)["offered model"].partition(":")[0] for one in approvals.list_requests()]
    assert offers.count("none") == 1


def test_approval_can_be_withdrawn_from_a_run_at_work_and_the_server_gets_the_reason(
    tiny_folder: Path, tmp_path: Path, approvals: Approvals
) -> None:
    service = NodeService(node(tiny_folder, tmp_path, limits=ASK))
    introduced(service, values(tiny_folder))
    approvals.decide(approvals.list_requests()[0].job, "approved")
    run, transport = served(tiny_folder, service)
    first = run.federation.run_round(run.federation.begin())
    assert not first.failures
    approvals.decide(approvals.list_requests()[0].job, "refused", "no consent for this model")
    with pytest.raises(FedspanError):
        run.federation.run_round(first.progress)
    answer = decode_reply(service.answer(transport.sent[-1]))
    assert answer.failed is not None
    introduction = introduced(service, values(tiny_folder))
    assert not introduction.waiting
    assert "refused job" in (introduction.refused or "")
    assert "no consent for this model" in (introduction.refused or "")
    assert events(tmp_path)[-1] == "invitation refused"
    assert events(tmp_path).count("job refused") == 1


def test_what_was_asked_and_answered_is_in_the_audit_logs_of_both_sides(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node(tiny_folder, tmp_path))
    run, transport = served(tiny_folder, service)
    log = AuditLog(tmp_path / "server" / AUDIT)
    federation: Any = run.federation
    federation.transport = AuditedTransport(transport, log, "run", {CLIENT: 2**63})
    assert not federation.run_round(federation.begin()).failures
    shared = ("event", "task", "round", "bytes", "sha256", "run")
    ours, theirs = (
        [{name: row.get(name) for name in shared} for row in own.read()] for own in (log, AuditLog(tmp_path / AUDIT))
    )
    assert ours == theirs[1:]
    assert len(ours) == 2
    assert {row["node"] for row in log.read()} == {str(2**63)}
    service.answer(transport.sent[0])  # sent again, and answered with the same reply
    service.answer(replace(decode_order(transport.sent[0]), lr=0.5).to_envelope())  # changed, and refused
    rows = AuditLog(tmp_path / AUDIT).read()
    assert [row["event"] for row in rows] == ["joined", "asked", "answered", "asked", "answered", "asked", "refused"]
    order, reply = rows[1], rows[2]
    assert reply["sha256"] == rows[4]["sha256"]
    assert (order["task"], order["round"], order["run"]) == ("train", 0, "run")
    assert order["bytes"] == len(transport.sent[0].header.encode()) + len(transport.sent[0].body)
    assert order["sha256"] == rows[3]["sha256"] != reply["sha256"]
    text = (tmp_path / AUDIT).read_text()
    assert "symptom" not in text  # neither labels nor paths
    assert str(tiny_folder) not in text


def test_no_more_jobs_wait_than_a_disk_bears(tiny_folder: Path, tmp_path: Path, approvals: Approvals) -> None:
    for number in range(32):
        with pytest.raises(NotApprovedError):
            approvals.require(invitation(values(tiny_folder), run=str(number)))
    with refusals.refused("limits.approve"):
        approvals.require(invitation(values(tiny_folder), run="one more"))
    assert len(approvals.list_requests()) == 32


@pytest.mark.parametrize("content", [b"", b"{}", b'{"job": 1}', b"[" * 9999])
def test_damaged_decisions_do_nothing(tiny_folder: Path, tmp_path: Path, approvals: Approvals, content: bytes) -> None:
    asked = invitation(values(tiny_folder))
    with pytest.raises(NotApprovedError):
        approvals.require(asked)
    (tmp_path / "jobs" / f"{compute_job_digest(asked)}.json").write_bytes(content)
    with pytest.raises(FedspanError, match=r"\.json`: the file is damaged"):
        approvals.require(asked)


def test_a_missing_reply_is_logged_with_its_reason(tmp_path: Path) -> None:
    class Broken(AuditedTransport):
        def exchange(self, orders: Any, on_reply: Any, seconds: float, *, wait_for_offline: bool = False) -> None:
            on_reply("a", "no reply within 5 s")

    log = AuditLog(tmp_path / AUDIT)
    inner = Broken(None, log, "", {})
    heard: list[Any] = []
    transport = AuditedTransport(inner, log, "run", {"a": 1})
    transport.exchange(Orders("train", "a", lambda _: Envelope("{}")), lambda *one: bool(heard.append(one)), 5.0)
    (row,) = log.read()
    assert (row["event"], row["client"], row["reason"]) == ("failed", "a", "no reply within 5 s")
    assert heard == [("a", "no reply within 5 s")]


def test_open_orders_are_logged_with_their_ends(tmp_path: Path) -> None:
    replies = [("a", Envelope('{"task": "train", "round": 3}')), ("b", "no reply within 5 s")]

    class Open:
        def send_orders(self, orders: Any, seconds: float, *, wait_for_offline: bool = False) -> None:
            assert [orders[id].header for id in orders] == ["{}"] * 3

        def receive_reply(self) -> Any:
            return replies.pop(0) if replies else None

        def retain_orders(self, ids: Any) -> frozenset[str]:
            return frozenset(ids)

        def list_training(self) -> frozenset[str]:
            return frozenset("c")

    log, inner = AuditLog(tmp_path / AUDIT), Open()
    transport = AuditedTransport(inner, log, "run", {"a": 1, "b": 2, "c": 3})
    transport.send_orders(Orders("train", "abc", lambda _: Envelope("{}")), 5.0)
    received = [transport.receive_reply() for _ in range(3)]
    assert [reply and reply[0] for reply in received] == ["a", "b", None]
    assert transport.list_training() == {"c"}
    assert transport.retain_orders("c") == {"c"}
    assert transport.retain_orders("") == frozenset()
    assert [(row["event"], row["client"]) for row in log.read()] == [
        ("asked", "a"), ("asked", "b"), ("asked", "c"), ("answered", "a"), ("failed", "b"), ("failed", "c"),
    ]  # fmt: skip
    assert log.read()[3]["round"] == 3
    assert [row["reason"] for row in log.read()[4:]] == ["no reply within 5 s", "the server closed its order"]


def test_a_header_is_described_in_few_bytes_and_a_digest_is_that_of_what_is_sent() -> None:
    for header in ("[" * 9999, '{"task": "' + "x" * 9999 + '", "round": [1], "serial": {}}', "\ud800", "{}"):
        description = describe_envelope(Envelope(header, b"abc"))
        assert len(str(description)) < 300
        assert set(description) <= {"task", "bytes", "sha256"}
    envelope = Envelope('{"task": "train", "round": 2}', b"abc")
    sent = envelope.header.encode() + envelope.body
    expected = {"task": "train", "round": 2, "bytes": len(sent), "sha256": hashlib.sha256(sent).hexdigest()}
    assert describe_envelope(envelope) == expected
    other = replace(envelope, body=b"abd")
    assert other.sha256 != envelope.sha256
    assert Envelope(envelope.header, b"abc") == envelope


def tuning_values(folder: Path, prompt: str | None, task: str = "causal-lm") -> dict[str, Any]:
    """A deployment's config of instruction tuning."""
    data = {} if prompt is None else {"prompt": prompt}
    given = tiny_decoders.settings(folder) | {"task": task, "data": data, "federation": {"rounds": 3}}
    return {name: value for name, value in given.items() if name not in ("partition", "evaluation")}


def test_a_server_chooses_no_column_that_the_owner_does_not_name(decoders: Path, tmp_path: Path) -> None:
    """The data have the column site, which the owner only groups by; the server learns nothing of what there is."""
    limits, data = {"models": [f"{decoders}/*"]}, {"train": str(decoders / "questions.jsonl"), "group": "site"}

    def refusal(folder: str, asked: str, columns: list[str], **own: str) -> str | None:
        made = node(decoders, tmp_path / folder, limits={**limits, "columns": columns}, data={**data, **own})
        return introduced(NodeService(made), tuning_values(decoders, asked)).refused

    for column in ("site", "absent"):
        told = refusal("a", f"Q: {{question}} {{{column}}} A:", ["question"])
        expected = f"this node does not allow the column '{column}' in data.prompt. Its owner can add it."
        assert told == f"`limits.columns`: {expected}"
    for asked in ("{question}" * 300, "{question}" + "A:" * 10**5):  # before each of the node's examples
        assert "`limits.tokens`: a text of" in (refusal("a", asked, ["question"]) or "")
    assert refusal("b", "Q: {question} A:", ["question"]) is None
    assert refusal("c", "Q: {question} {site} A:", [], prompt="{question}") is None  # which replaces the server's


@pytest.mark.parametrize(
    ("data", "task", "prompt", "refused"),
    [
        ({}, "causal-lm", "{text} {answer}", None),
        ({"text": "note"}, "causal-lm", "{note}", None),
        ({"text": "note"}, "causal-lm", "{text}", "text"),
        ({"label": "ward"}, "causal-lm", "{ward}", None),
        ({"group": "patient"}, "causal-lm", "{patient}", "patient"),
        ({}, "causal-lm", "alpaca", "instruction"),
        ({"dataset": "alpaca"}, "causal-lm", "alpaca", None),
        ({}, "preference", "{prompt}", None),
        ({"roles": {"prompt": "asked"}}, "preference", "{asked}", None),
        ({"roles": {"prompt": "asked"}}, "preference", "{prompt}", "prompt"),
        ({"train": FROM_TRAINERS}, "causal-lm", "{patient}", None),
    ],
)
def test_a_prompt_may_name_the_columns_that_the_owner_or_the_task_names(
    data: dict[str, Any], task: str, prompt: str, refused: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"instruction": "a", "input": "b", "output": "c"}\n')
    made = NodeConfig.model_validate({"id": "a", "server": "h:1", "data": {"train": str(path), **data}})
    config = parse_config(build_node_values(tuning_values(tmp_path, prompt, task), made.model_dump()))
    if refused is None:
        require_columns(made, config)
        return
    with pytest.raises(FedspanError, match=f"the column '{refused}'"):
        require_columns(made, config)


def test_an_operator_is_shown_the_columns_that_a_run_reads(tmp_path: Path) -> None:
    def show(asked: str | None, task: str = "causal-lm", **data: Any) -> str:
        own = {} if data == {"train": None} else {"train": "own.csv", **data}
        made = NodeConfig.model_validate({"id": "a", "server": "h:1", "data": own})
        return describe_columns(made, tuning_values(tmp_path, asked, task))

    assert show("{question} {hint}", answer="reply") == "question, hint, reply"
    assert show("{name}", prompt="{question}") == "question, answer"  # the node's own replaces the server's
    assert show(None, "preference", roles={"chosen": "better"}) == "better, rejected, prompt"
    assert show(None, "masked-lm", text="note") == "note"
    assert show("no column").startswith("unknown (`data.prompt`: 'no column' has no column in braces")
    assert show("{name}", train=None) == "those that the node's own trainer reads"


ALL = [field for fields in SHOWN.values() for field in fields]


def list_fields() -> Iterator[str]:
    """The fields of a run's config, those of a section with the section's name."""
    for name, field in RunConfig.model_fields.items():
        kinds = get_args(field.annotation) if isinstance(field.annotation, UnionType) else (field.annotation,)
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not sections or name in SILENT:
            yield name
        for section in sections:
            yield from (f"{name}.{inner}" for inner in section.model_fields if name not in SILENT)


def is_listed(field: str, listed: Any) -> bool:
    return field in listed or f"{field.partition('.')[0]}.*" in listed


def test_every_setting_is_shown_or_does_not_matter() -> None:
    fields = list(list_fields())
    assert [field for field in fields if not is_listed(field, ALL) and not is_listed(field, SILENT)] == []
    known = {*fields, *(f"{field.partition('.')[0]}.*" for field in fields)}
    assert {*ALL, *SILENT} - known == set(), "these are no settings any more"
    shared = dict.fromkeys(("labels", "label_separator", "chat", "system", "packing", "long_answers", "prompt"), "x")
    own = {"data": {}, "validation": 0.1, "test": 0.1, "split_seed": 0}
    taken = set(build_node_values({"data": {**dict.fromkeys(RunConfig.model_fields, "x"), **shared}}, own)["data"])
    assert {f"data.{name}" for name in taken - {"test_fraction"}} <= set(ALL)


def test_the_summary_names_what_a_hostile_config_hides(tiny_folder: Path, tmp_path: Path) -> None:
    config = values(
        tiny_folder,
        training={"batch_size": 3, "local_steps": 2, "gradient_accumulation_steps": 5},
        federation={"secure": {"clip": 7.0}, "clients_per_round": 1},
        evaluation={"every": 4},
    )
    config["model"] |= {"head_init": "lda", "modules_to_save": ["pooler"], "target_modules": ["query"]}
    config["data"] |= {"labels": ["a" * 500, "b"]}
    request = JobRequest("0" * 64, "run\x1b[2J", config, "now")
    summary = request.summarize(node(tiny_folder, tmp_path))
    assert {"batch_size 3", "local_steps 2", "gradient_accumulation_steps 5"} <= {*summary["training"].split(", ")}
    shown = {"trained in full": 'modules_to_save ["pooler"]', "adapted layers": 'target_modules ["query"]'}
    shown |= {"secure aggregation": '"clip": 7.0', "federation": "clients_per_round 1", "evaluation": "every 4"}
    shown |= {"problem": "(--settings shows all)", "head": "head_init lda, head_rounds auto", "input": "max_length 16"}
    assert all(part in summary[title] for title, part in shown.items()), summary
    of_trainer = request.summarize(node(tiny_folder, tmp_path, data={}))
    assert not {"batch_size", "max_length"} & {*" ".join(of_trainer.values()).split()}
    assert summary["privacy"] == "none: updates are sent without noise"
    assert "\x1b" not in "".join(summary.values())


def test_the_summary_shows_the_defaults_of_what_a_server_leaves_out(tiny_folder: Path, tmp_path: Path) -> None:
    config = {"data": {"labels": ["a", "b"]}, "model": {"pretrained": False}}
    summary = JobRequest("0" * 64, "run", config, "now").summarize(node(tiny_folder, tmp_path))
    defaults = RunConfig.model_validate({"data": {"train": "nodes"}})
    assert f"max_length {defaults.model.max_length}" in summary["input"]
    assert "pretrained false" in summary["model"]
    assert f"batch_size {defaults.training.batch_size}" in summary["training"]


def test_only_a_config_that_can_be_shown_waits_for_its_operator(
    tiny_folder: Path, tmp_path: Path, approvals: Approvals
) -> None:
    config, own = values(tiny_folder), node(tiny_folder, tmp_path, limits=ASK)
    hiding = {**config["data"], "bogus": 1}
    for change in ({"partition": 7}, {"data": hiding}, {"data": [["labels", []]]}, {"evaluation": [["every", 8]]}):
        introduction = introduced(NodeService(own), {**config, **change})
        assert introduction.refused
        assert not introduction.waiting
    assert not approvals.list_requests()
    later = JobRequest("0" * 64, "run", {**config, "new": 1}, "now")
    assert "this version cannot read its config" in later.summarize(own)["problem"]


NAMES = [f"n{number}" for number in range(60_000)]
LONG = "x" * 900_000
SECONDS = 15.0
"""Processor time of one invitation: three times the goal, for slow machines."""


@pytest.mark.parametrize(
    "changes",
    [
        {LONG: 1},
        {"task": LONG},
        {"training": {LONG: 1}},
        {"training": dict.fromkeys(NAMES, 1)},
        {"method": {"name": LONG}},
        {"method": {"name": "fedit", **dict.fromkeys(NAMES, 1)}},
        {"method": {"name": "fedit", "wrappers": ["fedpaq"] * 60_000}},
        {"federation": {"ranks": dict.fromkeys(NAMES, 2)}},
        {"federation": {"ranks": [2] * 200_000}},
        {"federation": {"require_tags": dict.fromkeys(NAMES[:50_000], "x")}},
        {"data": {"labels": NAMES}},
        {"data": {"labels": ["a"] * 120_000}},
        {"data": {"prompt": "{text}" * 140_000}},
        {"data": {"prompt": "{" * 900_000}},
        {"model": {"layers_to_transform": list(range(120_000)), "layers_pattern": "layer"}},
        {"model": {"target_modules": NAMES}},
        {"model": {"head_rounds": 10**9}},
        {"seed": 10**4000},
    ],
    ids=lambda changes: "-".join(str(key)[:8] for key in changes),
)
def test_an_invitation_costs_a_node_seconds_at_most(changes: dict[str, Any], tiny_folder: Path, tmp_path: Path) -> None:
    config = values(tiny_folder)
    for name, own in changes.items():
        config[name] = {**config.get(name, {}), **own} if isinstance(own, dict) else own
    assert len(invitation(config).model_dump_json()) <= HeaderPart.longest, "nodes refuse longer ones at once"
    service = NodeService(node(tiny_folder, tmp_path, limits={"approve": "ask"}))
    started = time.process_time()
    refused = introduced(service, config).refused
    assert time.process_time() - started < SECONDS
    assert 0 < len(refused or "") <= 4096


FREE = {"approve": "auto", "min_batch": 1, "train_examples": 1}


@pytest.fixture
def run(tiny_folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Prepared, Any]:
    service = NodeService(node(tiny_folder, tmp_path, limits={**FREE, **request.param}))
    return served(tiny_folder, service)


def measure(run: Prepared) -> list[float]:
    begin = run.federation.begin()
    scores = [run.evaluator.evaluate_clients(begin)[0] for _ in range(8)]
    return [one.pooled["accuracy"] for one in scores if one is not None]


@pytest.mark.parametrize(
    ("run", "is_measured"),
    [({"evaluation_examples": 10, "evaluation_epsilon": epsilon}, epsilon is None) for epsilon in (0.2, None)],
    indirect=["run"],
)
def test_a_model_has_other_metrics_each_time_and_no_training_loss_unless_an_owner_sends_them_as_measured(
    run: tuple[Prepared, Any], is_measured: bool
) -> None:
    assert (len(set(measure(run[0]))) == 1) == is_measured
    result = run[0].federation.run_round(run[0].federation.begin())
    assert not result.failures
    assert math.isfinite(result.loss) == is_measured


@pytest.mark.parametrize("run", [{"evaluation_examples": 100}], indirect=True)
def test_few_examples_send_no_metrics_and_the_last_round_is_the_best(run: tuple[Prepared, Any]) -> None:
    assert measure(run[0]) == []
    sent = run[1].service.answer(run[1].sent[-1])
    assert decode_order(run[1].sent[-1]).task == "evaluate"
    assert isinstance(reply := decode_reply(sent), Reply)
    assert not reply.scores


LASTING = {"invitation.json", "serial", "noise.key", "adapter/adapter_model.safetensors"}


def write_run(folder: Path, run: str, days: float) -> Path:
    path = get_run_folder(folder, run)
    for name in (f"{STATE}/a/state.safetensors", f"{TRAINING}/step.safetensors", LAST_REPLY, *LASTING):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"content")
    then = time.time() - days * 86400
    for entry in (*path.iterdir(), path):
        os.utime(entry, (then, then))
    return path


def list_files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_state_of_a_run_without_an_order_for_a_month_is_removed(tmp_path: Path) -> None:
    old, recent, other = write_run(tmp_path, "old", 31), write_run(tmp_path, "recent", 29), tmp_path / "bases" / STATE
    other.mkdir(parents=True)
    (tmp_path / "budget.json").write_text("{}")
    before = list_files(recent)
    assert remove_old_states(tmp_path) == 1
    assert list_files(old) == LASTING
    assert list_files(recent) == before
    assert other.is_dir()
    assert (tmp_path / "budget.json").is_file()
    assert remove_old_states(tmp_path) == 0


@pytest.mark.parametrize("name", ["serial", "invitation.json"])
def test_a_run_that_has_had_an_order_since_keeps_its_state(name: str, tmp_path: Path) -> None:
    path = write_run(tmp_path, "old", 90)
    os.utime(path / name)
    before = list_files(path)
    assert remove_old_states(tmp_path) == 0
    assert list_files(path) == before


@pytest.mark.parametrize("days", [29, 31])
def test_a_secure_session_without_a_phase_for_a_month_loses_its_secrets_and_keeps_its_number(
    days: int, tmp_path: Path
) -> None:
    folder = get_run_folder(tmp_path / SESSIONS, "run")
    store = DiskSessionStore(folder)
    session = Session(run="run", number=7, phase="masked", secret=b"secret", sealed={"b": b"x"}, trained=(2, "model"))
    store.store("a", session)
    (path,) = folder.glob("*/session.json")
    then = time.time() - days * 86400
    os.utime(path, (then, then))
    remove_old_states(tmp_path)
    ended = Session(run="run", number=7, phase="unmasked", secret=b"", trained=(2, "model"))
    assert store.load("a") == (ended if days > 30 else session)
    assert path.stat().st_mode & 0o777 == 0o600


MARKER = "zyxwv"
"""In every text, label, column and path of the node."""
SEVERAL = ",".join((MARKER, "b"))
PLAIN = f"text,label\n{MARKER} a,{tiny.LABELS[0]}\n"


def rows(*lines: Mapping[str, Any]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


CASES: dict[str, tuple[str, str | bytes, dict[str, Any], dict[str, Any]]] = {
    "no file": ("none.csv", "", {}, {}),
    "empty": ("a.csv", "", {}, {}),
    "header only": ("a.csv", f"text,{MARKER}\n", {}, {}),
    "binary": ("a.csv", b"\xff\xfe\x00" + MARKER.encode(), {}, {}),
    "not utf-8": ("a.csv", PLAIN.encode() + b"\xe4\xf6 " + MARKER.encode(), {"encoding": "utf-8"}, {}),
    "no label": ("a.csv", f"text,{MARKER}\na,b\n", {}, {}),
    "no column": ("a.csv", PLAIN, {"text": MARKER}, {}),
    "doubled column": ("a.csv", f"{MARKER},{MARKER},text,label\n1,2,a,b\n", {}, {}),
    "long row": ("a.csv", PLAIN + f"{MARKER},b,{MARKER},{MARKER}\n", {}, {}),
    "open quote": ("a.csv", PLAIN + f'"{MARKER},b\n', {}, {}),
    "empty text": ("a.csv", PLAIN + f",{MARKER}\n", {}, {}),
    "empty label": ("a.csv", PLAIN + f"{MARKER},\n", {}, {}),
    "broken json": ("a.jsonl", rows({"text": MARKER, "label": "b"}) + f'{{"text": "{MARKER}', {}, {}),
    "nested json": ("a.jsonl", rows({"text": {MARKER: [MARKER]}, "label": {MARKER: 1}}), {}, {}),
    "other types": ("a.jsonl", rows({"text": MARKER, "label": "b"}, {"text": [MARKER], "label": 1.5}), {}, {}),
    "no sheet": ("a.xlsx", MARKER, {}, {}),
    "no parquet": ("a.parquet", MARKER, {}, {}),
    "unknown form": (f"a.{MARKER}", PLAIN, {}, {}),
    "unknown field": ("a.csv", PLAIN, {"lable": MARKER}, {}),
    "few examples": ("a.csv", PLAIN, {}, {}),
    "numbers": ("a.csv", f"text,label\na,{MARKER}\n", {}, {"task": "regression"}),
    "tags": ("a.csv", f"text,label\na b,{MARKER}\n", {}, {"task": "token-classification"}),
    "several labels": ("a.csv", f'text,label\na,"{SEVERAL}"\n', {}, {"task": "multi-label-classification"}),
}


@pytest.mark.parametrize("name", CASES)
def test_errors_leave_a_node_without_its_data(name: str, tiny_folder: Path, tmp_path: Path) -> None:
    file, content, own, changes = CASES[name]
    folder = tmp_path / MARKER
    folder.mkdir()
    path = folder / file
    if content:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    limits = {"approve": "auto", "train_examples": 16}
    service = NodeService(node(tiny_folder, tmp_path / "node", data={"train": str(path), **own}, limits=limits))
    answered = introduced(service, {**values(tiny_folder), **changes})
    assert answered.refused, "the case is an error"
    assert MARKER not in answered.model_dump_json()
