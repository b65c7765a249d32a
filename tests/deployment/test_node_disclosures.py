"""What leaves a node beside updates, what invitations cost it, and what it removes of runs that ended long ago."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedspan.assembly.run import Prepared
from fedspan.clients.secagg_store import DiskSessionStore, Session
from fedspan.deployment.node import NodeService
from fedspan.deployment.node_folder import LAST_REPLY, SESSIONS, STATE, TRAINING, get_run_folder, remove_old_states
from fedspan.federation.protocol import HeaderPart, Reply, decode_order, decode_reply
from helpers import tiny
from helpers.node_service import introduced, invitation, node, served, values

NAMES = [f"n{number}" for number in range(60_000)]
LONG = "x" * 900_000
SECONDS = 15.0
"""Processor time of one invitation: three times the goal, for slow machines."""


@pytest.mark.parametrize(
    "changes",
    [
        {LONG: 1},
        {"task": LONG},
        {"training": {LONG: 1}},
        {"training": dict.fromkeys(NAMES, 1)},
        {"method": {"name": LONG}},
        {"method": {"name": "fedit", **dict.fromkeys(NAMES, 1)}},
        {"method": {"name": "fedit", "wrappers": ["fedpaq"] * 60_000}},
        {"federation": {"ranks": dict.fromkeys(NAMES, 2)}},
        {"federation": {"ranks": [2] * 200_000}},
        {"federation": {"require_tags": dict.fromkeys(NAMES[:50_000], "x")}},
        {"data": {"labels": NAMES}},
        {"data": {"labels": ["a"] * 120_000}},
        {"data": {"prompt": "{text}" * 140_000}},
        {"data": {"prompt": "{" * 900_000}},
        {"model": {"layers_to_transform": list(range(120_000)), "layers_pattern": "layer"}},
        {"model": {"target_modules": NAMES}},
        {"model": {"head_rounds": 10**9}},
        {"seed": 10**4000},
    ],
    ids=lambda changes: "-".join(str(key)[:8] for key in changes),
)
def test_an_invitation_costs_a_node_seconds_at_most(changes: dict[str, Any], tiny_folder: Path, tmp_path: Path) -> None:
    config = values(tiny_folder)
    for name, own in changes.items():
        config[name] = {**config.get(name, {}), **own} if isinstance(own, dict) else own
    assert len(invitation(config).model_dump_json()) <= HeaderPart.longest, "nodes refuse longer ones at once"
    service = NodeService(node(tiny_folder, tmp_path, limits={"approve": "ask"}))
    started = time.process_time()
    refused = introduced(service, config).refused
    assert time.process_time() - started < SECONDS
    assert refused is not None
    assert len(refused) <= 4096


FREE = {"approve": "auto", "min_batch": 1, "train_examples": 1}


@pytest.fixture
def run(tiny_folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Prepared, Any]:
    service = NodeService(node(tiny_folder, tmp_path, limits={**FREE, **request.param}))
    return served(tiny_folder, service)


def measure(run: Prepared) -> list[float]:
    begin = run.federation.begin()
    scores = [run.evaluator.evaluate_clients(begin)[0] for _ in range(8)]
    return [one.pooled["accuracy"] for one in scores if one is not None]


@pytest.mark.parametrize("run", [{"evaluation_examples": 10, "evaluation_epsilon": 0.2}], indirect=True)
def test_the_same_model_has_other_metrics_each_time_and_no_training_loss(run: tuple[Prepared, Any]) -> None:
    assert len(set(measure(run[0]))) > 1
    result = run[0].federation.run_round(run[0].federation.begin())
    assert not result.failures
    assert math.isnan(result.loss)


@pytest.mark.parametrize("run", [{"evaluation_examples": 10, "evaluation_epsilon": None}], indirect=True)
def test_an_owner_can_send_metrics_as_measured(run: tuple[Prepared, Any]) -> None:
    assert len(set(measure(run[0]))) == 1
    assert math.isfinite(run[0].federation.run_round(run[0].federation.begin()).loss)


@pytest.mark.parametrize("run", [{"evaluation_examples": 100}], indirect=True)
def test_few_examples_send_no_metrics_and_the_last_round_is_the_best(run: tuple[Prepared, Any]) -> None:
    assert measure(run[0]) == []
    sent = run[1].service.answer(run[1].sent[-1])
    assert decode_order(run[1].sent[-1]).task == "evaluate"
    assert isinstance(reply := decode_reply(sent), Reply)
    assert not reply.scores


LASTING = {"invitation.json", "serial", "noise.key", "adapter/adapter_model.safetensors"}


def write_run(folder: Path, run: str, days: float) -> Path:
    path = get_run_folder(folder, run)
    for name in (f"{STATE}/a/state.safetensors", f"{TRAINING}/step.safetensors", LAST_REPLY, *LASTING):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"content")
    then = time.time() - days * 86400
    for entry in (*path.iterdir(), path):
        os.utime(entry, (then, then))
    return path


def list_files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_state_of_a_run_without_an_order_for_a_month_is_removed(tmp_path: Path) -> None:
    old, recent, other = write_run(tmp_path, "old", 31), write_run(tmp_path, "recent", 29), tmp_path / "bases" / STATE
    other.mkdir(parents=True)
    (tmp_path / "budget.json").write_text("{}")
    before = list_files(recent)
    assert remove_old_states(tmp_path) == 1
    assert list_files(old) == LASTING
    assert list_files(recent) == before
    assert other.is_dir()
    assert (tmp_path / "budget.json").is_file()
    assert remove_old_states(tmp_path) == 0


@pytest.mark.parametrize("name", ["serial", "invitation.json"])
def test_a_run_that_has_had_an_order_since_keeps_its_state(name: str, tmp_path: Path) -> None:
    path = write_run(tmp_path, "old", 90)
    os.utime(path / name)
    before = list_files(path)
    assert remove_old_states(tmp_path) == 0
    assert list_files(path) == before


@pytest.mark.parametrize("days", [29, 31])
def test_a_secure_session_without_a_phase_for_a_month_loses_its_secrets_and_keeps_its_number(
    days: int, tmp_path: Path
) -> None:
    folder = get_run_folder(tmp_path / SESSIONS, "run")
    store = DiskSessionStore(folder)
    session = Session(run="run", number=7, phase="masked", secret=b"secret", sealed={"b": b"x"}, trained=(2, "model"))
    store.store("a", session)
    (path,) = folder.glob("*/session.json")
    then = time.time() - days * 86400
    os.utime(path, (then, then))
    remove_old_states(tmp_path)
    ended = Session(run="run", number=7, phase="unmasked", secret=b"", trained=(2, "model"))
    assert store.load("a") == (ended if days > 30 else session)
    assert path.stat().st_mode & 0o777 == 0o600


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
