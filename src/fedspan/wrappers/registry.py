"""Every wrapper by its key: the one place that names them all. One line a wrapper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fedspan.core.method import Method
from fedspan.core.values import OptimizerSpec
from fedspan.errors import FedspanError, nearest
from fedspan.methods.registry import METHODS
from fedspan.wrappers.fedadagrad import FedAdagrad
from fedspan.wrappers.fedadam import FedAdam
from fedspan.wrappers.fedavgm import FedAvgM
from fedspan.wrappers.fedpaq import FedPAQ
from fedspan.wrappers.fedprox import FedProx
from fedspan.wrappers.fedyogi import FedYogi
from fedspan.wrappers.scaffold import Scaffold
from fedspan.wrappers.wrapper import RegisteredWrapper

__all__ = ["WRAPPERS", "wrap", "wrapper_class"]

WRAPPERS: Mapping[str, type[RegisteredWrapper]] = MappingProxyType(
    {
        "fedadagrad": FedAdagrad,
        "fedadam": FedAdam,
        "fedavgm": FedAvgM,
        "fedpaq": FedPAQ,
        "fedprox": FedProx,
        "fedyogi": FedYogi,
        "scaffold": Scaffold,
    }
)


def wrapper_class(key: str, field: str = "method.wrappers") -> type[RegisteredWrapper]:
    """The class registered under a key.

    Args:
        key: of the registry.
        field: where the user wrote it.

    Raises:
        FedspanError: for an unknown key, with the nearest known ones.
    """
    if key in WRAPPERS:  # first: a method of somebody's own may have taken the key
        return WRAPPERS[key]
    if key in METHODS:
        raise FedspanError(field, key, "a wrapper; this is a method, which goes into method.name")
    raise FedspanError(field, key, f"no such wrapper; the nearest are {nearest(key, WRAPPERS)}")


def wrap(
    method: Method,
    wrappers: Sequence[tuple[str, Mapping[str, Any]]],
    seed: int,
    optimizer: OptimizerSpec,
    max_grad_norm: float,
) -> Method:
    """A method with wrappers around it.

    Args:
        method: with its extras.
        wrappers: keys and checked options, from the inside out.
        seed: of the wrappers' own draws.
        optimizer: of local training.
        max_grad_norm: of local training (0: none).

    Raises:
        FedspanError: for a wrapper that cannot go around what is inside it, or with such local training.
    """
    kinds: dict[str, str] = {}
    for position, (key, options) in enumerate(wrappers):
        field, cls = f"method.wrappers.{position}", wrapper_class(key)
        if cls.kind in kinds:
            raise FedspanError(field, key, f"one {cls.kind} around a method; {kinds[cls.kind]} is there already")
        kinds[cls.kind] = key
        wrapped = cls(inner=method, seed=seed, **options)
        inside = " and its wrappers inside" if position else ""
        refusal = wrapped.refusal(method.declared())
        if refusal is not None:
            raise FedspanError(field, key, f"another wrapper or method{inside}: {key} {refusal}")
        refusal = wrapped.training_refusal(optimizer, max_grad_norm)
        if refusal is not None:
            raise FedspanError(field, key, f"other settings: {refusal}")
        method = wrapped
    return method
