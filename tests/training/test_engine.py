"""Training one client after another: in the order of the clients, each until no assignment follows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedspan.core.values import Job, Trained
from fedspan.training.engine import train_one_by_one
from fedspan.training.jobs import Assignment


def test_clients_train_one_by_one_until_no_assignment_follows() -> None:
    """A client's first job is opened when the one before it has finished."""
    events: list[tuple[str, ...]] = []
    phases = {"b": ["first", "second", "third"], "a": ["first"], "c": ["first", "second"]}

    def open_job(client: str) -> Assignment:
        events.append(("open", client))
        return Assignment(client, 0, Job({}, {}, (), phase="first"), np.arange(3), 0.1)

    def train(assignment: Assignment) -> Trained:
        events.append(("train", assignment.client, assignment.job.phase))
        return Trained({}, 3.0, 0.5)

    def finish_job(assignment: Assignment, trained: Trained) -> Assignment | None:
        assert trained == Trained({}, 3.0, 0.5)
        events.append(("finish", assignment.client, assignment.job.phase))
        following = phases[assignment.client][phases[assignment.client].index(assignment.job.phase) + 1 :]
        return replace(assignment, job=replace(assignment.job, phase=following[0])) if following else None

    train_one_by_one({id: 3 for id in phases}, open_job, train, finish_job)
    expected: list[tuple[str, ...]] = []
    for id, names in phases.items():
        expected.append(("open", id))
        for name in names:
            expected += [("train", id, name), ("finish", id, name)]
    assert events == expected


def test_without_clients_nothing_is_opened() -> None:
    def fail(*_: object) -> None:
        raise AssertionError("nobody trains")

    train_one_by_one({}, fail, fail, fail)  # type: ignore[arg-type]
