"""Work of a run, in forward passes over one example, and the time that is left of it; stages in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rich.progress import Progress

from fedspan.assembly.run import Prepared
from fedspan.training.stages import Stage, StageName

_TRAINING = 3.0  # cost of a forward and a backward pass, in forward passes

_ONCE: tuple[StageName, ...] = ("hidden states", "reference", "statistics", "stacking", "learning rate")

STAGES: Mapping[StageName, str] = {
    "data": "reading the data",
    "model": "loading the model",
    "encoding": "encoding the examples",
    "workers": "starting the workers",
    "nodes": "waiting for the nodes",
    "hidden states": "outputs of the frozen layers",
    "reference": "outputs of the pretrained model",
    "statistics": "statistics for the head's start",
    "stacking": "trying how many clients to train at once",
    "learning rate": "range test of the learning rate",
    "training": "training",
    "evaluation": "measuring",
    "diagnostics": "diagnostics of the round",
    "export": "exporting",
}
"""The stages in words."""


def describe_stage(stage: Stage) -> str:
    """Return a stage in words, without its numbers."""
    outer = stage.outer
    if outer is not None and outer.is_within("learning rate"):
        while outer.name != "learning rate":
            assert outer.outer is not None
            outer = outer.outer
        return f"{STAGES['learning rate']}, {outer.done + 1} of {outer.total}"
    if stage.name == "training" and stage.total is not None and stage.done >= stage.total > 0:
        return "finishing the round"
    return STAGES[stage.name] + (" (once)" if stage.name in ("hidden states", "reference") else "")


def get_unrepeated_name(stage: Stage | None) -> StageName | None:
    """Return the name of a stage that the first round waits for and later ones do not repeat; None for any other."""
    if stage is None:
        return None
    if stage.is_within("learning rate"):
        return "learning rate"
    return stage.name if stage.name in _ONCE else None


@dataclass(frozen=True)
class _Part:
    """A part of a run: a round, an epoch of a baseline, or a final measurement; work in forward passes."""

    key: str
    training: float
    evaluation: float

    @property
    def work(self) -> float:
        return self.training + self.evaluation


class Effort:
    """Counts the total and the finished work of a run, and estimates the time left by the speed that rich measures.

    What only the first round waits for is no part of this work: the clock stands still meanwhile.
    """

    def __init__(self, prepared: Prepared, done: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._parts = _list_parts(prepared, done)
        self._at = 0
        self._floor = 0.0  # work of the finished parts
        self._before = self._measured = 0  # examples of this part's earlier measurements, and of the current one
        self._stopped, self._stopped_at = 0.0, math.nan  # seconds for which the clock stood still; since when it does
        self._once: tuple[Stage, float] | None = None  # the stage that it stands still for, and when that began
        self._counted = clock()
        # The display is ProgressBar's; the speed is that of the last 1,000 counts, however long ago they were.
        self._progress = Progress(disable=True, get_time=self._get_working_time, speed_estimate_period=math.inf)
        self._total = sum(part.work for part in self._parts)  # not rich's: a new total would reset its speed
        task = self._progress.add_task("work", total=None)
        self._progress.advance(task, 0)  # rich measures speeds from the first count
        (self._task,) = self._progress.tasks

    @property
    def total(self) -> float:
        """All work, in forward passes."""
        return self._total

    @property
    def completed(self) -> float:
        """Finished work, in forward passes."""
        return self._task.completed

    def stage(self, stage: Stage | None) -> None:
        """Count what a stage has done of the current part."""
        if stage is not None and get_unrepeated_name(stage) is not None:
            if self._once is None:
                self._stopped_at = self._clock()
            if self._once is None or self._once[0].name != stage.name or self._once[0].done > stage.done:
                self._once = (stage, self._clock())
            self._once = (stage, self._once[1])
            return
        if self._once is not None:
            self._stopped += self._clock() - self._stopped_at
            self._once = None
        if stage is None or self._at == len(self._parts):
            return
        part = self._parts[self._at]
        if stage.name == "training":
            self._count(self._floor + min(part.training, _TRAINING * stage.done))
        elif stage.name == "evaluation" and (self.completed > self._floor or not part.training):
            if stage.done < self._measured:
                self._before += self._measured
            self._measured = stage.done
            done = min(part.evaluation, self._before + self._measured)
            self._count(self._floor + part.training + done)

    def finish(self, key: str) -> None:
        """Count a part as finished (``round 3``, ``closing``, ``local-only``); skipped ones are no work."""
        if all(part.key != key for part in self._parts[self._at :]):
            return  # an estimate ends no run
        while self._parts[self._at].key != key:
            self._total -= self._parts[self._at].work
            self._at += 1
        self._floor += self._parts[self._at].work
        self._at += 1
        self._before = self._measured = 0
        self._progress.update(self._task.id, completed=min(self.completed, self._floor))
        self._count(self._floor)

    def _count(self, completed: float) -> None:
        if completed > self.completed:
            self._progress.advance(self._task.id, completed - self.completed)
            self._counted = self._get_working_time()

    def _get_working_time(self) -> float:
        """Return the clock without the seconds for which it stood still."""
        return (self._clock() if self._once is None else self._stopped_at) - self._stopped

    def estimate_left(self) -> float | None:
        """Estimate the seconds left, counting down; None before a speed is known, and if the rest takes longer."""
        speed = self._task.speed
        if not speed:
            return None
        once, current = 0.0, self._once
        if current is not None:
            stage, began = current
            if not stage.done or not stage.total:
                return None
            once = (self._clock() - began) * (stage.total - stage.done) / stage.done
        needed = math.ceil((self.total - self.completed) / speed)
        seconds_left = needed - (self._get_working_time() - self._counted) + once
        return seconds_left if seconds_left >= 1 else None


def _list_parts(prepared: Prepared, done: int) -> list[_Part]:
    """List the parts of a run after its first ``done`` rounds, in order."""
    federation, config, training = prepared.federation, prepared.config, prepared.federation.training
    clients, measured = federation.clients, prepared.evaluator.ids
    examples = sum(len(data.validation) + len(data.test) for data in map(clients.__getitem__, measured))
    heldout = 0 if prepared.test is None else len(prepared.test)
    personal = federation.method.declare_claims().personal
    rounds, every = federation.settings.rounds, config.evaluation.every

    def count_training_work(ids: Iterable[str]) -> float:
        added = sum(federation.method.list_added_epochs())
        return _TRAINING * sum(training.compute_workload(clients[id].client.examples, added) for id in ids)

    scored = examples + (0 if personal else heldout)
    parts = [_Part("round 0", 0.0, scored)] if prepared.head is not None and not done else []
    parts += [
        _Part(
            f"round {n}",
            count_training_work(federation.draw_cohort(n - 1)),
            scored if n % every == 0 or n == rounds else 0,
        )
        for n in range(done + 1, rounds + 1)
    ]
    final = config.federation.final_rounds * count_training_work(federation.draw_cohort(0))
    parts.append(_Part("closing", final, examples + heldout * (len(measured) if personal else 1)))
    epoch = count_training_work(clients) if config.baselines else 0.0
    for name in config.baselines:
        parts += [_Part(f"{name} {n}", epoch, examples) for n in range(1, rounds + 1)]
        parts.append(_Part(name, 0.0, examples + heldout * (len(measured) if name == "local-only" else 1)))
    return parts
