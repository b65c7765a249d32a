"""Conversion of a job and a base update to one standard PEFT adapter, and of a PEFT adapter to starting factors.

Shapes: O output features, I input features, R rank.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fedspan.core.base import BaseUpdate, Delta
from fedspan.core.lowrank import LowRank, concatenate, svd
from fedspan.core.method import compute_scaling
from fedspan.core.parametrization import compute_dense_change
from fedspan.core.tensors import group_by_layer, join_extra_name
from fedspan.core.values import Job, Weights
from fedspan.errors import FedspanError, suggest_nearest
from fedspan.models.adapted import AdaptedModel, hash_frozen
from fedspan.models.operators import Operator
from fedspan.models.sentence_encoders import HEAD, PooledClassifier, read_output_layer, write_modules

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig

_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.*)\.lora_(?:embedding_)?([AB])(?:\.weight)?")
NOTES = "fedspan.json"
"""File that fedspan writes beside a model that it trained."""
BASE_DIGEST = "base_sha256"
"""Entry of that file with the digest of the frozen weights (``digest.hash_frozen``), if the base has no name."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_LARGEST_NOTES = 1 << 24
"""Maximum size in bytes of the JSON files beside a model, which come from whoever exported it."""


@dataclass(frozen=True)
class StartingAdapter:
    """An adapter to start from."""

    factors: Mapping[str, LowRank]
    """Factors of its update by target layer, scaling folded in."""
    extras: Mapping[str, Tensor]
    """Parameters of its saved modules, by parameter path."""


def compute_layer_updates(
    job: Job, base: BaseUpdate, weights: Weights, adopted: Mapping[str, LowRank] | None = None
) -> dict[str, LowRank]:
    """Return everything that a model adds to its pretrained weights, by target layer, as one exact pair of factors.

    The rank is the sum of the parts' ranks, at most min(O, I): beyond it the dense update is written as itself times an
    identity, which is also exact and no larger.

    Args:
        job: The model as a job (``start(sync(state, client), client, memory)``).
        weights: Weights of the model that the federation started from.
        adopted: Update of the adapter that the federation started from, by layer.

    Raises:
        FedspanError: If the base itself was scaled (rho != 1): no low-rank update expresses that.
    """
    if base.rho != 1.0:
        raise FedspanError(
            "export",
            f"rho={base.rho}",
            "a merged model",
            problem="the method scales the base's own weights, which no adapter can express",
        )
    slots = group_by_layer(job.tensors)
    updates: dict[str, LowRank] = {}
    for layer, parametrization in job.parametrization.items():
        effective = parametrization.compute_effective(slots[layer])
        parts: list[Delta] = []
        if adopted and layer in adopted:
            parts.append(adopted[layer])
        if layer in base.total:
            parts.append(base.total[layer])
        if not effective.base:
            parts.append(compute_dense_change(effective, weights.get_weight(layer)))
        elif effective.pair is not None:
            parts.append(effective.pair)
        updates[layer] = _build_exact_pair([part for part in parts if not _is_zero(part)], parts[0])
    return updates


def _is_zero(delta: Delta) -> bool:
    if isinstance(delta, LowRank):
        return not (delta.B.any() and delta.A.any())
    return not delta.any()


def _build_exact_pair(parts: list[Delta], like: Delta) -> LowRank:
    rows, columns = like.shape
    if not parts:
        return LowRank(torch.zeros(rows, 1), torch.zeros(1, columns))
    pairs = [part for part in parts if isinstance(part, LowRank)]
    if len(pairs) == len(parts) and sum(pair.rank for pair in pairs) <= min(rows, columns):
        return concatenate(pairs)
    dense = torch.stack([part.to_dense() if isinstance(part, LowRank) else part for part in parts]).sum(0)
    return LowRank(dense, torch.eye(columns)) if columns <= rows else LowRank(torch.eye(rows), dense)


