"""Labels of a node, from its answers to invitations that leave out one label each, and what one invitation costs it.

An answer that differs from that to an invitation with all labels tells whether the node has the label.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from evidence.pages.games.harness import Rows
from evidence.pages.subsets import write_rows
from fedspan import __version__
from fedspan.config.node import NodeConfig, NodeLimits
from fedspan.deployment.handshake import Introduction, Invitation
from fedspan.deployment.node import NodeService
from fedspan.federation.protocol import HeaderPart, read_header

LABELS = [f"n{number}" for number in range(60_000)]
EXPENSIVE: Mapping[str, Mapping[str, Any]] = {
    "a valid config, the first of a node": {},
    "a valid config": {},
    "a slow regular expression": {"model": {"target_modules": "(([a-z0-9.]+)+)+!"}},
    "a module with a long name": {"model": {"target_modules": "x" * 900_000}},
    "many modules": {"model": {"target_modules": LABELS}},
    "a large unknown section": {"training": dict.fromkeys(LABELS, 1)},
    "many ranks": {"federation": {"ranks": dict.fromkeys(LABELS, 2)}},
    "many labels": {"data": {"labels": LABELS}},
    "many equal labels": {"data": {"labels": ["a"] * 120_000}},
    "many wrappers": {"method": {"name": "fedit", "wrappers": ["fedpaq"] * 60_000}},
    "a long prompt": {"data": {"prompt": "{text}" * 140_000}},
}
"""Changes of a config; most are nearly as long as an invitation may be."""


@contextmanager
def serve_node(rows: Rows, **limits: str) -> Iterator[NodeService]:
    """Start a new node with default limits, but for those given."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.csv"
        write_rows(path, ("text", "label"), rows)
        place = {"id": "victim", "server": "localhost:1", "folder": str(Path(folder) / "node")}
        yield NodeService(NodeConfig(**place, data={"train": str(path)}, limits=NodeLimits.model_validate(limits)))


def invite(
    service: NodeService, number: int, labels: list[str], changes: Mapping[str, Any] | None = None
) -> Introduction:
    """Send an invitation, and return the answer."""
    config: dict[str, Any] = {"seed": 0, "threads": 1, "data": {"labels": labels}}
    for section, values in (changes or {}).items():
        config[section] = {**config.get(section, {}), **values}
    invitation = Invitation(run=f"run-{number}", version=__version__, config=json.dumps(config))
    assert len(invitation.model_dump_json()) <= HeaderPart.longest, "nodes refuse longer ones at once"
    return read_header(Introduction, service.answer(invitation.to_envelope()))


def play_handshake(rows: Rows, seed: int, examples: int = 100, asked: int = 19) -> dict[str, float]:
    """Return the share of labels about which the attacker guesses right, above that of the more frequent answer.

    Args:
        rows: Texts and labels; the node has the first ones.
        seed: Seed of the labels that are left out.
        examples: Examples of the node.
        asked: Number of labels: with the invitation that has all, as many runs as the node's file allows.
    """
    labels, own = sorted({label for _, label in rows}), {label for _, label in rows[:examples]}
    left_out = np.random.default_rng(seed).permutation(labels)[:asked].tolist()
    with serve_node(rows[:examples], approve="auto") as service:
        usual, *answers = (
            invite(service, number, [label for label in labels if label != name])
            for number, name in enumerate([None, *left_out])
        )
    assert usual.refused is None
    differs, present = np.array([answer != usual for answer in answers]), np.array([name in own for name in left_out])
    prior = max(present.mean(), 1 - present.mean())
    return {"labels": float(max((differs == present).mean(), (differs != present).mean()) - prior)}


def measure_invitations(rows: Rows, examples: int = 1000) -> Iterator[tuple[str, float, bool]]:
    """Yield each kind of an invitation, the seconds of the processor that it takes, and whether it is refused."""
    labels = sorted({label for _, label in rows})
    with serve_node(rows[:examples], approve="auto") as service:
        for number, (kind, changes) in enumerate(EXPENSIVE.items()):
            began = time.process_time()
            refused = invite(service, number, labels, changes).refused
            yield kind, time.process_time() - began, refused is not None
