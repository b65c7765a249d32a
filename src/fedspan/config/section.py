"""What all sections of a configuration have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["Section"]


class Section(BaseModel):
    """Immutable, and without fields that nobody knows."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
