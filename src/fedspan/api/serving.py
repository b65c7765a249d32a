"""Using what a run trained, as anybody would without fedspan: pretrained model, then PEFT's ``from_pretrained``."""

from __future__ import annotations

import json
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
from safetensors import SafetensorError
from torch import Tensor

from fedspan.api.reports import is_run, read_config, read_report, require_client
from fedspan.data.config import DataConfig
from fedspan.data.loading import load
from fedspan.engines.batching import evaluation_batches
from fedspan.errors import FedspanError, nearest
from fedspan.models.loading import load_sequence_classifier
from fedspan.runs.build import choose_device
from fedspan.tasks.classification import EncodedText, SequenceClassification

__all__ = ["ADAPTER", "NOTES", "Served", "adapter_folder", "evaluate", "load_served", "predict"]

NOTES = "fedspan.json"
ADAPTER = "adapter_config.json"
_BATCH = 64


@dataclass(frozen=True)
class Served:
    """A trained model, ready to predict.

    Args:
        folder: the adapter's or the merged model's.
        notes: the content of its fedspan.json.
        model: base and adapter (a ``PeftModel``), or merged; in eval mode, on ``device``.
        task: tokenizer, labels, maximal length.
        device: where it computes.
        revision: of a base from the hub.
    """

    folder: Path
    notes: dict[str, Any]
    model: Any
    task: SequenceClassification
    device: torch.device
    revision: str | None

    @torch.inference_mode()
    def logits(self, examples: EncodedText) -> Tensor:
        """(examples, labels), float32 on the CPU."""
        rows = torch.empty(len(examples), len(self.task.labels))
        for indices in evaluation_batches(np.arange(len(examples)), examples.lengths, _BATCH):
            batch = self.task.batch(examples, indices.tolist(), self.device)
            rows[torch.from_numpy(indices)] = self.task.predict(self.model, batch).float().cpu()
        return rows


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
    if not (folder / NOTES).is_file():
        expected = f"a run folder, or a model that fedspan exported (with {NOTES} in it)"
        raise FedspanError("folder", str(folder), expected if folder.exists() else f"no such folder; {expected}")
    own = _notes(folder)["client"]
    if client is not None and client != own:
        whose = "everybody's" if own is None else f"the one of {own!r}"
        raise FedspanError("client", client, f"no client of its own here: this model is {whose}; leave it out")


def _notes(folder: Path) -> dict[str, Any]:
    path = folder / NOTES
    try:
        notes = json.loads(path.read_text(encoding="utf-8"))
        if {"labels", "max_length", "base_model", "client"} <= set(notes):
            return notes
    except (OSError, ValueError, TypeError) as error:
        raise FedspanError(str(path), str(error), "the notes that fedspan wrote beside the model") from None
    raise FedspanError(str(path), sorted(notes), "labels, max_length, base_model and client")


def load_served(folder: str | Path, client: str | None = None, device: str = "auto") -> Served:
    """Load a trained model.

    Args:
        folder: a run folder, an exported adapter or an exported merged model.
        client: whose model; needed if every client of the run has its own.
        device: ``auto``, or as in a config.

    Raises:
        FedspanError: as `adapter_folder`, or if the pretrained model or the adapter cannot be loaded.
    """
    place = adapter_folder(folder, client)
    notes, target = _notes(place), choose_device(device)
    revision: str | None = None
    if (place / ADAPTER).is_file():
        try:
            revision = PeftConfig.from_pretrained(str(place)).revision
            loaded = load_sequence_classifier(notes["base_model"], notes["labels"], revision=revision)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # what PEFT asks of Transformers is not the user's fault
                model = PeftModel.from_pretrained(loaded.model, str(place))
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise FedspanError("folder", str(place), f"an adapter that PEFT can read ({reason})") from None
    else:
        loaded = load_sequence_classifier(str(place), notes["labels"])
        if loaded.new_modules:
            raise FedspanError("folder", str(place), f"a model with weights for {', '.join(loaded.new_modules)}")
        model = loaded.model
    task = SequenceClassification(loaded.tokenizer, notes["labels"], notes["max_length"])
    return Served(place, notes, model.eval().to(target), task, target, revision)


def predict(
    folder: str | Path, texts: Sequence[str | tuple[str, str]], client: str | None = None
) -> list[tuple[str, float]]:
    """Label texts with a trained model.

    Args:
        folder: a run folder or an exported model.
        texts: to label; pairs of texts if it was trained on pairs.
        client: whose model, if every client has its own.

    Returns:
        For each text the most probable label and its probability.

    Raises:
        FedspanError: as `load_served`.
    """
    served = load_served(folder, client)
    if not texts:
        return []
    columns: dict[str, list[Any]] = {"text": [text if isinstance(text, str) else text[0] for text in texts]}
    if not all(isinstance(text, str) for text in texts):
        columns["text_pair"] = ["" if isinstance(text, str) else text[1] for text in texts]
    columns["label"] = [0] * len(texts)
    logits = served.logits(served.task.encode(datasets.Dataset.from_dict(columns)))
    best = logits.softmax(1).max(1)
    return [
        (served.task.labels[index], probability)
        for index, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def evaluate(
    folder: str | Path,
    client: str | None = None,
    *,
    data: str | Path | None = None,
    text: str = "text",
    label: str = "label",
    text_pair: str | None = None,
) -> dict[str, float]:
    """Measure a trained model.

    Args:
        folder: a run folder or an exported model.
        client: whose model, if every client has its own.
        data: a file of labelled texts; left out, the held-out test set of the run in ``folder``.
        text: the file's column of texts.
        label: its column of labels.
        text_pair: its column of second texts, for a model of pairs.

    Returns:
        ``accuracy``, ``macro_f1``, ``loss`` and the number of ``examples``.

    Raises:
        FedspanError: as `load_served`; no test set; or a file that does not fit the model.
    """
    served_from = adapter_folder(folder, client)  # cheap mistakes before slow loading
    if data is not None:
        wanted = DataConfig(
            train=str(data),
            text=text,
            label=label,
            text_pair=text_pair,
            labels=_notes(served_from)["labels"],
            test_split=None,
            test_fraction=0,
        )
        rows = _labelled(wanted)
    else:
        rows = _held_out(folder, served_from)
    served = load_served(folder, client)
    examples = served.task.encode(rows)
    metrics = served.task.metrics(served.logits(examples), examples, range(len(examples)))
    return {
        "accuracy": metrics["accuracy"],
        "macro_f1": metrics["macro_f1"],
        "loss": metrics["loss"],
        "examples": float(len(examples)),
    }


def _held_out(folder: str | Path, adapter: Path) -> datasets.Dataset:
    if not is_run(folder):
        raise FedspanError("data", None, "a file to measure on: only a run folder knows a test set of its own")
    config = read_config(folder)
    loaded = load(config.data, seed=config.seed)
    if loaded.test is None:
        raise FedspanError("data", None, "a file to measure on: this run has no held-out test set")
    if list(loaded.labels) != _notes(adapter)["labels"]:
        raise FedspanError("data.train", config.data.train, "the labels that the run was trained on; the file changed")
    return loaded.test


def _labelled(config: DataConfig) -> datasets.Dataset:
    """The rows of a file; what is wrong with it is said of ``data``, ``text``, ``label``, not of a config."""
    try:
        return load(config, "data").train
    except FedspanError as error:
        field = error.field.removeprefix("data.")
        said = re.sub(r"data\.labels has (.*) \(data\.keep_only.*\)", r"the model knows \1", error.expected)
        raise FedspanError("data" if field == "train" else field, error.value, said) from None