def export_adapter(
    folder: Path,
    updates: Mapping[str, LowRank],
    extras: Mapping[str, Tensor],
    operators: Mapping[str, Operator],
    config: LoraConfig,
    notes: Mapping[str, object],
    pooled: PooledClassifier | None = None,
) -> int:
    """Write a PEFT adapter (one rank for all layers, padded with zeros) and a ``fedspan.json`` beside it.

    Args:
        folder: Folder to write to; it is created, and files of an earlier export in it are replaced.
        config: Target modules as the user named them, modules to save and the base model's name.
        notes: JSON values for ``fedspan.json`` (labels, method, maximum length).
        pooled: The model, if it is a pooled classifier: the adapter is then one of its encoder, and the head is written
            as a module of sentence-transformers (``pooling.write_modules``).

    Returns:
        The adapter's rank.
    """
    rank = max(pair.rank for pair in updates.values())
    tensors: dict[str, Tensor] = {}
    for layer, pair in updates.items():
        folded = pair.fold_scale().to(torch.float32)
        A_RI, B_OR = torch.zeros(rank, folded.A.shape[1]), torch.zeros(folded.B.shape[0], rank)
        A_RI[: folded.rank], B_OR[:, : folded.rank] = folded.A, folded.B
        for name, value in operators[layer].to_peft(B_OR, A_RI).items():
            tensors[f"{_PREFIX}{layer}.{name}"] = value.contiguous()
    for path, value in extras.items():
        tensors[_PREFIX + path] = value.detach().clone().contiguous()
    if pooled is None:
        _write(folder, tensors, config, rank)
    else:
        weight, bias = (tensors.pop(f"{_PREFIX}{HEAD}.{name}") for name in ("weight", "bias"))
        prefix = f"{pooled.base_model_prefix}."
        adapter_tensors = {_PREFIX + name.removeprefix(_PREFIX + prefix): value for name, value in tensors.items()}
        _write(
            folder,
            adapter_tensors,
            _build_encoder_config(config, [layer.removeprefix(prefix) for layer in updates]),
            rank,
        )
        write_modules(folder, pooled.pooling, weight.shape[1], int(str(notes["max_length"])), (weight, bias))
    _write_notes(folder, notes)
    return rank


def _build_encoder_config(config: LoraConfig, layers: list[str]) -> LoraConfig:
    """Return PEFT's description of the target layers for the encoder alone, whose paths lack the model's prefix."""
    from peft import TaskType

    config = copy.copy(config)
    config.task_type, config.target_modules = TaskType.FEATURE_EXTRACTION, sorted(layers)
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    config.modules_to_save = [name for name in config.modules_to_save or () if name != HEAD] or None
    return config


