"""What the adapter relies on in Flower, checked against the installed version: each failure names what broke."""

from __future__ import annotations

import ast
import importlib
import re
import socket
import time
import tomllib
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from helpers.flower_names import broken, build_array_message, lookup, require

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

ROOT = Path(__file__).resolve().parents[4]
ADAPTER = ROOT / "src" / "fedspan" / "transports" / "flower" / "adapter"
PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy", "flwr.simulation")

OBJECTS = "flwr.supercore.inflatable.inflatable_object"
TRANSFER = "flwr.supercore.inflatable.inflatable_utils"
RUNTIME = "flwr.proto.runtime_pb2"
FLEET = "flwr.proto.fleet_pb2"
HEARTBEATS = "flwr.proto.heartbeat_pb2"
OBJECT_MESSAGES = "flwr.proto.message_pb2"
CONSTANTS = "flwr.supercore.constant"
KEYS = "flwr.supercore.primitives.asymmetric"
NAMES: dict[tuple[str, str], tuple[str, str]] = {
    ("flwr.app.message", "make_message"): ("metadata error", "the error that stands for a missing reply"),
    ("flwr.app.message", "remove_content_from_message"): ("message", "announcing a message"),
    ("flwr.cli.app", "app"): ("", "Flower's own commands"),
    ("flwr.common.constant", "ErrorCode"): ("", "the error that stands for a missing reply"),
    ("flwr.common.constant", "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE"): ("", "the maximum size of an object"),
    ("flwr.common.constant", "HEARTBEAT_CALL_TIMEOUT"): ("", "a node's heartbeats"),
    ("flwr.common.constant", "HEARTBEAT_DEFAULT_INTERVAL"): ("", "a node's heartbeats"),
    ("flwr.common.constant", "SUPERLINK_NODE_ID"): ("", "who a reply is addressed to"),
    ("flwr.common.constant", "SYSTEM_TIME_TOLERANCE"): ("", "a node's signature"),
    ("flwr.common.constant", "Status"): ("", "the replies that a run takes"),
    ("flwr.common.constant", "TIMESTAMP_HEADER"): ("", "a node's signature"),
    ("flwr.common.constant", "TIMESTAMP_TOLERANCE"): ("", "a node's signature"),
    ("flwr.common.serde", "message_from_proto"): ("message_proto", "receiving a message"),
    ("flwr.common.serde", "message_to_proto"): ("message", "announcing a message"),
    ("flwr.common.serde", "run_from_proto"): ("run_proto", "being the server of a run"),
    (FLEET, "ActivateNodeRequest"): ("", "a node's connection"),
    (FLEET, "ActivateNodeResponse"): ("", "a node's connection"),
    (FLEET, "DeactivateNodeRequest"): ("", "a node's connection"),
    (FLEET, "PullMessagesResponse"): ("", "receiving an order"),
    (FLEET, "PushMessagesRequest"): ("", "the check of a node's messages"),
    (FLEET, "PushMessagesResponse"): ("", "sending a reply"),
    (FLEET, "RegisterNodeFleetRequest"): ("", "a node's connection"),
    (FLEET, "UnregisterNodeFleetRequest"): ("", "a node's connection"),
    (HEARTBEATS, "SendNodeHeartbeatRequest"): ("", "a node's heartbeats"),
    (HEARTBEATS, "SendNodeHeartbeatResponse"): ("", "a node's heartbeats"),
    (OBJECT_MESSAGES, "ConfirmMessageReceivedRequest"): ("", "deleting a message on the SuperLink"),
    (OBJECT_MESSAGES, "ObjectTree"): ("", "the ids of a message's objects"),
    (OBJECT_MESSAGES, "PullObjectResponse"): ("", "fetching an object"),
    (OBJECT_MESSAGES, "PushObjectRequest"): ("", "noticing that a reply is complete"),
    (OBJECT_MESSAGES, "PushObjectResponse"): ("", "sending an object"),
    ("flwr.proto.node_pb2", "Node"): ("", "how a node names itself"),
    (RUNTIME, "AcquireTaskRequest"): ("", "taking over a run"),
    (RUNTIME, "PullAppMessagesRequest"): ("", "fetching replies"),
    (RUNTIME, "PullAppMessagesResponse"): ("", "fetching replies"),
    (RUNTIME, "PullTaskInputRequest"): ("", "being the server of a run"),
    (RUNTIME, "PushAppMessagesRequest"): ("", "sending orders"),
    (RUNTIME, "PushAppMessagesResponse"): ("", "sending orders"),
    (RUNTIME, "PushTaskOutputRequest"): ("", "ending a run"),
    (RUNTIME, "SendTaskHeartbeatRequest"): ("", "keeping a run alive"),
    ("flwr.proto.task_pb2", "Task"): ("", "being the server of a run"),
    ("flwr.server.superlink.utils", "check_abort"): ("run_id abort_status_list state", "the replies that a run takes"),
    (CONSTANTS, "FLEET_HTTP_PUBLIC_KEY_HEADER"): ("", "a node's signature"),
    (CONSTANTS, "FLEET_HTTP_SIGNATURE_HEADER"): ("", "a node's signature"),
    (CONSTANTS, "NodeStatus"): ("", "finding a registered node"),
    (CONSTANTS, "SYSTEM_MESSAGE_TYPE"): ("", "the error that stands for a missing reply"),
    (CONSTANTS, "TASK_TOKEN_HEADER"): ("", "being the server of a run"),
    ("flwr.supercore.corestate", "sql_corestate"): ("", "replies over a slow link"),
    ("flwr.supercore.date", "now"): ("", "the error that stands for a missing reply"),
    ("flwr.supercore.heartbeat", "HeartbeatSender"): ("heartbeat_fn", "keeping a run or a node alive"),
    (OBJECTS, "UnexpectedObjectContentError"): ("", "refusing an object that is not valid"),
    (OBJECTS, "get_all_nested_objects"): ("obj", "sending a message"),
    (OBJECTS, "get_object_body"): ("object_content cls", "the size of an assembled message"),
    (OBJECTS, "get_object_children_ids_from_object_content"): ("object_content", "the size of an assembled message"),
    (OBJECTS, "get_object_id"): ("object_content", "the names of objects that come along"),
    (OBJECTS, "get_object_tree"): ("obj", "sending a message"),
    (OBJECTS, "get_object_type_from_object_content"): ("object_content", "the size of an assembled message"),
    (OBJECTS, "is_valid_sha256_hash"): ("object_id", "storing objects"),
    (OBJECTS, "iterate_object_tree"): ("tree", "fetching a message"),
    (OBJECTS, "no_object_id_recompute"): ("", "sending a message without hashing it twice"),
    ("flwr.supercore.inflatable.inflatable_protobuf_utils", "make_pull_object_fn_protobuf"): (
        "pull_object_protobuf node run_id",
        "fetching objects",
    ),
    ("flwr.supercore.inflatable.inflatable_protobuf_utils", "make_push_object_fn_protobuf"): (
        "push_object_protobuf node run_id session_id",
        "sending objects",
    ),
    (TRANSFER, "ObjectPullError"): ("object_id reason", "noticing that a message can't be fetched"),
    (TRANSFER, "ObjectPushError"): ("", "noticing that a message can't be sent"),
    (TRANSFER, "ObjectUnavailableError"): ("", "a reply whose objects have not arrived"),
    (TRANSFER, "inflate_object_from_contents"): ("object_id object_contents", "assembling a message"),
    (TRANSFER, "pull_objects"): ("object_ids pull_object_fn", "fetching a message"),
    (TRANSFER, "push_objects"): ("objects push_object_fn", "sending an order"),
    (TRANSFER, "validate_object_content"): ("content", "refusing an object that is not valid"),
    ("flwr.supercore.interceptors", "RuntimeVersionHttpInterceptor"): ("component_name", "taking over a run"),
    ("flwr.supercore.interceptors", "SuperExecAuthHttpInterceptor"): (
        "master_secret protected_methods",
        "taking over a run",
    ),
    ("flwr.supercore.object_store", "NoObjectInStoreError"): ("", "an order that was deleted"),
    ("flwr.supercore.object_store.sql_object_store", "SqlObjectStore"): ("database_path verify", "storing objects"),
    (KEYS, "bytes_to_public_key"): ("public_key_bytes", "a node's signature"),
    (KEYS, "generate_key_pairs"): ("", "a node without a key"),
    (KEYS, "public_key_to_bytes"): ("public_key", "finding a registered node"),
    (KEYS, "sign_message"): ("private_key message", "a node's signature"),
    (KEYS, "verify_signature"): ("public_key message signature", "a node's signature"),
    ("flwr.supercore.retry", "RetryInvoker"): ("", "the reason why a run ended"),
    ("flwr.supercore.retry", "make_simple_http_retry_invoker"): ("", "taking over a run"),
    ("flwr.supercore.run", "RunNotRunningException"): ("", "noticing that a run has ended"),
    ("flwr.supercore.runtime", "RuntimeHttpClient"): ("", "being the server of a run"),
    ("flwr.supercore.task_identity", "TaskIdentity"): ("", "making messages"),
    ("flwr.supercore.utils", "int64_to_uint64"): ("signed", "unfinished replies of nodes that were stopped"),
    ("flwr.supercore.utils", "uint64_to_int64"): ("unsigned", "orders that were sent and not received"),
    ("flwr.superlink", "extensions"): ("", "the SuperLink's access filter"),
    ("flwr.superlink.grid", "HttpGrid"): (
        "runtime_api_address insecure root_certificates token",
        "the messages of a run",
    ),
    ("flwr.superlink.servicer.fleet", "fleet_handlers"): ("", "a node's heartbeats"),
    ("flwr.superlink.servicer.runtime", "runtime_handlers"): ("", "storing orders"),
}
"""By module and name: the parameters that are passed, and what for."""

