"""Federations across machines: a data owner's node joins, an operator submits a run."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from fedspan import __version__
from fedspan.assembly.server import ServerRun, prepare_server
from fedspan.config import RunConfig
from fedspan.config.node import NodeConfig, load_node, require_data
from fedspan.config.reading import to_plain_values
from fedspan.config.validation_errors import convert_validation_errors
from fedspan.data.config import DataConfig
from fedspan.data.dataset_defaults import fill_data_defaults
from fedspan.data.files import NOWHERE, read_source
from fedspan.deployment.base_files import BaseDownloads, describe_base
from fedspan.deployment.base_offers import BaseFile, find_local_base, list_base_files, offer_base
from fedspan.deployment.handshake import Invitation, build_node_values, build_server_config
from fedspan.deployment.health import Heartbeat, read_work
from fedspan.deployment.node_folder import WORKER
from fedspan.deployment.submission import Submission
from fedspan.deployment.supervisor import Supervisor
from fedspan.deployment.usage import UsageBook
from fedspan.errors import FedspanError
from fedspan.federation.plausibility import describe_few_nodes
from fedspan.federation.protocol import Envelope
from fedspan.files import convert_disk_errors, make_private_folder, read_bytes, write_atomic
from fedspan.processes import hold_folder
from fedspan.progress.file import ProgressFile
from fedspan.progress.listener import Listener, Listeners
from fedspan.run_folder import RunFolder
from fedspan.runs import start
from fedspan.runs.integrity import require_intact
from fedspan.runs.report import RunReport, is_run, read_report
from fedspan.transports.http import require

if TYPE_CHECKING:
    from fedspan.transports.http.client import Link
    from fedspan.transports.http.server import ServerLink

_MBIT_BYTES = 1e6 / 8
"""Bytes of a megabit."""
_SAMPLE_BYTES = 1 << 20
"""Bytes at the beginning of a node's data from which the check infers their task."""

log = logging.getLogger("fedspan.node")

_NAME = "federation-name"
"""The file in a run's folder with the run's name, as its nodes know it."""
_OFFER = "federation-offer"
"""The empty file in the folder of a run that offers its base model to nodes."""


def check_node(path: str | Path, *, insecure: bool = False) -> list[str]:
    """Check a node's file, its key, that its data can be loaded, its server, and that it admitted the key.

    Of the node, only the public key is sent to the server.

    Args:
        insecure: Whether the node runs without TLS and a key.

    Returns:
        What was checked, one line each.
    """
    from fedspan.transports.http.node import check_server

    node = load_node(path)
    lines = [f"file: {path}, node {node.id}"]
    if not node.data:
        lines.append("data: none in this file, so the node needs fedspan.join(file, trainer=...)")
    else:
        lines += _check_examples(node)
    if not insecure and (node.authority is None or node.key is None):
        missing = "authority" if node.authority is None else "key"
        raise FedspanError(missing, None, "ca.crt of the server and the node's key, or --insecure for a test")
    link = _build_link(node, insecure=insecure)
    if not insecure:
        lines.append(f"key: {node.key}")
    if Path(node.folder).exists():
        make_private_folder(Path(node.folder), "folder")
    for name in [*node.models, *(name for name in node.limits.models or () if not set(name) & set("*?["))]:
        if not name.startswith("builtin:"):
            lines.append(f"model {name}: {describe_base(node, name) if node.data else 'the trainer has its own'}")
    lines.append(f"server: {check_server(link)}")
    return lines


def _build_link(node: NodeConfig, *, insecure: bool) -> Link:
    from fedspan.transports.http.client import Link
    from fedspan.transports.http.keys import load_node_key

    key = None if insecure or node.key is None else load_node_key(Path(node.key))
    authority = None if insecure or node.authority is None else Path(node.authority)
    up, down = (
        None if mbit is None else mbit * _MBIT_BYTES for mbit in (node.bandwidth.up_mbit, node.bandwidth.down_mbit)
    )
    tls_authority = None if node.tls_authority is None else Path(node.tls_authority)
    return Link(node.server, authority, key, node.limits.message_bytes, up, down, node.proxy, tls_authority)


