"""Progress of a run, in forward passes over one example, and the estimated time left."""

from __future__ import annotations

from collections.abc import Callable

from fedspan.runs.setup import Prepared

__all__ = ["Effort"]

_TRAINING = 3.0  # cost of a forward and a backward pass, in forward passes


class Effort:
    """Counts the total and the finished work of a run; the time left is based on the mean speed so far.

    Args:
        prepared: The prepared run.
        done: Number of rounds that were finished before.
        clock: Function that returns the time in seconds.
    """

    def __init__(self, prepared: Prepared, done: int, clock: Callable[[], float]) -> None:
        federation, config, training = prepared.federation, prepared.config, prepared.config.training
        self._clock, self._began = clock, clock()
        members, measured = federation.members, prepared.evaluator.ids
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
        self._total = cohorts + sum(self._round.values()) + self._closing + baselines
        self._done, self._at = 0.0, self._began

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

    def _add(self, passes: float) -> None:
        self._done += passes
        self._at = self._clock()

    def left(self) -> float | None:
        """Estimate the seconds left; None before a speed is known, and if the rest takes longer than estimated."""
        if self._done == 0:
            return None
        left = (self._total - self._done) * (self._at - self._began) / self._done - (self._clock() - self._at)
        return left if left >= 1 else None
