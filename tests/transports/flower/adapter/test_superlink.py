"""The SuperLink as the door needs it: its database, the keys of nodes, its log, and how it is run."""

from __future__ import annotations

import base64
import importlib
import inspect
import logging
import sqlite3
from pathlib import Path

import pytest

from helpers.flower_names import broken, lookup, require
from helpers.hostile_node import make_strange_keys

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

KEYS = "flwr.supercore.primitives.asymmetric"


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
    monkeypatch.setattr(extensions, "get_middleware", lambda: (Middleware(Door),))  # type: ignore[arg-type]
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
