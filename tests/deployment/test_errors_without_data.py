"""Errors in a node's data reach the server without anything of them: no text, label, column, file name or count."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedspan.deployment.node import NodeService
from helpers import tiny
from helpers.node_service import introduced, node, values

MARKER = "zyxwv"
"""In every text, label, column and path of the node."""
SEVERAL = ",".join((MARKER, "b"))
PLAIN = f"text,label\n{MARKER} a,{tiny.LABELS[0]}\n"


def rows(*lines: Mapping[str, Any]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


CASES: dict[str, tuple[str, str | bytes, dict[str, Any], dict[str, Any]]] = {
    "no file": ("none.csv", "", {}, {}),
    "empty": ("a.csv", "", {}, {}),
    "header only": ("a.csv", f"text,{MARKER}\n", {}, {}),
    "binary": ("a.csv", b"\xff\xfe\x00" + MARKER.encode(), {}, {}),
    "not utf-8": ("a.csv", PLAIN.encode() + b"\xe4\xf6 " + MARKER.encode(), {"encoding": "utf-8"}, {}),
    "no label": ("a.csv", f"text,{MARKER}\na,b\n", {}, {}),
    "no column": ("a.csv", PLAIN, {"text": MARKER}, {}),
    "doubled column": ("a.csv", f"{MARKER},{MARKER},text,label\n1,2,a,b\n", {}, {}),
    "long row": ("a.csv", PLAIN + f"{MARKER},b,{MARKER},{MARKER}\n", {}, {}),
    "open quote": ("a.csv", PLAIN + f'"{MARKER},b\n', {}, {}),
    "empty text": ("a.csv", PLAIN + f",{MARKER}\n", {}, {}),
    "empty label": ("a.csv", PLAIN + f"{MARKER},\n", {}, {}),
    "broken json": ("a.jsonl", rows({"text": MARKER, "label": "b"}) + f'{{"text": "{MARKER}', {}, {}),
    "nested json": ("a.jsonl", rows({"text": {MARKER: [MARKER]}, "label": {MARKER: 1}}), {}, {}),
    "other types": ("a.jsonl", rows({"text": MARKER, "label": "b"}, {"text": [MARKER], "label": 1.5}), {}, {}),
    "no sheet": ("a.xlsx", MARKER, {}, {}),
    "no parquet": ("a.parquet", MARKER, {}, {}),
    "unknown form": (f"a.{MARKER}", PLAIN, {}, {}),
    "unknown field": ("a.csv", PLAIN, {"lable": MARKER}, {}),
    "few examples": ("a.csv", PLAIN, {}, {}),
    "numbers": ("a.csv", f"text,label\na,{MARKER}\n", {}, {"task": "regression"}),
    "tags": ("a.csv", f"text,label\na b,{MARKER}\n", {}, {"task": "token-classification"}),
    "several labels": ("a.csv", f'text,label\na,"{SEVERAL}"\n', {}, {"task": "multi-label-classification"}),
}


@pytest.mark.parametrize("name", CASES)
def test_errors_leave_a_node_without_its_data(name: str, tiny_folder: Path, tmp_path: Path) -> None:
    file, content, own, changes = CASES[name]
    folder = tmp_path / MARKER
    folder.mkdir()
    path = folder / file
    if content:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    limits = {"approve": "auto", "train_examples": 16}
    service = NodeService(node(tiny_folder, tmp_path / "node", data={"train": str(path), **own}, limits=limits))
    answered = introduced(service, {**values(tiny_folder), **changes})
    assert answered.refused, "the case is an error"
    assert MARKER not in answered.model_dump_json()
