"""Loading of a model with a task's head: pretrained, or with randomly initialized weights.

Names are hub ids, local folders, or ``builtin:`` names (``models.names``).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoTokenizer,
    ConvNextImageProcessorPil,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ViTImageProcessorPil,
)
from transformers.utils import logging as transformers_logging

from fedspan.errors import FedspanError
from fedspan.models.heads import Head, get_head
from fedspan.models.names import (
    MODEL_NAMES,
    describe_image_model_problem,
    describe_load_error,
    get_architecture,
    resolve_model,
)
from fedspan.models.offload import Offload, remove_with
from fedspan.models.plain import adopt_module, is_plain_module
from fedspan.models.pooling import Pooling
from fedspan.models.quantized import Quantization, get_quantization_options, prevent_repacking
from fedspan.models.resnet import SmallResNetConfig
from fedspan.models.sentence_encoders import HEAD, PooledClassifier, get_encoder_class, get_encoder_options

Processor = Any
"""Converter of rows to tensors: a ``PreTrainedTokenizerBase``, or one of Transformers' image processors."""
_PROCESSED_INPUTS = ("input_ids", "pixel_values")
"""Main inputs of models that a tokenizer or image processor makes."""


@dataclass(frozen=True)
class Loaded:
    """A model, its processor, and the modules with new weights (not from the checkpoint)."""

    model: Any
    """The model, in eval mode and without dropout."""
    processor: Processor | None
    """The model's tokenizer or image processor; None: it has none."""
    new_modules: tuple[str, ...]
    """Paths of the modules with newly initialized parameters (the head; from scratch, all)."""


def load_pretrained(
    name: str,
    head: Head | str = "classification",
    labels: Sequence[str] = (),
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    seed: int = 0,
    quantization: Quantization | None = None,
    keep: Sequence[str] = (),
    image_size: int | None = None,
    pooling: Pooling | None = None,
    device: torch.device | None = None,
    offload: Offload | None = None,
) -> Loaded:
    """Load a pretrained model and its processor; draw a new head from ``seed``.

    The frozen base runs without dropout, so every dropout rate of the config is set to 0.

    Args:
        name: Hub id, local folder, or ``builtin:NAME``.
        head: Head of the task, or its name in ``heads.HEADS``.
        dtype: Number format of all weights that are not quantized (Transformers would use the checkpoint's).
        attention: ``eager`` or ``sdpa``; None: Transformers' default.
        quantization: ``nf4`` (4 bits, double quantization) or ``int8``, by bitsandbytes.
        image_size: Rows and columns that images are resized to; None: the default of the model's processor.
        pooling: Pooling of a classifier on an encoder's hidden states; None: Transformers' own classifier. It has no
            effect on a head without outputs.
        device: Target device; None: the CPU.
        offload: Limits on memory, beyond which weights are offloaded; None: none are.

    Raises:
        FedspanError: If the model can't be found or read, has no such head, or bitsandbytes is missing.
    """
    source, head = get_source(name), get_head(head)
    pooling = None if head.outputs is None else pooling
    if get_architecture(name) is not None:
        raise FedspanError(
            "model.name", name, "a pretrained model", problem=f"{name!r} is an architecture without weights"
        )
    options = {} if quantization is None else get_quantization_options(quantization, dtype, keep, device)
    config: Any = None
    with _silence_transformers():
        try:
            config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
            prepare_config(config, head, labels)
            processor = _load_processor(source, head, revision, image_size)
            with torch.random.fork_rng(), _DrawsOnCpu():
                torch.manual_seed(seed)  # Transformers draws new heads from the global generator
                kind = head.load_class() if pooling is None else get_encoder_class(config)
                if offload is not None:
                    options = offload.get_options(kind, config, dtype, device, keep)
                model, info = kind.from_pretrained(
                    source,
                    config=config,
                    revision=revision,
                    dtype=dtype,
                    attn_implementation=attention,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # a head for other labels is replaced by a new one
                    trust_remote_code=False,  # else Transformers asks on the terminal whether to run the folder's code
                    use_safetensors=True,  # other files of weights would be unpickled
                    **options,
                    **(get_encoder_options(config) if pooling is not None or head == get_head("encoder") else {}),
                )
                if offload is not None:
                    remove_with(model, options["offload_folder"])
                if pooling is not None:
                    model = PooledClassifier(model, pooling)
                    info = _rename_encoder_keys(info, model.base_model_prefix)
        # Transformers, its tokenizers (a bare Exception) or the hub's client may raise anything on the files there.
        except Exception as error:
            _require_head(error, name, config, head)
            problem = f"{name!r} cannot be loaded ({describe_load_error(error)})"
            raise FedspanError("model.name", name, MODEL_NAMES, problem=problem) from error
    _prepare(model, processor, name)
    mismatched = {key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]}
    body = sorted(key for key in mismatched if key.startswith(f"{model.base_model_prefix}."))
    if body:
        raise FedspanError(
            "model.name", name, problem=f"the weights do not fit the model's own config: {body[0]} has another shape"
        )
    # Not of a head or a pooler, which some checkpoints omit.
    body = [key for key in info["missing_keys"] if key.startswith(f"{model.base_model_prefix}.")]
    absent = sorted(key for key in body if "pooler" not in key)
    if absent:
        problem = f"{len(absent)} of the weights in its config.json are missing, such as {absent[0]}"
        raise FedspanError("model.name", name, problem=problem)
    new_modules = sorted({key.rpartition(".")[0] for key in {*info["missing_keys"], *mismatched}})
    if new_modules and head.outputs is None and not head.is_new:
        expected = "a causal language model" if head == get_head("language-model") else f"a model of {head.auto_class}"
        raise FedspanError("model.name", name, expected, problem=f"{name!r} has no weights for {new_modules[0]}")
    if quantization is not None:
        prevent_repacking(model)
    elif offload is None and device is not None:
        model = model.to(device)
    return Loaded(model.eval(), processor, tuple(new_modules))


