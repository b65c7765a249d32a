"""A whole run of fedspan as a user runs it, with its ledger, checkpoints and evaluation; one JSON line about it.

python fedspan_run.py CONFIG.json FOLDER
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers_answers import Answers
from watch import Watch, peak, reset_peak

from fedspan.assembly.run import Prepared
from fedspan.config import parse_config
from fedspan.progress.listener import Listener
from fedspan.runs.start import run


class Rounds(Listener):
    """Takes the time of every round, from one commit to the next, and the peak of memory from the first round on."""

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self.seconds, self.outside = list[float](), list[float]()
        self.began = time.perf_counter()
        self.loaded = self.peak = 0

    def on_start(self, prepared: Prepared, done: int, resumed: bool) -> None:
        self.watch = Watch(prepared.engine)
        reset_peak()
        self.loaded = peak()
        self.began = time.perf_counter()

    def on_round_finish(self, row: Mapping[str, Any]) -> None:
        assert self.watch is not None
        spent = time.perf_counter() - self.began
        self.seconds.append(spent)
        self.outside.append(spent - self.watch.take())
        self.peak = peak()
        self.began = time.perf_counter()


def main() -> None:
    """Run and answer."""
    answers, rounds = Answers(), Rounds()
    report = run(parse_config(json.loads(Path(sys.argv[1]).read_text())), sys.argv[2], listener=rounds)
    answers.say(
        seconds=rounds.seconds,
        outside=rounds.outside,
        loaded=rounds.loaded,
        peak=rounds.peak,
        scores=dict(report.scores),
    )


if __name__ == "__main__":
    main()