def _write_notes(folder: Path, notes: Mapping[str, object]) -> None:
    (folder / NOTES).write_text(json.dumps(notes, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write(folder: Path, tensors: Mapping[str, Tensor], config: PeftConfig, rank: int) -> None:
    """Write the two files of an adapter with one rank and scaling 1."""
    from peft import LoraConfig

    assert isinstance(config, LoraConfig)
    config = copy.copy(config)
    config.r, config.lora_alpha, config.inference_mode = rank, rank, True
    for name in ("target_modules", "exclude_modules"):  # PEFT writes a set in the process's arbitrary order
        value = getattr(config, name)
        setattr(config, name, sorted(value) if isinstance(value, set) else value)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    # Not save_file: a failed write raises OSError here, as everywhere else.
    (folder / ADAPTER_WEIGHTS).write_bytes(safetensors.torch.save(dict(tensors), metadata={"format": "pt"}))


def require_adapter_base(folder: Path, notes: Mapping[str, object], base: nn.Module) -> None:
    """Check that a base that was passed from Python is the one that an adapter was trained on.

    Args:
        notes: The content of its fedspan.json; without a digest (a quantized base), there is nothing to compare, nor
            is there without the adapter's tensors (a merged model).
    """
    digest, path = notes.get(BASE_DIGEST), folder / ADAPTER_WEIGHTS
    if digest is None or not path.is_file():
        return
    try:
        with safe_open(str(path), "pt") as file:
            saved = {name.removeprefix(_PREFIX) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    except (OSError, SafetensorError) as error:
        raise FedspanError("folder", str(path), problem=f"the tensors cannot be read ({error})") from None
    values = base.state_dict(keep_vars=True)
    if hash_frozen(base, {name: values[name] for name in saved & values.keys()}).hexdigest() != digest:
        problem = (
            "its frozen weights are not those with which the run began, so the adapter does not fit. Load the same "
            "model in the same number format"
        )
        raise FedspanError("model", type(base).__name__, problem=problem)


def truncate_adapter(folder: Path, rank: int) -> None:
    """Replace an adapter that fedspan wrote by its best approximation of a rank, layer by layer (Eckart and Young).

    Args:
        rank: Rank of the approximation, at least 1.

    Its fedspan.json then holds, under ``relative_error``, ``||W - W_rank||_F / ||W||_F`` of each layer's update.
    """
    from peft import LoraConfig, PeftConfig

    config = PeftConfig.from_pretrained(str(folder))
    assert isinstance(config, LoraConfig)
    if rank > config.r:
        raise FedspanError("rank", rank, f"at most {config.r}, the rank of this adapter")
    tensors = safetensors.torch.load_file(str(folder / ADAPTER_WEIGHTS))
    names: dict[str, dict[str, str]] = {}
    for name in tensors:
        if factor := _FACTOR.fullmatch(name):
            names.setdefault(factor[1], {})[factor[2]] = name
    errors: dict[str, float] = {}
    for layer, layer_names in names.items():
        A, B = tensors[layer_names["A"]], tensors[layer_names["B"]]
        U, S, Vt = svd(LowRank(B.flatten(1), A.flatten(1)))  # for a convolution, the unfolded matrix
        root, smallest = S[:rank].sqrt(), min(rank, len(S))
        cut_B, cut_A = B.new_zeros(len(B), rank), A.new_zeros(rank, A[0].numel())
        cut_B[:, :smallest], cut_A[:smallest] = (
            (U[:, :rank] * root).to(B.dtype),
            (root[:, None] * Vt[:rank]).to(A.dtype),
        )
        tensors[layer_names["B"]] = cut_B.reshape(len(B), rank, *B.shape[2:])
        tensors[layer_names["A"]] = cut_A.reshape(rank, *A.shape[1:])
        norm = float(S.norm())
        errors[layer.removeprefix(_PREFIX)] = float(S[rank:].norm()) / norm if norm else 0.0
    _write(folder, tensors, config, rank)
    notes = json.loads((folder / NOTES).read_text(encoding="utf-8"))
    _write_notes(folder, {**notes, "relative_error": errors})


def get_job_extras(job: Job, model: AdaptedModel) -> dict[str, Tensor]:
    """Return the values of extras and buffers in a job, or as loaded if the job does not contain them, by path."""
    return {path: job.tensors.get(join_extra_name(path), model.get_extra(path)) for path in model.spec.extras}


def read_adapter(folder: str, operators: Mapping[str, Operator], model: Any = None) -> StartingAdapter:
    """Read a PEFT LoRA adapter's update and saved modules.

    Args:
        folder: Folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
        model: The run's model, whose encoder's adapter is one of the model; None: names are taken as they are. A head
            that was trained on other features than a pooled classifier's is left out.

    Raises:
        FedspanError: If there is no such folder, no LoRA or no readable weights, or if the adapter has a layer that the
            run does not target or shapes of another model.
    """
    from peft import LoraConfig, PeftConfig

    path = Path(os.path.expanduser(folder))
    if not os.path.isdir(path):  # PEFT would look the name up on the hub
        raise FedspanError(
            "model.adapter", folder, f"a folder with adapter_config.json and {ADAPTER_WEIGHTS} (no such folder)"
        )
    require_small_notes(path)
    try:
        config = PeftConfig.from_pretrained(str(path))
        tensors = safetensors.torch.load_file(str(path / ADAPTER_WEIGHTS))
        head = read_output_layer(path)
    # A config whose fields have other types than PEFT expects (AttributeError, ArithmeticError), or that is too deep.
    except (
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
        SafetensorError,
    ) as error:
        raise FedspanError(
            "model.adapter", folder, f"a folder with adapter_config.json and {ADAPTER_WEIGHTS} ({error})"
        ) from None
    if not isinstance(config, LoraConfig) or config.use_dora or config.lora_bias:
        raise FedspanError("model.adapter", folder, "a plain LoRA adapter (no DoRA, no lora_bias, no other PEFT type)")
    factors: dict[str, dict[str, Tensor]] = {}
    extras: dict[str, Tensor] = {}
    pooled, prefix = isinstance(model, PooledClassifier), getattr(model, "base_model_prefix", "")
    for name, value in tensors.items():
        bare = name.removeprefix(_PREFIX)
        if pooled and not bare.startswith((f"{prefix}.", f"{HEAD}.")):  # an adapter of the encoder alone
            bare = f"{prefix}.{bare}"
        if pooled and head is None and bare.startswith(f"{HEAD}."):
            continue
        if factor := _FACTOR.fullmatch(bare):
            factors.setdefault(factor[1], {})[factor[2]] = value
        elif not _is_base(bare, value, operators):
            extras[bare] = value
    if pooled and head is not None:
        extras |= head
    updates: dict[str, LowRank] = {}
    for layer, pair in factors.items():
        if layer not in operators:
            raise FedspanError(
                "model.adapter",
                layer,
                problem=(
                    f"it adapts the layer {layer!r}, which is not in model.target_modules. "
                    f"{suggest_nearest(layer, operators)}"
                ),
            )
        operator = operators[layer]
        B, A = operator.from_peft(pair["B"], pair["A"]) if set(pair) == {"A", "B"} else (torch.empty(0),) * 2
        if not (B.ndim == A.ndim == 2 and (B.shape[0], A.shape[1]) == operator.shape and B.shape[1] == A.shape[0] > 0):
            raise FedspanError("model.adapter", layer, f"factors of a weight of shape {operator.shape}")
        try:
            scaling = _compute_scaling(config, layer)
        except (ValueError, TypeError, AttributeError, ArithmeticError, re.error) as error:
            expected = f"an adapter_config.json with numbers above 0 for r and lora_alpha ({error})"
            raise FedspanError("model.adapter", folder, expected) from None
        updates[layer] = LowRank(B.float(), A.float(), scaling).fold_scale()
    return StartingAdapter(updates, extras)


def require_small_notes(folder: Path) -> None:
    """Check the sizes of the JSON files beside a model, which are read whole."""
    for path in (folder / NOTES, folder / "adapter_config.json"):
        if path.is_file() and (size := path.stat().st_size) > _LARGEST_NOTES:
            raise FedspanError(str(path), size, f"a file of at most {_LARGEST_NOTES >> 20} MiB")


def _is_base(name: str, value: Tensor, operators: Mapping[str, Operator]) -> bool:
    """Check whether a tensor is a target layer's frozen weight; PEFT saves those of embeddings by default."""
    layer, suffix, _ = name.partition(".base_layer.weight")
    if not suffix or layer not in operators:
        return False
    weight = operators[layer].module.weight
    assert isinstance(weight, Tensor)
    return weight.shape == value.shape and torch.equal(weight.cpu(), value.to(weight.dtype))


def _compute_scaling(config: LoraConfig, layer: str) -> float:
    """Return alpha / r of a layer, with PEFT's per-layer patterns."""
    from peft.utils.other import get_pattern_key

    ranks, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
    rank = int(ranks.get(get_pattern_key(list(ranks), layer), config.r))
    alpha = float(alphas.get(get_pattern_key(list(alphas), layer), config.lora_alpha))
    return compute_scaling(alpha, rank, config.use_rslora)
