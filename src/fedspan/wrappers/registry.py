"""The registry of all wrappers by key, one line per wrapper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fedspan.core.method import Method
from fedspan.core.values import OptimizerSpec
from fedspan.errors import FedspanError, suggest_nearest
from fedspan.methods.registry import METHODS
from fedspan.wrappers.fedadagrad import FedAdagrad
from fedspan.wrappers.fedadam import FedAdam
from fedspan.wrappers.fedavgm import FedAvgM
from fedspan.wrappers.fedpaq import FedPAQ
from fedspan.wrappers.fedprox import FedProx
from fedspan.wrappers.fedyogi import FedYogi
from fedspan.wrappers.low_precision import LowPrecision
from fedspan.wrappers.scaffold import Scaffold
from fedspan.wrappers.wrapper import RegisteredWrapper

WRAPPERS: Mapping[str, type[RegisteredWrapper]] = MappingProxyType(
    {
        "fedadagrad": FedAdagrad,
        "fedadam": FedAdam,
        "fedavgm": FedAvgM,
        "fedpaq": FedPAQ,
        "fedprox": FedProx,
        "fedyogi": FedYogi,
        "low-precision": LowPrecision,
        "scaffold": Scaffold,
    }
)


def get_wrapper_class(key: str, field: str = "method.wrappers") -> type[RegisteredWrapper]:
    """Return the class registered under a key."""
    if key in WRAPPERS:  # first: a user's own method may have the same key
        return WRAPPERS[key]
    if key in METHODS:
        raise FedspanError(field, key, problem=f"{key!r} is a method, not a wrapper. Put it into method.name")
    raise FedspanError(field, key, problem=f"no wrapper is named {key!r}. {suggest_nearest(key, WRAPPERS)}")


def wrap(
    method: Method,
    wrappers: Sequence[tuple[str, Mapping[str, Any]]],
    seed: int,
    optimizer: OptimizerSpec,
    max_grad_norm: float,
) -> Method:
    """Wrap a method.

    Args:
        method: Method with its extras.
        wrappers: Keys and validated options, from the inside out.
        seed: Seed of the wrappers' own random draws.
        optimizer: Optimizer of local training.
        max_grad_norm: Gradient clipping norm of local training (0: none).
    """
    kinds: dict[str, str] = {}
    for position, (key, options) in enumerate(wrappers):
        field, cls = f"method.wrappers.{position}", get_wrapper_class(key)
        if cls.kind in kinds:
            raise FedspanError(
                field, key, problem=f"a method takes one {cls.kind}, and {kinds[cls.kind]} is already one"
            )
        kinds[cls.kind] = key
        wrapped = cls(inner=method, seed=seed, **options)
        suffix = " and its wrappers inside" if position else ""
        refusal = wrapped.explain_refusal(method.declare_claims())
        if refusal is not None:
            raise FedspanError(field, key, f"another wrapper or method{suffix}", problem=f"{key} {refusal}")
        refusal = wrapped.explain_training_refusal(optimizer, max_grad_norm)
        if refusal is not None:
            raise FedspanError(field, key, problem=refusal)
        method = wrapped
    return method
