"""Using what a run trained, as anybody would without fedspan: pretrained model, then PEFT's ``from_pretrained``."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from peft import PeftConfig, PeftModel
from pydantic import ValidationError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fedspan.api.notes import NOTES, facts_of, read_notes
from fedspan.api.reports import is_run, read_config, read_report, require_client
from fedspan.config.mistakes import first_mistake
from fedspan.data.columns import TaskName
from fedspan.data.config import DataConfig
from fedspan.data.loading import load
from fedspan.data.templates import template_of
from fedspan.engines.batching import evaluation_batches
from fedspan.errors import FedspanError, nearest
from fedspan.models.loading import load_pretrained
from fedspan.runs.build import choose_device
from fedspan.runs.problems import PROBLEMS, Facts
from fedspan.tasks.metrics import shown
from fedspan.tasks.task import Examples, TextTask

__all__ = ["ADAPTER", "Served", "adapter_folder", "evaluate", "load_served", "predict"]

ADAPTER = "adapter_config.json"
_BATCH = 64


@dataclass(frozen=True)
class Served:
    """A trained model, ready to predict.

    Args:
        folder: the adapter's or the merged model's.
        notes: the content of its fedspan.json.
        facts: of these, what the model must be told of its task.
        model: base and adapter (a ``PeftModel``), or merged; in eval mode, on ``device``.
        tokenizer: the model's.
        task: with tokenizer, labels, maximal length.
        device: where it computes.
        revision: of a base from the hub.
    """

    folder: Path
    notes: dict[str, Any]
    facts: Facts
    model: Any
    tokenizer: PreTrainedTokenizerBase
    task: TextTask
    device: torch.device
    revision: str | None

    @torch.inference_mode()
    def predictions(self, examples: Examples, *, thorough: bool = True) -> Tensor:
        """The task's predictions, one row an example, float32 on the CPU; ``thorough`` ones with generated text."""
        rows: dict[int, Tensor] = {}
        for indices in evaluation_batches(np.arange(len(examples)), examples.lengths, _BATCH):
            batch = self.task.batch(examples, indices.tolist(), self.device)
            made = self.task.predict(self.model, batch, thorough=thorough).float().cpu()
            rows.update(zip(indices.tolist(), made, strict=True))
        return torch.stack([rows[index] for index in range(len(examples))])


def adapter_folder(folder: str | Path, client: str | None) -> Path:
    """The folder of the model to use: of a run, the best round's adapter; else the folder itself.

    Args:
        folder: a run folder or an exported model.
        client: whose model; needed if every client has its own.

    Raises:
        FedspanError: neither a run nor a model there, the run is not finished, or the client is unknown or missing.
    """
    folder = Path(folder)
    if not is_run(folder):
        _require_export(folder, client)
        return folder
    adapters = read_report(folder).adapters
    if client is not None:
        require_client(folder, client)
    if "global" in adapters:
        return folder / adapters["global"]
    if client is None:
        shown = nearest("", adapters)
        raise FedspanError("client", None, f"one of {shown}, ...: every client of this run has a model of its own")
    return folder / adapters[client]


def _require_export(folder: Path, client: str | None) -> None:
    if not os.path.isfile(folder / NOTES):
        expected = f"a run folder, or a model that fedspan exported (with {NOTES} in it)"
        raise FedspanError("folder", str(folder), expected if os.path.exists(folder) else f"no such folder; {expected}")
    own = read_notes(folder)["client"]
    if client is not None and client != own:
        whose = "everybody's" if own is None else f"the one of {own!r}"
        raise FedspanError("client", client, f"no client of its own here: this model is {whose}; leave it out")


def _unreadable(place: Path, error: Exception) -> FedspanError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return FedspanError("folder", str(place), f"an adapter that PEFT can read ({reason})")


