"""The base class of all sections of a configuration, each in the package that uses it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

VARIANT = "="
"""Prefix of the tags of a field with several notations; the tags are not part of the user's input."""


class Section(BaseModel):
    """A section: immutable, with unknown fields refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)
