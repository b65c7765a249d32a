"""Write docs/config.md and docs/node.md from the fields' own descriptions: ``python docs/generate_config.py``."""

from __future__ import annotations

from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from fedspan.config import RunConfig
from fedspan.config.node import NodeConfig

PAGE = Path(__file__).parent / "config.md"
NODE_PAGE = Path(__file__).parent / "node.md"
NODE_INTRO = """# A node's file

What a data owner writes for `fedspan join` ([deployment.md](deployment.md)): who it is, where its data are, and what
it allows. Paths are as seen from the file's folder. A server never sees this file; what it asks for beyond the
limits is refused. Written by `python docs/generate_config.py` from the descriptions in `fedspan.config.node`.
"""
INTRO = """# Configuration

A run is described by one YAML file; `--set section.field=value` overrides any field, and a mistake is answered with the
field, the value and what would be right. Only `data.train` or `data.dataset` is required. This page is written by
`python docs/generate_config.py` from the descriptions in `fedspan.config`; options of a method stand beside
`method.name`, those of a wrapper beside its `name` (`fedspan methods --json` lists them). Every method has `r` (the
adapter's rank, 8), `lora_alpha` (B A counts lora_alpha / r times, 16) and `use_rslora` (lora_alpha / sqrt(r), false).
"""


def _type(annotation: Any) -> str:
    """A type as people read it; what else an annotation holds is in the description."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(args[0])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_type, args)))
    if origin in (list, dict, tuple):
        return f"{origin.__name__}[{', '.join(map(_type, args))}]"
    if annotation is NoneType:
        return "None"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"{{{', '.join(annotation.model_fields)}}}"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def section(title: str, model: type[BaseModel]) -> str:
    """One table: field, type, default, meaning."""
    lines = [f"## {title}", "", "| field | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            continue
        default = "required" if field.is_required() else f"`{field.get_default(call_default_factory=True)!r}`"
        meaning = (field.description or "").replace("|", "\\|")
        lines.append(f"| `{name}` | {_type(field.annotation)} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def nested(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The sections that may be left out of a section, by field."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in model.model_fields.items():
        kinds = [kind for kind in get_args(field.annotation) if kind is not NoneType]
        optional = len(kinds) == 1 and NoneType in get_args(field.annotation)
        if optional and isinstance(kinds[0], type) and issubclass(kinds[0], BaseModel):
            found[name] = kinds[0]
    return found


def page(intro: str = INTRO, top: type[BaseModel] = RunConfig) -> str:
    """The whole page of a file: its top level, and a table for each section."""
    parts = [intro, section("Top level", top)]
    for name, field in top.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            parts.append(section(f"`{name}`", field.annotation))
            parts += [section(f"`{name}.{inner}`", kind) for inner, kind in nested(field.annotation).items()]
    parts += [section(f"`{name}`", kind) for name, kind in nested(top).items()]
    return "\n".join(parts)


def node_page() -> str:
    """The page of a node's file."""
    return page(NODE_INTRO, NodeConfig)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    NODE_PAGE.write_text(node_page(), encoding="utf-8")
