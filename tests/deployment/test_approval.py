"""A node that asks its operator does nothing for a run before it is approved, and stops when approval is withdrawn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedspan.deployment.approval import Approvals, NotApprovedError, compute_job_digest
from fedspan.deployment.audit import AUDIT
from fedspan.deployment.base_offers import BaseFile, compute_offer_digest
from fedspan.deployment.handshake import Invitation
from fedspan.deployment.node import NodeService
from fedspan.errors import FedspanError
from fedspan.federation.protocol import decode_order, decode_reply
from fedspan.logs import AuditLog
from helpers.node_service import introduced, invitation, node, served, values

ASK = {"approve": "ask"}


@pytest.fixture
def approvals(tmp_path: Path) -> Approvals:
    return Approvals(tmp_path, AuditLog(tmp_path / AUDIT))


def events(folder: Path) -> list[str]:
    return [str(row["event"]) for row in AuditLog(folder / AUDIT).read()]


def test_a_new_job_waits_for_its_operator(
    tiny_folder: Path, tmp_path: Path, approvals: Approvals, caplog: pytest.LogCaptureFixture
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
    assert caplog.messages == [
        f"job {request.job[:12]} waits for approval: fedspan approve shows it and approves it",
    ]
    summary = request.summarize(own)
    request = replace(request, config={**request.config, "training": {"local_steps": 2, "local_epochs": 1, "lr": 0.5}})
    assert request.summarize(own)["training"] == "local_steps 2, lr 0.5", "steps replace epochs"
    by_epochs = {**request.config, "training": {"local_steps": None, "local_epochs": 2, "lr": 0.5}}
    assert replace(request, config=by_epochs).summarize(own)["training"] == "local_epochs 2, lr 0.5"
    facts = {"method": "fedit", "columns": "text, label", "decision": "waits for fedspan approve"}
    assert {name: summary[name] for name in facts} == facts
    approvals.decide(request.job[:8], "approved")
    introduction = introduced(service, values(tiny_folder))
    assert (introduction.refused, introduction.waiting) == (None, False)
    assert introduction.examples > 0


def test_a_changed_config_is_another_job(tiny_folder: Path, tmp_path: Path, approvals: Approvals) -> None:
    service = NodeService(node(tiny_folder, tmp_path, limits=ASK))
    introduced(service, values(tiny_folder))
    approvals.decide(approvals.list_requests()[0].job, "approved")
    assert introduced(service, values(tiny_folder, training={"lr": 0.5})).waiting
    assert introduced(service, values(tiny_folder), run="another").waiting
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


def test_decisions_of_earlier_versions_are_read(tiny_folder: Path, tmp_path: Path, approvals: Approvals) -> None:
    asked = invitation(values(tiny_folder))
    with pytest.raises(NotApprovedError):
        approvals.require(asked)
    approvals.decide(compute_job_digest(asked), "approved")
    (path,) = (tmp_path / "jobs").iterdir()
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in stored.items() if not name.startswith("base_")}))
    approvals.require(asked)


def test_a_refusal_reaches_the_server_with_its_reason(tiny_folder: Path, tmp_path: Path, approvals: Approvals) -> None:
    service = NodeService(node(tiny_folder, tmp_path, limits=ASK))
    introduced(service, values(tiny_folder))
    approvals.decide(approvals.list_requests()[0].job, "refused", "no consent for this model")
    introduction = introduced(service, values(tiny_folder))
    assert not introduction.waiting
    assert "refused job" in (introduction.refused or "")
    assert "no consent for this model" in (introduction.refused or "")
    assert events(tmp_path) == ["job requested", "job refused", "invitation refused"]


def test_approval_can_be_withdrawn_from_a_run_at_work(tiny_folder: Path, tmp_path: Path, approvals: Approvals) -> None:
    service = NodeService(node(tiny_folder, tmp_path, limits=ASK))
    introduced(service, values(tiny_folder))
    approvals.decide(approvals.list_requests()[0].job, "approved")
    run, transport = served(tiny_folder, service)
    first = run.federation.run_round(run.federation.begin())
    assert not first.failures
    approvals.decide(approvals.list_requests()[0].job, "refused")
    with pytest.raises(FedspanError):
        run.federation.run_round(first.progress)
    answer = decode_reply(service.answer(transport.sent[-1]))
    assert answer.failed is not None


def test_what_was_asked_and_answered_is_in_the_audit_log(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node(tiny_folder, tmp_path))
    run, transport = served(tiny_folder, service)
    run.federation.run_round(run.federation.begin())
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
    with pytest.raises(FedspanError, match="32 jobs are already waiting"):
        approvals.require(invitation(values(tiny_folder), run="one more"))
    assert len(approvals.list_requests()) == 32


@pytest.mark.parametrize("content", [b"", b"{}", b'{"job": 1}', b"[" * 9999])
def test_a_damaged_decision_approves_nothing(
    tiny_folder: Path, tmp_path: Path, approvals: Approvals, content: bytes
) -> None:
    asked = invitation(values(tiny_folder))
    with pytest.raises(NotApprovedError):
        approvals.require(asked)
    (tmp_path / "jobs" / f"{compute_job_digest(asked)}.json").write_bytes(content)
    with pytest.raises(FedspanError, match=r"\.json`: the file is damaged"):
        approvals.require(asked)
