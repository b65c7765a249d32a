"""The engine of a simulation: it trains clients one after another, or many at once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from fedspan.section import Section
from fedspan.training.jobs import PrefixSettings

_GIB = 2**30


class EngineConfig(Section):
    """The simulator. These settings do not change results, up to rounding."""

    name: Literal["batched", "loop"] = "batched"
    """batched: several clients in each forward and backward pass over the frozen base. loop: one client after another,
    the reference."""
    clients_per_pass: int | None = Field(default=None, ge=1, le=1024)
    """Clients per pass of batched; default: measured at the start, 1 if more would be slower."""
    workers: int | None = Field(default=None, ge=1, le=1024)
    """batched: threads that train clients in parallel on one base and share torch's own threads; default: measured."""
    padding_free: bool = True
    """Concatenate the tokens of a batch between the first block and the last, with attention in bins of whole texts;
    batched only, for models with Transformers' eager or sdpa attention."""
    prefix_cache: bool = True
    """Compute the hidden states that enter the first trainable layer once per example, if layers_to_transform excludes
    the first layers."""
    prefix_memory: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """GiB of memory for these hidden states."""
    prefix_folder: str | None = Field(default=None, min_length=1)
    """Folder on a local disk for hidden states beyond prefix_memory, in a memory-mapped file that is removed with the
    process; default: compute them every time."""

    def build_prefix_settings(self, batch_size: int) -> PrefixSettings | None:
        """Return the settings of the prefix cache for the engines; None: no cache."""
        if not self.prefix_cache:
            return None
        folder = None if self.prefix_folder is None else Path(self.prefix_folder)
        return PrefixSettings(int(self.prefix_memory * _GIB), folder, batch_size)
