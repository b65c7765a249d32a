"""Work of a run, in forward passes over one example, and the time left as rich estimates it from that."""

from __future__ import annotations

import math
from collections.abc import Callable

from rich.progress import Progress, Task

from fedspan.runs.setup import Prepared

__all__ = ["Effort"]

_TRAINING = 3.0  # cost of a forward and a backward pass, in forward passes


class Effort:
    """Counts the total and the finished work of a run as a task of ``rich.progress``, which estimates the time left.

    Args:
        prepared: The prepared run.
        done: Number of rounds that were finished before.
        clock: Function that returns the time in seconds.
    """

    def __init__(self, prepared: Prepared, done: int, clock: Callable[[], float]) -> None:
        federation, config, training = prepared.federation, prepared.config, prepared.config.training
        self._clock, self._ends = clock, math.inf
        members, measured = federation.clients, prepared.evaluator.ids
        steps = training.local_steps
        batch = training.batch_size * training.gradient_accumulation_steps
        self._members, self._epochs = members, training.local_epochs
        self._passes = None if steps is None else _TRAINING * steps * batch
        own = sum(len(member.validation) + len(member.test) for member in map(members.__getitem__, measured))
        heldout = 0 if prepared.test is None else len(prepared.test)
        personal = federation.method.declared().personal
        rounds, every = federation.settings.rounds, config.evaluation.every
        scored = own + (0 if personal else heldout)
        self._round = {n: scored if n % every == 0 or n == rounds else 0 for n in range(done + 1, rounds + 1)}
        self._closing = own + heldout * (len(measured) if personal else 1)
        self._epoch = sum(map(self._training, members)) + own if config.baselines else 0.0
        final = {"local": own + heldout * len(measured), "centralised": own + heldout}
        self._final = {name: final[name] for name in config.baselines}
        cohorts = sum(sum(map(self._training, federation.cohort(n - 1))) for n in self._round)
        baselines = len(self._final) * rounds * self._epoch + sum(self._final.values())
        total = cohorts + sum(self._round.values()) + self._closing + baselines
        # By default rich forgets all that was counted over 30 seconds ago, and one client may train for longer.
        self._progress = Progress(get_time=clock, speed_estimate_period=math.inf)
        self._id = self._progress.add_task("run", total=total)
        self._progress.advance(self._id, 0.0)  # rich measures the speed since the first count

    def _training(self, id: str) -> float:
        """Compute a client's work in a round."""
        if self._passes is not None:
            return self._passes
        return _TRAINING * self._members[id].client.examples * self._epochs

    def client(self, id: str) -> None:
        """Count a client's training."""
        self._add(self._training(id))

    def round(self, number: int) -> None:
        """Count a round that was measured and saved."""
        self._add(self._round[number])

    def closed(self) -> None:
        """Count the measurement of the best round."""
        self._add(self._closing)

    def epoch(self) -> None:
        """Count a baseline's epoch, trained and validated."""
        self._add(self._epoch)

    def scored(self, name: str) -> None:
        """Count the measurement of a baseline."""
        self._add(self._final[name])

    @property
    def task(self) -> Task:
        """The run's work: ``total`` and ``completed``, in forward passes."""
        return self._progress.tasks[0]

    def _add(self, passes: float) -> None:
        self._progress.advance(self._id, passes)
        left = self.task.time_remaining
        self._ends = math.inf if left is None else self._clock() + left

    def left(self) -> float | None:
        """Estimate the seconds left; None before a speed is known, and if the rest takes longer than estimated.

        rich's own estimate stands still until the next count; this one counts down.
        """
        left = self._ends - self._clock()
        return left if 1 <= left < math.inf else None
