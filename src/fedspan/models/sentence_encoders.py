"""Sentence encoders: they classify and embed with the pooling that they were trained with.

A sentence encoder is a folder or a hub repository with sentence-transformers' ``modules.json``. Its pooled hidden
states separate texts well before any training, where the pooler of a stock sequence classifier may hold random or
unrelated weights. Shapes: B examples, T tokens, H hidden features, C outputs.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import safetensors.torch
import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import Tensor, nn

from fedspan.models.offload import get_device
from fedspan.models.pooling import DENSE, PAIR, PAIR_PARTS, Pooling, PoolingMode

if TYPE_CHECKING:
    from transformers.modeling_outputs import SequenceClassifierOutput

HEAD = "classifier"
"""Name of the output layer of a pooled classifier."""
_WEIGHTS = "model.safetensors"
_POOLER = "pooler"
"""The module that ``add_pooling_layer`` of a Transformers encoder adds."""
_MODES: Mapping[str, PoolingMode] = {"mean": "mean", "cls": "cls", "max": "max", "lasttoken": "last"}
_FLAGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


class PooledClassifier(nn.Module):
    """An encoder, a pooling and a linear output layer.

    The encoder has the name that it has in Transformers' own sequence classifier (``bert``, ``roberta``), so that
    target layers have the same paths with and without pooling.

    Args:
        encoder: A Transformers encoder without a pooler; its config has the number of outputs, ``num_labels``.
    """

    main_input_name = "input_ids"

    def __init__(self, encoder: Any, pooling: Pooling) -> None:
        super().__init__()
        self.base_model_prefix: str = encoder.base_model_prefix or "encoder"
        self.config = encoder.config
        self.pooling = pooling
        setattr(self, self.base_model_prefix, encoder)
        size = self.config.hidden_size * (PAIR_PARTS if pooling.pairs else 1)
        outputs = self.config.num_labels
        self.classifier = nn.Linear(size, outputs, dtype=encoder.dtype, device=get_device(encoder))

    @property
    def encoder(self) -> Any:
        """The encoder."""
        return getattr(self, self.base_model_prefix)

    def replace_encoder(self, encoder: nn.Module) -> None:
        """Put another module in the encoder's place, such as one with a PEFT adapter."""
        setattr(self, self.base_model_prefix, encoder)

    def get_input_embeddings(self) -> nn.Module:
        """Return the encoder's input embeddings, under the name of Transformers' own models."""
        return self.encoder.get_input_embeddings()

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the encoder."""
        return self.encoder.dtype

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        """Recompute the encoder's activations in the backward pass.

        Raises:
            ValueError: If the encoder does not support it.
        """
        self.encoder.gradient_checkpointing_enable(**options)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **inputs: Any
    ) -> SequenceClassifierOutput:
        """Compute the logits of texts, (B, T) -> (B, C).

        Of pairs, the inputs of the second texts begin with ``PAIR``. Without any, the first texts are encoded twice:
        the shapes and the cost of a pass do not depend on the texts.
        """
        from transformers.modeling_outputs import SequenceClassifierOutput

        first = {name: value for name, value in inputs.items() if not name.startswith(PAIR)}
        first |= {"input_ids": input_ids, "attention_mask": attention_mask}
        features = self._encode(**first)
        if self.pooling.pairs:
            second = {name.removeprefix(PAIR): value for name, value in inputs.items() if name.startswith(PAIR)}
            features = self.pooling.combine(features, self._encode(**(second or first)))
        return SequenceClassifierOutput(logits=self.classifier(features))

    def _encode(self, **inputs: Any) -> Tensor:
        """Compute the vectors of texts, (B, T) -> (B, H)."""
        return self.pooling(self.encoder(**inputs)[0], inputs["attention_mask"])


def write_modules(
    folder: Path, pooling: Pooling, features: int, max_length: int, head: tuple[Tensor, Tensor] | None = None
) -> None:
    """Write a pooling and an output layer beside an encoder, as modules of sentence-transformers.

    ``SentenceTransformer(folder).encode(texts)`` then returns the logits, or, of pairs or without an output layer, the
    vectors: no module computes features of two texts, so the output layer of pairs is a file beside the modules.

    Args:
        features: Number of features that the output layer has, H, or 3 H of pairs.
        max_length: Maximum number of tokens of a text.
        head: Weight, (C, features), and bias, (C,), of a classifier's output layer; None: there is none.
    """
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules += [("2_Normalize", "Normalize")] if pooling.normalize else []
    modules += [] if head is None or pooling.pairs else [(DENSE, "Dense")]
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(modules)
    ]
    size = features // PAIR_PARTS if pooling.pairs else features
    flags = {flag: _MODES.get(mode) == pooling.mode for flag, mode in _FLAGS.items()}
    for path in (*(path for path, _ in modules), *(() if head is None else (DENSE,))):
        (folder / path).mkdir(exist_ok=True)
    for name, values in (
        ("modules.json", listed),
        ("sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False}),
        ("1_Pooling/config.json", {"word_embedding_dimension": size, **flags}),
    ):
        _write_json(folder / name, values)
    if head is None:
        return
    weight, bias = head
    dense = {
        "in_features": weight.shape[1],
        "out_features": len(weight),
        "bias": True,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    _write_json(folder / DENSE / "config.json", dense)
    tensors = {"linear.weight": weight.float().cpu().contiguous(), "linear.bias": bias.float().cpu().contiguous()}
    (folder / DENSE / _WEIGHTS).write_bytes(safetensors.torch.save(tensors, metadata={"format": "pt"}))


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_output_layer(folder: Path) -> dict[str, Tensor] | None:
    """Read the output layer that ``write_modules`` wrote, by parameter path; None if there is none."""
    path = folder / DENSE / _WEIGHTS
    if not path.is_file():
        return None
    tensors = safetensors.torch.load_file(str(path))
    return {f"{HEAD}.{name}": tensors[f"linear.{name}"] for name in ("weight", "bias")}


def get_encoder_class(config: Any) -> Any:
    """Return the auto class that builds an encoder whose hidden states are pooled.

    Raises:
        ValueError: If the model has an encoder and a decoder, and Transformers has no class of the encoder alone.
    """
    from transformers import MODEL_FOR_TEXT_ENCODING_MAPPING, AutoModel, AutoModelForTextEncoding

    if not getattr(config, "is_encoder_decoder", False):
        return AutoModel
    if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING:
        return AutoModelForTextEncoding
    raise ValueError("it has an encoder and a decoder, whose hidden states are not pooled; set model.pooling: stock")


def get_encoder_options(config: Any) -> dict[str, Any]:
    """Return the options of ``AutoModel`` that omit the pooler of an encoder, which pooled classifiers do not use."""
    from transformers import MODEL_MAPPING

    kind = MODEL_MAPPING.get(type(config), None)
    kinds = cast("tuple[type, ...]", kind if isinstance(kind, tuple) else (kind,))
    has_option = all(
        model_class is not None and "add_pooling_layer" in inspect.signature(model_class.__init__).parameters
        for model_class in kinds
    )
    return {"add_pooling_layer": False} if has_option else {}


@dataclass(frozen=True)
class PoolingSearch:
    """The result of a search for the pooling that an encoder was trained with."""

    pooling: Pooling | None
    """The pooling; None: the model is no sentence encoder, or its pooling is not known."""
    doubt: str | None = None
    """Reason why a sentence encoder's pooling is not known, as a clause; None: nothing is in doubt."""


