"""Use of a trained model, loaded as without fedspan: pretrained model, then PEFT's ``from_pretrained``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedspan.assembly.engine import choose_device
from fedspan.assembly.model import ModelObjects
from fedspan.assembly.task import parse_task_settings, read_notes
from fedspan.data.templates import parse_template
from fedspan.errors import FedspanError, suggest_nearest
from fedspan.models.adapted import BlockedFastPaths
from fedspan.models.export import ADAPTER_WEIGHTS, NOTES, require_adapter_base
from fedspan.models.names import FROM_PYTHON
from fedspan.models.plain import STATE_DICT, read_state_dict
from fedspan.models.pooling import DENSE
from fedspan.models.sentence_encoders import PooledClassifier, read_output_layer
from fedspan.run_folder import RunFolder, require_intact_model, suggest_folder
from fedspan.runs.report import is_run, read_report, require_client
from fedspan.tasks.registry import get_task
from fedspan.tasks.settings import TaskSettings
from fedspan.tasks.task import Examples, RunTask
from fedspan.training.batching import split_evaluation_batches
from fedspan.training.references import fill_reference, has_reference

if TYPE_CHECKING:
    import datasets
    from peft import PeftModel

    from fedspan.models.loading import Loaded, Processor

ADAPTER = "adapter_config.json"
_BATCH = 64


@dataclass(frozen=True)
class Served:
    """A trained model, ready to predict.

    Args:
        notes: The content of its fedspan.json.
        task_settings: The part of the notes that describes the model's task.
        model: Base and adapter (a ``PeftModel``), or a merged model; in eval mode, on ``device``.
        processor: The model's tokenizer or image processor; None: it has none.
        task: The learning problem, with tokenizer, labels and maximum length.
        pretrained: The pretrained model of one without an adapter to switch off, if it was passed from Python and the
            task compares with it.
    """

    folder: Path
    notes: dict[str, Any]
    task_settings: TaskSettings
    model: Any
    processor: Processor | None
    task: RunTask
    device: torch.device
    revision: str | None
    pretrained: Any = None

    @torch.inference_mode()
    def compute_predictions(self, examples: Examples, *, generate: bool = True) -> Tensor:
        """Compute the predictions, one row per example, float32 on the CPU; if ``generate``, with generated text."""
        if has_reference(self.task):
            self._fill_reference(examples)
        rows: dict[int, Tensor] = {}
        for indices in split_evaluation_batches(np.arange(len(examples)), examples.lengths, _BATCH):
            batch = self.task.collate(examples, indices.tolist(), self.device)
            batch_predictions = self.task.predict(self.model, batch, generate=generate).float().cpu()
            rows.update(zip(indices.tolist(), batch_predictions, strict=True))
        return torch.stack([rows[index] for index in range(len(examples))])

    def _fill_reference(self, examples: Any) -> None:
        """Compute what the pretrained model gives for examples that a task compares with it."""
        missing = np.flatnonzero(np.isnan(examples.reference).any(1))
        if len(missing):
            with self._open_reference() as model:
                fill_reference(self.task, model, examples, missing, self.device, _BATCH)

    @contextmanager
    def _open_reference(self) -> Generator[Any]:
        """Yield the pretrained model: the base with the adapter switched off, or, of a merged model, loaded again."""
        if hasattr(self.model, "disable_adapter"):
            with self.model.disable_adapter():
                yield self.model
        elif self.pretrained is not None:
            yield self.pretrained
        else:
            loaded = _load_base(self.notes, self.task_settings, self.revision, self.device, quantized=False)
            yield loaded.model.eval()


def find_adapter_folder(folder: str | Path, client: str | None) -> Path:
    """Find the folder of the model to use: for a run, the adapter of its best round; else the folder itself.

    Raises:
        FedspanError: If the folder holds neither a run nor a model, the run is not finished, or the client is unknown
            or missing.
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
        names = ", ".join(sorted(adapters)[:6])
        raise FedspanError("client", None, f"one of {names}, ..., because every client of this run has its own model")
    if client not in adapters:
        similar = suggest_nearest(client, adapters)
        problem = f"the run wrote no model of {client!r}. {similar} Or use fedspan export --client first"
        raise FedspanError("client", client, problem=problem)
    return folder / adapters[client]


def _require_export(folder: Path, client: str | None) -> None:
    if not os.path.isfile(folder / NOTES):
        expected = f"a run folder, or a model that fedspan exported (with {NOTES} in it)"
        similar = suggest_folder(folder, (RunFolder(folder).config.name, NOTES))
        raise FedspanError(
            "folder",
            str(folder),
            expected,
            problem=None if os.path.exists(folder) else f"there is no folder {str(folder)!r}. {similar}",
        )
    exported_client = read_notes(folder)["client"]
    if client is not None and client != exported_client:
        whose = "everybody's" if exported_client is None else f"the one of {exported_client!r}"
        raise FedspanError("client", client, problem=f"this model is {whose}. Leave the client out")


def _build_unreadable_error(adapter_path: Path, error: Exception) -> FedspanError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return FedspanError("folder", str(adapter_path), problem=f"PEFT cannot read this adapter ({reason})")


