"""What an invitation costs a node before its owner has approved anything, however the server writes it."""

import time
from pathlib import Path
from typing import Any

import pytest

from fedspan.deployment.node import NodeService
from fedspan.federation.protocol import HeaderPart
from helpers.node_service import introduced, invitation, node, values

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
