"""The learning rate of a run with ``training.lr: auto``: a range test on the clients' validation parts.

The candidates are the default rate of task and method times powers of the square root of 10. With each, a few rounds
run from the same start, in which every client takes a few steps, and the pooled validation parts are scored. Of the
rates whose loss is lowest to within 1 % of what the best one gains over the start, the smallest is chosen, because a
larger one is riskier over many rounds. All draws are keyed by the run's seed, so the test can be repeated exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from fedspan.assembly.engine import make_engine
from fedspan.assembly.head import begin, compute_baseline_head
from fedspan.assembly.run import Prepared
from fedspan.errors import FedspanError
from fedspan.federation.federation import Federation
from fedspan.federation.progress import Progress
from fedspan.files import convert_disk_errors, from_json, read_bytes, to_json, write_atomic
from fedspan.training.batched import BatchedEngine
from fedspan.training.config import TrainingSettings
from fedspan.transports.in_process import simulate

EXPONENTS = (-2, -1, 0, 1, 2)
"""Exponents of the square root of 10 in the candidates."""
ROUNDS, STEPS = 2, 8
"""Rounds of a trial, and the largest number of optimizer steps of a client in each of them."""
_TOLERANCE = 0.01


@dataclass(frozen=True)
class RangeTest:
    """The result of a range test.

    Args:
        losses: Validation loss by candidate rate; infinite where training diverged.
    """

    lr: float
    start: float
    losses: tuple[tuple[float, float], ...]

    def to_json_values(self) -> dict[str, object]:
        """Return the result as JSON values, with null for an infinite loss."""
        trials = [{"lr": lr, "loss": loss if math.isfinite(loss) else None} for lr, loss in self.losses]
        return {**asdict(self), "losses": trials}


def choose_rate(start: float, losses: tuple[tuple[float, float], ...]) -> float:
    """Choose the smallest rate whose loss is the lowest, to within 1 % of what the best rate gains over the start.

    Args:
        losses: Loss by candidate rate, in ascending order of the rates.
    """
    lowest = min(loss for _, loss in losses)
    if not math.isfinite(lowest):
        problem = f"training diverged with every candidate from {losses[0][0]:g} to {losses[-1][0]:g}"
        raise FedspanError("training.lr", "auto", "a number", problem=problem)
    acceptable = lowest + _TOLERANCE * max(0.0, start - lowest)
    return next(lr for lr, loss in losses if loss <= acceptable)


def run_range_test(prepared: Prepared, default: float) -> RangeTest:
    """Run the range test of a prepared run whose clients' examples are in this process."""
    federation, settings = prepared.federation, prepared.federation.training
    steps = STEPS if settings.local_steps is None else min(STEPS, settings.local_steps)
    changes = {"local_steps": steps, "schedule": "constant", "warmup_rounds": 0, "cycle_rounds": None}
    short = settings.model_copy(update=changes)
    engine = make_engine(
        prepared.config, prepared.engine.adapted, prepared.task, short, None, shared_with=prepared.engine
    )
    if isinstance(engine, BatchedEngine) and isinstance(main := prepared.engine, BatchedEngine):
        engine.stacking = main.stacking
        # The plan that the test measures is that of the run, which follows.
        engine.rounds = len(EXPONENTS) * min(ROUNDS, federation.settings.rounds) + federation.settings.rounds
        engine.on_plan = main.adopt_plan
    synchronous = federation.settings.trust().model_copy(update={"buffered": None})
    trial = simulate(federation.method, engine, federation.clients, federation.examples, synchronous)
    with engine.stages.stage("learning rate", len(EXPONENTS), "rates"):
        return _test_rates(prepared, trial, short, default)


def _test_rates(prepared: Prepared, trial: Federation, short: TrainingSettings, default: float) -> RangeTest:
    head = compute_baseline_head(prepared.head)
    # Rounds that train the head alone have a rate of their own, so the test does without them.
    first = trial.begin() if head is None else begin(trial, head)
    losses: list[tuple[float, float]] = []
    for exponent in EXPONENTS:
        lr = default * 10 ** (exponent / 2)
        federation = trial.replace_training(short.model_copy(update={"lr": lr}))
        try:
            progress = first
            for _ in range(min(ROUNDS, trial.settings.rounds)):
                progress = federation.run_round(progress).progress
            losses.append((lr, _compute_validation_loss(prepared, progress)))
        except FedspanError as error:
            if error.field != "training.lr":  # the one error of training itself: divergence
                raise
            losses.append((lr, math.inf))
        trial.engine.stages.advance("learning rate")
    start = _compute_validation_loss(prepared, first)
    return RangeTest(choose_rate(start, tuple(losses)), start, tuple(losses))


def read_range_test(path: Path) -> Mapping[str, Any]:
    """Read the stored result of a range test; empty if there is none."""
    if not path.is_file():
        return {}
    try:
        values = from_json(read_bytes(path))
    except ValueError:
        values = None
    lr = values.get("lr") if isinstance(values, dict) else None
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 < lr < math.inf:
        raise FedspanError(str(path), lr, "a file with the chosen learning rate, lr")
    return cast("Mapping[str, Any]", values)


def load_or_choose(path: Path, find: Callable[[], RangeTest]) -> float:
    """Return the rate that is stored in a file, or run a range test and store its result."""
    if stored := read_range_test(path):
        return float(stored["lr"])
    result = find()
    with convert_disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (to_json(result.to_json_values(), indent=2) + "\n").encode())
    return result.lr


def set_rate(prepared: Prepared, lr: float) -> Prepared:
    """Return a run whose orders have another peak learning rate."""
    training = prepared.federation.training.model_copy(update={"lr": lr})
    return replace(prepared, federation=prepared.federation.replace_training(training))


def _compute_validation_loss(prepared: Prepared, progress: Progress) -> float:
    validation, _ = prepared.evaluator.evaluate_clients(progress)
    if validation is None:
        problem = "no client has a validation part to test rates on"
        raise FedspanError("training.lr", "auto", "a number", problem=problem)
    loss = float(cast("float", validation.pooled["loss"]))
    return loss if math.isfinite(loss) else math.inf