def load_served(
    folder: str | Path,
    client: str | None = None,
    device: str = "auto",
    *,
    quantized: bool = True,
    objects: ModelObjects | None = None,
) -> Served:
    """Load a trained model.

    Args:
        folder: A run folder, an exported adapter or an exported merged model.
        client: The client whose model is loaded; required if every client of the run has its own.
        quantized: Whether a base that was quantized to 4 or 8 bits in training is loaded quantized.
        objects: The base that the model was trained on and its tokenizer, if they were passed from Python. A plain
            module takes all weights from its state dict, so its own may be others.

    Raises:
        FedspanError: If `find_adapter_folder` raises it, a file in the folder is not what the run wrote, the pretrained
            model or the adapter cannot be loaded, or a base that was passed has other frozen weights.
    """
    from peft import PeftConfig

    from fedspan.models.loading import adopt_loaded, load_pretrained

    adapter_path = find_adapter_folder(folder, client)
    require_intact_model(adapter_path)
    notes, target = read_notes(adapter_path), choose_device(device)
    task_settings = parse_task_settings(adapter_path, notes)
    definition = get_task(task_settings.task)
    if definition.columns is None:
        problem = "the task of this model was its owners' trainers' own. Load the adapter with PEFT on the same base"
        raise FedspanError("folder", str(adapter_path), problem=problem)
    revision: str | None = notes.get("revision")
    pretrained: Any = None

    def adopt() -> Loaded:
        if objects is None or objects.model is None:
            kind = str(notes["base_model"]).removeprefix(FROM_PYTHON)
            problem = (
                f"the model of this run is a {kind} that was passed from Python: pass such a model again as model="
            )
            raise FedspanError("model", None, problem=problem)
        return adopt_loaded(objects.model, objects.tokenizer, definition.head, task_settings.labels, target)

    is_passed = objects is not None and objects.model is not None
    if (adapter_path / STATE_DICT).is_file():
        loaded = adopt()
        model = loaded.model
        read_state_dict(adapter_path, model)
        if definition.has_reference:
            pretrained = adopt().model
            require_adapter_base(adapter_path, notes, pretrained)
    elif (adapter_path / ADAPTER).is_file():
        # PEFT may raise any exception for these files. Errors of the base model are reported separately.
        try:
            config = PeftConfig.from_pretrained(str(adapter_path))
            if config.peft_type != "LORA" or not (adapter_path / ADAPTER_WEIGHTS).is_file():
                # PEFT would unpickle other files, and import what the configs of other types name
                raise ValueError(f"it is no LoRA adapter with its weights in {ADAPTER_WEIGHTS}")
            revision = config.revision
        except Exception as error:
            raise _build_unreadable_error(adapter_path, error) from error
        if is_passed or str(notes["base_model"]).startswith(FROM_PYTHON):
            loaded = adopt()
            require_adapter_base(adapter_path, notes, loaded.model)
        else:
            loaded = _load_base(notes, task_settings, revision, target, quantized=quantized)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # caused by PEFT's own calls, not by the user
                model = _load_adapter(loaded.model, adapter_path)
        except Exception as error:
            raise _build_unreadable_error(adapter_path, error) from error
    else:
        loaded = load_pretrained(
            str(adapter_path), definition.head, task_settings.labels, pooling=task_settings.pooling, device=target
        )
        if isinstance(loaded.model, PooledClassifier):
            _load_output_layer(loaded.model, adapter_path)
        elif loaded.new_modules:
            raise FedspanError("folder", str(adapter_path), f"a model with weights for {', '.join(loaded.new_modules)}")
        model = loaded.model
        if definition.has_reference and is_passed:
            pretrained = adopt().model
    if objects is not None and objects.tokenizer is not None:
        loaded = replace(loaded, processor=objects.tokenizer)
    processor = definition.get_processor(loaded.processor)
    task = definition.build(processor, task_settings, None)
    return Served(adapter_path, notes, task_settings, model.eval(), processor, task, target, revision, pretrained)


def _load_base(
    notes: dict[str, Any], task_settings: TaskSettings, revision: str | None, device: torch.device, *, quantized: bool
) -> Loaded:
    from fedspan.models.loading import load_pretrained

    return load_pretrained(
        str(notes["base_model"]),
        get_task(task_settings.task).head,
        task_settings.labels,
        revision=revision,
        quantization=task_settings.quantization if quantized else None,
        keep=notes["kept"],
        image_size=task_settings.image_size,
        pooling=task_settings.pooling,
        device=device,
    )


def _load_adapter(model: Any, adapter_path: Path) -> Any:
    """Return a model with an adapter; an adapter of a pooled classifier is one of its encoder."""
    from peft import PeftModel

    if not isinstance(model, PooledClassifier):
        BlockedFastPaths(model)
        return _copy_attributes(PeftModel.from_pretrained(model, str(adapter_path)))
    model.replace_encoder(PeftModel.from_pretrained(model.encoder, str(adapter_path)))
    _load_output_layer(model, adapter_path)
    return model


