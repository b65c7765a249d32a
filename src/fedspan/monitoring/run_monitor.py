"""The state of a run or a server for the web page, from files that they write; each call reads only what is new."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fedspan.config import load_yaml
from fedspan.deployment.status import NamedRun, is_at_work, load_named_run
from fedspan.errors import FedspanError, escape_controls
from fedspan.files import from_json
from fedspan.logs import LogFollower
from fedspan.progress.formatting import format_duration
from fedspan.reports.curves import get_score
from fedspan.run_folder import RunFolder
from fedspan.tasks.metrics import METRICS

if TYPE_CHECKING:
    from fedspan.transports.http.server import Node

_MAX_TEXT = 500
"""Longest text that the page shows, in characters."""
_MAX_FILE = 1 << 24
"""Largest file that is read as a whole, in bytes; larger ones count as unreadable."""
_MAX_INTEGER = 1 << 53
"""Largest integer that a browser represents exactly."""
_MAX_POINTS = 400
"""Points of a curve that the page receives; longer curves are thinned out."""
MAX_CLIENTS = 500
_MAX_FAILURES = 50


def clean_text(text: object, limit: int = _MAX_TEXT) -> str:
    """Return a text that may come from another machine on one line: controls escaped, and cut to a length."""
    shown = str(text)
    return escape_controls(shown[:limit] + ("…" if len(shown) > limit else ""))


class RunMonitor:
    """Follows the run in a folder; the run's own process is not involved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run = RunFolder(folder)
        self._metrics = LogFollower(self._run.metrics)
        self._files: dict[Path, tuple[tuple[int, int], Mapping[str, Any]]] = {}
        self._reset()

    def _reset(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._last: Mapping[str, Any] = {}
        self._clients: dict[str, dict[str, Any]] = {}
        self._failures: deque[dict[str, Any]] = deque(maxlen=_MAX_FAILURES)
        self._failure_count = 0

    def collect(self, listed: Collection[str] = ()) -> dict[str, Any] | None:
        """Return the state of the run as plain values for JSON; None: there is no run in the folder yet.

        Args:
            listed: Clients that are listed even if they have not been selected yet.
        """
        if not os.path.isfile(self._run.config):  # False as well if this user may not read the folder
            return None
        problem = self._read_rounds()
        config = self._read(self._run.config)
        report = self._read(self._run.report)
        progress = {} if report else self._read(self._run.progress)
        at_work = not report and is_at_work(self._run)
        state = "finished" if report else "running" if at_work else "stopped"
        reason = progress.get("reason")
        if not at_work and not report and progress.get("state") == "failed":
            state = "failed"
        metric = self._choose_metric(report, progress)
        shown = METRICS.get(metric)
        clients = self._collect_clients(progress if at_work else {}, listed)
        return {
            "folder": clean_text(self.folder),
            "method": clean_text(report.get("method") or _get(config, "method", "name") or ""),
            "model": clean_text(_get(config, "model", "name") or ""),
            "task": clean_text(config.get("task") or ""),
            "state": state,
            "reason": None if reason is None or at_work else clean_text(reason, 2000),
            "problem": problem,
            "round": _to_int(self._last.get("round")) or 0,
            "current": _to_int(progress.get("round")) if at_work else None,
            "rounds": _to_int(report.get("rounds") or progress.get("rounds") or _get(config, "federation", "rounds")),
            "stage": _clean_stage(progress.get("stage")) if at_work else None,
            "baseline": _clean_baseline(progress.get("baseline")) if at_work else None,
            "seconds": _to_float(self._last.get("seconds")),
            "updated": _to_float(progress.get("updated")) if at_work else None,
            "round_started": _to_float(progress.get("round_started")) if at_work else None,
            "metric": {
                "title": clean_text(progress.get("metric_title") or (metric if shown is None else shown.title)),
                "percent": shown.is_percentage if shown is not None else bool(progress.get("is_percentage")),
            },
            "curve": self._collect_curve(metric),
            "result": _collect_result(report, metric),
            "bytes": {way: _to_int(_get(self._last, "bytes", way)) or 0 for way in ("down", "up")},
            "privacy": _collect_privacy(self._last, config),
            "clients": clients,
            "client_count": _to_int(progress.get("clients")) or _to_int(_get(config, "partition", "clients")),
            "known_clients": len({*self._clients, *_to_names(progress.get("cohort")), *listed}),
            "failures": list(self._failures)[::-1],
            "failure_count": self._failure_count,
            "notes": [clean_text(note) for note in _to_names(progress.get("notes"))][:20]
            + [clean_text(warning) for warning in _to_names(report.get("warnings"))][:20],
        }

    def _read_rounds(self) -> str | None:
        """Read new lines of the metrics; return the problem if they cannot be read."""
        try:
            rows, is_restarted = self._metrics.read()
        except FedspanError as error:
            self._reset()
            return clean_text(error)
        if is_restarted:
            self._reset()
        for row in rows:
            self._add(cast("Mapping[str, Any]", row))
        return None

    def _add(self, row: Mapping[str, Any]) -> None:
        self._last = row
        number = _to_int(row.get("round")) or 0
        self._rows.append({key: row.get(key) for key in ("round", "loss", "validation", "test", "clients", "privacy")})
        for id in _to_names(row.get("cohort")):
            entry = self._get_client(id)
            entry["rounds"] += 1
            entry["last_round"] = number
        for id in _to_names(row.get("late")):
            self._get_client(id)["late"] += 1
        failures = row.get("failures")
        for failure in failures if isinstance(failures, list) else ():
            match failure:
                case {"client": str() as client, "reason": str() as reason}:
                    entry = self._get_client(client)
                    entry["failures"] += 1
                    entry["last_failure"] = {"round": number, "reason": clean_text(reason)}
                    self._failure_count += 1
                    self._failures.append({"round": number, "client": clean_text(client), "reason": clean_text(reason)})
                case _:
                    continue

    def _get_client(self, id: str) -> dict[str, Any]:
        return self._clients.setdefault(id, build_client())

    def _collect_clients(self, progress: Mapping[str, Any], listed: Collection[str]) -> list[dict[str, Any]]:
        """Return the clients, those of the current round and those with failures first."""
        cohort, replied = frozenset(_to_names(progress.get("cohort"))), frozenset(_to_names(progress.get("replied")))
        losses = progress.get("losses")
        losses = losses if isinstance(losses, Mapping) else {}
        failures = progress.get("failures")
        failures = failures if isinstance(failures, Mapping) else {}
        rows: list[dict[str, Any]] = []
        for id in {*self._clients, *cohort, *replied, *listed}:
            entry = self._clients.get(id) or build_client()
            if isinstance(reason := failures.get(id), str):
                status = "failed"
                entry = {
                    **entry,
                    "last_failure": {"round": _to_int(progress.get("round")), "reason": clean_text(reason)},
                }
            else:
                status = "replied" if id in replied else "no reply yet" if id in cohort else "not selected"
            rows.append({**entry, "name": id, "status": status if progress else "", "loss": _to_float(losses.get(id))})
        rows.sort(key=lambda row: (row["status"] in ("", "not selected"), not row["failures"], row["name"]))
        return [{**row, "name": clean_text(row["name"], 200)} for row in rows[:MAX_CLIENTS]]

    def _choose_metric(self, report: Mapping[str, Any], progress: Mapping[str, Any]) -> str:
        """Return the run's metric; of a run that names none, the first that was measured."""
        for values in (report, progress):
            if isinstance(name := values.get("metric"), str):
                return name
        for row in reversed(self._rows):
            for part in ("test", "clients", "validation"):
                names = row[part] if isinstance(row.get(part), Mapping) else {}
                for name in names:
                    if name not in ("loss", "worst"):
                        return str(name)
        return "accuracy"

    def _collect_curve(self, metric: str) -> list[dict[str, Any]]:
        points: list[dict[str, Any]] = []
        for row in self._rows:
            validation, privacy = row.get("validation"), row.get("privacy")
            points.append(
                {
                    "round": _to_int(row.get("round")) or 0,
                    "loss": _to_float(row.get("loss")),
                    "score": get_score(row, metric),
                    "validation": _to_float(validation.get(metric)) if isinstance(validation, Mapping) else None,
                    "epsilon": _to_float(privacy.get("epsilon")) if isinstance(privacy, Mapping) else None,
                }
            )
        step = math.ceil(len(points) / _MAX_POINTS) if points else 1
        return points[::-1][::step][::-1]  # the last point is always among them

    def _read(self, path: Path) -> Mapping[str, Any]:
        """Return the object in a JSON or YAML file; empty if the file is missing, too large or no object."""
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if (known := self._files.get(path)) is None or known[0] != stamp:
                with path.open("rb") as file:
                    data = file.read(_MAX_FILE + 1)
                self._files[path] = known = (stamp, self._parse(path, data))
        except OSError:
            return {}
        return known[1]

    def _parse(self, path: Path, data: bytes) -> Mapping[str, Any]:
        if len(data) > _MAX_FILE:
            return {}
        try:
            value = load_yaml(data) if path == self._run.config else from_json(data)
        except ValueError:
            return {}
        return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def build_page_state(monitor: RunMonitor) -> dict[str, Any]:
    """Return the state that the page shows of a run without nodes of a server."""
    state = monitor.collect()
    clients = [] if state is None else state.pop("clients")
    return {
        "time": time.time(),
        "folder": clean_text(monitor.folder),
        "run": state,
        "clients": clients,
        "nodes": None,
    }


def build_client() -> dict[str, Any]:
    """Return the row of a client that was never selected."""
    return {"rounds": 0, "last_round": None, "late": 0, "failures": 0, "last_failure": None}


def _get(values: Mapping[str, Any], *path: str) -> Any:
    """Return a nested value; None if there is none."""
    value: Any = values
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _to_int(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_INTEGER:
        return value
    return None


def _to_float(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the largest float
        return None
    return number if math.isfinite(number) else None


def _to_names(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _clean_stage(stage: object) -> dict[str, Any] | None:
    values = cast("Mapping[str, Any]", stage) if isinstance(stage, Mapping) else {}
    if not isinstance(text := values.get("text"), str):
        return None
    done, total = _to_int(values.get("done")) or 0, _to_int(values.get("total"))
    return {"text": clean_text(text), "done": done, "total": total, "unit": clean_text(values.get("unit"), 40)}


def _clean_baseline(baseline: object) -> dict[str, Any] | None:
    values = cast("Mapping[str, Any]", baseline) if isinstance(baseline, Mapping) else {}
    name, round, rounds = values.get("name"), _to_int(values.get("round")), _to_int(values.get("rounds"))
    if not isinstance(name, str) or round is None or rounds is None:
        return None
    return {"name": clean_text(name, 40), "round": round, "rounds": rounds}


def _collect_result(report: Mapping[str, Any], metric: str) -> dict[str, Any] | None:
    """Return the exported round of a finished run, with its score; None: the run is not finished."""
    if not report:
        return None
    scores = report.get("scores")
    score = get_score(scores, metric) if isinstance(scores, Mapping) else None
    worst = _get(report, "scores", "clients", "worst")
    return {
        "best_round": _to_int(report.get("best_round")),
        "selected": report.get("selected") is not False,
        "score": score,
        "worst": None
        if not isinstance(worst, Mapping)
        else {"client": clean_text(worst.get("client"), 200), "score": _to_float(worst.get(metric))},
    }


def _collect_privacy(row: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the privacy budget that is spent, and its limit; None: the run has no differential privacy."""
    if not isinstance(config.get("privacy"), Mapping):
        return None
    return {
        "epsilon": _to_float(_get(row, "privacy", "epsilon")) or 0.0,
        "delta": _to_float(_get(config, "privacy", "delta")),
        "limit": _to_float(_get(config, "privacy", "epsilon")),
        "mechanism": clean_text(_get(config, "privacy", "mechanism"), 40),
    }


INTERVAL = 3.0
"""Seconds between two lists of the nodes, which are requested only for a viewer."""


class ServerMonitor:
    """Follows the nodes of a server, and the run that was submitted last.

    Args:
        list_nodes: Returns the server's nodes; it may wait for the server, and is called in a thread of its own.
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
        seen = "not since start"  # of the serving process
    else:
        seen = f"{format_duration(max(0.0, time.time() - node.offline_since))} ago"
    if work is not None:
        doing = clean_text(work.doing if work.percent is None else f"{work.doing}, {work.percent} %", 60)
    return {"node_status": clean_text(node.status, 40), "node_seen": seen, "node_work": doing}
