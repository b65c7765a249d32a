"""The first blocks of a model, in which nothing changes: their recorded output replaces them.

Shapes: B examples, T tokens, D features of a hidden state.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedspan.models.adapted import AdaptedModel
from fedspan.models.calls import DROPOUTS, HIDDEN, find_block_chains, get_hidden, replace_forward, trace_calls


class NoPrefix(Exception):
    """A model or data for which no blocks can be skipped; the text is the reason, without a full stop."""


class _Stopped(Exception):
    """Signal that ends a forward pass early."""


@dataclass
class Recording:
    """Recording of a forward pass: ``hidden``, (B, T, D), the input of the first block that is not skipped."""

    hidden: Tensor


class FrozenPrefix:
    """The blocks of an adapted model before the first one with anything trainable (or random) in it.

    Args:
        adapted: The model; while one of the contexts is open, no other code may use it.
        paths: Paths of the blocks in call order: those to skip, and the one after them.
        widths: Number of values in the tuple that each skipped block returns; None: a bare tensor.
    """

    def __init__(self, adapted: AdaptedModel, paths: Sequence[str], widths: Sequence[int | None]) -> None:
        self._paths, self._widths = tuple(paths), tuple(widths)
        *self._skipped, self._first = [adapted.model.get_submodule(path) for path in paths]

    @classmethod
    def search(cls, adapted: AdaptedModel, live: Collection[str]) -> FrozenPrefix:
        """Find the longest prefix (by parameters) from the calls of one forward pass of a tiny batch.

        Args:
            live: Paths of the modules whose values may differ between jobs or change within one.
        """
        model = adapted.model
        if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            raise NoPrefix("activations are computed again in the backward pass (gradient checkpointing)")
        names = {module: name for name, module in model.named_modules()}
        try:
            entered, calls = trace_calls(model)
        # A model may raise anything on a batch that it does not expect.
        except Exception as error:
            raise NoPrefix(f"a forward pass for inspection failed ({type(error).__name__}: {error})") from error
        if not live:
            raise NoPrefix("nothing in the model is trained")
        first, culprit = min((_get_entry(model, path, entered), path) for path in live)
        candidates = find_block_chains(model, calls)
        if not candidates:
            raise NoPrefix("the model has no list of blocks that hand on hidden states (examples, tokens, features)")
        # The blocks that end before its first use, and the one after them (the last block, if all end before it).
        prefixes = [chain[: max(1, sum(calls[block][0].entered <= first for block in chain))] for chain in candidates]
        best = max(prefixes, key=lambda chain: sum(w.numel() for block in chain[:-1] for w in block.parameters()))
        if len(best) < 2:
            raise NoPrefix(f"{culprit} changes, and it is used in the first block or before it")
        end = calls[best[-1]][0].entered
        for module, moment in entered.items():
            if moment < end and isinstance(module, DROPOUTS) and module.p > 0:
                raise NoPrefix(f"{names[module]} draws at random (dropout {module.p}) before what changes")
        return cls(adapted, [names[block] for block in best], [calls[block][0].width for block in best[:-1]])

    @classmethod
    def find(cls, adapted: AdaptedModel, live: Collection[str]) -> FrozenPrefix | None:
        """Find the prefix as ``search`` does; return None if there is none (``explain_refusal`` gives the reason)."""
        try:
            return cls.search(adapted, live)
        except NoPrefix:
            return None

    @classmethod
    def explain_refusal(cls, adapted: AdaptedModel, live: Collection[str]) -> str | None:
        """Return the reason why there is no prefix; None if there is one."""
        try:
            cls.search(adapted, live)
        except NoPrefix as error:
            return str(error)
        return None

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the skipped blocks, and of the one after them."""
        return self._paths

    def on(self, adapted: AdaptedModel) -> FrozenPrefix:
        """Return the same prefix of a replica of the model."""
        return FrozenPrefix(adapted, self._paths, self._widths)

    @contextmanager
    def record(self) -> Generator[Recording]:
        """Stop one forward pass, and this context, where the first live block would begin.

        Yields:
            The recording, set by then: the hidden states that were about to enter that block.

        Raises:
            NoPrefix: If the pass never reached that block.
        """
        recording = Recording(torch.empty(0))

        def stop(*args: Any, **options: Any) -> Any:
            hidden = get_hidden(args, options)
            assert hidden is not None
            recording.hidden = hidden.detach()
            raise _Stopped

        try:
            with replace_forward(self._first, stop):
                yield recording
        except _Stopped:
            return
        raise NoPrefix(f"{self._paths[-1]} was not called")

    @contextmanager
    def feed(self, hidden: Tensor) -> Generator[None]:
        """Skip the prefix in forward passes within this context.

        Args:
            hidden: Input of the first live block in place of its usual one, (B, T, D).

        Raises:
            ValueError: If a forward pass within the context has a batch of another shape.
        """
        forward = self._first.forward

        def begin(*args: Any, **options: Any) -> Any:
            current = get_hidden(args, options)
            if current is None or current.shape != hidden.shape:
                shape = None if current is None else tuple(current.shape)
                raise ValueError(f"hidden states of shape {tuple(hidden.shape)} for a batch of shape {shape}")
            if args:
                return forward(hidden, *args[1:], **options)
            return forward(**{**options, HIDDEN: hidden})

        with ExitStack() as contexts:
            for block, width in zip(self._skipped, self._widths, strict=True):
                contexts.enter_context(replace_forward(block, _pass_through(width)))
            contexts.enter_context(replace_forward(self._first, begin))
            yield


def list_live_modules(adapted: AdaptedModel) -> frozenset[str]:
    """Return the paths of modules whose values may differ between jobs: target layers and owners of extras."""
    return frozenset(adapted.layers) | {path.rpartition(".")[0] for path in (*adapted.extras, *adapted.buffers)}


def _pass_through(width: int | None) -> Any:
    """Return a forward that returns its hidden states unchanged, in the block's own return format."""

    def forward(*args: Any, **options: Any) -> Any:
        hidden = get_hidden(args, options)
        return hidden if width is None else (hidden, *[None] * (width - 1))

    return forward


def _get_entry(model: nn.Module, path: str, entered: Mapping[nn.Module, int]) -> int:
    """Return when a module's weights may first be used: at its first call, or that of a module with tied weights.

    A module that is never called itself (another module reads its weights) counts from the call of its parent.
    """
    weights = {id(weight) for weight in model.get_submodule(path).parameters()}
    paths = [path]
    for name, module in model.named_modules():
        if weights & {id(weight) for weight in module.parameters(recurse=False)}:
            paths.append(name)
    moments: list[int] = []
    for candidate in paths:
        while candidate and model.get_submodule(candidate) not in entered:
            candidate = candidate.rpartition(".")[0]
        moments.append(entered[model.get_submodule(candidate)])
    return min(moments)