def _copy_attributes(model: PeftModel) -> PeftModel:
    """Give PEFT's wrappers of convolutions the attributes of a convolution, which MobileNet's padding reads."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer) and isinstance(base := module.get_base_layer(), nn.Conv1d | nn.Conv2d):
            for name in ("stride", "kernel_size", "dilation"):
                setattr(module, name, getattr(base, name))
    return model


def _load_output_layer(model: PooledClassifier, adapter_path: Path) -> None:
    try:
        head = read_output_layer(adapter_path)
        if head is None:
            raise FileNotFoundError(f"no {DENSE} in {adapter_path}")
        model.load_state_dict(head, strict=False)
    except (OSError, LookupError, RuntimeError, SafetensorError) as error:
        problem = f"the output layer beside the encoder cannot be read ({error})"
        raise FedspanError("folder", str(adapter_path / DENSE), problem=problem) from error


def predict(
    folder: str | Path,
    texts: Sequence[str | os.PathLike[str] | tuple[str, str]],
    client: str | None = None,
    *,
    model: Any = None,
    tokenizer: Any = None,
) -> list[Any]:
    """Use a trained model: label texts, predict numbers for them, or answer prompts.

    Args:
        folder: A run folder or an exported model.
        texts: Texts to label or to answer; tuples of two texts if the model was trained on pairs, paths of images if it
            was trained on images. For a language model, a prompt template with one column (``Question: {question}``) is
            applied to each text; otherwise the text is used as it is.
        client: The client whose model is used, if every client has its own.
        model: The model that the run began with, if it was passed from Python; None: loaded by its ``name_or_path``.
        tokenizer: Tokenizer or image processor of ``model``; None: the one of the model's name.

    Returns:
        For each text, the most probable label and its probability, ``("yes", 0.93)``, of a classifier; a list of such
        pairs, of all labels above the threshold, of a multi-label classifier; the number of a regression model; the
        generated answer of a language model; a readable answer of any other task.

    Examples:
        >>> fedspan.predict("runs/first", ["Can I move my appointment?"])
        [('reschedule_appointment', 0.93)]

    Raises:
        FedspanError: If `load_served` raises it, or inputs are pairs and the training's were not, or the other way
            round.
    """
    served = load_served(folder, client, objects=ModelObjects(model, tokenizer))
    if not texts:
        return []
    predictions = served.compute_predictions(served.task.encode(_build_rows(served.task_settings, texts)))
    definition = get_task(served.task_settings.task)
    answer = definition.target_type
    if definition.postprocess is not None:
        return definition.postprocess(served.task, texts, predictions)
    if answer == "number":
        return predictions[:, 0].tolist()
    answers = served.task.decode_predictions(predictions)
    if answer != "label":
        return answers
    return list(zip(answers, predictions.softmax(1).amax(1).tolist(), strict=True))


def _build_rows(
    task_settings: TaskSettings, inputs: Sequence[str | os.PathLike[str] | tuple[str, str]]
) -> datasets.Dataset:
    """Arrange the inputs in the columns that the task encodes; unknown answers are blank."""
    import datasets

    definition = get_task(task_settings.task)
    if definition.preprocess is not None:
        return definition.preprocess(task_settings, inputs)
    none: list[list[int]] = [[] for _ in inputs]
    blank = {"label": [0] * len(inputs), "labels": none, "target": [0.0] * len(inputs), "answer": [""] * len(inputs)}
    if definition.has_image_inputs:
        paths = [None if isinstance(path, tuple) else os.path.expanduser(path) for path in inputs]
        if None in paths:
            raise FedspanError("texts", inputs[paths.index(None)], "paths of images, because this model takes no pairs")
        images = datasets.Dataset.from_dict({"image": paths, **blank})
        return images.cast_column("image", datasets.Image())
    columns: dict[str, list[Any]] = {"text": [*inputs]}
    if _takes_pairs(task_settings, inputs):
        pairs = cast("Sequence[tuple[str, str]]", inputs)
        columns = {"text": [text for text, _ in pairs], "text_pair": [pair for _, pair in pairs]}
    if task_settings.prompt is not None:
        template = parse_template(task_settings.prompt, "data.prompt")
        if len(template.required) == 1:
            columns["text"] = [template.render({template.required[0]: text}) for text in columns["text"]]
    return datasets.Dataset.from_dict({**columns, **blank})


def _takes_pairs(task_settings: TaskSettings, inputs: Sequence[Any]) -> bool:
    """Check that inputs have the form of the training data: all of them pairs of texts, or none."""
    columns = task_settings.columns
    is_known = "text" in columns or "text_pair" in columns
    takes_pairs = "text_pair" in columns if is_known else isinstance(inputs[0], tuple)
    other = next((text for text in inputs if not _has_form(text, takes_pairs)), None)
    if other is not None:
        expected = "pairs of texts (in a shell, separated by a tab)" if takes_pairs else "single texts"
        raise FedspanError("texts", other, f"{expected}, as in this model's training")
    return takes_pairs


def _has_form(text: Any, is_pair: bool) -> bool:
    if not is_pair:
        return isinstance(text, str)
    return isinstance(text, tuple) and len(text) == 2 and all(isinstance(part, str) for part in text)
