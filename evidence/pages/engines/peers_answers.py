"""How every child process of the benchmark answers the driver."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any


class Answers:
    """The line to the driver: one JSON object a line on stdout; all else that is printed goes to stderr."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, **values: Any) -> None:
        """One line."""
        self.out.write(json.dumps(values) + "\n")
        self.out.flush()

    def serve(
        self, run_round: Callable[[int], dict[str, float]], checked: int, more: Callable[[], dict[str, Any]] = dict
    ) -> None:
        """Run the first rounds, report readiness, then run one round for every line that the driver sends.

        Args:
            run_round: Function that runs the round of a number. It returns ``loss`` (mean over examples), ``examples``,
                and maybe ``training``, the seconds within local training.
            checked: Number of rounds before the first that is timed.
            more: Further values for the last line.
        """
        began = time.perf_counter()
        losses = [run_round(round)["loss"] for round in range(checked)]
        if not all(math.isfinite(loss) for loss in losses):
            raise ValueError(f"losses {losses}")
        self.say(losses=losses, warm_up=time.perf_counter() - began, **more())
        for round, _ in enumerate(sys.stdin, checked):
            began = time.perf_counter()
            result = run_round(round)
            self.say(**{"seconds": time.perf_counter() - began, **result})
