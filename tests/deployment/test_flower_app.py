"""Federations over stock Flower, as its users run them, give the bits of the same federation without it."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import fedspan
from fedspan.assembly.server import build_server_clients, connect, prepare_server
from fedspan.config.node import load_node
from fedspan.deployment.deploy import build_invitation
from fedspan.deployment.flower_server import write_app
from fedspan.deployment.handshake import Introduction, build_server_config
from fedspan.deployment.node import NodeService
from fedspan.federation.protocol import read_header
from fedspan.runs import start
from helpers.conformance import require_same_model
from helpers.node_service import OPEN
from helpers.ports import free_port
from helpers.reply_transport import ReplyingTransport
from helpers.sites import local_values, run_values, site_files

BIN = Path(sys.executable).parent


class StockFlower:
    """Flower's processes, which end with it; the folder has its configuration and the logs."""

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


SITES = ("north", "south")
pytestmark = pytest.mark.slow


def node_file(folder: Path, tiny_folder: Path, site: str, data: Path) -> Path:
    values = {
        **{"id": site, "server": "localhost:1", "folder": f"{site}-state", "data": {"train": str(data)}},
        **{"validation": 0.0, "test": 0.0, "device": "cpu", "threads": 1},
        "limits": {"models": [f"{tiny_folder}/*"], **OPEN},
    }
    path = folder / f"{site}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture(scope="module")
def files(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return site_files(tiny_folder / "corpus.csv", tmp_path_factory.mktemp("files"), SITES)


@pytest.fixture(scope="module")
def flower(
    tiny_folder: Path, files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StockFlower]:
    folder = tmp_path_factory.mktemp("flower")
    with StockFlower(folder / "stock") as stock:
        stock.start_superlink()
        for site in SITES:
            node, socket = node_file(folder, tiny_folder, site, files[site]), folder / f"{site}.sock"
            stock.start(f"host-{site}", "python", "-m", "fedspan", "host", str(node), "--socket", str(socket))
            stock.start_supernode(site, socket)
        yield stock


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StockFlower]:
    pytest.importorskip("ray", reason="the extra fedspan[flower] is not installed")
    with StockFlower(tmp_path_factory.mktemp("simulation") / "stock") as stock:
        stock.start_superlink("--simulation")
        yield stock


def values_of(tiny_folder: Path, method: str) -> dict[str, Any]:
    values = run_values(tiny_folder, {"name": method, "r": 2}, SITES, kind="deep-bert")
    return {**values, "threads": 1, "device": "cpu", "engine": {"name": "loop"}}


def written(values: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    write_app(folder / "app", folder / "run.yaml", folder / "runs")
    return folder / "app"


class Services(ReplyingTransport):
    """The hosts' services, in this process."""

    def __init__(self, services: dict[str, NodeService]) -> None:
        self.services = services

    def replies(self, envelopes: Any, seconds: float, *, wait_for_offline: bool = False) -> Any:
        for id, envelope in envelopes.items():
            yield id, self.services[id].answer(envelope)


def run_here(values: dict[str, Any], nodes: dict[str, Path], folder: Path) -> None:
    """Run the federation with the same nodes behind the same orders, without Flower."""
    services = {id: NodeService(load_node(path)) for id, path in nodes.items()}

    def host(run_folder: Any, prepared: Any, run_rounds: Any) -> Any:
        config = prepared.config
        invitation = build_invitation(config, "here")
        replies = {id: service.answer(invitation.to_envelope()) for id, service in services.items()}
        examples = {id: read_header(Introduction, reply).examples for id, reply in replies.items()}
        clients = build_server_clients(config, prepared.engine.adapted.spec, examples)
        transport = Services(services)
        return run_rounds(connect(prepared, transport, clients=clients, run="here", agreed=invitation.digest))

    build = lambda config, _, key, stages: prepare_server(config, key, stages)  # noqa: E731
    start.run(build_server_config(values), folder, host=host, build=build)


@pytest.mark.parametrize("method", ["fedit", "rolora", "flora"])
def test_superlink_and_supernodes_give_the_bits_of_the_run_without_flower(
    method: str, flower: StockFlower, files: dict[str, Path], tiny_folder: Path, tmp_path: Path
) -> None:
    values = values_of(tiny_folder, method)
    printed = flower.run(written(values, tmp_path / "flower"))
    (run,) = (tmp_path / "flower" / "runs").iterdir()
    assert (run / "adapter").is_dir(), printed + flower.logs()
    nodes = {site: node_file(tmp_path, tiny_folder, site, files[site]) for site in SITES}
    run_here(values, nodes, tmp_path / "here")
    require_same_model(run, tmp_path / "here")


def test_a_stopped_run_goes_on_as_a_new_run_of_flower_with_the_bits_of_an_uninterrupted_one(
    flower: StockFlower, files: dict[str, Path], tiny_folder: Path, tmp_path: Path
) -> None:
    values = values_of(tiny_folder, "fedgalore")
    app = written(values, tmp_path / "flower")
    flower.call("run", str(app), "test")
    until = time.monotonic() + 300
    while not any(path.stat().st_size for path in (tmp_path / "flower").glob("runs/*/metrics.jsonl")):
        assert time.monotonic() < until, flower.logs()
        time.sleep(0.1)
    (run,) = (tmp_path / "flower" / "runs").iterdir()
    flower.call("stop", run.name, "test")
    printed = flower.run(app, "--run-config", f'resume="{run.name}"')
    assert list((tmp_path / "flower" / "runs").iterdir()) == [run]
    assert (run / "adapter").is_dir(), printed + flower.logs()
    nodes = {site: node_file(tmp_path, tiny_folder, site, files[site]) for site in SITES}
    run_here(values, nodes, tmp_path / "here")
    require_same_model(run, tmp_path / "here")


@pytest.mark.parametrize(("method", "federation"), [("fedit", {"secure": {"clip": 10.0}}), ("fedgalore", {})])
def test_flower_s_simulation_gives_the_bits_of_the_run_in_process(
    method: str, federation: dict[str, Any], simulation: StockFlower, tiny_folder: Path, tmp_path: Path
) -> None:
    """Secure aggregation needs three clients; Flower's default simulation has two nodes."""
    data = site_files(tiny_folder / "corpus.csv", tmp_path)["all"]
    values = run_values(tiny_folder, {"name": method, "r": 2}, kind="deep-bert", federation=federation)
    values = local_values(values, data, {"name": "loop"})
    printed = simulation.run(written(values, tmp_path / "flower"))
    (run,) = (tmp_path / "flower" / "runs").iterdir()
    assert (run / "adapter").is_dir(), printed + simulation.logs()
    fedspan.run(values, tmp_path / "here", progress=False)
    require_same_model(run, tmp_path / "here")
