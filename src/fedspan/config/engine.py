"""How the simulation trains its clients: one after another, or many at once."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedspan.config.section import Section

__all__ = ["EngineConfig"]


class EngineConfig(Section):
    """The simulator. Results are the same to rounding, whatever is set here."""

    name: Literal["batched", "loop"] = Field(
        default="batched",
        description="batched: several clients in each forward and backward pass over the frozen base. loop: one client "
        "after another, the reference.",
    )
    clients_at_once: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Clients in a pass of batched; left out: measured at the start, 1 where more would be slower.",
    )
    workers: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Threads of batched that train clients side by side on one base; torch's own threads are divided "
        "among them. Left out: measured.",
    )
