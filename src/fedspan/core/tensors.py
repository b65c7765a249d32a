"""Named tensors: the names of values in states, messages and jobs, and arithmetic on dicts of them.

A tensor of a target layer is named ``<module path>/<slot>`` (``encoder.layer.0.attention.self.query/A``), one of the
extras (head, norms, buffers) ``extras/<parameter path>``. Module paths contain no slash, so the first one separates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]

EXTRAS = "extras"


def join_tensor_name(layer: str, slot: str) -> str:
    """Return ``layer/slot``."""
    return f"{layer}/{slot}"


def join_extra_name(parameter: str) -> str:
    """Return ``extras/parameter``."""
    return f"{EXTRAS}/{parameter}"


def is_extra(name: str) -> bool:
    """Return whether a name belongs to the extras."""
    return name.startswith(EXTRAS + "/")


def select_slots(tensors: Tensors, layer: str) -> dict[str, Tensor]:
    """Return one layer's tensors by slot: ``{"A": ..., "B": ...}``."""
    prefix = layer + "/"
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}


def group_by_layer(tensors: Tensors) -> dict[str, dict[str, Tensor]]:
    """Group all tensors as ``{layer: {slot: tensor}}``."""
    grouped: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        layer, _, slot = name.partition("/")
        grouped.setdefault(layer, {})[slot] = value
    return grouped


def split_extras(tensors: Tensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split tensors into ``(tensors of target layers, extras)``."""
    inner = {name: value for name, value in tensors.items() if not is_extra(name)}
    extras = {name: value for name, value in tensors.items() if is_extra(name)}
    return inner, extras


def select(tensors: Tensors, names: Iterable[str]) -> dict[str, Tensor]:
    """Select the named tensors, in the requested order."""
    return {name: tensors[name] for name in names}


def map_tensors(function: Callable[..., Tensor], first: Tensors, *further: Tensors) -> dict[str, Tensor]:
    """Apply a function name by name, for every name of the first dict (all dicts must have it)."""
    return {name: function(value, *(other[name] for other in further)) for name, value in first.items()}


def subtract(left: Tensors, right: Tensors) -> dict[str, Tensor]:
    """Compute ``left - right``, name by name."""
    return map_tensors(torch.sub, left, right)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; from the CPU to an accelerator through pinned memory, so that the host does not wait.

    A tensor that is on the device already is returned as it is.
    """
    if tensor.device.type != "cpu" or device.type in ("cpu", "mps", "meta"):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def sum_rows(rows_SD: Tensor, numbers_S: Tensor, count: int) -> Tensor:
    """Sum rows by number, in a deterministic order.

    Args:
        rows_SD: The rows, (S, D).
        numbers_S: Number of each row's sum, int64, from 0 to ``count`` - 1.

    Returns:
        (count, D); zero where there is no row.
    """
    sums = rows_SD.new_zeros(count, rows_SD.shape[1])
    if rows_SD.device.type == "cpu":
        return sums.index_add_(0, numbers_S, rows_SD)
    return sums.index_put_((numbers_S,), rows_SD, accumulate=True)  # CUDA's index_add_ sums in a nondeterministic order


def compute_norm(tensors: Tensors) -> float:
    """Compute the Euclidean norm over all tensors together, in float64."""
    return float(sum(float(value.double().square().sum()) for value in tensors.values())) ** 0.5


def count(tensors: Tensors) -> int:
    """Count the elements over all tensors."""
    return sum(value.numel() for value in tensors.values())


def create_generator(seed: int, purpose: str, *keys: int | str) -> torch.Generator:
    """Create a separate CPU generator for one draw, keyed by (seed, purpose, keys): no draw depends on any other.

    The key is hashed (SHA-256), so neighboring seeds or rounds give unrelated streams, and the stream is the
    same on every machine.
    """
    text = "\x1f".join([str(seed), purpose, *map(str, keys)])
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def create_example_generators(
    purpose: str, indices: Sequence[int], keys: Sequence[Sequence[int | str]]
) -> list[torch.Generator]:
    """Create the generator of each example's draw in a batch of training.

    Args:
        indices: The batch's examples.
        keys: Key of each example: the seed of the run, followed by round, client, phase and batch.
    """
    pairs = zip(keys, indices, strict=True)
    return [create_generator(int(seed), purpose, *key, index) for (seed, *key), index in pairs]
