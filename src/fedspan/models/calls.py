"""Modules that a forward pass calls, in call order, as hooks observe them; nothing is inferred from names."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fedspan.models.offload import get_device

HIDDEN = "hidden_states"
"""The name of a block's first argument."""
DROPOUTS = nn.modules.dropout._DropoutNd  # pyright: ignore[reportPrivateUsage]
"""Base class of the modules that draw random numbers in training."""


@dataclass
class Call:
    """One call of a block: when it began, its inputs (hidden states first) and its result."""

    entered: int
    hidden: Tensor | None
    arguments: Sequence[Any]
    result: Any = None

    @property
    def width(self) -> int | None:
        """Number of values in the returned tuple; None for a bare tensor."""
        return len(self.result) if isinstance(self.result, tuple) else None

    @property
    def output(self) -> Tensor | None:
        """The returned hidden states; None if the block returned none."""
        first = self.result[0] if isinstance(self.result, tuple) and self.result else self.result
        return first if isinstance(first, Tensor) else None

    def is_shape_preserved(self, shape: torch.Size) -> bool:
        """Check whether both the input and the output are hidden states of the given shape."""
        return all(tensor is not None and tensor.shape == shape for tensor in (self.hidden, self.output))

    def is_input_of(self, after: Call) -> bool:
        """Check whether another call took this one's returned hidden states, and none of its other returned values."""
        further = self.result[1:] if isinstance(self.result, tuple) else ()
        inputs = {id(value) for value in after.arguments}
        return after.hidden is self.output and not any(
            tensor is not None and id(tensor) in inputs for tensor in further
        )


@contextmanager
def enter_evaluation(model: nn.Module) -> Generator[None]:
    """Enter evaluation mode without gradients; on exit, restore the mode of every module."""
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def get_hidden(args: Sequence[Any], options: Mapping[str, Any]) -> Tensor | None:
    """Return the hidden states that a block is called with (its first argument); None if that is no tensor."""
    value = args[0] if args else options.get(HIDDEN)
    return value if isinstance(value, Tensor) else None


def trace_calls(model: nn.Module) -> tuple[dict[nn.Module, int], dict[nn.Module, list[Call]]]:
    """Trace a forward pass of a tiny batch: when each module is first entered, and all calls of modules in lists.

    Raises:
        ValueError: If the model takes neither tokens nor images. Errors that the model raises on such a batch
            propagate.
    """
    entered: dict[nn.Module, int] = {}
    calls = {
        block: list[Call]()
        for container in model.modules()
        if isinstance(container, nn.ModuleList)
        for block in container
    }
    moment = 0

    def enter(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        nonlocal moment
        moment += 1
        entered.setdefault(module, moment)
        if module in calls:
            calls[module].append(Call(moment, get_hidden(args, options), (*args, *options.values())))

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        calls[module][-1].result = result

    handles = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in model.modules()]
    handles += [module.register_forward_hook(leave) for module in calls]
    try:
        with enter_evaluation(model):
            model(**build_tiny_batch(model))
    finally:
        for handle in handles:
            handle.remove()
    return entered, calls


def find_block_chains(model: nn.Module, calls: Mapping[nn.Module, Sequence[Call]]) -> list[list[nn.Module]]:
    """Return the lists of blocks that pass hidden states (examples, tokens, features) to each other, in call order."""
    return [chain for blocks in _list_outer_lists(model) if (chain := _order_chain(blocks, calls))]


def _list_outer_lists(model: nn.Module) -> list[nn.ModuleList]:
    """Return the module lists that are not nested in an element of another list."""
    lists = [outer for outer in model.modules() if isinstance(outer, nn.ModuleList)]
    inside = {module for outer in lists for element in outer for module in element.modules()}
    return [outer for outer in lists if outer not in inside]


def _order_chain(blocks: nn.ModuleList, calls: Mapping[nn.Module, Sequence[Call]]) -> list[nn.Module] | None:
    """Return a list's blocks in call order if each is called once, with hidden states of the one before; else None."""
    used = sorted((block for block in blocks if calls[block]), key=lambda block: calls[block][0].entered)
    if not used or any(len(calls[block]) > 1 for block in used):
        return None
    chain = [calls[block][0] for block in used]
    first = chain[0].hidden
    if first is None or first.ndim != 3 or not all(call.is_shape_preserved(first.shape) for call in chain):
        return None
    return used if all(call.is_input_of(after) for call, after in pairwise(chain)) else None


@contextmanager
def replace_forward(module: nn.Module, forward: Any) -> Generator[None]:
    """Replace a module's forward within this context; on exit, restore any forward of its own (an adapted layer's)."""
    own_forward = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own_forward is None:
            del module.forward
        else:
            module.forward = own_forward


def has_own_decoder_inputs(model: nn.Module) -> bool:
    """Check whether a model has a decoder that reads the target, beside an encoder that reads the source."""
    return hasattr(model, "prepare_decoder_input_ids_from_labels")


def build_tiny_batch(model: nn.Module) -> dict[str, Tensor]:
    """Build a batch of two texts of three tokens (and targets of as many), or of two images; only its shape matters.

    A classifier with an encoder and a decoder reads the token that ends a text, so theirs end with it.
    """
    name, config = getattr(model, "main_input_name", None), getattr(model, "config", None)
    parameter = next(model.parameters())
    if name == "input_ids":
        ids = torch.ones(2, 3, dtype=torch.int64, device=get_device(model))
        end = getattr(config, "eos_token_id", None)
        if getattr(config, "is_encoder_decoder", False) and isinstance(end, int):
            ids[:, -1] = end
        return {name: ids, **({"decoder_input_ids": ids} if has_own_decoder_inputs(model) else {})}
    if name != "pixel_values":
        raise ValueError("the model takes neither tokens nor images")
    size = getattr(config, "image_size", None) or 32
    rows, columns = (size, size) if isinstance(size, int) else size
    colors = getattr(config, "num_channels", 3)
    floating = getattr(model, "dtype", parameter.dtype)
    return {name: torch.zeros(2, colors, rows, columns, dtype=floating, device=get_device(model))}
