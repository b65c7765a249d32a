"""What passes of a device cost by client and step: its operators, copies and waits, counted while clients train."""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from fedspan.assembly.run import prepare
from fedspan.config import parse_config
from fedspan.core.values import Job, Trained
from fedspan.training.batched import BatchedEngine
from fedspan.training.config import EngineConfig
from fedspan.training.jobs import Assignment
from fedspan.training.loop import LoopEngine

PASSES = ("method fedit", "task causal-lm")
"""Runs of an encoder and of a decoder, by their names in ``device_runs.RUNS``."""


def count_pass(
    settings: dict[str, Any],
    device: str,
    clients: int,
    steps: int,
    count: Callable[[], AbstractContextManager[Mapping[str, int]]],
) -> Counter[str]:
    """Count what training some clients in shared passes of one example each takes.

    Args:
        settings: Settings of the run.
        clients: Number of clients, which all share every pass.
        steps: Number of passes.
        count: Counts within its context.
    """
    settings["training"] |= {"batch_size": 1, "local_steps": steps}
    settings["model"].setdefault("attention", "eager")
    prepared = prepare(parse_config({**settings, "device": device}))
    federation = prepared.federation
    state, client = federation.begin().state, next(iter(federation.clients.values())).client
    lengths = prepared.train.lengths
    indices = np.flatnonzero(lengths == np.bincount(lengths).argmax())[:steps]  # one layout of all passes
    assert len(indices) == steps
    options = EngineConfig(clients_per_pass=clients, workers=1, prefix_cache=False)
    engine = BatchedEngine(LoopEngine(prepared.engine.adapted, prepared.task, prepared.engine.settings, 0, options))
    message, assignments = federation.method.sync(state, client), dict[str, Assignment]()
    for number in range(clients):  # a host decodes a message to several clients once
        job = federation.method.start(message, replace(client, id=f"client-{number:02}"), {}, 0)
        assert isinstance(job, Job)
        assignments[f"client-{number:02}"] = Assignment(f"client-{number:02}", 0, job, indices, 0.01)
    finished: dict[str, Trained] = {}

    def finish(assignment: Assignment, trained: Trained) -> None:
        finished[assignment.client] = trained

    sizes = dict.fromkeys(assignments, steps)
    engine.train_all(prepared.train, sizes, assignments.__getitem__, finish)  # verifies the model, and fills its caches
    with count() as counter:
        engine.train_all(prepared.train, sizes, assignments.__getitem__, finish)
    assert engine.refusal is None
    assert len(finished) == clients
    first = assignments["client-00"]
    trained = [first.job.tensors[name] for name in first.job.trainable_names]
    return Counter({**counter, "bytes of a row": sum(value.numel() * value.element_size() for value in trained)})


def fit_counts(counts: Mapping[tuple[int, int], Mapping[str, int]]) -> dict[str, dict[str, float]]:
    """Fit ``fixed + by client * C + by step * S + by client and step * C * S`` to counts by (C, S), by kind."""
    kinds = sorted({kind for counter in counts.values() for kind in counter})
    terms = ("fixed", "by client", "by step", "by client and step")
    rows = np.array([[1, clients, steps, clients * steps] for clients, steps in counts], dtype=float)
    fitted: dict[str, dict[str, float]] = {}
    for kind in kinds:
        solution, *_ = np.linalg.lstsq(rows, np.array([counter[kind] for counter in counts.values()], dtype=float))
        fitted[kind] = {term: round(float(value), 3) for term, value in zip(terms, solution, strict=True)}
    return fitted
