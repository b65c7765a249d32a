"""The state of a server for the web page: its nodes and its newest run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedspan.deployment.status import NamedRun, load_named_run
from fedspan.errors import FedspanError
from fedspan.monitoring.run_monitor import MAX_CLIENTS, RunMonitor, build_client, clean_text
from fedspan.progress.formatting import format_duration

if TYPE_CHECKING:
    from fedspan.transports.http.server import Node

__all__ = ["INTERVAL", "ServerMonitor"]

INTERVAL = 3.0
"""Seconds between two lists of the nodes, which are requested only for a viewer."""


class ServerMonitor:
    """Follows the nodes of a server, and the run that was submitted last.

    Args:
        folder: The server's folder.
        list_nodes: Returns the server's nodes; it may wait for the server, and is called in a thread of its own.
        clock: Function that returns the time in seconds.
    """

    def __init__(
        self, folder: Path, list_nodes: Callable[[], Sequence[Node]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._list_nodes, self._clock = folder, list_nodes, clock
        self._thread: threading.Thread | None = None
        self._next = clock()
        self._listed: tuple[Sequence[Node] | None, str | None] = (None, None)
        self._run: RunMonitor | None = None

    def collect(self) -> dict[str, Any]:
        """Return the state of the server and its newest run as plain values for JSON."""
        if self._clock() >= self._next and (self._thread is None or not self._thread.is_alive()):
            self._next = self._clock() + INTERVAL
            self._thread = threading.Thread(target=self._update_nodes, name="nodes of the web page", daemon=True)
            self._thread.start()
        named = load_named_run(self._folder)
        if named is not None and (self._run is None or self._run.folder != named.folder):
            self._run = RunMonitor(named.folder)
        run = None if named is None or self._run is None else self._run.collect(tuple(named.nodes))
        clients = [] if run is None else run.pop("clients")
        nodes, problem = self._listed
        present = [node for node in nodes or () if node.status != "revoked"]
        return {
            "time": time.time(),
            "folder": clean_text(self._folder),
            "run": run,
            "clients": _merge(clients, nodes or (), named),
            "nodes": {
                "online": sum(node.status == "online" for node in present),
                "total": None if nodes is None else len(present),
                "problem": problem,
            },
        }

    def _update_nodes(self) -> None:
        try:
            self._listed = (self._list_nodes(), None)
        except (FedspanError, OSError) as error:
            self._listed = (self._listed[0], clean_text(error))


def _merge(clients: list[dict[str, Any]], nodes: Sequence[Node], named: NamedRun | None) -> list[dict[str, Any]]:
    """Return the run's clients with the status of their nodes, followed by the nodes that are not in the run.

    There are at most ``MAX_CLIENTS`` rows; the run may have clients without one.
    """
    by_id = {node.id: node for node in nodes}
    ids = {} if named is None else {clean_text(client, 200): id for client, id in named.nodes.items()}
    rows: list[dict[str, Any]] = []
    for client in clients:
        node = by_id.pop(ids.get(client["name"], ""), None)
        rows.append({**client, **_describe(node)})
    others = [node for id, node in by_id.items() if id not in ids.values()]
    for node in others[: max(0, MAX_CLIENTS - len(rows))]:
        name = clean_text(node.name or f"node {node.id}", 200)
        rows.append({**build_client(), "name": name, "status": "", "loss": None, **_describe(node)})
    return rows


def _describe(node: Node | None) -> dict[str, str]:
    if node is None:
        return {"node_status": "unknown", "node_seen": "", "node_work": ""}
    work, doing = node.work, ""
    if node.status == "online":
        seen = f"now, for {format_duration(node.online_seconds)}"
    elif node.offline_since is None:
        seen = "never"
    else:
        seen = f"{format_duration(max(0.0, time.time() - node.offline_since))} ago"
    if work is not None:
        doing = clean_text(work.doing if work.percent is None else f"{work.doing}, {work.percent} %", 60)
    return {"node_status": clean_text(node.status, 40), "node_seen": seen, "node_work": doing}
