"""The server component of the Flower app that ``fedspan flower-app`` writes, and the app itself."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from os.path import abspath, exists, expanduser
from pathlib import Path
from typing import Any

from fedspan import __version__
from fedspan.assembly.run import Prepared, prepare
from fedspan.assembly.server import ServerRun, build_server_clients, connect, prepare_server
from fedspan.config import RunConfig, override, parse_config, read_values
from fedspan.data.multiple_files import has_files
from fedspan.deployment.console import log_to_console
from fedspan.deployment.deploy import build_invitation, read_run_name
from fedspan.deployment.flower_client import get_run_path
from fedspan.deployment.flower_simulation import get_nodes_folder
from fedspan.deployment.handshake import build_server_config, compute_base_digest
from fedspan.deployment.participants import RECORD, Participant, ParticipantRecord, load_record
from fedspan.deployment.submission import explain_base, read_introduction
from fedspan.errors import FedspanError
from fedspan.federation.plausibility import describe_few_nodes
from fedspan.federation.protocol import Envelope
from fedspan.files import convert_disk_errors, restrict_new_files, write_atomic
from fedspan.progress.listener import Listener
from fedspan.run_folder import RunFolder
from fedspan.runs import start
from fedspan.runs.report import RunReport
from fedspan.transports.flower.server import Context, Grid, GridTransport, create_server_app, invite

_WAIT = 600.0
"""Seconds to wait for all nodes, unless the run's config of Flower has another number."""

_APP = """\
[project]
name = "fedspan-app"
description = "A run of fedspan"
version = "{version}"
license = "Apache-2.0"
dependencies = []  # Flower would install them for each run; fedspan is installed beside Flower

[tool.flwr.app]
publisher = "fedspan"

[tool.flwr.app.components]
serverapp = "{serverapp}:app"
clientapp = "{clientapp}:app"

[tool.flwr.app.config]
config = {config}
folder = {folder}
resume = ""
simulated = {simulated}
wait = {wait}
"""

log = logging.getLogger("fedspan.flower")

_PATHS = {"data": ("train", "test"), "model": ("name", "adapter")}
"""The settings of a run that may be files or folders."""

RunRounds = Callable[[Prepared], RunReport]


class _LogListener(Listener):
    """Writes the events of a run to the log, which Flower shows."""

    def on_note(self, text: str) -> None:
        log.info("%s", text)

    def on_client_failure(self, round: int, client: str, reason: str) -> None:
        log.warning("round %d: no update of %s: %s", round, client, reason)

    def on_round_finish(self, row: Mapping[str, Any]) -> None:
        if "loss" in row:
            log.info("round %d: training loss %.4g, %d clients", row["round"], row["loss"], len(row["cohort"]))


def write_app(folder: Path, config: str | Path, out: Path, overrides: Sequence[str] = ()) -> None:
    """Write a Flower app that runs a federation; ``flwr run`` starts it.

    Args:
        folder: Folder of the app; empty, or not existing yet.
        config: The run's YAML file. With ``data``, the app is for Flower's simulation; without, each node has its own.
        out: Folder for the runs' folders, on the machine of the server component.
        overrides: Changes to the config, each ``section.field=value``.
    """
    values = override(read_values(config), overrides)
    data = values.get("data")
    simulated = isinstance(data, Mapping) and (data.get("train") is not None or data.get("dataset") is not None)
    if simulated:
        values = _make_paths_absolute(values)
    _parse(values, simulated)
    with convert_disk_errors(folder, "choose another folder", "FOLDER"):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise FedspanError("FOLDER", str(folder), "an empty folder, or one that does not exist")
    components = {"serverapp": __name__, "clientapp": get_run_path.__module__, "version": __version__}
    settings = {"config": json.dumps(values), "folder": str(out.absolute()), "simulated": simulated, "wait": _WAIT}
    text = _APP.format(**components, **{name: _format_toml(value) for name, value in settings.items()})
    with convert_disk_errors(folder, "choose another folder", "FOLDER"):
        write_atomic(folder / "pyproject.toml", text.encode())


