"""Dependence of a run's finished rounds on the number of rounds that it was planned with."""

from __future__ import annotations

from fedspan.config import RunConfig
from fedspan.errors import FedspanError
from fedspan.runs.learning_rate import ROUNDS

ROUNDS_FIELD = "federation.rounds"


def require_independent_rounds(done: int, stored: RunConfig, changed: RunConfig) -> None:
    """Check that finished rounds do not depend on the number of all rounds.

    Args:
        done: Number of finished rounds.
        stored: The config under which they ran.
        changed: The stored config with another number of rounds.
    """
    before, after, training = stored.federation.rounds, changed.federation.rounds, stored.training
    start_anew = f"Start a new run with {ROUNDS_FIELD}={after} in another folder"
    settings = stored.build_training_settings()
    if any(settings.compute_lr(round, before) != settings.compute_lr(round, after) for round in range(done)):
        problem = (
            f"training.schedule {training.schedule} spreads over all rounds, and the {done} finished rounds had the "
            f"learning rates of a run of {before} rounds. {start_anew}; a run with training.schedule: constant can be "
            "extended"
        )
        raise FedspanError(ROUNDS_FIELD, after, problem=problem)
    if stored.privacy is not None and stored.privacy.epsilon is not None:
        problem = f"privacy.epsilon is the budget of the {before} rounds that were planned. {start_anew}"
        raise FedspanError(ROUNDS_FIELD, after, problem=problem)
    if training.lr == "auto" and min(ROUNDS, before) != min(ROUNDS, after):
        problem = f"the range test of training.lr ran {min(ROUNDS, before)} of {ROUNDS} rounds. {start_anew}"
        raise FedspanError(ROUNDS_FIELD, after, problem=problem)
