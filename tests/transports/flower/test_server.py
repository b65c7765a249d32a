"""A server's folder, the names that its certificate is good for, and those of its nodes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from fedspan.errors import FedspanError

servers = pytest.importorskip("fedspan.transports.flower.server", reason="the extra fedspan[flower] is not installed")

SAID = [
    {"node-id": "11", "status": "online", "online-elapsed": 75.4, "offline-at": "N/A"},
    {"node-id": "12", "status": "offline", "online-elapsed": 9.0, "offline-at": "2026-01-02 03:04:05Z"},
    {"node-id": "13", "status": "registered", "online-elapsed": 0.0, "offline-at": "N/A"},
    {"node-id": "14", "status": "unregistered", "online-elapsed": 0.0, "offline-at": "N/A"},
]


def test_a_name_that_the_certificate_is_not_good_for_is_refused(tmp_path: Path) -> None:
    servers.prepare_folder(tmp_path, 9092, ["fl.example.org"], insecure=False)
    servers.prepare_folder(tmp_path, 9093, ["fl.example.org"], insecure=False)
    servers.prepare_folder(tmp_path, 9093, [], insecure=False)
    servers.prepare_folder(tmp_path, 9093, ["127.0.0.1", "localhost"], insecure=False)
    with pytest.raises(FedspanError, match=r"`--name`: 'other\.example\.org'.*fl\.example\.org, localhost"):
        servers.prepare_folder(tmp_path, 9093, ["other.example.org"], insecure=False)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "server"
    servers.prepare_folder(folder, 9092, [], insecure=True)

    def flower(link: Any, *arguments: str) -> dict[str, Any]:
        return {"nodes": SAID}

    monkeypatch.setattr(servers, "call_flower", flower)
    return folder


def test_nodes_have_the_names_that_they_were_admitted_as(server: Path) -> None:
    first, second, third = servers.list_nodes(servers.read_link(server), {11: "clinic-a"})
    assert (first.name, first.status, first.online_seconds, first.offline_since) == ("clinic-a", "online", 75.4, None)
    assert second.offline_since == 1767323045.0
    assert (third.status, third.offline_since) == ("registered", None)
    assert [one.status for one in servers.list_nodes(servers.read_link(server), {14: "clinic-b"})][3:] == ["revoked"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (subprocess.TimeoutExpired("flwr", 120), "flwr list x took more than 120 seconds"),
        (OSError(28, "No space left on device"), "flwr list x could not be run: .*No space left"),
    ],
)
def test_a_command_of_flower_that_cannot_be_run_is_an_error_of_the_server(
    error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = servers.prepare_folder(tmp_path / "server", 9092, [], insecure=True)

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(servers.subprocess, "run", fail)
    with pytest.raises(FedspanError, match=said):
        servers.call_flower(link, "list", "x")
