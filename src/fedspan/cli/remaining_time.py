"""How much of a run is done, in forward passes over one example, and how long the rest may take."""

from __future__ import annotations

from collections.abc import Callable

from fedspan.runs.setup import Prepared

__all__ = ["Effort"]

_TRAINING = 3.0  # a forward and a backward pass, in forward passes


class Effort:
    """Counts what a run has to do and what it has done; time left follows from the mean speed so far.

    Args:
        prepared: the run.
        done: rounds that were finished before.
        clock: seconds.
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
        """A client's part of a round."""
        if self._passes is not None:
            return self._passes
        return _TRAINING * self._members[id].client.examples * self._epochs

    def client(self, id: str) -> None:
        """A client has trained."""
        self._add(self._training(id))

    def round(self, number: int) -> None:
        """A round was measured and saved."""
        self._add(self._round[number])

    def closed(self) -> None:
        """The best round was measured."""
        self._add(self._closing)

    def epoch(self) -> None:
        """A baseline's epoch was trained and validated."""
        self._add(self._epoch)

    def scored(self, name: str) -> None:
        """A baseline was measured."""
        self._add(self._final[name])

    def _add(self, passes: float) -> None:
        self._done += passes
        self._at = self._clock()

    def left(self) -> float | None:
        """Seconds; None before there is a speed, and where the rest takes longer than it should."""
        if self._done == 0:
            return None
        left = (self._total - self._done) * (self._at - self._began) / self._done - (self._clock() - self._at)
        return left if left >= 1 else None