def _check_examples(node: NodeConfig) -> list[str]:
    """Load a node's examples as a run of the task that they seem to be for would."""
    from fedspan.config.column_inference import infer_data
    from fedspan.data.loading import load
    from fedspan.data.partition import compute_part_sizes
    from fedspan.tasks.registry import get_task

    def parse(values: Mapping[str, Any]) -> DataConfig:
        with convert_validation_errors("data", DataConfig):
            return DataConfig.model_validate(values)

    data = parse({"test_fraction": 0.0, **node.data})
    rows = read_source(fill_data_defaults(data), "train", "data", _SAMPLE_BYTES)
    named = {
        "text": node.data.get("text", node.data.get("image")),
        "label": data.label,
        "answer": node.data.get("answer"),
    }
    try:
        inferred = infer_data(rows, str(data.train), None, {**named, "by": None})
    except FedspanError as error:  # which names an option of `fedspan init`
        raise error.relocate(f"data.{error.field.removeprefix('--')}") from error
    task = get_task(inferred.task)
    # The labels are those of the run, so none of the owner's are an error.
    shared = {**inferred.data, **({"labels": ["0", "1"]} if task.has_labels else {})}
    own = {"data": node.data, "validation": node.validation, "test": node.test, "split_seed": node.split_seed}
    assert task.columns is not None
    try:
        loaded = load(parse(build_node_values({"data": shared}, own)["data"]), task=task.columns, ignores_labels=True)
    except FedspanError as error:
        columns = ", ".join(f"{name}: {value}" for name, value in inferred.data.items())
        raise error.relocate(
            note=f"They seem to be examples for {task.name} ({columns or 'default columns'})."
        ) from error
    count, limits = len(loaded.train), node.limits
    scored, test = compute_part_sizes(count, node.validation, node.test)
    if (trained := count - scored - test) < limits.train_examples:
        value = f"{count} examples, {trained} of them for training"
        raise FedspanError("data.train", value, f"at least {limits.train_examples} (limits.train_examples)")
    lines = [f"data: {count} examples, about {trained} of them for training, read for {task.name}"]
    if limits.evaluation_epsilon is not None and scored < limits.evaluation_examples:
        lines.append(
            f"scores: none will be sent, because about {scored} examples are for validation, and "
            f"limits.evaluation_examples is {limits.evaluation_examples}"
        )
    return lines


def join(path: str | Path, *, trainer: Any = None, insecure: bool = False, stop: Event | None = None) -> None:
    """Participate in federations as a data owner's node until stopped (by Ctrl-C, or ``stop``).

    Args:
        path: The node file.
        trainer: A trainer of the owner's own, which trains and evaluates on its own data: a ``transformers.Trainer``
            or one derived from it, a ``TorchTrainer``, or a function without arguments that makes one. It runs in this
            process, so ``limits.round_seconds`` has no effect. In a script of several processes (``torchrun``), each
            calls this function, and rank 0 speaks for the owner. None: fedspan trains on the file's ``data``.
        insecure: Whether to run without TLS and a key, for a test on one machine.
        stop: Event that ends the function when set.

    Examples:
        >>> fedspan.join("node.yaml", trainer=trainer)

    Raises:
        FedspanError: If the file has an error, other users may enter the node's folder, another process works in it,
            the record of what servers have used is missing or damaged, the server refuses this node, or one of several
            processes failed.
    """
    require()
    from fedspan.transports.http.keys import SOON, compute_days_left
    from fedspan.transports.http.node import serve
    from fedspan.transports.http.wire import NodeWork

    node = load_node(path)
    for field, value in (("authority", node.authority), ("key", node.key)):
        if value is None and not insecure:
            raise FedspanError(field, None, "a file, or --insecure for a trial without TLS and keys")
    link = _build_link(node, insecure=insecure)
    authority = link.authority
    if authority is not None and (days := compute_days_left(authority)) < SOON:
        log.warning("%s expires in %.0f days: ask the server's operator for a new one (fedspan renew)", authority, days)
    make_private_folder(Path(node.folder), "folder")
    stop, heartbeat = stop or Event(), Heartbeat(Path(node.folder))
    downloads: BaseDownloads | None = None
    if trainer is not None:
        from fedspan.deployment.console import log_to_console
        from fedspan.deployment.trainer_node import TrainerNode, adopt_node_trainer, follow
        from fedspan.training.trainers.processes import Processes, count_processes

        adopted = adopt_node_trainer(node, trainer)
        processes = Processes() if count_processes() > 1 else None
        if processes is not None and not processes.is_leader:
            follow(node, adopted, processes)
            return
        log_to_console("fedspan")  # a script may have configured no logging
        worker = TrainerNode(node, adopted, processes, stop)
    else:
        require_data(node)
        worker = Supervisor(Path(path), node.limits.round_seconds, heartbeat.notify_watchdog)
        if node.limits.accept_base:
            downloads = BaseDownloads(Path(node.folder))

    def answer(envelope: Envelope) -> Envelope:
        heartbeat.renew("an order")
        return worker.answer(envelope)

    def get_work() -> NodeWork | None:
        work = read_work(Path(node.folder))
        return None if work is None else NodeWork(*work)

    with hold_folder(Path(node.folder), "node", "folder"), closing(worker):
        with hold_folder(Path(node.folder), WORKER, "folder"):  # the process that a killed node left has ended
            book = UsageBook(node)
            book.begin()
            book.get_account()  # a lost book is reported here, and not only to the first server that asks
        before_order = None if downloads is None else downloads.start
        serve(link, answer, stop, heartbeat.renew, before_order, get_work)


