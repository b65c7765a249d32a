"""The server side of a deployment: a run on a SuperLink whose server is this process.

In Flower, the SuperLink starts a ServerApp in a separate process, from a bundle that anyone who can reach it may
submit. Here the SuperLink starts nothing (``--isolation process`` without a SuperExec). A process that has the
SuperLink's secret takes over the run, and the process with the run folder and the terminal uses the grid.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from flwr.common.serde import run_from_proto
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest, PushTaskOutputRequest
from flwr.serverapp import Grid
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity

from fedspan.errors import FedspanError
from fedspan.transports.flower.limited import LimitedGrid

__all__ = ["ServerLink", "attach", "flower"]

_NAME = "fedspan"
_BUNDLE = """\
[project]
name = "fedspan-run"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedspan"

[tool.flwr.app.components]
serverapp = "fedspan.transports.flower.app:server"
clientapp = "fedspan.transports.flower.app:client"
"""
_PATIENCE = 60.0
"""Time limit for taking over a submitted run, in seconds."""


@dataclass(frozen=True)
class ServerLink:
    """The connection data of a SuperLink for its operator.

    Args:
        address: Address as ``host:port``, on this machine.
        authority: File with the certificate of the authority that signed the SuperLink's; None: an insecure connection.
        secret: File with the secret that the SuperLink was started with.
    """

    address: str
    authority: Path | None
    secret: Path

    @property
    def folder(self) -> Path:
        """The server's folder, which contains the secret."""
        return self.secret.parent


def flower(link: ServerLink, *arguments: str) -> Any:
    """Call Flower's own command line for a SuperLink.

    Args:
        link: Connection data of the SuperLink.
        arguments: Arguments of ``flwr``; ``@`` stands for the SuperLink's name.

    Returns:
        The parsed output of ``--format json``.

    Raises:
        FedspanError: If the command failed.
    """
    with tempfile.TemporaryDirectory(prefix="fedspan-") as home:
        secure = f'root-certificates = "{link.authority.resolve()}"' if link.authority else "insecure = true"
        config = f'[superlink]\ndefault = "{_NAME}"\n\n[superlink.{_NAME}]\naddress = "{link.address}"\n{secure}\n'
        Path(home, "config.toml").write_text(config, encoding="utf-8")
        bundle = Path(home, "bundle")
        bundle.mkdir()
        (bundle / "pyproject.toml").write_text(_BUNDLE, encoding="utf-8")
        given = [_NAME if one == "@" else str(bundle) if one == "%" else one for one in arguments]
        command = [sys.executable, "-c", "from flwr.cli.app import app; app()", *given, "--format", "json"]
        environment = {**os.environ, "FLWR_HOME": home}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    return _said(done, given)


def _said(done: subprocess.CompletedProcess[str], given: Sequence[str]) -> Any:
    try:
        said = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        said = {"success": False, "error-message": (done.stderr or done.stdout).strip()[-500:]}
    if done.returncode or not said.get("success", True):
        raise FedspanError("server", f"flwr {' '.join(given[:2])}", str(said.get("error-message", said)))
    return said


@contextmanager
def attach(link: ServerLink, most: int) -> Generator[Grid]:
    """Make this process the server of a new run on a SuperLink for the duration of the context.

    Args:
        link: Connection data of the SuperLink.
        most: Maximum size of a reply, in bytes.

    Raises:
        FedspanError: If the SuperLink is unreachable, refuses, rejects the secret, or later no longer knows the run.
    """
    started = flower(link, "run", "%", "@")
    run_id = int(started["run-id"])
    grid = LimitedGrid(
        runtime_api_address=link.address,
        insecure=link.authority is None,
        root_certificates=None if link.authority is None else link.authority.read_bytes(),
        token=_token(link, run_id),
    )
    grid.most = most
    client = grid._runtime_client  # pyright: ignore[reportPrivateUsage]
    heartbeat = HeartbeatSender(_beat(client))
    heartbeat.start()
    status = "failed"
    try:
        given = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
        TaskIdentity.node_id = given.context.node_id
        grid.set_run(run_from_proto(given.run))
        yield grid
        status = "completed"
    except (httpx.HTTPError, RunNotRunningException) as error:
        expected = "one that knows this run: it was down for too long, or was asked to stop it; go on with --resume"
        raise FedspanError("server", link.address, expected) from error
    finally:
        grid._retry_invoker.max_tries = 1  # pyright: ignore[reportPrivateUsage]
        with suppress(httpx.HTTPError):
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=""))
        heartbeat.stop()
        grid.close()


def _beat(client: RuntimeHttpClient) -> Callable[[], bool]:
    """Create the heartbeat function. It ignores that the SuperLink no longer knows the run: the next message fails."""
    beat = make_task_heartbeat_fn_http(client)

    def quiet() -> bool:
        try:
            return beat()
        except httpx.HTTPStatusError:
            return True

    return quiet


def _token(link: ServerLink, run_id: int) -> str:
    """Take over the server part of a run and return its token.

    Raises:
        FedspanError: If the SuperLink refuses, or another process took over the run first.
    """
    client = RuntimeHttpClient.from_server_address(
        server_address=link.address,
        insecure=link.authority is None,
        root_certificates=None if link.authority is None else link.authority.read_bytes(),
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="SuperExec"),
            SuperExecAuthHttpInterceptor(
                master_secret=link.secret.read_bytes(), protected_methods=("/flwr.proto.Runtime/AcquireTask",)
            ),
        ],
        retry_invoker=make_simple_http_retry_invoker(),
    )
    until = time.monotonic() + _PATIENCE
    try:
        while time.monotonic() < until:
            taken = client.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
            if taken.HasField("task") and taken.token and taken.task.run_id == run_id:
                return taken.token
            time.sleep(0.2)
    except httpx.HTTPStatusError as error:
        expected = f"the file that fedspan server wrote (the SuperLink answered {error.response.status_code})"
        raise FedspanError("secret", str(link.secret), expected) from error
    finally:
        client.close()
    raise FedspanError("server", link.address, "a SuperLink without a SuperExec of its own (fedspan server)")
