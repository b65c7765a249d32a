"""A download that breaks off, and a hub that cannot be reached: one line, and the next try goes on.

The hub is a real HTTP server of the test's own, on loopback, that the hub's client is pointed at.
"""

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
import yaml

from helpers import tiny

_COMMIT = "0" * 40


class Hub(http.server.ThreadingHTTPServer):
    """Serves one model's files; ``breaks`` lets it hang up in the middle of the weights."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Reply)
        self.folder, self.breaks, self.broken = folder, True, 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Reply(http.server.BaseHTTPRequestHandler):
    """The three kinds of request that a download of a model makes."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        name = self.path.partition("?")[0]
        file = self.server.folder / name.rpartition("/")[2]
        if name.startswith("/api/models/"):
            siblings = [{"rfilename": entry.name} for entry in self.server.folder.iterdir()]
            known = {"id": "org/tiny", "sha": _COMMIT, "siblings": siblings, "private": False, "tags": []}
            self._send(200 if name == "/api/models/org/tiny" else 404, json.dumps(known).encode(), {}, body)
        elif "/resolve/" in name and file.is_file():
            content, start = file.read_bytes(), int((self.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
            headers = {"ETag": f'"{file.name}-{len(content)}"', "X-Repo-Commit": _COMMIT, "Accept-Ranges": "bytes"}
            self._send(206 if start else 200, content[start:], headers, body, cut=file.name == "model.safetensors")
        else:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)

    def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool, cut: bool = False) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body and cut and self.server.breaks:
            # Half of the weights, and no more of them to those who ask for the rest: as long as something comes, the
            # hub's client tries again after a second, and half of every rest would keep it going for 20 of them.
            self.wfile.write(b"" if self.server.broken else content[: len(content) // 2])
            self.server.broken += 1
            self.close_connection = True
        elif body:
            self.wfile.write(content)


@pytest.fixture
def hub(tiny_folder: Path) -> Generator[Hub]:
    with Hub(tiny_folder / "bert") as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def command(folder: Path, tiny_folder: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    values = tiny.settings(tiny_folder, model={"name": "org/tiny"}, federation={"rounds": 1})
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    environment = {
        **{key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"},
        **{"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "cache"), "HF_HUB_DISABLE_XET": "1"},
        **{"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "2", "HF_HUB_ETAG_TIMEOUT": "2"},
    }
    arguments = ["run", str(folder / "config.yaml"), "--out", str(folder / "run")]
    called = [sys.executable, "-m", "fedspan", *arguments]
    return subprocess.run(called, env=environment, capture_output=True, text=True, check=False, timeout=300)


def refusal(said: subprocess.CompletedProcess[str]) -> str:
    assert said.returncode == 2, said.stderr
    lines = [line for line in said.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "Traceback" not in said.stderr
    return lines[0]


@pytest.mark.slow  # three processes that import torch, and the waits of the hub's client
def test_a_download_that_breaks_off(hub: Hub, tiny_folder: Path, tmp_path: Path) -> None:
    """Refused in one line, without a run folder; once the hub holds out, the same command works."""
    line = refusal(command(tmp_path, tiny_folder, hub.address))
    assert line.startswith("error: `model.name`: 'org/tiny' cannot be loaded (")
    assert hub.broken >= 1
    assert not (tmp_path / "run").exists()
    hub.breaks = False
    again = command(tmp_path, tiny_folder, hub.address)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "run" / "report.json").is_file()


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached(tiny_folder: Path, tmp_path: Path) -> None:
    """Nobody listens on the port; the hub's client tries for half a minute."""
    line = refusal(command(tmp_path, tiny_folder, "http://127.0.0.1:9"))
    assert line.startswith("error: `model.name`: 'org/tiny' cannot be loaded (")
