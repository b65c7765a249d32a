"""What a forward pass calls, and in which order, as hooks see it; nothing is guessed from names."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["HIDDEN", "Call", "evaluating", "hidden_of", "traced"]

HIDDEN = "hidden_states"
"""The name of a block's first argument."""


@dataclass
class Call:
    """One use of a block: when it began, what it was given (hidden states first), what it answered."""

    entered: int
    hidden: Tensor | None
    given: Sequence[Any]
    result: Any = None

    @property
    def width(self) -> int | None:
        """How many values it returned as a tuple; None for a bare tensor."""
        return len(self.result) if isinstance(self.result, tuple) else None

    @property
    def output(self) -> Tensor | None:
        """The hidden states that it returned."""
        first = self.result[0] if isinstance(self.result, tuple) and self.result else self.result
        return first if isinstance(first, Tensor) else None

    def keeps(self, shape: torch.Size) -> bool:
        """Whether hidden states of a shape went in and came out."""
        return all(one is not None and one.shape == shape for one in (self.hidden, self.output))

    def hands_on_to(self, after: Call) -> bool:
        """Whether another block took the hidden states that this one returned, and nothing else of what it returned."""
        others = self.result[1:] if isinstance(self.result, tuple) else ()
        taken = {id(value) for value in after.given}
        return after.hidden is self.output and not any(one is not None and id(one) in taken for one in others)


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Evaluation mode without gradients; afterwards every module is in the mode that it was in."""
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def hidden_of(args: Sequence[Any], options: Mapping[str, Any]) -> Tensor | None:
    """The hidden states that a block is called with: its first argument; None if that is something else."""
    value = args[0] if args else options.get(HIDDEN)
    return value if isinstance(value, Tensor) else None


def traced(model: nn.Module) -> tuple[dict[nn.Module, int], dict[nn.Module, list[Call]]]:
    """When each module is first entered, and all calls of the members of lists, in a forward pass of a tiny batch.

    Raises:
        ValueError: if the model takes neither tokens nor images. Beside that, what a model makes of such a batch.
    """
    entered: dict[nn.Module, int] = {}
    calls = {block: list[Call]() for one in model.modules() if isinstance(one, nn.ModuleList) for block in one}
    moment = 0

    def enter(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        nonlocal moment
        moment += 1
        entered.setdefault(module, moment)
        if module in calls:
            calls[module].append(Call(moment, hidden_of(args, options), (*args, *options.values())))

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        calls[module][-1].result = result

    handles = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in model.modules()]
    handles += [module.register_forward_hook(leave) for module in calls]
    try:
        with evaluating(model):
            model(**_tiny_batch(model))
    finally:
        for handle in handles:
            handle.remove()
    return entered, calls


def _tiny_batch(model: nn.Module) -> dict[str, Tensor]:
    """Two texts of three tokens, or two images, of which nothing but the shape matters."""
    name, config = getattr(model, "main_input_name", None), getattr(model, "config", None)
    parameter = next(model.parameters())
    if name == "input_ids":
        return {name: torch.ones(2, 3, dtype=torch.int64, device=parameter.device)}
    if name != "pixel_values":
        raise ValueError("the model takes neither tokens nor images")
    size = getattr(config, "image_size", None) or 32
    rows, columns = (size, size) if isinstance(size, int) else size
    colours = getattr(config, "num_channels", 3)
    floating = getattr(model, "dtype", parameter.dtype)
    return {name: torch.zeros(2, colours, rows, columns, dtype=floating, device=parameter.device)}
