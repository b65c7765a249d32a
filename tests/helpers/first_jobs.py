"""The job of a run's first client in its first round."""

from __future__ import annotations

from fedspan.core.values import Job
from fedspan.runs.setup import Prepared


def first_job(prepared: Prepared) -> Job:
    """FedIT's, after a round: B is not 0, so that every factor has a gradient."""
    federation = prepared.federation
    progress = federation.run_round(federation.begin()).progress
    return federation.method.start(federation.method.sync(progress.state, None), None, {}, progress.state.round)
