"""The engine of a run, and its stacking plan, which is chosen at the start and stays the same to the run's end."""

from __future__ import annotations

from dataclasses import asdict

from fedspan.config import RunConfig
from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.runs.folder import RunFolder
from fedspan.tasks.task import Task
from fedspan.training.autotuning import StackingPlan, StackingRequest
from fedspan.training.batched import BatchedEngine
from fedspan.training.engine import Engine
from fedspan.training.loop import LoopEngine
from fedspan.training.prefix_caches import PrefixCaches
from fedspan.training.settings import TrainingSettings

__all__ = ["engine_note", "load_stacking_plan", "make_engine", "store_stacking_plan"]


def make_engine(
    config: RunConfig,
    adapted: AdaptedModel,
    task: Task,
    settings: TrainingSettings,
    prefixes: PrefixCaches | None = None,
) -> Engine:
    """Build the engine that a config names.

    Args:
        config: Config of the run.
        adapted: The adapted model.
        task: The learning problem.
        settings: Settings of local training.
        prefixes: Prefix caches of another engine on the same model and task, to be shared.

    Raises:
        FedspanError: If the config asks to compile blocks that cannot be compiled.
    """
    chosen, seed = config.engine, config.seed
    prefix = prefixes or chosen.prefix_settings(config.evaluation.batch_size)
    refusals = {
        f"with engine.name: {chosen.name}; only batched compiles": chosen.name != "batched",
        "with training.lora_dropout, whose masks are drawn client by client": settings.dropout > 0,
    }
    if chosen.compile and (why := next((why for why, holds in refusals.items() if holds), None)):
        raise FedspanError("engine.compile", True, f"false {why}")
    if chosen.name != "batched":
        return LoopEngine(adapted, task, settings, seed, prefix)
    wish = StackingRequest(chosen.clients_at_once, chosen.workers)
    return BatchedEngine(adapted, task, settings, seed, wish, prefix, chosen.padding_free, chosen.compile)


def engine_note(engine: Engine) -> str | None:
    """Return a note for the user on how the clients trained; None if they trained as requested."""
    why = engine.why_not if isinstance(engine, BatchedEngine) else None
    return None if why is None else f"clients train one by one, as with engine.name: loop, because {why}"


def load_stacking_plan(place: RunFolder, engine: Engine) -> None:
    """Restore the stacking plan of a resumed run: the bits of its results depend on the number of stacked clients.

    Raises:
        FedspanError: If the file cannot be read.
    """
    if not isinstance(engine, BatchedEngine) or not place.engine.exists():
        return
    found = place.read_json(place.engine)
    try:
        engine.stacking = StackingPlan(int(found["at_once"]), int(found["workers"]))  # pyright: ignore
    except (TypeError, KeyError, ValueError):
        raise FedspanError("engine", str(place.engine), "a file with two numbers, at_once and workers") from None


def store_stacking_plan(place: RunFolder, engine: Engine) -> None:
    """Write the engine's stacking plan to the run folder, if there is one and the file does not exist yet."""
    if isinstance(engine, BatchedEngine) and engine.stacking is not None and not place.engine.exists():
        place.write_json(place.engine, asdict(engine.stacking))