FIELDS = {
    (FLEET, "ActivateNodeRequest"): "public_key heartbeat_interval",
    (FLEET, "ActivateNodeResponse"): "node_id",
    (FLEET, "DeactivateNodeRequest"): "node_id",
    (FLEET, "PullMessagesResponse"): "messages_list message_object_trees",
    (FLEET, "PushMessagesRequest"): "node messages_list message_object_trees clientapp_runtime_list",
    (FLEET, "PushMessagesResponse"): "results objects_to_push session_id",
    (FLEET, "RegisterNodeFleetRequest"): "public_key",
    (FLEET, "UnregisterNodeFleetRequest"): "node_id",
    (HEARTBEATS, "SendNodeHeartbeatRequest"): "node heartbeat_interval",
    (HEARTBEATS, "SendNodeHeartbeatResponse"): "success",
    (OBJECT_MESSAGES, "ConfirmMessageReceivedRequest"): "node run_id message_object_id",
    (OBJECT_MESSAGES, "ObjectTree"): "object_id children",
    (OBJECT_MESSAGES, "PushObjectRequest"): "session_id",
    (RUNTIME, "AcquireTaskRequest"): "supported_task_types",
    (RUNTIME, "AcquireTaskResponse"): "token task",
    (RUNTIME, "PullAppMessagesRequest"): "message_ids",
    (RUNTIME, "PullAppMessagesResponse"): "messages_list message_object_trees",
    (RUNTIME, "PullTaskInputResponse"): "task_id run context",
    (RUNTIME, "PushAppMessagesRequest"): "messages_list message_object_trees",
    (RUNTIME, "PushAppMessagesResponse"): "message_ids objects_to_push session_id",
    (RUNTIME, "PushTaskOutputRequest"): "sub_status details",
}
"""Fields of Flower's messages that are written or read."""


