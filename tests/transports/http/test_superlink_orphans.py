"""A server that is killed leaves no SuperLink, and can be started again at once."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from threading import Event, Thread

import pytest

from fedspan import processes
from fedspan.errors import FedspanError
from fedspan.processes import hold_folder

servers = pytest.importorskip("fedspan.transports.http.server", reason="the extra fedspan[flower] is not installed")
superlink = pytest.importorskip("fedspan.transports.http.supervision")

SERVER = """
    import sys
    from pathlib import Path
    from threading import Event
    from fedspan.transports.http.server import read_link
    from fedspan.transports.http.supervision import supervise
    folder = Path(sys.argv[1])
    supervise(folder, read_link(folder), "127.0.0.1", Event(), lambda: print("ready", flush=True))
"""


@pytest.fixture
def link(tmp_path: Path) -> object:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    return servers.prepare_folder(tmp_path / "server", port, [], insecure=True)


@pytest.mark.slow
def test_a_killed_server_takes_its_superlink_along_and_starts_again(link: object, tmp_path: Path) -> None:
    folder = tmp_path / "server"
    for _ in range(2):
        command = [sys.executable, "-c", textwrap.dedent(SERVER), str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n", (folder / "server.log").read_text()
            os.kill(server.pid, signal.SIGKILL)
    stop, ready = Event(), Event()
    again = Thread(target=superlink.supervise, args=(folder, link, "127.0.0.1", stop, ready.set))
    again.start()
    try:
        assert ready.wait(120), (folder / "server.log").read_text()
    finally:
        stop.set()
        again.join()


def test_a_superlink_without_a_server_ends(tmp_path: Path) -> None:
    code = """
        import time
        from fedspan.transports.http import superlink
        superlink.run_superlink = lambda *_: (print("runs", flush=True), time.sleep(600))
        superlink.main()
    """
    environment = {**os.environ, "FEDSPAN_SERVER": str(tmp_path), "FEDSPAN_RECONNECT_SECONDS": "60"}
    command, pipe = [sys.executable, "-c", textwrap.dedent(code)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"runs\n"
        process.stdin.close()  # as the end of the server does
        try:
            assert process.wait(10) == 1
        finally:
            process.kill()


@pytest.mark.parametrize("role", ["server", "superlink"])
def test_what_holds_the_folder_is_named(
    role: str, link: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_ENDING", 0.1)
    with (
        hold_folder(tmp_path / "server", role, "--folder"),
        pytest.raises(FedspanError, match=rf"process {os.getpid()} works in .* as its {role}.*kill {os.getpid()}"),
    ):
        superlink.supervise(tmp_path / "server", link, "127.0.0.1", Event(), lambda: None)
