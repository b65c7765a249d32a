"""Labels of a node, from its answers to invitations that leave out one label each.

An answer that differs from that to an invitation with all labels tells whether the node has the label.
"""

from __future__ import annotations

import csv
import json
import tempfile
from pathlib import Path

import numpy as np

from evidence.pages.games.harness import Rows
from fedspan import __version__
from fedspan.config.node import NodeConfig
from fedspan.deployment.handshake import Introduction, Invitation
from fedspan.deployment.node import NodeService
from fedspan.federation.protocol import read_header


def play_handshake(rows: Rows, seed: int, examples: int = 100, asked: int = 19) -> dict[str, float]:
    """Return the share of labels about which the attacker guesses right, above that of the more frequent answer.

    Args:
        rows: Texts and labels; the node has the first ones.
        seed: Seed of the run.
        examples: Examples of the node.
        asked: Number of labels: with the invitation that has all, as many runs as the node's file allows.
    """
    labels, own = sorted({label for _, label in rows}), {label for _, label in rows[:examples]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *rows[:examples]])
        values = {"id": "victim", "server": "localhost:1", "folder": str(Path(folder) / "node")}
        service = NodeService(NodeConfig(**values, data={"train": str(path)}, limits={"approve": "auto"}))

        def invite(number: int, left_out: str | None) -> str:
            config = {"seed": seed, "threads": 1, "data": {"labels": [name for name in labels if name != left_out]}}
            invitation = Invitation(run=f"run-{number}", version=__version__, config=json.dumps(config))
            answer = read_header(Introduction, service.answer(invitation.to_envelope()))
            assert answer.refused is None
            return answer.model_dump_json()

        usual = invite(0, None)
        differs = np.array([invite(1 + number, label) != usual for number, label in enumerate(labels[:asked])])
    present = np.array([label in own for label in labels[:asked]])
    prior = max(present.mean(), 1 - present.mean())
    return {"labels": float(max((differs == present).mean(), (differs != present).mean(), prior) - prior)}
