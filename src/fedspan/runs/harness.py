"""Public benchmarks of language models on what a run trained, through EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedspan.errors import FedspanError, nearest
from fedspan.runs.load import load_served

__all__ = ["harness"]

_RESAMPLES = 1000
"""Of a bootstrap, for the standard errors of the metrics that have no formula."""


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
    """Measure a language model on tasks of lm-evaluation-harness (MMLU, ARC, GSM8K, ...); their data come from the hub.

    Args:
        folder: a run folder or an exported model.
        tasks: names of tasks or groups of tasks, as the harness has them: ``mmlu``, ``arc_easy``.
        client: whose model, if every client has its own.
        shots: examples in the prompt; None: as each task says.
        limit: examples of a task, at most; for a quick look, not for a result.
        batch_size: of the forward passes.
        chat: write prompts with the model's chat template; None: as it was trained.
        include: a folder with tasks of one's own, in the harness's YAML.

    Returns:
        By task, its metrics and their standard errors (``acc``, ``acc_stderr``; of a filtered answer,
        ``exact_match:strict-match``), and ``examples``.

    Raises:
        FedspanError: without the extra ``fedspan[harness]``, a model that answers no prompts, an unknown task, or a
            number that is none.
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
        raise FedspanError("tasks", list(tasks), f"pip install 'fedspan[harness]' first ({error})") from None
    manager: Any = None
    if include is not None:  # without the harness's own, whose thousands of files take seconds to read
        manager = TaskManager(include_path=str(include), include_defaults=False)
    if manager is None or not set(tasks) <= set(manager.all_tasks):
        manager = TaskManager(include_path=None if include is None else str(include))
    for task in tasks:
        if task not in manager.all_tasks:
            expected = f"a task of lm-evaluation-harness; the nearest are {nearest(task, manager.all_tasks)}"
            raise FedspanError("tasks", task, expected)
    served = load_served(folder, client)
    if served.facts.task != "causal-lm":
        raise FedspanError("tasks", list(tasks), f"a causal-lm run; this one's task is {served.facts.task}")
    model = HFLM(pretrained=served.model, tokenizer=served.processor, batch_size=batch_size)  # pyright: ignore
    evaluated: Any = lm_eval.simple_evaluate  # its decorator hides its parameters
    try:
        found = evaluated(
            model,
            tasks=list(tasks),
            num_fewshot=shots,
            limit=limit,
            apply_chat_template=served.facts.chat if chat is None else chat,
            system_instruction=served.facts.system,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=_RESAMPLES,
        )
    except (OSError, ValueError, RuntimeError) as error:  # data sets that can't be had or read, among them
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise FedspanError("tasks", list(tasks), f"tasks that can be evaluated here ({why})") from error
    counts = found.get("n-samples", {})
    return {task: _plain(values, counts.get(task)) for task, values in found["results"].items()}


def _plain(values: Mapping[str, Any], counts: Mapping[str, int] | None) -> dict[str, float]:
    """A task's numbers; of ``acc,none`` the filter that filters nothing is left out."""
    metrics: dict[str, float] = {}
    for key, value in values.items():
        name, comma, kind = key.partition(",")
        if comma and isinstance(value, int | float):
            metrics[name if kind == "none" else f"{name}:{kind}"] = float(value)
    if counts is not None:
        metrics["examples"] = float(counts["effective"])
    return metrics