class _DrawsOnCpu(TorchDispatchMode):
    """Fills tensors on other devices with random values from the CPU's generator.

    Quantized and offloaded models are loaded straight onto their devices, new heads included, and heads must not
    depend on the device. Only in-place operators (``normal_``, ``uniform_``) are covered, which initialization uses.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        target = args[0] if args else None
        if (
            not isinstance(target, Tensor)
            or target.device.type in ("cpu", "meta")
            or not func._schema.name.endswith("_")
            or torch.Tag.nondeterministic_seeded not in func.tags
        ):
            return func(*args, **options)
        return target.copy_(func(target.cpu(), *args[1:], **options))


def adopt_loaded(
    model: Any,
    processor: Processor | None,
    head: Head | str,
    labels: Sequence[str],
    device: torch.device | None = None,
) -> Loaded:
    """Return a copy of a model that was passed from Python, prepared as `load_pretrained` prepares one.

    Args:
        model: A ``PreTrainedModel`` with the head of the task, or another ``nn.Module``.
        processor: Tokenizer or image processor of the model; None: the one of the model's ``name_or_path``, or none
            if the model has no such name, or reads neither tokens nor images.
        head: Head of the task, or its name in ``heads.HEADS``.
        device: Target device; None: the CPU.

    Raises:
        FedspanError: If it is no such model, its head has another number of outputs, or its processor cannot be loaded.
    """
    head = get_head(head)
    kind = type(model).__name__
    if is_plain_module(model):
        return Loaded(adopt_module(model, device), processor, ())
    if not isinstance(model, PreTrainedModel):
        expected = (
            "a PreTrainedModel of Transformers or another nn.Module (of a PEFT model, its base, with model.adapter for "
            "the adapter)"
        )
        raise FedspanError("model", kind, expected)
    if type(model).__module__.startswith("transformers.") and not kind.endswith(head.suffixes):
        expected = f"{head.auto_class}.from_pretrained(...)"
        raise FedspanError("model", kind, expected, problem=f"{kind} lacks the head that the task needs")
    outputs = None if head.outputs is None else 1 if head.outputs == "number" else len(labels)
    if outputs is not None and model.config.num_labels != outputs:
        problem = f"the head of {kind} has {model.config.num_labels} outputs where {outputs} are needed. "
        raise FedspanError("model", kind, problem=f"{problem}Load it with num_labels={outputs}.")
    if processor is None and model.name_or_path and model.main_input_name in _PROCESSED_INPUTS:
        try:
            processor = _load_processor(model.name_or_path, head, None, None)
        except Exception as error:
            raise FedspanError("tokenizer", None, f"the model's tokenizer ({describe_load_error(error)})") from error
    model = copy.deepcopy(model)  # training changes weights, and the caller's model stays as it is
    prepare_config(model.config, head, labels)
    _prepare(model, processor, model.name_or_path or kind)
    if isinstance(processor, PreTrainedTokenizerBase) and len(processor) > model.get_input_embeddings().num_embeddings:
        problem = f"the tokenizer has {len(processor)} tokens, more than the model has embeddings"
        raise FedspanError("tokenizer", type(processor).__name__, problem=problem)
    return Loaded((model if device is None else model.to(device)).eval(), processor, ())


def load_scratch(
    name: str,
    head: Head | str,
    labels: Sequence[str] = (),
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    seed: int = 0,
    image_size: int | None = None,
    pooling: Pooling | None = None,
    device: torch.device | None = None,
) -> Loaded:
    """Build a model's architecture with all weights drawn from ``seed``, and its processor.

    Images are scaled to [-1, 1].

    Args:
        name: Name as for `load_pretrained`, or an architecture (``builtin:resnet-18``).
        head: Head of the task, or its name in ``heads.HEADS``.
        attention: ``eager`` or ``sdpa``; None: Transformers' default.
        image_size: Rows and columns of images; None: the architecture's default.
        device: Target device; None: the CPU.

    Raises:
        FedspanError: If there is no such architecture, or it has no such head.
    """
    source, shape, head = get_source(name), get_architecture(name), get_head(head)
    if shape and not head.has_image_inputs:
        raise FedspanError("model.name", name, problem=describe_image_model_problem(name))
    config: Any = None
    with _silence_transformers():
        try:
            config = (
                SmallResNetConfig(shape["widths"], shape["depths"])
                if shape
                else AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
            )
            prepare_config(config, head, labels)
            if head.has_image_inputs:
                size = image_size or getattr(config, "image_size", None) or 224
                height, width = (size, size) if isinstance(size, int) else size
                config.num_channels, config.image_size = 3, size
                processor = ViTImageProcessorPil(size={"height": height, "width": width})
            else:
                processor = _load_processor(source, head, revision, None)
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                options = {} if attention is None else {"attn_implementation": attention}
                model = build_from_config(config, head, pooling, dtype=dtype, **options)
        except Exception as error:
            _require_head(error, name, config, head)
            expected = "a model whose architecture has the head that the task needs"
            raise FedspanError(
                "model.name", name, expected, problem=f"{name!r} cannot be built ({describe_load_error(error)})"
            ) from error
    _prepare(model, processor, name)
    model = model if device is None else model.to(device)
    return Loaded(model.eval(), processor, tuple(path for path, _ in model.named_children()))


def build_from_config(config: Any, head: Head | str, pooling: Pooling | None, **options: Any) -> Any:
    """Build a model with a task's head from a config, with weights as they are initialized.

    Args:
        config: Transformers' config, with the head's size (`prepare_config`).
        options: Further arguments of Transformers' ``from_config``.
    """
    head = get_head(head)
    if pooling is None or head.outputs is None:
        encoder_options = get_encoder_options(config) if head == get_head("encoder") else {}
        return head.load_class().from_config(config, trust_remote_code=False, **encoder_options, **options)
    encoder_options = get_encoder_options(config)
    encoder = get_encoder_class(config).from_config(config, trust_remote_code=False, **encoder_options, **options)
    return PooledClassifier(encoder, pooling)


def get_source(name: str) -> str:
    """Return the argument for ``from_pretrained``: that of `resolve_model`, with ``~`` expanded in local folders."""
    source = resolve_model(name)
    # os.path, since Path raises for names that are too long for the disk and for homes of unknown users.
    return os.path.expanduser(source) if os.path.isdir(os.path.expanduser(source)) else source


def _load_processor(source: str, head: Head, revision: str | None, image_size: int | None) -> Processor:
    if not head.has_image_inputs:
        return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    # Pillow's resizing on every machine: torchvision, if installed, gives other pixels.
    load = partial(AutoImageProcessor.from_pretrained, source, revision=revision, trust_remote_code=False)
    processor = load(backend="pil")
    if image_size is None:
        return processor
    size = {"size": {"height": image_size, "width": image_size}}
    if isinstance(processor, ConvNextImageProcessorPil):  # ResNets use it too; it supports short edges only
        names = ("resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
        return ViTImageProcessorPil(**size, **{name: getattr(processor, name) for name in names})
    return load(backend="pil", do_center_crop=False, **size)


def _prepare(model: Any, processor: Processor | None, name: str) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for attribute, value in vars(module).items():
            if "drop" in attribute and isinstance(value, float):  # BART's and T5's modules call F.dropout with it
                setattr(module, attribute, 0.0)
    if isinstance(processor, PreTrainedTokenizerBase):
        _prepare_tokenizer(processor, model, name)


def _rename_encoder_keys(info: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Rename an encoder's keys to those of the classifier around it, whose output layer is new."""

    def rename(key: Any) -> Any:
        return f"{prefix}.{key}" if isinstance(key, str) else (f"{prefix}.{key[0]}", *key[1:])

    missing = [*map(rename, info["missing_keys"]), f"{HEAD}.weight", f"{HEAD}.bias"]
    return {"missing_keys": missing, "mismatched_keys": [rename(key) for key in info["mismatched_keys"]]}


