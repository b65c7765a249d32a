"""What ``fedspan submit`` and ``fedspan report`` print of a node that reports metrics which no model can have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

from fedspan.config import load_config
from fedspan.federation.protocol import Envelope, decode_order, decode_reply
from fedspan.logs import read_lines
from fedspan.runs import start
from fedspan.runs.folder import RunFolder
from fedspan.runs.model_card import RunReport
from fedspan.runs.remote import build_server_clients, connect, get_nodes_folder, reply_as
from fedspan.runs.results import read_report
from fedspan.runs.setup import Prepared
from fedspan.transports.flower.server import prepare_folder
from helpers import tiny
from helpers.command_line import get_program
from helpers.reply_transport import Replies, ReplyingTransport

LIAR = "south"


class Lying(ReplyingTransport):
    """A transport to clients in this process, one of whom reports what it likes after the first round.

    Args:
        run: Folder of the run.
        ids: Ids of the clients.
        lies: Metrics that the client reports in place of its own; None: it is not measured.
    """

    def __init__(self, run: Path, ids: list[str], lies: Mapping[str, float] | None) -> None:
        self.run, self.ids, self.lies = str(run), ids, lies

    def replies(self, envelopes: Mapping[str, Envelope], seconds: float, *, wait_for_offline: bool = False) -> Replies:
        for id, envelope in envelopes.items():
            order = decode_order(envelope)
            if id == LIAR and order.task == "evaluate" and order.round == 1:
                if self.lies is None:
                    yield id, "it is offline"
                    continue
                reply = decode_reply(reply_as(self.run, torch.get_num_threads(), self.ids.index(id), envelope))
                scores = {part: {**row, **self.lies} for part, row in reply.scores.items()}
                yield id, replace(reply, scores=scores).to_envelope()
            else:
                yield id, reply_as(self.run, torch.get_num_threads(), self.ids.index(id), envelope)


def submitted(
    monkeypatch: pytest.MonkeyPatch, config: Path, folder: Path, lies: Mapping[str, float] | None, known: bool = True
) -> tuple[str, RunReport]:
    """Print of ``fedspan submit`` and ``fedspan report``, and the run's report; the nodes are in this process.

    Args:
        monkeypatch: pytest's.
        config: File of the run's config.
        folder: Folder of the run.
        lies: As of ``Lying``.
        known: Whether the server knows how many examples a node evaluates.
    """
    monkeypatch.chdir(folder.parent)  # where report.html is written
    prepare_folder(folder.with_suffix(".server"), 1, [], insecure=True)

    def host(place: RunFolder, prepared: Prepared, run_rounds: Any) -> RunReport:
        transport = Lying(place.path.resolve(), list(prepared.federation.clients), lies)
        rules = prepared.config.federation.build_reply_rules()
        counts = {id: data.client.examples for id, data in prepared.federation.clients.items()}
        clients = None if known else build_server_clients(prepared.config, prepared.engine.adapted.spec, counts)
        return run_rounds(connect(prepared, transport, rules, nodes=get_nodes_folder(place.path), clients=clients))

    def submit(config: Path, folder: Path, *_: Any, listener: Any, **__: Any) -> RunReport:
        return start.run(load_config(config), folder, listener=listener, host=host)

    monkeypatch.setattr("fedspan.deployment.deploy.submit", submit)
    server = str(folder.with_suffix(".server"))
    result = CliRunner().invoke(get_program(), ["submit", str(config), "--out", str(folder), "--server", server])
    assert result.exit_code == 0, result.output
    shown = CliRunner().invoke(get_program(), ["report", str(folder)])
    assert shown.exit_code == 0, shown.output
    return result.output + shown.output, read_report(folder)


@pytest.mark.parametrize(("clients", "selection"), [(2, "last round"), (3, "best by validation")])
def test_the_summary_says_what_selected_the_round(
    clients: int, selection: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = tiny.settings(tiny_folder, federation={"clients_per_round": None, "rounds": 2})
    values["partition"] = {"partitioner": "iid", "clients": clients, "validation": 0.2, "test": 0.2}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    printed, report = submitted(monkeypatch, config, tmp_path / "run", {}, known=False)
    assert f"{report.best_round}, {selection}\n" in printed
    assert report.selected == (clients == 3)


def test_an_impossible_metric_is_neither_printed_as_a_score_nor_decides_between_rounds(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = tiny.settings(tiny_folder, federation={"clients_per_round": None, "rounds": 3})
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    lies = {"accuracy": 1e308, "loss": 1e308, "perplexity": 1e308}
    printed, lied = submitted(monkeypatch, config, tmp_path / "lied", lies)
    _, offline = submitted(monkeypatch, config, tmp_path / "offline", None)
    assert not re.search(r"(?i)\binf\b|\bnan\b|\d{20}|e\+?308 *%", printed), printed
    assert f"{LIAR} " in printed
    assert "not measured: no accuracy" in printed
    assert lied.best_round == offline.best_round
    assert lied.failures.keys() == {LIAR}
    assert {name: lied.failures[LIAR][name] for name in ("count", "round")} == {"count": 2, "round": 1}, (
        "one of each part"
    )
    rows = [list(read_lines(tmp_path / name / "metrics.jsonl")) for name in ("lied", "offline")]
    for mine, theirs in zip(*rows, strict=True):
        assert mine["validation"] == theirs["validation"]
