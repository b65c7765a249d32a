"""The kinds of problem: for each task, the head of the model and the encoding of its examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from peft import TaskType
from torch import nn

from fedspan.config import RunConfig
from fedspan.data.columns import TaskName
from fedspan.errors import FedspanError
from fedspan.models.loading import Head, Processor
from fedspan.models.quantized import Quantization
from fedspan.tasks.causal import CausalLM, Generation, sees_across
from fedspan.tasks.classification import SequenceClassification
from fedspan.tasks.images import ImageClassification
from fedspan.tasks.metrics import METRICS_OF
from fedspan.tasks.regression import Regression
from fedspan.tasks.task import Examples, RunTask

__all__ = ["PROBLEMS", "Facts", "Problem", "require_packing", "require_size"]


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

    @classmethod
    def of(cls, config: RunConfig, labels: tuple[str, ...], max_length: int) -> Facts:
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
    peft: TaskType | None
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
        raise FedspanError("data.packing", True, f"false: the attention of {kind} does not keep packed examples apart")


def require_size(config: RunConfig, model: nn.Module, task: RunTask, examples: Examples, device: torch.device) -> None:
    """Check that a model accepts images of the size that they were resized to.

    Raises:
        FedspanError: If it does not. A ViT, for example, has position embeddings for one size.
    """
    if config.task != "image-classification":
        return
    batch = task.batch(examples, [0], device)
    try:
        with torch.no_grad():
            task.predict(model, batch)
    except (ValueError, RuntimeError) as error:
        rows, columns = batch["pixel_values"].shape[-2:]
        expected = f"a size that the model takes; of one of {rows} x {columns} pixels it says: {error}"
        raise FedspanError("model.image_size", config.model.image_size, expected.splitlines()[0]) from error


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


PROBLEMS: Mapping[TaskName, Problem] = {
    "sequence-classification": Problem("classification", TaskType.SEQ_CLS, _classification, classifies=True),
    "regression": Problem("regression", TaskType.SEQ_CLS, _regression),
    "causal-lm": Problem("language-model", TaskType.CAUSAL_LM, _causal),
    "image-classification": Problem("image-classification", None, _images, classifies=True),
}
