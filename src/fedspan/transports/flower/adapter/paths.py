"""Paths of the SuperLink's HTTP interface that fedspan's nodes send requests to, or that the door knows."""

from __future__ import annotations

__all__ = [
    "ACTIVATE_NODE",
    "CONFIRM_RECEIVED",
    "DEACTIVATE_NODE",
    "GET_RUN",
    "NODE_API",
    "PULL_MESSAGES",
    "PULL_OBJECT",
    "PUSH_MESSAGES",
    "PUSH_OBJECT",
    "PUSH_ORDERS",
    "REGISTER_NODE",
    "SEND_HEARTBEAT",
    "UNREGISTER_NODE",
]

NODE_API = "/v1/fleet/"
"""Beginning of the paths of the node API, of which the following ones are the ends."""
ACTIVATE_NODE, DEACTIVATE_NODE, SEND_HEARTBEAT = "activate-node", "deactivate-node", "send-node-heartbeat"
GET_RUN, PULL_MESSAGES, PULL_OBJECT = "get-run", "pull-messages", "pull-object"
PUSH_MESSAGES, PUSH_OBJECT, CONFIRM_RECEIVED = "push-messages", "push-object", "confirm-message-received"
REGISTER_NODE, UNREGISTER_NODE = "register-node", "unregister-node"

PUSH_ORDERS = "/v1/runtime/push-messages"
"""Path for the orders of a run's server."""
