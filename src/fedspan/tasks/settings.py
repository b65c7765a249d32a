"""The settings of a task that a trained model needs besides its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedspan.models.pooling import Pooling
from fedspan.models.quantized import Quantization


@dataclass(frozen=True)
class TaskSettings:
    """The settings of a task that a trained model needs besides its weights; stored in its fedspan.json."""

    task: str
    """Name of the task in the registry."""
    labels: tuple[str, ...]
    """Label names by index, for a task whose answers are labels."""
    max_length: int
    """Maximum number of tokens of an example."""
    metric: str
    """The metric that the model was selected by."""
    chat: bool = False
    """Whether prompts are formatted with the chat template."""
    system: str | None = None
    """The system message that opens a conversation."""
    prompt: str | None = None
    """Template of prompts."""
    max_new_tokens: int = 64
    """Maximum number of tokens of a generated answer."""
    answer_pattern: str | None = None
    """Pattern of the part of an answer that counts."""
    quantization: Quantization | None = None
    """Quantization of the base in training and use."""
    image_size: int | None = None
    """Rows and columns that images are resized to; None: the setting of the model's processor."""
    pooling: Pooling | None = None
    """Pooling of an encoder's hidden states; None: Transformers' own classifier."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Options of the section ``data`` that name the columns of the training data, and the separator of several labels
    in a text. Empty for a deployment, whose owners name their columns."""
    options: Mapping[str, str | bool | int | float | None] = field(default_factory=dict)
    """The task's own options (``TaskDefinition.options``) that the config sets."""

    @property
    def has_pairs_apart(self) -> bool:
        """Whether the model encodes each text of a pair alone."""
        return self.pooling is not None and self.pooling.pairs
