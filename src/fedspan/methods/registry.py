"""Every method by its key: the one place that names them all. One line a method."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fedspan.core.method import RegisteredMethod
from fedspan.errors import FedspanError, nearest
from fedspan.methods.fedavg import FedAvg
from fedspan.methods.fedgalore import FedGaLore
from fedspan.methods.fedit import FedIT
from fedspan.methods.fedloru import FedLoRU
from fedspan.methods.fedsa_lora import FedSALoRA
from fedspan.methods.ffa_lora import FFALoRA
from fedspan.methods.flora import FLoRA
from fedspan.methods.florg import FLoRG
from fedspan.methods.local_only import LocalOnly
from fedspan.methods.rolora import RoLoRA

__all__ = ["METHODS", "method_class"]

METHODS: Mapping[str, type[RegisteredMethod]] = MappingProxyType(
    {
        "fedavg": FedAvg,
        "fedgalore": FedGaLore,
        "fedit": FedIT,
        "fedloru": FedLoRU,
        "fedsa-lora": FedSALoRA,
        "ffa-lora": FFALoRA,
        "flora": FLoRA,
        "florg": FLoRG,
        "local-only": LocalOnly,
        "rolora": RoLoRA,
    }
)


def method_class(key: str) -> type[RegisteredMethod]:
    """The class registered under a key.

    Raises:
        FedspanError: for an unknown key, with the nearest known ones.
    """
    if key not in METHODS:
        raise FedspanError("method.name", key, f"no such method; the nearest are {nearest(key, METHODS)}")
    return METHODS[key]
