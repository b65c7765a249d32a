"""Stock Flower as processes: a SuperLink, SuperNodes, and ``flwr run``, with the configuration in a folder."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from .ports import free_port

BIN = Path(sys.executable).parent


class StockFlower:
    """Flower's processes, which end with it.

    Args:
        folder: Folder of Flower's configuration and of the logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        (folder / "home").mkdir(parents=True)
        (folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "test"\n\n[superlink.test]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        self.environment = {
            **os.environ,
            **{"FLWR_HOME": str(folder / "home"), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"},
            **{"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RAY_ADDRESS": "local"},
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }

    def __enter__(self) -> "StockFlower":
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def start(self, name: str, *command: str) -> None:
        """Start a program beside this interpreter, with a log of its own."""
        with (self.folder / f"{name}.log").open("ab") as log:
            line = [str(BIN / command[0]), *command[1:]]
            process = subprocess.Popen(line, env=self.environment, stdout=log, stderr=log, start_new_session=True)
        self._processes.append(process)

    def start_superlink(self, *options: str) -> None:
        """Start a SuperLink, and wait until it listens."""
        here = ("--host", "127.0.0.1", "--port", str(self.port), "--insecure")
        self.start("superlink", "flower-superlink", *here, "--disable-runtime-dependency-installation", *options)
        until = time.monotonic() + 60
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            assert time.monotonic() < until, self.logs()
            time.sleep(0.1)

    def start_supernode(self, name: str, host: Path | None) -> None:
        """Start a SuperNode with the socket of a data owner's host."""
        own = () if host is None else ("--node-config", f'fedspan-host="{host}"')
        here = (
            "--insecure",
            "--superlink",
            f"127.0.0.1:{self.port}",
            "--host",
            "127.0.0.1",
            "--port",
            str(free_port()),
        )
        self.start(f"supernode-{name}", "flower-supernode", *here, *own)

    def call(self, command: str, *arguments: str) -> str:
        """Call a command of ``flwr`` to its end, and return what it prints."""
        line = [str(BIN / "flwr"), command, *arguments]
        ended = subprocess.run(line, env=self.environment, capture_output=True, text=True, timeout=400)
        assert ended.returncode == 0, ended.stdout + ended.stderr + self.logs()
        return ended.stdout + ended.stderr

    def run(self, app: Path, *options: str) -> str:
        """Run an app to its end, and return what it prints."""
        return self.call("run", str(app), "test", "--stream", *options)

    def logs(self) -> str:
        """The ends of all logs."""
        return "".join(f"\n--- {path.name}\n{path.read_text()[-4000:]}" for path in sorted(self.folder.glob("*.log")))
