"""Write docs/config.md and docs/node.md from the fields' own descriptions: ``python docs/generate_config.py``."""

from __future__ import annotations

from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from fedspan.config import RunConfig
from fedspan.config.node import NodeConfig

PAGE = Path(__file__).parent / "config.md"
NODE_PAGE = Path(__file__).parent / "node.md"
NODE_INTRO = """# Node file

All fields of the file that a data owner writes for `fedspan join` ([setup](own-a-node.md)): the node, its data and
its limits. Relative paths start at the file's folder. The server never sees this file, and requests beyond its limits
are refused. `python docs/generate_config.py` writes this page.
"""
INTRO = """# Configuration

All fields of a run's YAML file, with their types and defaults. Only `data.train` or `data.dataset` is required; `null`
is the default where none is given. `--set section.field=value` overrides a field on the command line.

A method's options are in the section `method` next to `name`; a wrapper's are next to its `name` in `method.wrappers`
(`fedspan methods --json` lists them). Every method has `r` (rank of the adapter, 8), `lora_alpha` (the update is
lora_alpha / r times B A, 16) and `use_rslora` (lora_alpha / sqrt(r) instead, false).
`python docs/generate_config.py` writes this page.
"""


def _type(annotation: Any) -> str:
    """The type as text, without an annotation's metadata, which the description covers."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(args[0])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_type(arg) for arg in args if arg is not NoneType))
    if origin in (list, dict, tuple):
        return f"{origin.__name__}[{', '.join(map(_type, args))}]"
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in args)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def format_section(title: str, model: type[BaseModel]) -> str:
    """The fields of a section with their types, defaults and descriptions."""
    lines = [f"## {title}", ""]
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            continue
        default = field.get_default(call_default_factory=True)
        value = ", required" if field.is_required() else "" if default is None else f", `{default!r}`"
        description = " ".join((field.description or "").split())
        lines.append(f"- **`{name}`** ({_type(field.annotation)}{value}): {description}")
    return "\n".join(lines) + "\n"


def list_nested(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The optional sections of a section, by field."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in model.model_fields.items():
        kinds = [kind for kind in get_args(field.annotation) if kind is not NoneType]
        optional = len(kinds) == 1 and NoneType in get_args(field.annotation)
        if optional and isinstance(kinds[0], type) and issubclass(kinds[0], BaseModel):
            found[name] = kinds[0]
    return found


def page(intro: str = INTRO, top: type[BaseModel] = RunConfig) -> str:
    """The page of a file: its top level and its sections."""
    parts = [intro, format_section("Top level", top)]
    for name, field in top.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            parts.append(format_section(f"`{name}`", field.annotation))
            parts += [
                format_section(f"`{name}.{inner}`", kind) for inner, kind in list_nested(field.annotation).items()
            ]
    parts += [format_section(f"`{name}`", kind) for name, kind in list_nested(top).items()]
    return "\n".join(parts)


def format_node_page() -> str:
    """The page of a node's file."""
    return page(NODE_INTRO, NodeConfig)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    NODE_PAGE.write_text(format_node_page(), encoding="utf-8")
