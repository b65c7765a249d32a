"""The SuperLink's process: what is wrong with an address is said before it starts."""

from __future__ import annotations

import socket
from pathlib import Path
from threading import Event

import pytest

from fedspan.errors import FedspanError

servers = pytest.importorskip("fedspan.transports.flower.server", reason="the extra fedspan[flower] is not installed")
superlink_process = pytest.importorskip("fedspan.transports.flower.superlink")


@pytest.mark.parametrize("insecure", [True, False])
def test_a_port_that_is_taken_is_named(insecure: bool, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        link = servers.prepare_folder(tmp_path, port, [], insecure=insecure)
        with pytest.raises(
            FedspanError, match=f"`--port`: {port} is not accepted\. Expected a port on which nobody else listens"
        ):
            superlink_process.supervise(tmp_path, link, "127.0.0.1", Event(), lambda: None)
    with pytest.raises(FedspanError, match="--host"):
        superlink_process.supervise(tmp_path, link, "192.0.2.1", Event(), lambda: None)
    assert not (tmp_path / "superlink.log").exists()
