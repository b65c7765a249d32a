"""A whole run whose clients are behind a transport: what is counted of it, and what is left of that when it resumes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fedspan.assembly.run import Prepared
from fedspan.assembly.server import connect
from fedspan.deployment.flower_simulation import get_nodes_folder, reply_as
from fedspan.federation.protocol import Envelope, Reply, decode_order
from fedspan.federation.serialization import encode_state
from fedspan.logs import read_lines
from fedspan.run_folder import RunFolder
from fedspan.runs import start
from fedspan.runs.checkpoint import load_latest
from fedspan.runs.ledger import read_totals
from fedspan.runs.report import RunReport
from helpers import tiny
from helpers.listeners import Notes
from helpers.reply_transport import Replies, ReplyingTransport

BAD = "south"


class Here(ReplyingTransport):
    """A transport to clients in this process, one of whom is asked in vain."""

    def __init__(self, run: Path, tasks: tuple[str, ...]) -> None:
        self.run, self.tasks = str(run), tasks

    def replies(self, envelopes: Mapping[str, Envelope], seconds: float, *, wait_for_offline: bool = False) -> Replies:
        for id, envelope in envelopes.items():
            if id == BAD and decode_order(envelope).task in self.tasks:
                yield id, "no reply within 5 s"
            else:
                yield id, reply_as(self.run, torch.get_num_threads(), envelope)


def host(*tasks: str, kind: type[Here] = Here, reads_nodes: bool = True) -> start.HostRun:
    """A host of runs whose clients are behind a transport."""

    def simulated(place: RunFolder, prepared: Prepared, played: Any) -> RunReport:
        transport = kind(place.path.resolve(), tasks)
        rules = prepared.config.federation.build_reply_rules()
        return played(connect(prepared, transport, rules, nodes=get_nodes_folder(place.path) if reads_nodes else None))

    return simulated


def test_failures_are_counted_over_the_whole_run_though_it_was_resumed(tiny_folder: Path, tmp_path: Path) -> None:
    config = tiny.config(tiny_folder, federation={"clients_per_round": None, "rounds": 2})
    whole = start.run(config, tmp_path / "whole", host=host("train"))
    assert whole.failures == {BAD: {"count": 2, "round": 2, "reason": "no reply within 5 s"}}
    with pytest.raises(KeyboardInterrupt):
        start.run(config, tmp_path / "resumed", host=host("train"), listener=Notes(1))
    again = start.run(None, tmp_path / "resumed", resume=True, host=host("train"))
    assert again.failures == whole.failures
    assert again.bytes == whole.bytes
    assert again.other_bytes == whole.other_bytes
    told = json.loads((tmp_path / "resumed" / "report.json").read_text())
    assert told["failures"] == again.failures


def test_who_is_not_measured_is_counted_too(tiny_folder: Path, tmp_path: Path) -> None:
    config = tiny.config(tiny_folder, federation={"clients_per_round": None, "rounds": 2})
    report = start.run(config, tmp_path / "run", host=host("evaluate"))
    assert report.failures[BAD]["count"] == 4  # of the start, after each round, and of the best one at the end
    assert report.failures[BAD]["reason"] == "not measured: no reply within 5 s"
    failures = next(read_lines(tmp_path / "run" / "metrics.jsonl"))["failures"]
    assert [failure["purpose"] for failure in failures] == ["evaluate"] * 2  # the start has no line of its own


def test_what_evaluation_sends_is_in_the_ledger_and_apart_from_the_training(tiny_folder: Path, tmp_path: Path) -> None:
    config = tiny.config(tiny_folder, federation={"clients_per_round": None, "rounds": 2})
    here = start.run(config, tmp_path / "here")
    report = start.run(config, tmp_path / "run", host=host())
    assert report.failures == {}
    assert report.bytes == here.bytes
    assert here.other_bytes == {}
    totals = read_totals(tmp_path / "run" / "ledger.jsonl")
    assert totals.run("down").bytes == report.bytes["down"]
    rows = list(read_lines(tmp_path / "run" / "ledger.jsonl"))
    asked = [row for row in rows if row["purpose"] == "evaluate"]
    assert len(asked) == 4 * len(tiny.SITES)  # of the start, after each round, and of the best one at the end
    sent = sum(row["bytes"] for row in asked)
    assert report.other_bytes == {"evaluate": {"down": sent, "up": 0}}


def test_a_run_of_personal_models_ends_without_an_adapter_of_its_own(tiny_folder: Path, tmp_path: Path) -> None:
    federation = {"clients_per_round": None, "rounds": 1}
    config = tiny.config(tiny_folder, method={"name": "local-only"}, federation=federation)
    report = start.run(config, tmp_path / "run", host=host(reads_nodes=False))
    assert report.adapters == {}
    assert not (tmp_path / "run" / "adapter").exists()


class Forgetful(Here):
    """One client replies last, and in the third round it reports that it lost what it stored."""

    def replies(self, envelopes: Mapping[str, Envelope], seconds: float, *, wait_for_offline: bool = False) -> Replies:
        yield from super().replies(
            {id: envelope for id, envelope in envelopes.items() if id != BAD},
            seconds,
            wait_for_offline=wait_for_offline,
        )
        for id in envelopes.keys() & {BAD}:
            order = decode_order(envelopes[id])
            if (order.task, order.round) == ("train", 2):
                yield id, Reply("train", 2, order.attempt, id, failed="its disk was replaced", lost=True).to_envelope()
            else:
                yield id, reply_as(self.run, torch.get_num_threads(), envelopes[id])


@pytest.mark.slow
def test_a_client_that_lost_its_state_misses_the_round_of_the_loss_only(tiny_folder: Path, tmp_path: Path) -> None:
    forgetful = host(kind=Forgetful)
    config = tiny.config(
        tiny_folder, method={"name": "fedsa-lora"}, federation={"clients_per_round": None, "rounds": 5}
    )
    start.run(config, tmp_path / "whole", host=forgetful)
    with pytest.raises(KeyboardInterrupt):
        start.run(config, tmp_path / "resumed", host=forgetful, listener=Notes(3))
    halfway = load_latest(RunFolder(tmp_path / "resumed"))
    assert BAD not in halfway.last_rounds
    assert halfway.last_replies == {BAD: 1}
    start.run(None, tmp_path / "resumed", resume=True, host=forgetful)
    ends: list[bytes] = []
    for name in ("whole", "resumed"):
        rows: list[Any] = list(read_lines(tmp_path / name / "metrics.jsonl"))
        assert [row.get("late") for row in rows] == [None] * 5, "every round waited for it"
        assert [[one["client"] for one in row.get("failures", [])] for row in rows] == [[], [], [BAD], [], []]
        last = load_latest(RunFolder(tmp_path / name))
        assert last.last_rounds[BAD] == 4
        assert last.last_replies == {}
        ends.append(encode_state(last.state))
    assert ends[0] == ends[1]
