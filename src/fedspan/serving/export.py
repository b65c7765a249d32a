"""Export of a trained model from a run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError

from fedspan.assembly.model import ModelObjects
from fedspan.assembly.run import collect_objects, prepare
from fedspan.assembly.task import parse_task_settings, read_notes
from fedspan.errors import FedspanError
from fedspan.files import build_temporary_path, remove
from fedspan.models.export import NOTES, truncate_adapter
from fedspan.models.names import FROM_PYTHON
from fedspan.models.plain import STATE_DICT, is_plain_module
from fedspan.models.sentence_encoders import PooledClassifier, write_modules
from fedspan.run_folder import CARD, RunFolder, require_intact_model
from fedspan.runs import checkpoint as checkpoints
from fedspan.runs.checkpoint_format import load as load_checkpoint
from fedspan.runs.integrity import read_resolved_config, require_intact, require_same_base
from fedspan.runs.model_card import convert_card, cut_card
from fedspan.runs.report import is_run, read_partition, read_report, require_client
from fedspan.runs.trained_models import write_adapters
from fedspan.serving.load import ADAPTER, find_adapter_folder, load_served
from fedspan.tasks.registry import get_task

Form = Literal["adapter", "merged"]


def export(
    run_folder: str | Path,
    out: str | Path,
    form: Form = "adapter",
    client: str | None = None,
    round: int | Literal["best", "last"] = "best",
    rank: int | None = None,
    *,
    data: Any = None,
    model: Any = None,
    tokenizer: Any = None,
) -> Path:
    """Write a trained model to a folder of its own.

    Args:
        run_folder: Folder of a run, finished or not, or of an exported model.
        out: An empty folder, or one that does not exist.
        form: ``adapter`` for PEFT, or ``merged``: a plain Transformers model with its tokenizer.
        client: The client whose model is exported, if every client has its own.
        round: ``best`` (by validation), ``last``, or a number; a run stores the checkpoints of its last two rounds and
            of the best one.
        rank: Rank that the adapter's update is truncated to by its best approximation; its fedspan.json reports the
            error of each layer under ``relative_error``. None: exact, at the adapter's own rank.
        data: The data, if the run began with data passed from Python; needed for what it did not export at its end.
        model: The model, if the run began with one passed from Python, with its weights as they were then; needed for
            what the run did not export at its end. ``merged`` loads it by its ``name_or_path`` if it is None, and
            needs none for a plain module, all of whose weights the run exported.
        tokenizer: The tokenizer, if the run began with one passed from Python.

    Returns:
        ``out``.

    Examples:
        >>> fedspan.export("runs/first", "model", form="merged")

    Raises:
        FedspanError: If the form, client or round is unknown, the adapter does not have the rank, the run has no
            finished round, the folder is not empty, a model that was passed has other frozen weights, or a file of the
            run is not what it wrote.
    """
    out = Path(out)
    if form not in ("adapter", "merged"):
        raise FedspanError("form", form, "adapter or merged")
    if rank is not None and (form != "adapter" or rank < 1):
        raise FedspanError("rank", rank, "a number from 1 for form adapter (a merged model has no rank)")
    if os.path.exists(out) and (not out.is_dir() or any(out.iterdir())):
        raise FedspanError("out", str(out), "an empty folder, or one that does not exist")
    with tempfile.TemporaryDirectory(prefix="fedspan-") as scratch:
        partial = build_temporary_path(out)
        try:
            source = _find_source(Path(run_folder), client, round, Path(scratch), (data, model, tokenizer))
            out.parent.mkdir(parents=True, exist_ok=True)
            remove(partial)
            is_whole = not (source / ADAPTER).is_file()
            if is_whole and form == "adapter":
                raise FedspanError("form", form, problem=f"{source} holds a merged model, which has no adapter")
            if is_whole or form == "adapter":
                shutil.copytree(source, partial)
                if rank is not None:
                    truncate_adapter(partial, rank)
                    (partial / STATE_DICT).unlink(missing_ok=True)  # whose weights have the whole update
                    _rewrite_card(source, partial, lambda text: cut_card(text, rank))
            elif (source / STATE_DICT).is_file():
                _copy_state_dict(source, partial)
            else:
                _merge(source, partial, ModelObjects(model, tokenizer))
            if out.exists():
                out.rmdir()
            partial.rename(out)
        except (OSError, SafetensorError) as error:  # the latter where Transformers writes a merged model
            reason = getattr(error, "strerror", None) or error
            raise FedspanError("out", str(out), problem=f"the folder cannot be written ({reason})") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return out


def _find_source(
    folder: Path, client: str | None, round: int | str, scratch: Path, objects: tuple[Any, Any, Any]
) -> Path:
    """Return the adapter's folder: the one that the run exported at its end, or a new one from a checkpoint."""
    if not is_run(folder):
        require_intact_model(folder)
        return find_adapter_folder(folder, client)
    run_files = RunFolder(folder)
    require_intact(run_files)
    if client is not None:
        require_client(folder, client)
    if run_files.report.is_file():
        report = read_report(folder)
        is_available = client is None or "global" in report.adapters or client in report.adapters
        if is_available and (round == "best" or (round == report.best_round and not report.final_rounds)):
            return find_adapter_folder(folder, client)
    checkpoint, config = load_checkpoint(checkpoints.select_checkpoint(run_files, round)), read_resolved_config(folder)
    passed = collect_objects(config, "fedspan.export", *objects)
    progress, prepared = checkpoint.progress, prepare(config, read_partition(folder), objects=passed)
    if prepared.base_digest is not None:
        require_same_base(run_files, prepared.base_digest(), "model")
    adapters = write_adapters(prepared, progress, RunFolder(scratch), () if client is None else (client,))
    if "global" in adapters:
        return adapters["global"]
    if client is None:
        raise FedspanError("client", None, "the id of a client, because every client of this run has its own model")
    return adapters[client]


def _merge(adapter: Path, out: Path, objects: ModelObjects) -> None:
    from fedspan.models.merging import save_model

    # Plain weights, even after quantized training.
    served = load_served(adapter, device="cpu", quantized=False, objects=objects)
    model, length = served.model, served.task_settings.max_length
    if isinstance(model, PooledClassifier):
        model.replace_encoder(model.encoder.merge_and_unload())
    else:
        model = model.merge_and_unload()
    save_model(out, model, served.processor, served.notes["base_model"], served.revision, max_length=length)
    if get_task(served.task_settings.task).is_embedding and served.task_settings.pooling is not None:
        write_modules(out, served.task_settings.pooling, model.config.hidden_size, length)
    shutil.copyfile(served.folder / NOTES, out / NOTES)
    kind = _get_kind(served.notes) if is_plain_module(model) else None
    _rewrite_card(served.folder, out, lambda text: convert_card(text, served.task_settings, kind))


def _copy_state_dict(source: Path, out: Path) -> None:
    """Write the merged model of a plain module: the state dict beside its adapter has all weights."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("adapter_*"))
    notes = read_notes(source)
    settings = parse_task_settings(source, notes)
    _rewrite_card(source, out, lambda text: convert_card(text, settings, _get_kind(notes)))


def _get_kind(notes: Mapping[str, Any]) -> str:
    return str(notes["base_model"]).removeprefix(FROM_PYTHON)


def _rewrite_card(source: Path, out: Path, recast: Callable[[str], str]) -> None:
    """Write the model card of a derived model from that of its source, if the source has one."""
    if (source / CARD).is_file():
        (out / CARD).write_text(recast((source / CARD).read_text(encoding="utf-8")), encoding="utf-8")
