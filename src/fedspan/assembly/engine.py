"""The engine of a run: its construction, its stacking plan, and what it could not do as requested."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict

from fedspan.config import RunConfig
from fedspan.errors import FedspanError
from fedspan.files import convert_disk_errors
from fedspan.models.adapted import AdaptedModel
from fedspan.run_folder import RunFolder
from fedspan.tasks.task import Task
from fedspan.training.batched import BatchedEngine
from fedspan.training.engine import Engine
from fedspan.training.jobs import TrainingSettings
from fedspan.training.loop import LoopEngine
from fedspan.training.stacking import StackingPlan, StackingRequest
from fedspan.training.stages import Stages


def make_engine(
    config: RunConfig,
    adapted: AdaptedModel,
    task: Task,
    settings: TrainingSettings,
    stages: Stages | None = None,
    shared_with: Engine | None = None,
) -> Engine:
    """Build the engine that a config names.

    Args:
        config: Config of the run.
        adapted: The adapted model.
        task: The learning problem.
        settings: Settings of local training.
        stages: Reports the progress of long work; None: that of ``shared_with``, if any.
        shared_with: Another engine on the same model and task, whose prefix caches and time for measuring are shared.

    Raises:
        FedspanError: If the config asks to compile blocks that cannot be compiled.
    """
    options, seed = config.engine, config.seed
    prefix = (
        options.build_prefix_settings(config.evaluation.batch_size) if shared_with is None else shared_with.prefixes
    )
    stages = stages or (None if shared_with is None else shared_with.stages)
    refusals = {
        f"engine.name: {options.name} does not compile, only batched does": options.name != "batched",
        "it cannot be combined with training.lora_dropout, whose masks are drawn client by client": settings.dropout
        > 0,
    }
    if options.compile and (reason := next((reason for reason, holds in refusals.items() if holds), None)):
        raise FedspanError("engine.compile", True, problem=reason)
    if options.name != "batched":
        return LoopEngine(adapted, task, settings, seed, prefix, stages=stages)
    request = StackingRequest(options.clients_per_pass, options.workers)
    rounds = config.federation.rounds
    engine = BatchedEngine(
        adapted, task, settings, seed, request, prefix, options.padding_free, options.compile, stages, rounds
    )
    if isinstance(shared_with, BatchedEngine):
        engine.measuring = shared_with.measuring
    return engine


def describe_refusal(engine: Engine) -> str | None:
    """Return a note for the user if the clients did not train as requested; None: they did."""
    reason = engine.refusal if isinstance(engine, BatchedEngine) else None
    return None if reason is None else f"clients train one by one, as with engine.name: loop, because {reason}"


def keep_stacking_plan(run_folder: RunFolder, engine: Engine) -> None:
    """Restore a resumed run's stacking plan, or have the one that is chosen written before it is used.

    The bits of a run's results depend on the number of stacked clients. Numbers that the config asks for replace those
    of the plan, as after an error for too little memory.
    """
    if not isinstance(engine, BatchedEngine):
        return
    if not run_folder.engine.exists():

        def store(plan: StackingPlan) -> None:
            with convert_disk_errors(run_folder.path):
                run_folder.path.mkdir(parents=True, exist_ok=True)  # that of a baseline is new
            run_folder.write_json(run_folder.engine, asdict(plan))

        engine.on_plan = store
        return
    stored = run_folder.read_json(run_folder.engine)
    try:
        plan = StackingPlan(int(stored["clients_per_pass"]), int(stored["workers"]))  # pyright: ignore
    except (TypeError, KeyError, ValueError):
        raise FedspanError(
            "engine", str(run_folder.engine), "a file with two numbers, clients_per_pass and workers"
        ) from None
    request = engine.request
    engine.stacking = StackingPlan(request.clients_per_pass or plan.clients_per_pass, request.workers or plan.workers)
    if engine.stacking != plan:
        run_folder.write_json(run_folder.engine, asdict(engine.stacking))


@contextmanager
def without_stacking_plan(engine: Engine) -> Generator[None]:
    """Evaluate within this context as before a plan is known.

    The start of a run is evaluated before the first round, which chooses the plan. A run that was stopped in its first
    round evaluates its start again, and knows the plan by then.
    """
    if not isinstance(engine, BatchedEngine):
        yield
        return
    plan, engine.stacking = engine.stacking, None
    try:
        yield
    finally:
        engine.stacking = engine.stacking or plan
