"""A model's blocks, compiled by ``torch.compile`` for the passes that several clients share."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.models.calls import block_chains, replaced, traced

__all__ = ["CompiledBlocks"]


class CompiledBlocks:
    """The blocks of an adapted model; the whole model where it has no list of blocks.

    Only what runs within ``within`` is compiled: jobs that train alone, refreshed projectors (which hook into the
    backward pass) and evaluation are not. Shapes are dynamic, or every number of tokens would be compiled anew.

    Args:
        adapted: the model.
    """

    def __init__(self, adapted: AdaptedModel) -> None:
        model = adapted.model
        try:
            chains = block_chains(model, traced(model)[1])
        except Exception:  # whatever a model makes of a batch that is not what it expects
            chains = []
        blocks: list[nn.Module] = [block for chain in chains for block in chain] or [model]
        self._compiled = {block: torch.compile(block.forward, dynamic=True) for block in blocks}

    @contextmanager
    def within(self) -> Generator[None]:
        """Within this context forward passes take the compiled blocks.

        Raises:
            FedspanError: if one can't be compiled.
        """
        from torch._dynamo.exc import TorchDynamoException  # seconds to import, for those who compile

        with ExitStack() as contexts:
            for block, forward in self._compiled.items():
                contexts.enter_context(replaced(block, forward))
            try:
                yield
            except TorchDynamoException as error:
                said = str(error).strip().splitlines()
                expected = f"false: torch.compile failed here ({type(error).__name__}: {said[0] if said else ''})"
                raise FedspanError("engine.compile", True, expected) from error
