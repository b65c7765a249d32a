"""The device of a run, and torch's restriction to deterministic algorithms on it."""

from __future__ import annotations

import os
from typing import Any

import torch

from fedspan.errors import FedspanError

_FILLING: Any = torch.utils.deterministic
_restricts_torch = False  # whether the last run of this process has restricted torch


def choose_device(name: str) -> torch.device:
    """Return the named device; ``auto``: CUDA, then Apple's MPS, then the CPU.

    Raises:
        FedspanError: If the name is not a device name, or this machine lacks the device.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # on "meta", tensors can be created but hold no values
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).strip().splitlines()[0].partition(". ")[0]
        raise FedspanError(
            "device", name, "auto, cpu, cuda, cuda:N or mps", problem=f"this machine has no device {name!r} ({reason})"
        ) from None
    return device


def set_algorithms(deterministic: bool, device: torch.device) -> None:
    """Restrict torch to deterministic algorithms in this process, or undo what an earlier run restricted.

    Args:
        deterministic: Whether the run asks for it.
        device: Device of the run; a CPU needs no restriction.
    """
    global _restricts_torch
    if deterministic and device.type != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS at its start
        _FILLING.fill_uninitialized_memory = False  # only finds mistakes, and takes time
        torch.use_deterministic_algorithms(True)
        _restricts_torch = True
    elif _restricts_torch:
        torch.use_deterministic_algorithms(False)
        _FILLING.fill_uninitialized_memory = True  # torch's default
        _restricts_torch = False
