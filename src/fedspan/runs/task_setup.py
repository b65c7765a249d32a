"""The task of a run: its construction, the facts that a trained model needs about it, and the notes that hold them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from fedspan.config import RunConfig
from fedspan.config.validation_errors import convert_validation_error
from fedspan.data.columns import TaskName
from fedspan.errors import FedspanError
from fedspan.models.export import NOTES
from fedspan.models.loading import Head, Processor
from fedspan.models.pooling import PooledClassifier, Pooling
from fedspan.models.quantized import Quantization
from fedspan.tasks.causal import CausalLM, Generation, sees_across
from fedspan.tasks.classification import SequenceClassification
from fedspan.tasks.images import ImageClassification
from fedspan.tasks.metrics import METRICS_OF
from fedspan.tasks.regression import Regression
from fedspan.tasks.task import RunTask
from fedspan.tasks.trainer import TrainerTask

if TYPE_CHECKING:
    pass


__all__ = ["PROBLEMS", "Facts", "Problem", "facts_of", "read_notes", "require_packing"]


@dataclass(frozen=True)
class Facts:
    """Facts about its task that a trained model needs besides its weights; stored in its fedspan.json.

    Args:
        task: Kind of problem.
        labels: Label names by index, for a classifier.
        max_length: Maximum number of tokens of an example.
        metric: The metric that the model was selected by.
        chat: Whether prompts are formatted with the chat template.
        system: The system message that opens a conversation.
        prompt: Template of prompts.
        max_new_tokens: Maximum number of tokens of a generated answer.
        answer_pattern: Pattern of the part of an answer that counts.
        quantization: Quantization of the base in training and use.
        image_size: Rows and columns that images are resized to; None: the setting of the model's processor.
        pooling: Pooling of a classifier on an encoder; None: Transformers' own classifier.
    """

    task: TaskName
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

    @classmethod
    def of(cls, config: RunConfig, labels: tuple[str, ...], max_length: int, model: nn.Module) -> Facts:
        """Collect the facts of a run."""
        data, evaluation = config.data, config.evaluation
        return cls(
            task=config.task,
            labels=labels if PROBLEMS[config.task].classifies else (),
            max_length=max_length,
            metric=evaluation.metric or METRICS_OF[config.task][0],
            chat=data.chat,
            system=data.system,
            prompt=data.prompt,
            max_new_tokens=evaluation.max_new_tokens,
            answer_pattern=evaluation.answer_pattern,
            quantization=config.model.quantization,
            image_size=config.model.image_size,
            pooling=model.pooling if isinstance(model, PooledClassifier) else None,
        )


@dataclass(frozen=True)
class Problem:
    """One kind of problem.

    Args:
        head: Head of the model.
        peft: PEFT's task type; None: PEFT has none.
        task: Builds the task from a processor, the facts, and the config of the run (in training, else None).
        classifies: Whether an answer is one of several labels.
    """

    head: Head
    peft: Literal["SEQ_CLS", "CAUSAL_LM"] | None
    task: Callable[[Processor, Facts, RunConfig | None], RunTask]
    classifies: bool = False


def _images(processor: Processor, facts: Facts, config: RunConfig | None) -> RunTask:
    return ImageClassification(processor, facts.labels, facts.metric)


def _classification(tokenizer: Processor, facts: Facts, config: RunConfig | None) -> RunTask:
    return SequenceClassification(tokenizer, facts.labels, facts.max_length, facts.metric)


def _regression(tokenizer: Processor, facts: Facts, config: RunConfig | None) -> RunTask:
    return Regression(tokenizer, facts.max_length, facts.metric)


def require_packing(config: RunConfig, model: nn.Module, device: torch.device) -> None:
    """Check that a model keeps packed examples apart, if the run packs them.

    Raises:
        FedspanError: If it does not. OPT, for example, builds its attention mask without regard to positions.
    """
    if config.task == "causal-lm" and config.data.packing and sees_across(model, device):
        kind = type(model).__name__
        raise FedspanError(
            "data.packing", True, "false", problem=f"the attention of {kind} does not separate packed examples"
        )


def _causal(tokenizer: Processor, facts: Facts, config: RunConfig | None) -> RunTask:
    return CausalLM(
        tokenizer,
        facts.max_length,
        chat=facts.chat,
        system=facts.system,
        refuse_long=config is not None and config.data.long_answers == "refuse",
        packing=config is not None and config.data.packing,
        generation=Generation(facts.max_new_tokens, facts.answer_pattern),
        metric=facts.metric,
    )


def _trainer(processor: Processor, facts: Facts, config: RunConfig | None) -> RunTask:
    return TrainerTask(facts.metric)


PROBLEMS: Mapping[TaskName, Problem] = {
    "sequence-classification": Problem("classification", "SEQ_CLS", _classification, classifies=True),
    "regression": Problem("regression", "SEQ_CLS", _regression),
    "causal-lm": Problem("language-model", "CAUSAL_LM", _causal),
    "image-classification": Problem("image-classification", None, _images, classifies=True),
    "trainer": Problem("classification", None, _trainer),  # a head named as a classifier's trains whole
}


_FACTS = {field.name for field in dataclasses.fields(Facts)}


_NOTED = {*_FACTS, "base_model", "client", "kept"}


def read_notes(folder: Path) -> dict[str, Any]:
    """Read the content of a model's fedspan.json.

    Raises:
        FedspanError: If it is missing, is not a JSON object, or lacks an entry that is needed to use the model.
    """
    path = folder / NOTES
    try:
        notes = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FedspanError(
            str(path), str(error), problem=f"the file does not hold what fedspan wrote beside the model ({error})"
        ) from None
    if not isinstance(notes, dict) or not set(notes) >= _NOTED:
        fields = sorted(notes) if isinstance(notes, dict) else notes
        raise FedspanError(str(path), fields, f"an object with {', '.join(sorted(_NOTED))}")
    round_number = notes["kept"]
    wrong = {
        "base_model": not isinstance(notes["base_model"], str) or not notes["base_model"],
        "client": not isinstance(notes["client"], str | None),
        "kept": not isinstance(round_number, list) or not all(isinstance(name, str) for name in round_number),
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise FedspanError(f"{path}.{name}", notes[name], problem="the file was changed after fedspan wrote it")
    return notes


def facts_of(folder: Path, notes: dict[str, Any]) -> Facts:
    """Extract the facts about the model's task from the notes.

    Raises:
        FedspanError: If a value is one that no run can have.
    """
    path = folder / NOTES
    try:
        facts = TypeAdapter(Facts).validate_python({name: notes[name] for name in _FACTS})
    except ValidationError as error:
        raise convert_validation_error(error, str(path)) from None
    try:
        re.compile(facts.answer_pattern or "")
        pattern = True
    except (re.error, OverflowError, RecursionError):
        pattern = False
    right = {
        "labels": not PROBLEMS[facts.task].classifies or len(set(facts.labels)) == len(facts.labels) >= 2,
        "max_length": facts.max_length >= 1,
        "max_new_tokens": facts.max_new_tokens >= 1,
        "metric": facts.metric in METRICS_OF[facts.task],
        "answer_pattern": pattern,
        "image_size": facts.image_size is None or facts.image_size >= 1,
    }
    for name, is_right in right.items():
        if not is_right:
            raise FedspanError(f"{path}.{name}", notes[name], problem="the file was changed after fedspan wrote it")
    return facts
