"""Model blocks compiled by ``torch.compile`` for passes that several clients share."""

from __future__ import annotations

import traceback
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.models.calls import find_block_chains, replace_forward, trace_calls

VARIANTS = 64
"""Compiled variants of a block: one for each number of clients that share a pass, with and without gradients and masks.

All blocks of Transformers are counted together, of all models of a process. Beyond PyTorch's own limit (8) further
variants would run uncompiled, without an error.
"""


class CompiledBlocks:
    """The compiled blocks of an adapted model, or the whole model if it has no list of blocks.

    Only passes inside the context ``within`` are compiled: jobs that train alone, refreshed projectors (which hook into
    the backward pass) and evaluation are not. Shapes are dynamic, since static ones would need a compilation for every
    number of tokens.
    """

    def __init__(self, adapted: AdaptedModel) -> None:
        model = adapted.model
        try:
            chains = find_block_chains(model, trace_calls(model)[1])
        except Exception:  # a model may raise anything on a batch that it does not expect
            chains = []
        blocks: list[nn.Module] = [block for chain in chains for block in chain] or [model]
        from torch._dynamo import config  # takes seconds to import, so only when compiling

        config.recompile_limit = max(config.recompile_limit, VARIANTS)
        self._compiled = {block: torch.compile(block.forward, dynamic=True) for block in blocks}

    @contextmanager
    def within(self) -> Generator[None]:
        """Use the compiled blocks in forward passes within this context."""
        from torch._dynamo.exc import TorchDynamoException

        with ExitStack() as contexts:
            for block, forward in self._compiled.items():
                contexts.enter_context(replace_forward(block, forward))
            try:
                yield
            except (TorchDynamoException, AssertionError) as error:
                if isinstance(error, AssertionError) and not _is_raised_by_compiled_code(error):
                    raise
                lines = str(error).strip().splitlines()
                problem = f"torch.compile failed on this machine ({type(error).__name__}: {lines[0] if lines else ''})"
                raise FedspanError("engine.compile", True, "false", problem=problem) from error


def _is_raised_by_compiled_code(error: BaseException) -> bool:
    """Return whether one of Inductor's modules raised an error: they check the strides that they were compiled for."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return "assert_size_stride" in frame.f_globals
