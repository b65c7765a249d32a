"""Errors where a device has too little memory for a pass."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from fedspan.errors import FedspanError


@contextmanager
def convert_out_of_memory(
    device: torch.device, field: str, value: int, content: str, remedy: str = ""
) -> Generator[None]:
    """Raise an error that names a setting if a device's memory does not suffice within this context.

    Args:
        device: The device.
        field: The setting that determines the size of a pass.
        value: Its value.
        content: What a pass holds, after the value ("clients in a pass").
        remedy: What would need less memory, after "a smaller number".
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        problem = f"{device} has too little memory for {value} {content} ({error})"
        raise FedspanError(field, value, f"a smaller number{remedy}", problem=problem) from error
