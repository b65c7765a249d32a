"""Names of Flower's that the adapter relies on: there in the installed version, or a failure says what broke."""

import importlib
import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NoReturn

import pytest


def broken(what: str, purpose: str) -> NoReturn:
    """Fail, and say what of Flower's is gone and what for the adapter needs it."""
    pytest.fail(
        f"Flower {version('flwr')} no longer has {what}: fedspan.transports.flower.adapter relies on it for {purpose}",
        pytrace=False,
    )


def lookup(module: str, name: str, purpose: str) -> Any:
    """Return what has a name of Flower's; a submodule is a name, too."""
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        try:
            return importlib.import_module(f"{module}.{name}")
        except ImportError:
            broken(f"{module}.{name}", purpose)
    except ImportError as error:
        broken(f"{module}.{name} ({error})", purpose)


def require(parameters: str, function: Callable[..., Any], name: str, purpose: str) -> None:
    """Check that a function takes these parameters, and needs no others."""
    signature = inspect.signature(function)
    for parameter in parameters.split():
        if parameter not in signature.parameters:
            broken(f"the parameter {parameter} of {name}{signature}", purpose)
    needed = {
        one.name for one in signature.parameters.values() if one.default is one.empty and "VAR_" not in one.kind.name
    }
    if more := needed - set(parameters.split()):
        broken(f"a {name} that does without {', '.join(sorted(more))}", purpose)


def build_array_message(body: bytes) -> Any:
    """Build a message whose body is an array."""
    from flwr.app import Array, ArrayRecord, Message, RecordDict

    array = Array(dtype="uint8", shape=(len(body),), stype="bytes", data=body)
    return Message(RecordDict({"body": ArrayRecord({"body": array})}), dst_node_id=1, message_type="train")