def submit(
    config: Mapping[str, Any] | str | Path | None,
    folder: str | Path,
    link: ServerLink,
    *,
    overrides: Sequence[str] = (),
    resume: bool = False,
    wait: float = 600.0,
    offer: bool = False,
    listener: Listener | None = None,
) -> RunReport:
    """Run a federation with the nodes of a server from this process.

    Args:
        config: Config of a new run, a YAML file or plain values; ``partition.clients`` is the number of nodes.
        folder: Folder of the run; for a new run, empty or not yet created.
        overrides: Changes to the config, each ``section.field=value``.
        resume: Whether to continue the run in the folder after its last finished round; a finished run returns its
            report.
        wait: Seconds to wait for all nodes.
        offer: Whether to offer the files of the base model to nodes that have no copy of it; a resumed run offers them
            if it has offered them before.
    """
    require()
    from fedspan.transports.http.admissions import read_admissions
    from fedspan.transports.http.server import attach
    from fedspan.transports.http.signing import ServerSigner

    parsed: RunConfig | None = None
    if resume and is_run(folder) and RunFolder(folder).report.is_file():
        require_intact(RunFolder(folder))
        return read_report(folder)
    if not resume:
        if config is None:
            raise FedspanError("config", None, "a config for a new run")
        parsed = build_server_config(to_plain_values(config, overrides))

    progress_file = ProgressFile(RunFolder(folder).progress)
    events = Listeners(listener or Listener(), progress_file)

    def host(run_folder: RunFolder, prepared: ServerRun, run_rounds: Any) -> RunReport:
        run, config = read_run_name(run_folder), prepared.config
        evaluated = min(config.partition.clients, config.evaluation.clients or config.partition.clients)
        if (note := describe_few_nodes(evaluated)) is not None:
            events.on_note(note)
        files, offered = list[BaseFile](), nullcontext()
        if offer or (run_folder.path / _OFFER).is_file():
            base_folder = _find_offered_base(config)
            events.on_note(f"hashing the files of the base model that is offered to the nodes: {base_folder}")
            files = list_base_files(base_folder)
            with convert_disk_errors(run_folder.path):
                write_atomic(run_folder.path / _OFFER, b"")  # nodes that received the base need it after a resume, too
            size = sum(file.size for file in files) / 2**20
            events.on_note(f"offered to the nodes, {size:.1f} MiB: {', '.join(file.name for file in files)}")
            offered = offer_base(link.folder, base_folder, files)
        with offered, attach(link, prepared.config.federation.message_mib << 20) as server:
            signer = None
            if link.authority is not None:
                signer = ServerSigner(
                    link.folder,
                    lambda: {node: admission.key.encode() for node, admission in read_admissions(link).items()},
                )
            invitation = build_invitation(prepared.config, run, files)
            submission = Submission(link, run_folder, prepared, invitation, signer, events, wait)
            submission.gather(server)
            return run_rounds(submission.connect(server))

    return start.run(
        parsed,
        folder,
        resume=resume,
        listener=events,
        host=host,
        build=lambda run_config, _, key, stages: prepare_server(run_config, key, stages),
        progress_file=progress_file,
    )


def read_run_name(folder: RunFolder) -> str:
    """Return the run's name for its nodes; it is created at the start of the run."""
    path = folder.path / _NAME
    if not path.is_file():
        with convert_disk_errors(folder.path):
            write_atomic(path, secrets.token_hex(16).encode())
    return read_bytes(path).decode()


def _find_offered_base(config: RunConfig) -> Path:
    name = config.model.name
    folder = None if name.startswith("builtin:") else find_local_base(name, config.model.revision)
    if folder is None:
        problem = "only a model in a folder or from the hub can be offered to nodes; builtin: models are packages"
        raise FedspanError("--offer-base", name, problem=problem)
    return folder


def build_invitation(config: RunConfig, run: str, files: Sequence[BaseFile] = ()) -> Invitation:
    """Return the invitation to a run, with the files of the base model that the server offers."""
    values = config.model_dump(mode="json", exclude={"device", "threads", "baselines"})
    values["data"] = {key: value for key, value in values["data"].items() if value != NOWHERE}
    return Invitation(run=run, version=__version__, config=json.dumps(values), base_files=tuple(files))