@pytest.mark.parametrize(("module", "name"), NAMES, ids=map(".".join, NAMES))
def test_flower_has_the_name(module: str, name: str) -> None:
    parameters, purpose = NAMES[module, name]
    value = lookup(module, name, purpose)
    if parameters:
        require(parameters, value, f"{module}.{name}", purpose)


@pytest.mark.parametrize(("module", "name"), FIELDS, ids=map(".".join, FIELDS))
def test_flower_s_messages_have_the_fields(module: str, name: str) -> None:
    purpose = "the requests to the SuperLink"
    fields = lookup(module, name, purpose).DESCRIPTOR.fields_by_name
    for field in FIELDS[module, name].split():
        if field not in fields:
            broken(f"the field {field} of {module}.{name}", purpose)


def test_the_lists_are_whole() -> None:
    """Everything private that the adapter imports is checked here, and listed in its docstring with its version."""
    trees = [ast.parse(path.read_text()) for path in ADAPTER.glob("*.py")]
    listed = " ".join((ast.get_docstring(ast.parse((ADAPTER / "__init__.py").read_text())) or "").split())
    imported = {name for tree in trees for name in private_imports(tree)} | {("flwr.cli.app", "app")}
    assert imported == set(NAMES)
    for _, name in imported - {("flwr.proto.message_pb2", "ObjectTree")}:
        assert re.search(rf"\b{name}\b", listed), f"{name} is not in the adapter's docstring"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"``{extras['flower'][0]}``" in listed
    assert version("flwr") in listed


