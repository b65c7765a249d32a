"""The settings of a task that a trained model needs besides its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedspan.models.pooling import Pooling
from fedspan.models.quantized import Quantization


@dataclass(frozen=True)
class TaskSettings:
    """The settings of a task that a trained model needs besides its weights; stored in its fedspan.json.

    Args:
        task: Name of the task in the registry.
        labels: Label names by index, for a task whose answers are labels.
        max_length: Maximum number of tokens of an example.
        metric: The metric that the model was selected by.
        chat: Whether prompts are formatted with the chat template.
        system: The system message that opens a conversation.
        prompt: Template of prompts.
        max_new_tokens: Maximum number of tokens of a generated answer.
        answer_pattern: Pattern of the part of an answer that counts.
        quantization: Quantization of the base in training and use.
        image_size: Rows and columns that images are resized to; None: the setting of the model's processor.
        pooling: Pooling of an encoder's hidden states; None: Transformers' own classifier.
        columns: Options of the section ``data`` that name the columns of the training data, and the separator of
            several labels in a text. Empty for a deployment, whose owners name their columns.
        options: The task's own options (``TaskDefinition.options``) that the config sets.
    """

    task: str
    labels: tuple[str, ...]
    max_length: int
    metric: str
    chat: bool = False
    system: str | None = None
    prompt: str | None = None
    max_new_tokens: int = 64
    answer_pattern: str | None = None
    quantization: Quantization | None = None
    image_size: int | None = None
    pooling: Pooling | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, str | bool | int | float | None] = field(default_factory=dict)
