"""The columns of a node's data that a server's prompt may name, and what a node's operator is shown of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedspan.config import parse_config
from fedspan.config.node import NodeConfig
from fedspan.data.files import FROM_TRAINERS
from fedspan.deployment.columns import describe_columns, require_columns
from fedspan.deployment.handshake import build_node_values
from fedspan.deployment.node import NodeService
from fedspan.errors import FedspanError
from helpers import tiny_decoders
from helpers.node_service import introduced, node


def values(folder: Path, prompt: str | None, task: str = "causal-lm") -> dict[str, Any]:
    """A deployment's config of instruction tuning."""
    data = {} if prompt is None else {"prompt": prompt}
    given = tiny_decoders.settings(folder) | {"task": task, "data": data, "federation": {"rounds": 3}}
    return {name: value for name, value in given.items() if name not in ("partition", "evaluation")}


def test_a_server_chooses_no_column_that_the_owner_does_not_name(decoders: Path, tmp_path: Path) -> None:
    """The data have the column site, which the owner only groups by; the server learns nothing of what there is."""
    limits, data = {"models": [f"{decoders}/*"]}, {"train": str(decoders / "questions.jsonl"), "group": "site"}

    def refusal(folder: str, asked: str, columns: list[str], **own: str) -> str | None:
        made = node(decoders, tmp_path / folder, limits={**limits, "columns": columns}, data={**data, **own})
        return introduced(NodeService(made), values(decoders, asked)).refused

    for column in ("site", "absent"):
        told = refusal("a", f"Q: {{question}} {{{column}}} A:", ["question"])
        expected = f"this node does not allow the column '{column}' in data.prompt. Its owner can add it."
        assert told == f"`limits.columns`: {expected}"
    assert refusal("b", "Q: {question} A:", ["question"]) is None
    assert refusal("c", "Q: {question} {site} A:", [], prompt="{question}") is None  # which replaces the server's


@pytest.mark.parametrize(
    ("data", "task", "prompt", "refused"),
    [
        ({}, "causal-lm", "{text} {answer}", None),
        ({"text": "note"}, "causal-lm", "{note}", None),
        ({"text": "note"}, "causal-lm", "{text}", "text"),
        ({"label": "ward"}, "causal-lm", "{ward}", None),
        ({"group": "patient"}, "causal-lm", "{patient}", "patient"),
        ({}, "causal-lm", "alpaca", "instruction"),
        ({"dataset": "alpaca"}, "causal-lm", "alpaca", None),
        ({}, "preference", "{prompt}", None),
        ({"roles": {"prompt": "asked"}}, "preference", "{asked}", None),
        ({"roles": {"prompt": "asked"}}, "preference", "{prompt}", "prompt"),
        ({"train": FROM_TRAINERS}, "causal-lm", "{patient}", None),
    ],
)
def test_a_prompt_may_name_the_columns_that_the_owner_or_the_task_names(
    data: dict[str, Any], task: str, prompt: str, refused: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"instruction": "a", "input": "b", "output": "c"}\n')
    made = NodeConfig.model_validate({"id": "a", "server": "h:1", "data": {"train": str(path), **data}})
    config = parse_config(build_node_values(values(tmp_path, prompt, task), made.model_dump()))
    if refused is None:
        require_columns(made, config)
        return
    with pytest.raises(FedspanError, match=f"the column '{refused}'"):
        require_columns(made, config)


def test_an_operator_is_shown_the_columns_that_a_run_reads(tmp_path: Path) -> None:
    def show(asked: str | None, task: str = "causal-lm", **data: Any) -> str:
        own = {} if data == {"train": None} else {"train": "own.csv", **data}
        made = NodeConfig.model_validate({"id": "a", "server": "h:1", "data": own})
        return describe_columns(made, values(tmp_path, asked, task))

    assert show("{question} {hint}", answer="reply") == "question, hint, reply"
    assert show("{name}", prompt="{question}") == "question, answer"  # the node's own replaces the server's
    assert show(None, "preference", roles={"chosen": "better"}) == "better, rejected, prompt"
    assert show(None, "masked-lm", text="note") == "note"
    assert show("no column").startswith("unknown (`data.prompt`: 'no column' has no column in braces")
    assert show("{name}", train=None) == "those that the node's own trainer reads"
