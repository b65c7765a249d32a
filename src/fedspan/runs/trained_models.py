"""Export of the trained models of a progress, as adapters or, where no adapter can express them, as whole models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedspan.assembly.engine import RunTrainer
from fedspan.assembly.run import Prepared
from fedspan.core.base import BaseUpdate
from fedspan.core.values import Job
from fedspan.federation.progress import Progress
from fedspan.files import build_folder_name
from fedspan.models.export import BASE_DIGEST, compute_layer_updates, export_adapter, get_job_extras
from fedspan.models.names import FROM_PYTHON
from fedspan.models.plain import has_name, is_plain_module, write_state_dict
from fedspan.models.quantized import is_quantized
from fedspan.models.sentence_encoders import PooledClassifier, write_modules
from fedspan.run_folder import RunFolder


def write_adapters(
    prepared: Prepared, progress: Progress, run_folder: RunFolder, clients: Iterable[str] | None = None
) -> dict[str, Path]:
    """Export the models of a progress: ``adapter/`` for a global one, ``adapter/<client>/`` for each personal one.

    A model that is not a change of pretrained weights (from scratch, or of other factors) is written whole.

    Returns:
        Folders by client id, or under ``global``.
    """
    personal = prepared.federation.method.declare_claims().personal
    folders: dict[str, Path] = {}
    for ids, job in prepared.evaluator.iterate_models(progress, clients):
        key = ids[0] if personal else "global"
        folder = run_folder.adapter / build_folder_name(key) if personal else run_folder.adapter
        write_model(prepared, job, progress.state.base, folder, progress.state.round, ids[0] if personal else None)
        folders[key] = folder
    return folders


def write_model(
    trainer: RunTrainer, job: Job, base: BaseUpdate, folder: Path, round: int, client: str | None = None
) -> None:
    """Write a job's model as an adapter or, where no adapter can express it, as a whole model.

    The tokenizer or image processor is written beside it, so that the folder loads without a network if the base model
    is local. Beside a plain module's adapter is the state dict with all its weights.
    """
    from fedspan.models.merging import export_merged, is_merging_required, merge_weights

    adapted, name = trainer.engine.adapted, trainer.config.model.name
    notes: dict[str, Any] = {
        **asdict(trainer.task_settings),
        "method": trainer.config.method.title,
        "round": round,
        "base_model": name.removeprefix(FROM_PYTHON) if has_name(adapted.model) else name,
        "revision": trainer.config.model.revision,
        "kept": trainer.config.model.modules_to_save,
        "client": client,
    }
    built, settings = trainer.model, trainer.config.model
    if settings.is_from_scratch or is_merging_required(job, base):
        export_merged(folder, adapted, job, base, built.processor, notes, settings.revision)
    else:
        updates, extras = compute_layer_updates(job, base, adapted, built.adopted), get_job_extras(job, adapted)
        pooled = adapted.model if isinstance(adapted.model, PooledClassifier) else None
        assert built.lora_config is not None, "only workers, which export nothing, build models without PEFT"
        is_served = trainer.config.task_definition.columns is not None  # by fedspan, not by the trainers' owners
        # Quantized target layers are merged into their weights before quantization.
        is_quantized_base = any(is_quantized(layer.module) for layer in adapted.layers.values())
        if is_served and trainer.base_digest is not None and not is_quantized_base:
            notes[BASE_DIGEST] = trainer.base_digest()
        export_adapter(folder, updates, extras, adapted.operators, built.lora_config, notes, pooled)
        if is_served and is_plain_module(adapted.model):
            write_state_dict(folder, merge_weights(adapted, job, base))
        if built.processor is not None:
            built.processor.save_pretrained(str(folder))
    definition, pooling = trainer.config.task_definition, trainer.task_settings.pooling
    # A trainer's model may be one of several modalities, whose config has no common size.
    features = getattr(getattr(adapted.model, "config", None), "hidden_size", None)
    if (definition.is_embedding or definition.columns is None) and pooling is not None and features is not None:
        write_modules(folder, pooling, features, trainer.task_settings.max_length)