def load_served(
    folder: str | Path, client: str | None = None, device: str = "auto", *, quantized: bool = True
) -> Served:
    """Load a trained model.

    Args:
        folder: a run folder, an exported adapter or an exported merged model.
        client: whose model; needed if every client of the run has its own.
        device: ``auto``, or as in a config.
        quantized: keep the base in 4 or 8 bits if it was trained so.

    Raises:
        FedspanError: as `adapter_folder`, or if the pretrained model or the adapter cannot be loaded.
    """
    place = adapter_folder(folder, client)
    notes, target = read_notes(place), choose_device(device)
    facts = facts_of(place, notes)
    problem = PROBLEMS[facts.task]
    revision: str | None = None
    if (place / ADAPTER).is_file():
        # Whatever PEFT makes of the files there. The model has lines of its own for what is wrong with it.
        try:
            revision = PeftConfig.from_pretrained(str(place)).revision
        except Exception as error:
            raise _unreadable(place, error) from error
        loaded = load_pretrained(
            notes["base_model"],
            problem.head,
            facts.labels,
            revision=revision,
            quantization=facts.quantization if quantized else None,
            keep=notes["kept"],
            device=target,
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # what PEFT asks of Transformers is not the user's fault
                model = PeftModel.from_pretrained(loaded.model, str(place))
        except Exception as error:
            raise _unreadable(place, error) from error
    else:
        loaded = load_pretrained(str(place), problem.head, facts.labels, device=target)
        if loaded.new_modules:
            raise FedspanError("folder", str(place), f"a model with weights for {', '.join(loaded.new_modules)}")
        model = loaded.model
    task = problem.task(loaded.tokenizer, facts, None)
    return Served(place, notes, facts, model.eval(), loaded.tokenizer, task, target, revision)


def predict(folder: str | Path, texts: Sequence[str | tuple[str, str]], client: str | None = None) -> list[Any]:
    """Use a trained model: label texts, give numbers to them, or answer prompts.

    Args:
        folder: a run folder or an exported model.
        texts: what to label or to answer; pairs of texts if it was trained on pairs. A language model gets its prompt
            template around a text if that has one column (``Question: {question}``), else the text as it is.
        client: whose model, if every client has its own.

    Returns:
        For each text, of a classifier the most probable label and its probability, ``("yes", 0.93)``; of a regression
        the number; of a language model the generated answer.

    Raises:
        FedspanError: as `load_served`.
    """
    served = load_served(folder, client)
    if not texts:
        return []
    columns: dict[str, list[Any]] = {"text": [text if isinstance(text, str) else text[0] for text in texts]}
    if not all(isinstance(text, str) for text in texts):
        columns["text_pair"] = ["" if isinstance(text, str) else text[1] for text in texts]
    if served.facts.prompt is not None:
        template = template_of(served.facts.prompt, "data.prompt")
        if len(template.required) == 1:
            columns["text"] = [template.render({template.required[0]: text}) for text in columns["text"]]
    columns |= {"label": [0] * len(texts), "target": [0.0] * len(texts), "answer": [""] * len(texts)}
    predictions = served.predictions(served.task.encode(datasets.Dataset.from_dict(columns)))
    if served.facts.task == "regression":
        return predictions[:, 0].tolist()
    answers = served.task.answers(predictions)
    if served.facts.task == "causal-lm":
        return answers
    return list(zip(answers, predictions.softmax(1).amax(1).tolist(), strict=True))


def evaluate(
    folder: str | Path,
    client: str | None = None,
    *,
    data: str | Path | None = None,
    text: str | None = None,
    label: str | None = None,
    text_pair: str | None = None,
    answer: str | None = None,
    generate: bool = True,
) -> dict[str, float]:
    """Measure a trained model.

    Args:
        folder: a run folder or an exported model.
        client: whose model, if every client has its own.
        data: a file of examples; left out, the held-out test set of the run in ``folder``.
        text: the file's column of texts; left out: ``text``.
        label: its column of labels or numbers; left out: ``label``.
        text_pair: its column of second texts, for a model of pairs.
        answer: its column of answers, for a language model, whose prompt template names the others; left out:
            ``answer``.
        generate: let a language model answer, and count exact matches; the slow part.

    Returns:
        The task's metrics and the number of ``examples``.

    Raises:
        FedspanError: as `load_served`; no test set; or a file that does not fit the model.
    """
    served_from = adapter_folder(folder, client)  # cheap mistakes before slow loading
    if data is not None:
        facts = facts_of(served_from, read_notes(served_from))
        rows = _labelled(_file_config(data, facts, text, label, text_pair, answer), facts.task)
    else:
        rows = _held_out(folder, served_from)
    served = load_served(folder, client)
    examples = served.task.encode(rows)
    metrics = served.task.metrics(served.predictions(examples, thorough=generate), examples, range(len(examples)))
    return {**{name: metrics[name] for name in shown(metrics)}, "examples": float(len(examples))}


def _file_config(
    data: str | Path, facts: Facts, text: str | None, label: str | None, text_pair: str | None, answer: str | None
) -> DataConfig:
    causal = facts.task == "causal-lm"
    try:
        return DataConfig(
            train=str(data),
            text=text or "text",
            label=None if causal else label,
            text_pair=text_pair,
            prompt=(facts.prompt or "{text}") if causal else None,
            answer=answer or "answer",
            labels=list(facts.labels) or None,
            test_split=None,
            test_fraction=0,
        )
    except ValidationError as error:
        mistake = first_mistake(error)
        field = "data" if mistake.field in ("config", "train") else mistake.field
        raise FedspanError(field, str(data), mistake.expected) from None


def _held_out(folder: str | Path, adapter: Path) -> datasets.Dataset:
    if not is_run(folder):
        raise FedspanError("data", None, "a file to measure on: only a run folder knows a test set of its own")
    config = read_config(folder)
    loaded = load(config.data, seed=config.data_seed, task=config.task)
    if loaded.test is None:
        raise FedspanError("data", None, "a file to measure on: this run has no held-out test set")
    if config.task == "sequence-classification" and list(loaded.labels) != read_notes(adapter)["labels"]:
        raise FedspanError("data.train", config.data.train, "the labels that the run was trained on; the file changed")
    return loaded.test


def _labelled(config: DataConfig, task: TaskName) -> datasets.Dataset:
    """The rows of a file; what is wrong with it is said of ``data``, ``text``, ``label``, not of a config."""
    try:
        return load(config, "data", task=task).train
    except FedspanError as error:
        field = error.field.removeprefix("data.")
        said = re.sub(r"data\.labels has (.*) \(data\.keep_only.*\)", r"the model knows \1", error.expected)
        raise FedspanError("data" if field == "train" else field, error.value, said) from None
