"""Work of a run, in forward passes over one example, and the time that is left of it; stages in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

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
    round: int | None = None

    @property
    def work(self) -> float:
        return self.training + self.evaluation


class Effort:
    """Counts the total and the finished work of a run, and estimates the time left by the measured speeds.

    What only the first round waits for is no part of this work: the clock stands still meanwhile.
    """

    def __init__(self, prepared: Prepared, done: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._parts = _list_parts(prepared, done)
        self._patience = prepared.config.federation.early_stopping
        self._at, self._round, self._best = 0, done, 0
        self._done = {"training": 0.0, "evaluation": 0.0}  # finished work of the current part
        self._before = self._measured = 0  # examples of this part's earlier measurements, and of the current one
        self._stopped, self._stopped_at = 0.0, math.nan  # seconds for which the clock stood still; since when it does
        self._once: tuple[Stage, float] | None = None  # the stage that it stands still for, and when that began
        self._last: Stage | None = None  # the last stage of training or evaluation
        self._seen = self._counted = clock()
        self._is_counted = False  # whether a stage of the current part has counted anything
        self._work, self._seconds = dict.fromkeys(self._done, 0.0), dict.fromkeys(self._done, 0.0)
        self.total = sum(part.work for part in self._parts)
        """All work, in forward passes."""
        self._floor = 0.0  # work of the finished parts

    @property
    def completed(self) -> float:
        """Finished work, in forward passes."""
        return self._floor + sum(self._done.values())

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
        self._count_seconds()
        if stage is None or stage.name not in self._done:
            return
        if stage.total is not None:  # a method that trains twice does more
            stage = replace(stage, done=min(stage.done, stage.total))
        last, self._last = self._last, stage
        is_same = last is not None and last.name == stage.name and last.done <= stage.done
        cost = _TRAINING if stage.name == "training" else 1.0
        if passed := stage.done - (last.done if is_same and last is not None else 0):
            self._work[stage.name] += cost * passed
            self._counted, self._is_counted = self._seen, True
        if self._at == len(self._parts):
            return
        part = self._parts[self._at]
        if stage.name == "training":
            self._done["training"] = max(self._done["training"], min(part.training, _TRAINING * stage.done))
        elif self._done["training"] or not part.training:
            if stage.done < self._measured:
                self._before += self._measured
            self._measured = stage.done
            self._done["training"] = part.training
            self._done["evaluation"] = min(part.evaluation, self._before + self._measured)

    def finish(self, key: str, best: int | None = None) -> None:
        """Count a part as finished (``round 3``, ``closing``, ``local-only``); skipped ones are no work.

        Args:
            best: The best round so far, by which early stopping may end the run; None: unknown.
        """
        self._count_seconds()
        if all(part.key != key for part in self._parts[self._at :]):
            return  # an estimate ends no run
        while self._parts[self._at].key != key:
            self.total -= self._parts[self._at].work
            self._at += 1
        part, self._counted = self._parts[self._at], self._seen
        self._floor += part.work
        self._round, self._best = part.round or self._round, self._best if best is None else best
        self._at += 1
        self._before = self._measured = 0
        self._done = dict.fromkeys(self._done, 0.0)
        if not self._is_counted:  # its stages were not reported
            self._work["training"] += part.work
        self._is_counted = False
        for measured in (self._work, self._seconds):  # the last parts count most: the first prepare what others reuse
            measured.update({name: value / 4 for name, value in measured.items()})

    def _count_seconds(self) -> None:
        """Count the time since the last call as that of the last stage of training or evaluation."""
        now = self._get_working_time()
        self._seconds["training" if self._last is None else self._last.name] += now - self._seen
        self._seen = now

    def _get_working_time(self) -> float:
        """Return the clock without the seconds for which it stood still."""
        return (self._clock() if self._once is None else self._stopped_at) - self._stopped

    def estimate_left(self) -> tuple[float, float] | None:
        """Estimate the seconds left, counting down: the least, if early stopping ends the run, and the most.

        Returns:
            Both numbers; None before the speed of training is known, and if the rest takes longer.
        """
        once, current = 0.0, self._once
        if current is not None:
            stage, began = current
            if not stage.done or not stage.total:
                return None
            once = (self._clock() - began) * (stage.total - stage.done) / stage.done
        left = self._parts[self._at :]
        paces = {name: self._seconds[name] / work for name, work in self._work.items() if work and self._seconds[name]}
        # Measuring the start, with what it loads for the first time, says little about the speed of training.
        if not paces or ("training" not in paces and any(part.training for part in left)):
            return None
        known = next(iter(paces.values()))  # of the other kind of passes, if only one was measured
        training, evaluation = (paces.get(name, known) for name in self._done)
        most = -self._done["training"] * training - self._done["evaluation"] * evaluation
        most += once - (self._get_working_time() - self._counted)
        least = most
        last = math.inf if self._patience is None else max(self._round + 1, self._best + self._patience)
        for part in left:
            seconds = part.training * training + part.evaluation * evaluation
            most += seconds
            least += seconds if part.round is None or part.round <= last else 0.0
        return (max(least, 0.0), most) if most >= 1 else None


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
            n,
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
