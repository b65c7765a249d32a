"""Public benchmarks of a run's language model, through EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedspan.errors import FedspanError, build_install_command, suggest_nearest
from fedspan.serving.load import load_served
from fedspan.tasks.registry import get_task

_RESAMPLES = 1000
"""Number of bootstrap resamples, for the standard errors of metrics without a formula."""


def harness(
    folder: str | Path,
    tasks: Sequence[str],
    client: str | None = None,
    *,
    shots: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    chat: bool | None = None,
    include: str | Path | None = None,
) -> dict[str, dict[str, float]]:
    """Evaluate a language model on tasks of lm-evaluation-harness (MMLU, ARC, GSM8K, ...) with data from the hub.

    Args:
        folder: A run folder or an exported model.
        tasks: Names of tasks or task groups of the harness: ``mmlu``, ``arc_easy``.
        client: The client whose model is evaluated, if every client has its own.
        shots: Number of examples in the prompt; None: each task's default.
        limit: Maximum number of examples of a task; for a quick check, not for a result.
        batch_size: Batch size of the forward passes.
        chat: Whether prompts use the model's chat template; None: as in training.
        include: A folder with custom tasks, in the harness's YAML.

    Returns:
        By task, its metrics and their standard errors (``acc``, ``acc_stderr``; for filtered answers,
        ``exact_match:strict-match``), and ``examples``.

    Examples:
        >>> fedspan.harness("runs/instruct", ["arc_easy"], limit=100)["arc_easy"]["acc"]

    Raises:
        FedspanError: If the extra ``fedspan[harness]`` is not installed, the model answers no prompts, a task is
            unknown, or a number is invalid.
    """
    for name, value in (("shots", shots), ("limit", limit), ("batch_size", batch_size)):
        least = 0 if name == "shots" else 1
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise FedspanError(name, value, f"a whole number from {least}")
    if not tasks:
        raise FedspanError("tasks", [], "names of lm-evaluation-harness, such as mmlu")
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise FedspanError(
            "tasks",
            list(tasks),
            problem=f"the package lm-eval is missing ({error}). Run: {build_install_command('harness')}",
        ) from None
    manager: Any = None
    if include is not None:  # without the harness's own, whose thousands of files take seconds to read
        manager = TaskManager(include_path=str(include), include_defaults=False)
    if manager is None or not set(tasks) <= set(manager.all_tasks):
        manager = TaskManager(include_path=None if include is None else str(include))
    for task in tasks:
        if task not in manager.all_tasks:
            problem = f"lm-evaluation-harness has no task {task!r}. {suggest_nearest(task, manager.all_tasks)}"
            raise FedspanError("tasks", task, problem=problem)
    served = load_served(folder, client)
    if not get_task(served.task_settings.task).is_generative:
        raise FedspanError(
            "tasks", list(tasks), "a run of causal-lm", problem=f"this run's task is {served.task_settings.task}"
        )
    model = HFLM(pretrained=served.model, tokenizer=served.processor, batch_size=batch_size)  # pyright: ignore
    evaluated: Any = lm_eval.simple_evaluate  # its decorator hides its parameters
    try:
        results = evaluated(
            model,
            tasks=list(tasks),
            num_fewshot=shots,
            limit=limit,
            apply_chat_template=served.task_settings.chat if chat is None else chat,
            system_instruction=served.task_settings.system,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=_RESAMPLES,
        )
    except (OSError, ValueError, RuntimeError) as error:  # among others, data sets that cannot be downloaded or read
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise FedspanError("tasks", list(tasks), problem=f"the tasks cannot be evaluated here ({reason})") from error
    counts = results.get("n-samples", {})
    return {task: _list_numbers(values, counts.get(task)) for task, values in results["results"].items()}


def _list_numbers(values: Mapping[str, Any], counts: Mapping[str, int] | None) -> dict[str, float]:
    """Return the numbers of a task; ``none``, the filter that filters nothing, is dropped from ``acc,none``."""
    metrics: dict[str, float] = {}
    for key, value in values.items():
        name, comma, kind = key.partition(",")
        if comma and isinstance(value, int | float):
            metrics[name if kind == "none" else f"{name}:{kind}"] = float(value)
    if counts is not None:
        metrics["examples"] = float(counts["effective"])
    return metrics
