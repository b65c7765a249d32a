"""The columns of preference pairs: a prompt with a better and a worse answer, in TRL's formats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from fedspan.data.columns import ColumnReader, ReadColumns, parse_messages
from fedspan.data.config import DataConfig
from fedspan.data.names import get_arrow_column, is_list
from fedspan.data.source import Source
from fedspan.data.templates import parse_template
from fedspan.errors import FedspanError
from fedspan.tasks.definition import InferredColumns

if TYPE_CHECKING:
    import datasets


ANSWERS = ("chosen", "rejected")
"""Roles of an example's answers, in the order of all columns of numbers of preference tuning."""


def split_preference(prompt: object, chosen: object, rejected: object) -> dict[str, str] | None:
    """Return prompt, history and answers of an example in one of TRL's formats; None if it is in none of them.

    Args:
        prompt: A text, or messages that end with a user's; None: both answers begin with the prompt.
        chosen: A text, or messages that end with an assistant's.
        rejected: The same.

    Returns:
        ``text`` (the prompt, or the user's last message), ``history`` (earlier messages, JSON), ``chosen`` and
        ``rejected``.
    """
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is None:
            prompt, chosen, rejected = _extract_prompt(chosen, rejected)
        if not isinstance(prompt, str) or not chosen.strip() or not rejected.strip() or chosen == rejected:
            return None
        return {"text": prompt, "history": "[]", "chosen": chosen, "rejected": rejected}
    before = [] if prompt is None else parse_messages(prompt)
    better, worse = parse_messages(chosen), parse_messages(rejected)
    if before is None or not better or not worse:
        return None
    better, worse = [*before, *better], [*before, *worse]
    shared, roles = better[:-1], [message["role"] for message in (*better[-2:], worse[-1])]
    is_pair = shared == worse[:-1] and roles == ["user", "assistant", "assistant"] and better != worse
    if not is_pair or not better[-1]["content"].strip() or not worse[-1]["content"].strip():
        return None
    history = json.dumps(shared[:-1], ensure_ascii=False)
    texts = (shared[-1]["content"], better[-1]["content"], worse[-1]["content"])
    return {"text": texts[0], "history": history, "chosen": texts[1], "rejected": texts[2]}


def _extract_prompt(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Divide two texts after their common beginning, before a space that ends it, as TRL does."""
    limit = min(len(chosen), len(rejected))
    end = next((index for index in range(limit) if chosen[index] != rejected[index]), limit)
    if end and end < limit and chosen[end - 1] == " ":
        end -= 1
    return chosen[:end], chosen[end:], rejected[end:]


def _get_prompt_column(columns: Sequence[str], config: DataConfig) -> str | None:
    """Return the column of prompts; None: the answers begin with them, or a template makes them."""
    column = config.roles.get("prompt", "prompt")
    return column if config.prompt is None and ("prompt" in config.roles or column in columns) else None


def _list_pairs(source: datasets.Dataset, prompts: Sequence[object] | None, config: DataConfig) -> list[Any]:
    """Return ``split_preference`` of every row; ``prompts`` are those of a template."""
    column = _get_prompt_column(source.column_names, config)
    if prompts is None:
        prompts = [None] * len(source) if column is None else get_arrow_column(source, column).to_pylist()
    answers = [get_arrow_column(source, config.roles.get(role, role)).to_pylist() for role in ANSWERS]
    if column is not None:  # a missing prompt is no request to find it in the answers
        prompts = ["" if prompt is None else prompt for prompt in prompts]
    return [split_preference(*row) for row in zip(prompts, *answers, strict=True)]


def read_columns(reader: ColumnReader, config: DataConfig) -> ReadColumns:
    """Read the texts of all pairs (``TaskColumns.read``)."""
    for option, value in (("messages", config.messages), ("packing", config.packing or None)):
        if value is not None:
            problem = f"preference has two answers to each prompt, which data.{option} does not describe. Leave it out"
            raise FedspanError(f"{reader.field}.{option}", value, problem=problem)
    dataset = reader.source.dataset
    prompt = _get_prompt_column(dataset.column_names, config)
    columns = [reader.get_role_column(config, role) for role in ANSWERS] + ([] if prompt is None else [prompt])
    for role, column in zip((*ANSWERS, "prompt"), columns, strict=False):
        option_field = reader.require(column, f"roles.{role}")
        kind = get_arrow_column(dataset, column).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or is_list(kind)):
            problem = f"column {column!r} of {reader.source.name} holds {kind}, not texts or lists of messages"
            raise FedspanError(option_field, column, problem=problem)
    has_messages = is_list(get_arrow_column(dataset, columns[0]).type)
    if has_messages and not config.chat:
        problem = f"the answers of {reader.source.name} are lists of messages, which the model's chat template writes"
        raise FedspanError(f"{reader.field}.chat", False, "true", problem=problem)
    prompts = None if config.prompt is None else reader.read_prompts(config.prompt).to_pylist()
    rows = _list_pairs(dataset, prompts, config)
    reader.require_rows([row is not None for row in rows], "no two different answers to one prompt", columns)
    keys = ("text", *ANSWERS, *(("history",) if has_messages else ()))
    texts = {key: pa.chunked_array([pa.array([row[key] for row in rows], pa.string())]) for key in keys}
    return ReadColumns(texts, {*columns}, None if config.label is None else reader.read_classes(config.label))


def get_required_columns(config: DataConfig, field: str) -> list[tuple[str, ...]]:
    """Return the columns that a config requires (``TaskColumns.get_required_columns``)."""
    template = () if config.prompt is None else parse_template(config.prompt, f"{field}.prompt").columns
    columns = [(config.roles.get(role, role),) for role in ANSWERS]
    return [*columns, *((template,) if template else ()), *(() if config.label is None else ((config.label,),))]


def find_valid_rows(source: Source, config: DataConfig, limit: int | None) -> list[bool]:
    """Return of each row whether it is a pair (``TaskColumns.find_valid_rows``)."""
    dataset = source.dataset
    names = dataset.column_names
    prompt = _get_prompt_column(names, config)
    if not {*(config.roles.get(role, role) for role in ANSWERS), *([] if prompt is None else [prompt])} <= {*names}:
        return [True] * len(dataset)  # the check of the columns reports it better
    prompts = None if config.prompt is None else [""] * len(dataset)
    return [row is not None for row in _list_pairs(dataset, prompts, config)]


def infer_columns(sample: datasets.Dataset, options: Mapping[str, str | None]) -> InferredColumns | None:
    """Find the columns by TRL's names."""
    names = sample.column_names
    if not {*ANSWERS} <= {*names} or options["label"] is not None:
        return None
    column = options["text"] or ("prompt" if "prompt" in names else None)
    fields: dict[str, Any] = {} if column in (None, "prompt") else {"roles": {"prompt": column}}
    if is_list(get_arrow_column(sample, ANSWERS[0]).type):
        fields["chat"] = True
    prompts = "the beginning of both answers" if column is None else repr(column)
    return InferredColumns(fields, f"prompts {prompts}, answers 'chosen' and 'rejected'")