def test_no_other_module_relies_on_private_names() -> None:
    private = re.compile(r"_message_id\"|\._runtime_client|\._retry_invoker|flwr_exit|TaskIdentity|flwr\.cli\.app")
    for folder in ("src", "tests", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.parent in (ADAPTER, Path(__file__).resolve().parent):
                continue
            text = path.read_text()
            assert "flwr" not in text or not list(private_imports(ast.parse(text))), (
                path
            )  # parsing takes most of the time
            assert not private.search(text), path


def private_imports(tree: ast.AST) -> list[tuple[str, str]]:
    """Modules and names of Flower's that a file imports, but for the public ones."""
    found: list[tuple[str, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr":
            found += [(node.module or "", one.name) for one in node.names if node.module not in PUBLIC]
        elif isinstance(node, ast.Import):
            found += [(one.name, "") for one in node.names if one.name.startswith("flwr.") and one.name not in PUBLIC]
    return found


def test_messages_need_the_identity_that_can_be_set() -> None:
    identity = lookup("flwr.supercore.task_identity", "TaskIdentity", "making messages")
    identity.task_id, identity.run_id, identity.node_id = 5, 6, 7
    if (identity.task_id, identity.run_id, identity.node_id) != (5, 6, 7):
        broken("a TaskIdentity that can be set", "making messages")
    metadata = build_array_message(b"").metadata
    if (metadata.run_id, metadata.src_node_id) != (6, 7):
        broken("messages with the run and node of TaskIdentity", "making messages")


def test_no_header_names_another_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, uvicorn believes a header of this machine's clients; the door trusts the connections of its user."""
    uvicorn = pytest.importorskip("uvicorn")
    command = importlib.import_module("flwr.superlink.cli.flower_superlink")
    from flwr.supercore.corestate import sql_corestate
    from flwr.superlink import extensions

    from fedspan.transports.flower.adapter import run_superlink
    from fedspan.transports.flower.connections import BoundedProtocol, BoundedSocket

    for module, name in ((extensions, "get_middleware"), (sql_corestate, "OBJECT_PUSH_SESSION_TTL_SECONDS")):
        monkeypatch.setattr(module, name, getattr(module, name))  # restored with the others
    monkeypatch.setattr(command, "uvicorn", None)
    clients, servers = list[Any](), list[Any]()

    class Server(uvicorn.Server):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            servers.append(self)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        clients.append((scope["client"], scope["scheme"], scope["root_path"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    monkeypatch.setattr(uvicorn, "Server", Server)
    monkeypatch.setattr(
        command, "flower_superlink", lambda: command.uvicorn.run(app=app, host="127.0.0.1", port=0, lifespan="off")
    )
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    thread = Thread(target=run_superlink, args=([], BoundedProtocol, BoundedSocket.take_over))
    thread.start()
    try:
        until = time.monotonic() + 30
        while not (servers and servers[0].started):
            assert time.monotonic() < until
            time.sleep(0.02)
        address = servers[0].servers[0].sockets[0].getsockname()
        with socket.create_connection(address, 10) as attacker:
            forged = "X-Forwarded-For: 127.0.0.1:7\r\nForwarded: for=127.0.0.1:7\r\nX-Real-IP: 127.0.0.1\r\n"
            forged += "X-Forwarded-Proto: https\r\nX-Forwarded-Prefix: /a\r\n"
            attacker.sendall(f"POST /v1/control/list-nodes HTTP/1.1\r\nHost: a\r\n{forged}\r\n".encode())
            assert attacker.recv(100).startswith(b"HTTP/1.1 200")
            assert clients == [(attacker.getsockname(), "http", "")]
    finally:
        for server in servers:
            server.should_exit = True
        thread.join(20)
