"""Every method and every wrapper of the registry as a tiny run, which each transport repeats to the bit."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fedspan.methods.registry import METHODS
from fedspan.run_folder import RunFolder
from fedspan.runs.checkpoint import load_latest
from fedspan.wrappers.registry import WRAPPERS

from .families import UNLIKE
from .watched_rounds import OPTIONS, PERIODIC, differences
from .wrapped_configs import TRAINING

AROUND = "fedit"
"""The method around which the wrappers are."""
WRAPPED = f"{AROUND}+scaffold"
"""The wrapper that differs most from none: it sends twice as much, and has memory on both sides."""
UNLIKE_CASES = (*UNLIKE, WRAPPED)
"""The cases in ``make test``."""


def list_cases() -> list[str]:
    """Return every registered method, and every wrapper around FedIT, as ``METHOD`` or ``METHOD+WRAPPER``."""
    return [*sorted(METHODS), *(f"{AROUND}+{wrapper}" for wrapper in sorted(WRAPPERS))]


def get_method(case: str) -> str:
    """Return the key of a case's method."""
    return case.partition("+")[0]


def describe_case(case: str) -> dict[str, Any]:
    """Return what a case changes in the sections of a run's config; periods of methods end within its rounds."""
    method, *wrappers = case.split("+")
    return {
        "method": {"name": method, "r": 2, "lora_alpha": 4, **OPTIONS.get(method, {}), "wrappers": wrappers},
        "federation": {"rounds": 3 if method in PERIODIC else 2},
        "training": {name: value for wrapper in wrappers for name, value in TRAINING.get(wrapper, {}).items()},
    }


def require_same_model(folder: Path, other: Path) -> None:
    """Require that two runs ended with the same bits of the server's state and of every exported adapter."""
    require_same_state(folder, other)
    require_same_tensors(folder / "adapter", other / "adapter")


def require_same_state(folder: Path, other: Path) -> None:
    """Require that two runs ended with the same bits of the server's state."""
    ours, theirs = (load_latest(RunFolder(run)) for run in (folder, other))
    assert differences(ours.state, theirs.state) == []


def require_same_tensors(folder: Path, other: Path) -> None:
    """Require that two folders have the same files of tensors, to the bit."""
    mine, theirs = (
        {path.relative_to(root): load_file(path) for path in root.rglob("*.safetensors")} for root in (folder, other)
    )
    assert mine
    assert mine.keys() == theirs.keys()
    for file, tensors in mine.items():
        assert tensors.keys() == theirs[file].keys()
        for name, value in tensors.items():
            assert torch.equal(value, theirs[file][name]), (file, name)
