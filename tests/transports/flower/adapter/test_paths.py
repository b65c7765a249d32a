"""The SuperLink's paths that nodes and the door know."""

from __future__ import annotations

import pytest

from helpers.flower_names import broken, lookup

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

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
