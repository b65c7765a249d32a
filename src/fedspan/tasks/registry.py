"""The registry of all tasks by name.

Add your own with ``register_task``, or from an installed package that declares them as entry points in the group
``fedspan.tasks`` (``my-task = "my_package:MY_TASK"``): configs find them there, on the command line and on nodes. A
node runs only the tasks installed on it; no server can add to these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from fedspan.errors import FedspanError, suggest_nearest
from fedspan.models.heads import HEADS, Head
from fedspan.packages import load_installed
from fedspan.tasks.causal import CAUSAL_LM
from fedspan.tasks.classification import SEQUENCE_CLASSIFICATION
from fedspan.tasks.definition import TaskDefinition
from fedspan.tasks.images import IMAGE_CLASSIFICATION
from fedspan.tasks.masked_lm import MASKED_LM
from fedspan.tasks.metrics import METRICS, replace_metrics
from fedspan.tasks.multi_label import MULTI_LABEL_CLASSIFICATION
from fedspan.tasks.preference import PREFERENCE
from fedspan.tasks.regression import REGRESSION
from fedspan.tasks.seq2seq import SEQ2SEQ
from fedspan.tasks.text_embedding import TEXT_EMBEDDING
from fedspan.tasks.token_classification import TOKEN_CLASSIFICATION
from fedspan.tasks.trainer import TRAINER

ENTRY_POINTS = "fedspan.tasks"
"""Group of the entry points."""
_OWN = (
    "A task of your own: register it first in this process, with fedspan.register_task. The command line, clusters and "
    f"nodes find those of installed packages (entry points in the group {ENTRY_POINTS})."
)
_PIPELINES = {
    "text-classification": SEQUENCE_CLASSIFICATION.name,
    "sentiment-analysis": SEQUENCE_CLASSIFICATION.name,
    "text-generation": CAUSAL_LM.name,
    "ner": TOKEN_CLASSIFICATION.name,
    "fill-mask": MASKED_LM.name,
    "feature-extraction": TEXT_EMBEDDING.name,
    "sentence-similarity": TEXT_EMBEDDING.name,
    "translation": SEQ2SEQ.name,
    "summarization": SEQ2SEQ.name,
    "text2text-generation": SEQ2SEQ.name,
    "dpo": PREFERENCE.name,
}
"""What tasks are called on the hub, in Transformers' pipelines and in TRL, for the message about an unknown name."""
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
BUILT_IN = (
    SEQUENCE_CLASSIFICATION,
    REGRESSION,
    CAUSAL_LM,
    IMAGE_CLASSIFICATION,
    TOKEN_CLASSIFICATION,
    MULTI_LABEL_CLASSIFICATION,
    MASKED_LM,
    TEXT_EMBEDDING,
    SEQ2SEQ,
    PREFERENCE,
    TRAINER,
)
"""fedspan's own tasks."""

_tasks: dict[str, TaskDefinition] = {}
TASKS: Mapping[str, TaskDefinition] = MappingProxyType(_tasks)
_installed: dict[str, TaskDefinition] = {}
"""fedspan's own tasks and the loaded ones of installed packages, whose names no other task may take."""
_metric_owners: dict[str, str] = {}
"""The task that registered a metric, which it may change, by the metric's name."""


def register_task(definition: TaskDefinition) -> None:
    """Register a task of your own in this process, for configs, comparisons and plans.

    Args:
        definition: The task; its ``custom_metrics`` become metrics of reports and tables.

    Examples:
        >>> fedspan.register_task(definition)
        >>> fedspan.run({**config, "task": definition.name}, "runs/mine")

    Raises:
        FedspanError: If it is no definition, its name is invalid or belongs to a task of fedspan or of an installed
            package, or its head or a metric is unknown. A task of your own may be registered again with changes, as
            when a cell of a notebook runs twice.
    """
    _register(definition)


def _register(definition: TaskDefinition, *, is_installed: bool = False) -> None:
    if not isinstance(definition, TaskDefinition):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise FedspanError("task", repr(definition), "a fedspan.tasks.definition.TaskDefinition")
    name = definition.name
    if not _NAME.fullmatch(name):
        raise FedspanError("task", name, "lower case letters and digits, with hyphens between words")
    known = _installed.get(name, definition)
    if (
        not is_installed
        and name not in _installed
        and (installed := load_installed(ENTRY_POINTS, name, "task")) is not None
    ):
        known = installed[1]
    if known is not definition:
        raise FedspanError("task", name, problem=f"{name!r} is already the name of another task")
    if not isinstance(definition.head, Head) and definition.head not in HEADS:
        expected = f"a fedspan.models.heads.Head, or one of {', '.join(HEADS)}"
        raise FedspanError("task", definition.head, expected, problem=f"{name} has an unknown head")
    unknown = [metric for metric in definition.metrics if metric not in {**METRICS, **definition.custom_metrics}]
    if unknown:
        problem = f"{name} names the metric {unknown[0]!r}, which is neither in custom_metrics nor known. "
        raise FedspanError("task", unknown[0], problem=problem + suggest_nearest(unknown[0], METRICS))
    new = [metric for metric in definition.custom_metrics if metric not in METRICS]
    own = {metric for metric, owner in _metric_owners.items() if owner == name}
    replace_metrics(definition.custom_metrics, own)
    _metric_owners.update(dict.fromkeys(new, name))
    _tasks[name] = definition
    if is_installed:
        _installed[name] = definition


def get_task(name: str, field: str = "task") -> TaskDefinition:
    """Return the task registered under a name, here or by an installed package.

    Raises:
        FedspanError: If the name is unknown (the message lists the nearest known ones), or its package cannot be
            loaded or holds no task of this name.
    """
    if name not in _tasks:
        installed = load_installed(ENTRY_POINTS, name, field)
        if installed is not None:
            source, definition = installed
            if getattr(definition, "name", None) != name:
                problem = f"{source} is not the definition of a task of this name"
                raise FedspanError(field, name, problem=problem)
            _register(definition, is_installed=True)
            return definition
        meant = _PIPELINES.get(name)
        hint = f"Did you mean {meant!r}?" if meant else suggest_nearest(name, _tasks.keys() - {TRAINER.name})
        problem = f"no task is named {name!r}. {hint} {_OWN}"
        raise FedspanError(field, name, problem=problem)
    return _tasks[name]


def list_tasks() -> tuple[TaskDefinition, ...]:
    """Return fedspan's tasks, and those that were registered in this process or loaded from installed packages.

    Returns:
        The definitions, each with its ``name``.

    Examples:
        >>> [task.name for task in fedspan.list_tasks()]
    """
    return tuple(_tasks.values())


def is_installed(name: str) -> bool:
    """Check whether every process of this machine finds a task: it is fedspan's own, or of an installed package."""
    return name in _installed


for _definition in BUILT_IN:
    _register(_definition, is_installed=True)
