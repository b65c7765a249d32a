"""The heads of models: which of Transformers' classes a task needs, and what its outputs are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Head:
    """The head of a model."""

    auto_class: str
    """Name of Transformers' auto class, such as ``AutoModelForSequenceClassification``."""
    suffixes: tuple[str, ...]
    """Ends of the names of its model classes, such as ``ForSequenceClassification``."""
    outputs: Literal["labels", "number"] | None = None
    """``labels``: one output for each label; ``number``: one; None: those of the model's own config."""
    is_new: bool = False
    """Whether the head is trained whole with the adapters, because a pretrained model has none for the task."""
    has_image_inputs: bool = False
    """Whether the model reads images, with an image processor in place of a tokenizer."""
    problem_type: str | None = None
    """Transformers' ``problem_type``, written into the config; None: the config's own."""

    def load_class(self) -> Any:
        """Return Transformers' auto class."""
        import transformers

        return getattr(transformers, self.auto_class)


HEADS: Mapping[str, Head] = {
    "classification": Head(
        "AutoModelForSequenceClassification", ("ForSequenceClassification",), outputs="labels", is_new=True
    ),
    "multi-label": Head(
        "AutoModelForSequenceClassification",
        ("ForSequenceClassification",),
        outputs="labels",
        is_new=True,
        problem_type="multi_label_classification",
    ),
    "regression": Head(
        "AutoModelForSequenceClassification",
        ("ForSequenceClassification",),
        outputs="number",
        is_new=True,
        problem_type="regression",
    ),
    "token-classification": Head(
        "AutoModelForTokenClassification", ("ForTokenClassification",), outputs="labels", is_new=True
    ),
    "image-classification": Head(
        "AutoModelForImageClassification",
        ("ForImageClassification",),
        outputs="labels",
        is_new=True,
        has_image_inputs=True,
    ),
    "language-model": Head("AutoModelForCausalLM", ("ForCausalLM",)),
    "masked-language-model": Head("AutoModelForMaskedLM", ("ForMaskedLM",)),
    "sequence-to-sequence": Head("AutoModelForSeq2SeqLM", ("ForConditionalGeneration", "MTModel")),
    "encoder": Head("AutoModel", ("Model",)),
}
"""Heads by name."""


def get_head(head: Head | str) -> Head:
    """Return a head, given itself or its name in `HEADS`."""
    return HEADS[head] if isinstance(head, str) else head
