"""What the adapter relies on in Flower, checked against the installed version: each failure names what broke."""

import ast
import base64
import importlib
import inspect
import json
import logging
import re
import socket
import sqlite3
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from helpers.flower_names import broken, build_array_message, lookup, require
from helpers.hostile_node import make_strange_keys

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


STAND_IN = ROOT / "tests" / "transports" / "flower_app" / "test_grid_transport.py"
"""Makes messages of the public interface without a SuperLink, which sets what they need."""


def test_no_other_module_relies_on_private_names() -> None:
    private = re.compile(r"_message_id\"|\._runtime_client|\._retry_invoker|flwr_exit|TaskIdentity|flwr\.cli\.app")
    for folder in ("src", "tests", "evidence", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.parent in (ADAPTER, Path(__file__).resolve().parent) or path == STAND_IN:
                continue
            text = path.read_text()
            if "flwr" in text:  # parsing takes most of the time
                assert private_imports(ast.parse(text)) == [], path
            assert not private.search(text), path


def private_imports(tree: ast.AST) -> list[tuple[str, str]]:
    """Modules and names of Flower's that a file imports, but for the public ones."""
    found: list[tuple[str, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr":
            names = [one.name for one in node.names if f"{node.module}.{one.name}" not in PUBLIC]
            found += [(node.module or "", name) for name in names if node.module not in PUBLIC]
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


PATHS = {
    "ACTIVATE_NODE": "a node's connection",
    "CONFIRM_RECEIVED": "the check of a node's requests",
    "DEACTIVATE_NODE": "a node's connection",
    "GET_RUN": "the check of a node's requests",
    "PULL_MESSAGES": "the check of a node's requests",
    "PULL_OBJECT": "fetching an object",
    "PUSH_MESSAGES": "the check of a node's messages",
    "PUSH_OBJECT": "sending an object",
    "PUSH_ORDERS": "noticing that there are orders",
    "REGISTER_NODE": "a node's connection to a server without keys",
    "SEND_HEARTBEAT": "a node's heartbeats",
    "UNREGISTER_NODE": "a node's connection to a server without keys",
}


def test_the_superlink_has_each_path_that_nodes_and_the_door_know() -> None:
    from fedspan.transports.flower.adapter import paths

    assert PATHS.keys() == {*paths.__all__} - {"NODE_API"}
    create_app = lookup("flwr.superlink.main", "create_app", "the SuperLink's access filter")
    routes = create_app().openapi()["paths"]
    for name, purpose in PATHS.items():
        end = getattr(paths, name)
        path = end if end.startswith("/") else f"{paths.NODE_API}{end}"
        if "post" not in routes.get(path, {}):
            broken(f"a path {path} that takes POST requests ({sorted(routes)})", purpose)


@pytest.mark.usefixtures("identity")
def test_a_message_s_id_is_the_hash_of_its_content() -> None:
    message = build_array_message(b"abc")
    message.metadata.__dict__["_message_id"] = message.object_id
    if message.metadata.message_id != message.object_id:
        broken('metadata.__dict__["_message_id"]', "naming a message by its content")
    if not re.fullmatch("[0-9a-f]{64}", message.object_id):
        broken("a SHA-256 as Message.object_id", "naming a message by its content")


@pytest.mark.usefixtures("identity")
def test_a_message_comes_apart_and_together_again() -> None:
    objects, transfer = importlib.import_module(OBJECTS), importlib.import_module(TRANSFER)
    body = bytes(25 * 2**20)  # three pieces, of which two are equal
    message = build_array_message(body)
    contents = {id: one.deflate() for id, one in objects.get_all_nested_objects(message).items()}
    purpose = "sending and assembling a message"
    if {one.object_id for one in objects.iterate_object_tree(objects.get_object_tree(message))} != set(contents):
        broken("an object tree of all nested objects", purpose)
    arrays = [data for data in contents.values() if objects.get_object_type_from_object_content(data) == "Array"]
    if len(arrays) != 1:
        broken('one object of type "Array" for an array', "the size of an assembled message")
    pieces = objects.get_object_children_ids_from_object_content(arrays[0])
    from flwr.app import Array

    positions = json.loads(objects.get_object_body(arrays[0], Array)).get("arraychunk_ids")
    if positions is None or sum(len(contents[pieces[one]]) for one in positions) < len(body):
        broken('"arraychunk_ids" with the positions of an array\'s pieces', "the size of an assembled message")
    whole = transfer.inflate_object_from_contents(message.object_id, contents)
    if whole.content["body"]["body"].data != body:
        broken("inflate_object_from_contents as the inverse of deflate", purpose)
    if contents:
        broken("an inflate_object_from_contents that removes the objects that it used", "saving memory")


def test_the_first_error_of_a_pull_is_raised() -> None:
    transfer = importlib.import_module(TRANSFER)
    error = transfer.ObjectPullError("id", "why")
    if str(error).partition("': ")[2] != "why":
        broken("an ObjectPullError whose text ends with ': and the reason", "the reason of a missing reply")

    def pull(id: str) -> bytes:
        raise error

    with pytest.raises(transfer.ObjectPullError) as raised:
        transfer.pull_objects(["a", "b"], pull_object_fn=pull)
    if raised.value is not error:
        broken("pull_objects that raises the first error unchanged", "the limit on the size of messages")


def test_the_grid_has_what_the_server_of_a_run_needs() -> None:
    grid = lookup("flwr.superlink.grid", "HttpGrid", "the messages of a run")("127.0.0.1:1", insecure=True, token="t")
    for name in ("_runtime_client", "_retry_invoker", "node", "set_run", "get_node_ids", "close"):
        if not hasattr(grid, name):
            broken(f"HttpGrid.{name}", "the messages of a run")
    if not hasattr(grid._retry_invoker, "max_tries") or not callable(grid._retry_invoker.invoke):
        broken("HttpGrid._retry_invoker.max_tries", "ending a run without waiting for a lost SuperLink")
    if not callable(getattr(grid._retry_invoker, "should_giveup", None)):
        broken("HttpGrid._retry_invoker.should_giveup", "the reason why a run ended")
    client = lookup("flwr.supercore.runtime", "RuntimeHttpClient", "being the server of a run")
    if not isinstance(grid._runtime_client, client):
        broken("a RuntimeHttpClient as HttpGrid._runtime_client", "the messages of a run")
    calls = (
        "AcquireTask PullTaskInput PushTaskOutput SendTaskHeartbeat PullObject PushObject ConfirmMessageReceived close"
    )
    for name in (*calls.split(), "from_server_address"):
        if not hasattr(client, name):
            broken(f"RuntimeHttpClient.{name}", "being the server of a run")
    parameters = "server_address insecure root_certificates interceptors retry_invoker"
    require(parameters, client.from_server_address, "RuntimeHttpClient.from_server_address", "taking over a run")
    sender = lookup("flwr.supercore.heartbeat", "HeartbeatSender", "keeping a run alive")
    for name in ("start", "stop"):
        if not hasattr(sender, name):
            broken(f"HeartbeatSender.{name}", "keeping a run alive")
    if not hasattr(importlib.import_module("flwr.common.constant").ErrorCode, "MESSAGE_UNAVAILABLE"):
        broken("ErrorCode.MESSAGE_UNAVAILABLE", "the error that stands for a missing reply")
    grid.close()


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_no_longer_knows_the_run_is_an_error_and_ends_no_process(status: int, tmp_path: Path) -> None:
    """As after an outage in which the run's heartbeats expired: Flower's own retries would send SIGINT."""
    import httpx

    from fedspan.transports.flower.adapter import RunNotRunningException, TaskGrid

    with _answering(status, b"") as address:
        grid = TaskGrid(address, None, "stale")
        assert grid._send_heartbeat(), "the next message fails"
        expected = httpx.HTTPStatusError if status == 401 else RunNotRunningException
        with pytest.raises(expected), grid.serve_task():
            broken("an error", "the reason why a run ended")


def test_a_heartbeat_of_a_run_that_has_ended_ends_no_process() -> None:
    from fedspan.transports.flower.adapter import TaskGrid

    with _answering(200, b"") as address:  # an empty answer has success = false
        grid = TaskGrid(address, None, "stale")
        assert grid._send_heartbeat()
    grid._grid._retry_invoker.max_tries = 1
    assert not grid._send_heartbeat(), "nobody answers: it is repeated"


def test_a_heartbeat_that_the_server_failed_to_take_is_sent_again() -> None:
    from fedspan.transports.flower.adapter import TaskGrid

    with _answering(500, b"") as address:
        assert not TaskGrid(address, None, "token")._send_heartbeat()


@contextmanager
def _answering(status: int, body: bytes) -> Iterator[str]:

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.send_header("content-type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_superlink_s_database_has_what_the_door_needs(tmp_path: Path) -> None:
    purpose = "the door's own requests"
    manager = lookup("flwr.superlink.federation", "NoOpFederationManager", purpose)()
    objects = lookup("flwr.supercore.object_store", "ObjectStoreFactory", purpose)(str(tmp_path / "flower.db"))
    factory = lookup("flwr.server.superlink.linkstate", "LinkStateFactory", purpose)
    state = factory(str(tmp_path / "flower.db"), manager, objects).state()
    for function, parameters in {
        "session": "",
        "_cleanup_push_session": "session_id cleanup_messages",
        "acknowledge_node_heartbeat": "node_id heartbeat_interval",
        "delete_messages": "message_ins_ids",
        "get_message_ins": "node_id limit",
        "get_task_by_token": "token",
        "start_session": "run_id",
        "store_message_and_object_tree": "message object_tree session_id",
        "store_object": "run_id session_id object_id object_content",
    }.items():
        require(parameters, getattr(state, function), f"the link state's {function}", purpose)
    for function in ("get_object_tree", "get", "delete"):
        require("object_id", getattr(state.object_store, function), f"the object store's {function}", purpose)
    if "id" in state.object_store or state.get_task_by_token("token") is not None:
        broken("a database that knows what it does not have", purpose)
    with state.session() as outer, state.session() as inner, state.object_store.session() as third:
        if not outer is inner is third:
            broken("one transaction for messages and objects", purpose)
    fleet = lookup("flwr.superlink.servicer.fleet", "fleet_handlers", purpose)
    runtime = lookup("flwr.superlink.servicer.runtime", "runtime_handlers", purpose)
    require("request state", fleet.send_node_heartbeat, "send_node_heartbeat", purpose)
    for function in ("push_messages", "pull_messages"):
        require("request state task", getattr(runtime, function), function, purpose)


def test_a_registered_node_is_found_in_the_superlink_s_database(tmp_path: Path) -> None:
    from fedspan.transports.flower.adapter import read_node_id
    from fedspan.transports.flower.keys import load_node_key, make_node_key

    model = lookup("flwr.supercore.state.schema.linkstate_models", "Node", "finding a registered node")
    if model.__tablename__ != "node" or not {"node_id", "public_key", "status"} <= set(model.__table__.columns.keys()):
        broken("the table node with node_id, public_key and status", "finding a registered node")
    to_bytes = lookup("flwr.supercore.primitives.asymmetric", "public_key_to_bytes", "finding a registered node")
    public = make_node_key(tmp_path / "node.key").read_bytes()
    pem = to_bytes(load_node_key(tmp_path / "node.key")[1])
    database = tmp_path / "flower.db"
    assert read_node_id(database, public) == (None, False)
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE node (node_id INTEGER, public_key BLOB, status TEXT)")
        connection.execute("INSERT INTO node VALUES (-2, ?, 'offline')", (pem,))
    assert read_node_id(database, public) == (2**64 - 2, True)
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE node SET status = 'unregistered'")
    assert read_node_id(database, public) == (2**64 - 2, False)
    assert read_node_id(database, make_node_key(tmp_path / "other.key").read_bytes()) == (None, False)


def test_the_headers_of_strangers_are_refused_whatever_their_key_is() -> None:
    from fedspan.transports.flower import adapter

    asymmetric = importlib.import_module(KEYS)
    private, public = asymmetric.generate_key_pairs()
    own, stamp = asymmetric.public_key_to_bytes(public), lookup("flwr.supercore.date", "now", "a time")().isoformat()

    def verify(key: bytes, signature: bytes, stamp: str) -> bytes | None:
        values = (base64.b64encode(key), base64.b64encode(signature), stamp.encode())
        names = (adapter.FLEET_HTTP_PUBLIC_KEY_HEADER, adapter.FLEET_HTTP_SIGNATURE_HEADER, adapter.TIMESTAMP_HEADER)
        return adapter.verify_node_headers({name.encode(): value for name, value in zip(names, values, strict=True)})

    signature = asymmetric.sign_message(private, stamp.encode())
    assert verify(own, signature, stamp) == own
    for key in make_strange_keys():
        assert verify(key, signature, stamp) is None, key
    assert verify(own + b" " * 2**10, signature, stamp) is None
    for sent in ("", "x" * 2**15, "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", stamp[:19], f"{stamp} "):
        assert verify(own, asymmetric.sign_message(private, sent.encode()), sent) is None, sent
    assert adapter.verify_node_headers({}) is None


def test_strangers_write_short_entries_into_the_access_log() -> None:
    from fedspan.transports.flower.adapter import superlink

    def shorten(method: str, path: str, status: int) -> tuple[bool, str]:
        values = ("192.0.2.1:7", method, path, "1.1", status)
        record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', values, None)
        return superlink._shorten_remarkable(record), record.getMessage()

    assert shorten("POST", "/fedspan/node/take-order", 200)[0] is False
    assert shorten("POST", "/v1/control/list-nodes", 200) == (
        True, '192.0.2.1:7 - "POST /v1/control/list-nodes HTTP/1.1" 200'
    )  # fmt: skip
    for method, path in (("POST", "/" + "a" * 2**15), ("A" * 2**15, "/"), ("POST", "/fedspan/node/" + "a" * 2**15)):
        is_logged, text = shorten(method, path, 403)
        assert is_logged
        assert len(text) < 300


def test_the_superlink_is_run_by_the_uvicorn_of_its_module() -> None:
    command = lookup("flwr.superlink.cli", "flower_superlink", "starting the SuperLink")
    module = importlib.import_module("flwr.superlink.cli.flower_superlink")
    if not callable(command) or module.__dict__.get("flower_superlink") is not command:
        broken("flwr.superlink.cli.flower_superlink.flower_superlink", "starting the SuperLink")
    if "uvicorn.run(" not in inspect.getsource(module) or module.__dict__.get("uvicorn") is None:
        broken("flower_superlink, which calls its module's uvicorn.run", "bounds on connections")


def test_the_superlink_asks_for_middleware_and_its_node_api_has_one_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    from starlette.middleware import Middleware

    from fedspan.transports.flower.adapter import NODE_API
    from fedspan.transports.flower.door import Door

    extensions = lookup("flwr.superlink", "extensions", "the SuperLink's access filter")
    create_app = lookup("flwr.superlink.main", "create_app", "the SuperLink's access filter")
    monkeypatch.setattr(extensions, "get_middleware", lambda: (Middleware(Door),))
    app = create_app()
    for name in ("enable_supernode_auth", "linkstate_factory"):
        if not hasattr(app.state, name):
            broken(f"the app's state.{name}", "the check of a node's key")
    if app.state.linkstate_factory.state().get_node_id_by_public_key(b"none") is not None:
        broken("get_node_id_by_public_key that returns None for an unknown key", "the check of a node's key")
    if app.user_middleware[0].cls is not Door:
        broken("extensions.get_middleware as the outermost middleware", "the SuperLink's access filter")
    paths = list(app.openapi()["paths"])
    for of, prefix in (("node", NODE_API), ("command", "/v1/control/"), ("server", "/v1/runtime/")):
        if not any(path.startswith(prefix) for path in paths):
            broken(f"{of} paths that begin with {prefix} ({paths})", "the SuperLink's access filter")
    if others := [path for path in paths if "fleet" in path and not path.startswith(NODE_API)]:
        broken(f"a node API that all begins with {NODE_API} ({others})", "the SuperLink's access filter")


def test_the_superlink_waits_for_the_objects_of_a_message_as_long_as_the_door() -> None:
    from flwr.supercore.corestate.sql_corestate import SqlCoreState

    from fedspan.transports.flower.adapter import superlink
    from fedspan.transports.flower.limits import DoorLimits

    for function in (SqlCoreState.start_session, SqlCoreState.store_object):
        if "OBJECT_PUSH_SESSION_TTL_SECONDS" not in function.__code__.co_names:
            broken(f"a global variable that {function.__name__} reads", "replies over a slow link")
    assert DoorLimits().partial_seconds <= superlink._PUSH_SECONDS
