"""What a forward pass calls, and in which order, as hooks see it; nothing is guessed from names."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["DROPOUTS", "HIDDEN", "Call", "block_chains", "evaluating", "hidden_of", "replaced", "traced"]

HIDDEN = "hidden_states"
"""The name of a block's first argument."""
DROPOUTS = nn.modules.dropout._DropoutNd  # pyright: ignore[reportPrivateUsage]
"""What draws at random in training."""


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


def block_chains(model: nn.Module, calls: Mapping[nn.Module, Sequence[Call]]) -> list[list[nn.Module]]:
    """The lists of blocks that hand on hidden states (examples, tokens, features), each in the order of its calls."""
    return [made for one in _outer_lists(model) if (made := _chain(one, calls))]


def _outer_lists(model: nn.Module) -> list[nn.ModuleList]:
    """The lists of modules that are not inside a member of another one."""
    lists = [one for one in model.modules() if isinstance(one, nn.ModuleList)]
    inside = {module for one in lists for member in one for module in member.modules()}
    return [one for one in lists if one not in inside]


def _chain(blocks: nn.ModuleList, calls: Mapping[nn.Module, Sequence[Call]]) -> list[nn.Module] | None:
    """A list's blocks in the order of their calls, if they are called once each, each with what the last one gave."""
    used = sorted((block for block in blocks if calls[block]), key=lambda block: calls[block][0].entered)
    if not used or any(len(calls[block]) > 1 for block in used):
        return None
    chain = [calls[block][0] for block in used]
    first = chain[0].hidden
    if first is None or first.ndim != 3 or not all(call.keeps(first.shape) for call in chain):
        return None
    return used if all(call.hands_on_to(after) for call, after in pairwise(chain)) else None


@contextmanager
def replaced(module: nn.Module, forward: Any) -> Generator[None]:
    """Within this context a module computes something else; a forward of its own (an adapted layer's) comes back."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


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
