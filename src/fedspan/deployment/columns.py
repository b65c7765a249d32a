"""Columns of a node's data that a run may read: a server's prompt can name only those that the owner allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedspan.config import RunConfig, parse_config
from fedspan.config.node import NodeConfig
from fedspan.data.catalogue import get_dataset_entry
from fedspan.data.config import DataConfig
from fedspan.data.dataset_defaults import fill_data_defaults
from fedspan.data.files import FROM_TRAINERS
from fedspan.data.templates import parse_template
from fedspan.deployment.handshake import build_node_values
from fedspan.errors import FedspanError

_CHARACTERS, _COLUMNS = 8, 256
"""Characters of a server's prompt for each token of an example, and its opening braces, each of which may insert a
column: prompts are built as a whole before they are cut."""


def require_columns(node: NodeConfig, config: RunConfig) -> None:
    """Check that a run's prompt names only columns that the node's owner allows, before the data are read.

    Raises:
        FedspanError: If it names another one, whether the data have it or not, or if it or the system message, which
            stand before each example, are longer than an example may be.
    """
    prompt, longest = config.data.prompt, _CHARACTERS * node.limits.tokens
    for name, own in (("prompt", prompt), ("system", config.data.system)):
        text = "" if own is None or node.data.get(name) is not None else own
        if len(text) > longest or text.count("{") > _COLUMNS:
            expected = f"at most {longest} characters, and {_COLUMNS} braces"
            problem = f"a text of {len(text)} characters before each example"
            raise FedspanError("limits.tokens", node.limits.tokens, expected, problem=problem)
    if prompt is None or node.data.get("prompt") is not None or node.data.get("train") == FROM_TRAINERS:
        return
    data = fill_data_defaults(config.data)
    allowed = {*node.limits.columns, *_list_named_columns(data), *_list_roles(config, data)}
    for column in parse_template(prompt, "data.prompt").columns:
        if column not in allowed:
            problem = f"this node does not allow the column {column!r} in data.prompt. Its owner can add it"
            raise FedspanError("limits.columns", column, problem=problem)


def describe_columns(node: NodeConfig, values: Mapping[str, Any]) -> str:
    """Return the columns of a node's data that a run may read, as text."""
    if not node.data:
        return "those that the node's own trainer reads"
    try:
        own = node.model_dump(include={"data", "validation", "test", "split_seed"})
        config = parse_config(build_node_values(values, own))
        data, task = fill_data_defaults(config.data), config.task_definition.columns
        groups = [] if task is None else task.get_required_columns(data, "data")
    except FedspanError as error:
        return f"unknown ({error})"
    required = [name for group in groups for name in group]
    return ", ".join(dict.fromkeys([*required, *sorted(_list_roles(config, data))]))


def _list_named_columns(data: DataConfig) -> set[str | None]:
    """Return the columns of examples that a node's data, or the catalogue for them, name; not what groups examples."""
    columns = {
        data.text,
        data.text_pair,
        data.label,
        data.answer,
        data.image,
        data.messages,
        *(data.label_columns or ()),
    }
    if data.dataset is not None and (prompt := get_dataset_entry(data.dataset, "data.dataset").prompt) is not None:
        columns |= {*parse_template(prompt, "data.prompt").columns}
    return columns


def _list_roles(config: RunConfig, data: DataConfig) -> set[str]:
    task = config.task_definition.columns
    return {data.roles.get(role, role) for role in (() if task is None else task.roles)}