def _make_paths_absolute(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config whose files and folders are found from the folders of Flower's processes, too."""
    changed = dict(values)
    for section, names in _PATHS.items():
        if not isinstance(part := values.get(section), Mapping):
            continue
        for name in names:
            if isinstance(value := part.get(name), str) and (exists(path := expanduser(value)) or has_files(value)):
                changed[section] = {**changed[section], name: abspath(path)}
    return changed


def _format_toml(value: str | float | bool) -> str:
    """Format a value in TOML, whose strings are those of JSON, but for surrogates and one character."""
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise FedspanError("--out", value, "a folder whose path is UTF-8") from None
    return text


def _parse(values: Mapping[str, Any], simulated: bool) -> RunConfig:
    """Parse a run's config, and refuse what is not possible over Flower."""
    config = parse_config(values) if simulated else build_server_config(values)
    federation = config.federation
    refused: dict[str, tuple[object, str]] = {
        "federation.buffered": (federation.buffered, "Flower cancels no order, so rounds over it are synchronous"),
        "federation.late_joiners": (federation.late_joiners or None, "over Flower, the nodes are those of the start"),
        "simulation": (config.simulation, "Flower's simulation has no such conditions; `fedspan run` has"),
        "cluster": (config.cluster, "Flower's simulation has processes of its own"),
    }
    for field, (value, problem) in refused.items():
        if value is not None:
            raise FedspanError(field, value, problem=problem)
    return config


def _run(grid: Grid, context: Context) -> None:
    """Run the federation of a Flower app, or resume an earlier run."""
    log_to_console("fedspan")  # Flower shows its own
    values, listener, resume = context.run_config, _LogListener(), bool(context.run_config["resume"])
    folder, simulated = get_run_path(context), bool(values["simulated"])
    if not folder.is_absolute():
        raise FedspanError("folder", str(folder), "an absolute path on the machine of Flower's ServerApp")
    config = None if resume else _parse(json.loads(str(values["config"])), simulated)
    log.info("folder of the run: %s", folder)
    host = partial(_simulate, grid) if simulated else partial(_deploy, grid, float(values["wait"]), listener)
    build = prepare if simulated else _build_server
    with restrict_new_files():
        start.run(config, folder, resume=resume, listener=listener, host=host, build=build)


def _build_server(config: RunConfig, _: object, key: bytes | None, stages: Any) -> ServerRun:
    return prepare_server(config, key, stages)


def _simulate(grid: Grid, run_folder: RunFolder, prepared: Prepared, run_rounds: RunRounds) -> RunReport:
    """Run a federation whose clients are in the processes of Flower's simulation.

    An order names its client, and every process can train every client: the number of nodes does not matter.
    """
    online, federation = sorted(grid.get_node_ids()), prepared.config.federation
    if not online:
        raise FedspanError("nodes", 0, "at least one node of Flower's simulation")
    nodes = {id: online[number % len(online)] for number, id in enumerate(prepared.federation.clients)}
    transport = GridTransport(grid, nodes, federation.reconnect_timeout)
    return run_rounds(connect(prepared, transport, nodes=get_nodes_folder(run_folder.path)))


def _deploy(
    grid: Grid, wait: float, listener: Listener, run_folder: RunFolder, prepared: ServerRun, run_rounds: RunRounds
) -> RunReport:
    config, run = prepared.config, read_run_name(run_folder)
    evaluated = min(config.partition.clients, config.evaluation.clients or config.partition.clients)
    if (note := describe_few_nodes(evaluated)) is not None:
        listener.on_note(note)
    invitation = build_invitation(config, run)
    with prepared.engine.stages.stage("nodes", config.partition.clients, "nodes"):
        record = load_record(run_folder.path)
        begun = () if record is None else record.clients.keys()
        nodes, examples = _gather(grid, prepared, invitation.to_envelope(), wait, listener, begun)
    if record is None:
        joined = {id: Participant(node=node, examples=examples[id]) for id, node in nodes.items()}
        with convert_disk_errors(run_folder.path):
            write_atomic(run_folder.path / RECORD, ParticipantRecord(clients=joined).model_dump_json().encode())
    transport = GridTransport(grid, nodes, config.federation.reconnect_timeout)
    clients = build_server_clients(config, prepared.engine.adapted.spec, examples)
    return run_rounds(connect(prepared, transport, clients=clients, run=run, agreed=invitation.digest))


def _gather(
    grid: Grid, prepared: ServerRun, invitation: Envelope, wait: float, listener: Listener, begun: Collection[str]
) -> tuple[dict[str, int], dict[str, int]]:
    """Invite nodes until as many have joined as there are clients.

    Args:
        listener: Listener that is told which nodes participate, and why others do not.
        begun: Clients with which a resumed run began, which it needs again; none: any node may participate.

    Returns:
        Flower's node id and the number of examples of each client.
    """
    base, config = compute_base_digest(prepared.model), prepared.config
    nodes, examples, refused, undecided = dict[str, int](), dict[str, int](), dict[int, str](), set[int]()
    for node, reply in invite(grid, invitation, wait, undecided):
        for id in [id for id, known in nodes.items() if known == node]:
            del nodes[id], examples[id]  # it has come back, and what it declares now is what counts
        explain = partial(explain_base, prepared, base)
        introduction, reason = read_introduction(reply, explain, None, (), config.federation)
        id = f"node {node}" if introduction is None else introduction.id
        if introduction is not None and reason is None:
            if begun and id not in begun:
                reason = f"this run began with {', '.join(sorted(begun))}"
            elif id in nodes and nodes[id] in set(grid.get_node_ids()):
                reason = "another node has this id"
        if introduction is None or reason is not None:
            if introduction is None or introduction.waiting:
                undecided.add(node)
            if refused.get(node) != (text := f"{id}: {reason}"):
                refused[node] = text
                listener.on_note(f"{id} does not participate{' yet' if node in undecided else ''}: {reason}")
            continue
        refused.pop(node, None)
        nodes[id], examples[id] = node, introduction.examples
        listener.on_note(f"{id} participates with {introduction.examples} examples (node {node})")
        if len(nodes) == config.partition.clients:
            return nodes, examples
    reasons = "; ".join(sorted(refused.values())) or "no more nodes are online"
    problem = f"{len(nodes)} of {config.partition.clients} nodes participate ({reasons})"
    raise FedspanError("nodes", len(nodes), problem=problem)


app = create_server_app(_run)
