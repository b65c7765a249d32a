"""Values as nested plain data, to be compared exactly."""

from collections.abc import Mapping

import torch
from torch import Tensor


def plain(value: object) -> object:
    """Nested plain data with types, tensors and floats exactly."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if hasattr(value, "__dataclass_fields__"):
        return type(value).__name__, plain(vars(value))
    return type(value).__name__, value.hex() if isinstance(value, float) else value
