"""The first round of federations whose cache of hidden states is filled before training or within it; one JSON line.

python fedspan_first_round.py CONFIG.json REPETITIONS
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

from peers_answers import Answers

from fedspan.clients.host import Host
from fedspan.config import RunConfig, parse_config
from fedspan.runs.setup import prepare

BEFORE, WITHIN = "before training", "as clients begin to train"


def skip_preparing(self: Host, ids: Iterable[str]) -> None:
    """Leave the hidden states to the engine, which computes a client's when it opens the client's job."""


def time_round(config: RunConfig) -> tuple[float, float, float]:
    """Return the clock's and the processor's seconds of the first round, and its loss."""
    federation = prepare(config).federation
    progress = federation.begin()
    began, worked = time.perf_counter(), time.process_time()
    loss = federation.run_round(progress).loss
    return time.perf_counter() - began, time.process_time() - worked, loss


def main() -> None:
    """Measure in turns."""
    answers = Answers()
    config = parse_config(json.loads(Path(sys.argv[1]).read_text()))
    rounds: dict[str, list[tuple[float, float, float]]] = {BEFORE: [], WITHIN: []}
    time_round(config)  # not counted: the process's first round
    for _ in range(int(sys.argv[2])):
        rounds[BEFORE].append(time_round(config))
        with mock.patch.object(Host, "prepare", skip_preparing):
            rounds[WITHIN].append(time_round(config))
    answers.say(rounds=rounds)


if __name__ == "__main__":
    main()