def _require_head(error: Exception, name: str, config: Any, head: Head) -> None:
    """Report a missing class of Transformers, if that is why a model could not be made."""
    if "for this kind of AutoModel" not in str(error):
        return
    problem = (
        f"{name!r} has the architecture {config.model_type!r}, for which Transformers has no {head.auto_class}. "
        "A task of your own (fedspan.run with model= and task=) or a trainer of your own (fedspan.simulate) can train "
        "it"
    )
    raise FedspanError("model.name", name, problem=problem) from error


@contextmanager
def _silence_transformers() -> Generator[None]:
    """Silence Transformers' progress bars and warnings (a new head is expected here)."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()


def prepare_config(config: Any, head: Head | str, labels: Sequence[str]) -> None:
    """Set the task's head in a Transformers config and remove all dropout."""
    head = get_head(head)
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    if head.outputs == "labels":
        config.num_labels = len(labels)
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: index for index, label in enumerate(labels)}
    if head.outputs == "number":
        config.num_labels = 1
    if head.problem_type is not None:
        config.problem_type = head.problem_type


def _prepare_tokenizer(tokenizer: PreTrainedTokenizerBase, model: Any, name: str) -> None:
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # Transformers' result for a missing file
        raise FedspanError("model.name", name, "a model with its tokenizer", problem=f"{name!r} has no tokenizer")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token_id is None:
        raise FedspanError(
            "model.name", name, problem="its tokenizer has no token for padding, the end of a text or unknown words"
        )
    model.config.pad_token_id = tokenizer.pad_token_id  # some models find a text's last token by it
