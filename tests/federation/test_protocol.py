"""Headers of orders and replies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedspan.federation.progress import Progress
from fedspan.federation.protocol import Order, Reply, decode_order, decode_reply
from fedspan.runs.setup import Prepared, prepare
from helpers import tiny


@pytest.fixture(scope="module")
def built(tiny_folder: Path) -> Prepared:
    return prepare(tiny.config(tiny_folder, federation={"clients_per_round": None}))


def test_headers_survive_the_way(built: Prepared, tmp_path: Path) -> None:
    client = built.federation.get_client("south", Progress(built.federation.begin().state, last_rounds={"south": 3}))
    order = Order("train", 4, 1, 0.125, "south", client, b"\x00body", 2, "run", 17)
    assert decode_order(order.to_envelope()) == order
    answer = Reply("train", 4, 1, "south", failed="why", lost=True, body=b"x")
    assert decode_reply(answer.to_envelope()) == replace(answer, scores={})