def find_pooling(source: str, revision: str | None = None) -> PoolingSearch:
    """Find the pooling that a sentence encoder was trained with, by its ``modules.json``."""
    modules = _read(source, "modules.json", revision)
    if modules is None and _is_unknown(source, "modules.json", revision):
        return PoolingSearch(None, "its modules.json could not be looked up, and is not in the cache")
    if not isinstance(modules, list):
        damaged = modules is not None or os.path.isfile(os.path.join(source, "modules.json"))
        return PoolingSearch(None, "its modules.json cannot be read" if damaged else None)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules if isinstance(module, dict)]
    if (problem := _explain_kinds(kinds)) is not None:
        return PoolingSearch(None, problem)
    path = f"{modules[1].get('path', '1_Pooling')}/config.json"
    settings = _read(source, path, revision)
    if not isinstance(settings, dict):
        return PoolingSearch(None, f"its {path} cannot be read")
    mode = settings.get("pooling_mode", [name for flag, name in _FLAGS.items() if settings.get(flag)] or "mean")
    return _build_search(mode, kinds)


def read_pooling(modules: Iterable[nn.Module]) -> PoolingSearch:
    """Read the pooling of a sentence encoder in memory.

    Args:
        modules: The modules of a sentence-transformers model, in the order of their calls.
    """
    modules = list(modules)
    kinds = [type(module).__name__ for module in modules]
    if (problem := _explain_kinds(kinds)) is not None:
        return PoolingSearch(None, problem)
    return _build_search(modules[1].pooling_mode, kinds)


def _explain_kinds(kinds: Sequence[str]) -> str | None:
    """Return why modules are no encoder with a pooling and perhaps a normalization; None if they are."""
    if kinds[:2] == ["Transformer", "Pooling"] and kinds[2:] in ([], ["Normalize"]):
        return None
    return f"its modules are {', '.join(kinds) or 'unreadable'}"


def _build_search(mode: Any, kinds: Sequence[str]) -> PoolingSearch:
    names = list(mode) if isinstance(mode, list | tuple) else [mode]
    if len(names) != 1 or names[0] not in _MODES:
        return PoolingSearch(None, f"its pooling is {' and '.join(map(str, names))}")
    return PoolingSearch(Pooling(_MODES[names[0]], "Normalize" in kinds))


@contextmanager
def omit_pooler(encoder: nn.Module) -> Generator[None]:
    """Omit an encoder's own pooler within this context, as ``get_encoder_options`` does when it is loaded."""
    pooler = getattr(encoder, _POOLER, None)
    if pooler is None or not get_encoder_options(getattr(encoder, "config", None)):
        yield
        return
    setattr(encoder, _POOLER, None)
    try:
        yield
    finally:
        setattr(encoder, _POOLER, pooler)


def _is_unknown(source: str, name: str, revision: str | None) -> bool:
    """Check whether the cache holds neither a file of a hub repository nor its absence."""
    if os.path.isdir(source):
        return False
    try:
        return try_to_load_from_cache(source, name, revision=revision) is None
    except HFValidationError:  # no id of a repository; loading the model reports it
        return False


def _read(source: str, name: str, revision: str | None) -> Any:
    """Read a JSON file of a repository; None if there is none, or it cannot be read."""
    from transformers.utils.hub import cached_file

    try:
        file = cached_file(
            source,
            name,
            revision=revision,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return None if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
