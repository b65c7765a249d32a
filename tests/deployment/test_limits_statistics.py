"""Statistics of a node's examples leave it only if its owner says so, once, and of many examples of whole texts."""

from pathlib import Path
from typing import Any

import pytest

from fedspan.assembly.head import begin
from fedspan.assembly.run import Prepared
from fedspan.config.node import NodeConfig, NodeLimits
from fedspan.deployment.handshake import build_server_config
from fedspan.deployment.node import NodeService
from fedspan.errors import FedspanError
from fedspan.runs import start
from helpers.listeners import Notes
from helpers.node_service import introduced, node, served, values

EXACT = {"approve": "auto", "head_statistics": "exact", "statistics_max_length": 2, "statistics_examples": 1}
LDA = {"head_init": "lda"}


def test_a_deployment_starts_without_statistics_unless_it_asks_for_them(tiny_folder: Path) -> None:
    for model in ({}, {"head_init": "auto"}):
        assert build_server_config({**values(tiny_folder), "model": model}).head_kind == (None, None)
    assert build_server_config({**values(tiny_folder), "model": LDA}).head_kind == ("lda", None)


def test_nodes_send_no_statistics_by_default_and_the_run_starts_at_random(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(
        node(tiny_folder, tmp_path / "node", limits={"head_statistics": NodeLimits().head_statistics})
    )

    def build(config: Any, partition: Any, key: bytes | None, callbacks: Any) -> Prepared:
        return served(tiny_folder, service, model=LDA)[0]

    notes = Notes()
    config = build_server_config(values(tiny_folder, model=LDA))
    report = start.run(config, tmp_path / "run", build=build, listener=notes)
    assert (report.rounds, report.start["head_init"]) == (3, "random")
    said = [note for note in notes.notes if "no statistics of examples leave this node" in note]
    assert len(said) == 1
    assert said[0].startswith("the head starts at random: ")


def test_an_owner_s_statistics_leave_once_whatever_the_run(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node(tiny_folder, tmp_path, limits=EXACT))
    run, _ = served(tiny_folder, service, model=LDA)
    begin(run.federation, run.head)
    restarted = NodeService(node(tiny_folder, tmp_path, limits=EXACT))
    again, _ = served(tiny_folder, restarted, model=LDA)
    for name in ("run", "another"):
        assert introduced(restarted, values(tiny_folder, model=LDA), run=name).refused is None
        again.federation.run = name
        with pytest.raises(FedspanError, match="statistics of this data set have left this node for this server"):
            begin(again.federation, again.head)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"statistics_max_length": 17}, "model.max_length is 16, and this node sends statistics only from 17 on"),
        ({"statistics_examples": 10}, r"statistics of \d+ features need \d+ examples here"),
    ],
)
def test_statistics_of_short_texts_or_few_examples_stay(
    limits: dict[str, int], reason: str, tiny_folder: Path, tmp_path: Path
) -> None:
    run, _ = served(tiny_folder, NodeService(node(tiny_folder, tmp_path, limits={**EXACT, **limits})), model=LDA)
    with pytest.raises(FedspanError, match=reason):
        begin(run.federation, run.head)
    allowed, _ = served(tiny_folder, NodeService(node(tiny_folder, tmp_path, limits=EXACT)), model=LDA)
    assert begin(allowed.federation, allowed.head).state.tensors, "what was refused did not leave"


def test_yaml_reads_off_as_false() -> None:
    given = {"id": "clinic", "server": "localhost:1", "limits": {"head_statistics": False}}
    assert NodeConfig.model_validate(given).limits.head_statistics == "off"
