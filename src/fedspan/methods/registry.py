"""Every method by its key: the one place that names them all. One line a method."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fedspan.core.method import RegisteredMethod
from fedspan.errors import FedspanError, nearest
from fedspan.methods.fed_sb import FedSB
from fedspan.methods.fedavg import FedAvg
from fedspan.methods.federa import FeDeRA
from fedspan.methods.fedex_lora import FedExLoRA
from fedspan.methods.fedgalore import FedGaLore
from fedspan.methods.fedhm import FedHM
from fedspan.methods.fedit import FedIT
from fedspan.methods.fedloru import FedLoRU
from fedspan.methods.fedmomentum import FedMomentum
from fedspan.methods.fedrot_lora import FedRotLoRA
from fedspan.methods.fedsa_lora import FedSALoRA
from fedspan.methods.fedsvd import FedSVD
from fedspan.methods.ffa_lora import FFALoRA
from fedspan.methods.flexlora import FlexLoRA
from fedspan.methods.flora import FLoRA
from fedspan.methods.florg import FLoRG
from fedspan.methods.fr_lora import FRLoRA
from fedspan.methods.hetlora import HetLoRA
from fedspan.methods.local_only import LocalOnly
from fedspan.methods.lora_a2 import LoRAA2
from fedspan.methods.lora_fair import LoRAFAIR
from fedspan.methods.mfedloru import MFedLoRU
from fedspan.methods.pfedlora import PFedLoRA
from fedspan.methods.pfedloru import PFedLoRU
from fedspan.methods.rolora import RoLoRA
from fedspan.methods.slora import SLoRA

__all__ = ["METHODS", "method_class"]

METHODS: Mapping[str, type[RegisteredMethod]] = MappingProxyType(
    {
        "fed-sb": FedSB,
        "fedavg": FedAvg,
        "federa": FeDeRA,
        "fedex-lora": FedExLoRA,
        "fedgalore": FedGaLore,
        "fedhm": FedHM,
        "fedit": FedIT,
        "fedloru": FedLoRU,
        "fedmomentum": FedMomentum,
        "fedrot-lora": FedRotLoRA,
        "fedsa-lora": FedSALoRA,
        "fedsvd": FedSVD,
        "ffa-lora": FFALoRA,
        "flexlora": FlexLoRA,
        "flora": FLoRA,
        "florg": FLoRG,
        "fr-lora": FRLoRA,
        "hetlora": HetLoRA,
        "local-only": LocalOnly,
        "lora-a2": LoRAA2,
        "lora-fair": LoRAFAIR,
        "mfedloru": MFedLoRU,
        "pfedlora": PFedLoRA,
        "pfedloru": PFedLoRU,
        "rolora": RoLoRA,
        "slora": SLoRA,
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
