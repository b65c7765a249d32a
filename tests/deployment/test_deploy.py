"""Joining and submitting: what a node's file sets of its connection, and which base models a server can offer."""

from __future__ import annotations

import importlib
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from fedspan.deployment import deploy
from fedspan.deployment.handshake import Invitation
from fedspan.deployment.health import Heartbeat
from fedspan.errors import FedspanError
from fedspan.training.stages import Stages
from helpers import tiny
from helpers.command_line import get_program
from helpers.node_service import values

supernode = pytest.importorskip(
    "fedspan.transports.flower.supernode", reason="the extra fedspan[flower] is not installed"
)


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What a node would be served with: connection data, the function before orders, and what its heartbeats say."""
    found = list[Any]()

    def serve(link: Any, answer: Any, stop: Any, on_idle: Any, before_order: Any, get_work: Any) -> None:
        on_idle()
        works = [get_work()]
        with Stages(Heartbeat(tmp_path / "state").observe).stage("training", 3):
            works.append(get_work())
        found.append((link, before_order, works))

    monkeypatch.setattr(supernode, "serve", serve)
    monkeypatch.setattr(deploy, "Supervisor", lambda *_: SimpleNamespace(answer=None, close=lambda: None))
    return found


def write_node(folder: Path, **changes: Any) -> Path:
    values = {"id": "a", "server": "localhost:1", "folder": "state", "data": {"train": "data.csv"}, **changes}
    (folder / "data.csv").write_text("text,label\nx,0\n")
    path = folder / "node.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_bandwidth_is_in_megabits_per_second(links: list[Any], tmp_path: Path) -> None:
    deploy.join(write_node(tmp_path, bandwidth={"up_mbit": 2, "down_mbit": 10}), insecure=True)
    deploy.join(write_node(tmp_path), insecure=True)
    limits = [(link.bandwidth.up, link.bandwidth.down) for link, *_ in links]
    assert limits == [(250_000.0, 1_250_000.0), (None, None)]


def test_a_node_receives_base_models_only_if_its_file_says_so(links: list[Any], tmp_path: Path) -> None:
    deploy.join(write_node(tmp_path), insecure=True)
    deploy.join(write_node(tmp_path, limits={"accept_base": True}), insecure=True)
    assert [before_order is not None for _, before_order, _ in links] == [False, True]


def test_a_node_s_heartbeats_say_what_its_file_says(links: list[Any], tmp_path: Path) -> None:
    deploy.join(write_node(tmp_path), insecure=True)
    assert [works for *_, works in links] == [[None, ("training", 0)]]


def test_a_node_s_folder_is_not_for_other_users(
    links: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from fedspan.transports.flower import reachability

    monkeypatch.setattr(reachability, "check_server", lambda *_: "reached")
    path = write_node(tmp_path)
    deploy.check_node(path, insecure=True)
    assert not (tmp_path / "state").exists()
    deploy.join(path, insecure=True)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    (tmp_path / "state").chmod(0o755)
    for use in (deploy.check_node, deploy.join):
        with pytest.raises(FedspanError, match=r"`folder`: other users can read .*chmod 700"):
            use(path, insecure=True)


@pytest.mark.parametrize(
    ("module", "function", "arguments"),
    [
        ("fedspan.transports.flower.superlink", "supervise", ["server", "--insecure", "--folder", "server"]),
        ("fedspan.deployment.deploy", "join", ["join", "node.yaml", "--insecure"]),
        ("fedspan.deployment.deploy", "submit", ["submit", "config.yaml", "--server", "server"]),
    ],
)
def test_no_other_user_reads_what_the_commands_write(
    module: str, function: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from fedspan.transports.flower.server import prepare_folder

    def write(*_: Any, **__: Any) -> None:
        Path("written").touch()
        raise FedspanError("test", None, problem="the file is written")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.import_module(module), function, write)
    prepare_folder(Path("server"), 9092, [], insecure=True)
    before = os.umask(0o022)
    try:
        result = CliRunner().invoke(get_program(), arguments)
        assert "the file is written" in result.output
        assert Path("written").stat().st_mode & 0o777 == 0o600
        assert os.umask(0o022) == 0o022  # of a process that calls the command's function
    finally:
        os.umask(before)


def test_the_check_of_a_node_says_where_its_models_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fedspan.transports.flower import reachability

    monkeypatch.setattr(reachability, "check_server", lambda *_: "reached")
    limits = {"models": ["clinic/encoder", "google/*", "builtin:all-minilm-l6-v2"]}
    path = write_node(tmp_path, models={"ours": str(tmp_path)}, limits=limits)
    lines = [line for line in deploy.check_node(path, insecure=True) if line.startswith("model ")]
    assert [line.partition(":")[0] for line in lines] == ["model ours", "model clinic/encoder"]
    assert lines[0].endswith(str(tmp_path))
    assert "not on this machine" in lines[1]


def test_a_resumed_run_offers_the_base_that_it_offered_before(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A received model is used only while it is offered, and its files are part of the job that an owner approved."""
    invitations = list[Invitation]()

    class Interrupted:
        def __init__(self, link: Any, run_folder: Any, prepared: Any, invitation: Invitation, *_: Any) -> None:
            invitations.append(invitation)

        def gather(self, grid: Any) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(deploy, "Submission", Interrupted)
    monkeypatch.setattr("fedspan.transports.flower.grid.attach", lambda *_: nullcontext())
    link: Any = SimpleNamespace(folder=tmp_path, authority=None)
    with monkeypatch.context() as context:
        context.setattr(deploy, "find_local_base", lambda *_: None)  # of a model that cannot be offered
        with pytest.raises(FedspanError, match="can be offered"):
            deploy.submit(values(tiny_folder), tmp_path / "plain", link, offer=True)
    for name, offer in (("offered", True), ("plain", False)):
        started = name == "plain"
        with pytest.raises(KeyboardInterrupt):
            deploy.submit(None if started else values(tiny_folder), tmp_path / name, link, resume=started, offer=offer)
        with pytest.raises(KeyboardInterrupt):
            deploy.submit(None, tmp_path / name, link, resume=True)
    first, resumed, *others = invitations
    assert first.base_files
    assert resumed == first
    assert [invitation.base_files for invitation in others] == [(), ()]


def test_a_base_that_is_no_folder_of_the_server_cannot_be_offered(tiny_folder: Path) -> None:
    config = tiny.config(tiny_folder)
    assert deploy._find_offered_base(config) == Path(config.model.name)
    for name in ("builtin:all-minilm-l6-v2", "clinic/encoder"):
        other = config.model_copy(update={"model": config.model.model_copy(update={"name": name})})
        with pytest.raises(FedspanError, match="can be offered"):
            deploy._find_offered_base(other)
