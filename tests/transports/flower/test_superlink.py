"""The SuperLink's door: nodes from anywhere, commands from this machine alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

superlink = pytest.importorskip(
    "fedspan.transports.flower.superlink", reason="the extra fedspan[flower] is not installed"
)


async def behind(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def status(path: str, client: tuple[str, int] | None) -> int:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def call() -> None:
        scope = {"type": "http", "path": path, "client": client, "method": "POST", "headers": []}
        await superlink.Door(behind)(scope, None, send)

    asyncio.run(call())
    return sent[0]["status"]


@pytest.mark.parametrize("client", [("192.0.2.1", 7), ("::ffff:192.0.2.1", 7), ("2001:db8::1", 7), ("", 7), None])
def test_only_what_is_for_nodes_is_open_to_others(client: tuple[str, int] | None) -> None:
    assert status("/v1/fleet/pull-messages", client) == 200
    for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/health", "/", "/v1/fleets", "/docs"):
        assert status(path, client) == 403


@pytest.mark.parametrize("client", [("127.0.0.1", 7), ("::1", 7)])
def test_this_machine_may_do_everything(client: tuple[str, int]) -> None:
    for path in ("/v1/fleet/pull-messages", "/v1/control/start-run", "/v1/runtime/acquire-task"):
        assert status(path, client) == 200
