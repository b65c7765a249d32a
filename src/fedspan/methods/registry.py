"""The registry of all methods by key, one line per method.

Add your own methods with ``register``, or from an installed package that declares them as entry points in the group
``fedspan.methods`` (``my-method = "my_package:MyMethod"``): configs find them there, on the command line and on nodes.
The tables of ``fedspan methods`` show those of the registry itself. A node runs only the methods installed on it; no
server can add to these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fedspan.core.method import Claims, RegisteredMethod
from fedspan.errors import FedspanError, suggest_nearest
from fedspan.methods.fed_sb import FedSB
from fedspan.methods.fedask import FedASK
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
from fedspan.methods.florist import FLoRIST
from fedspan.methods.fr_lora import FRLoRA
from fedspan.methods.hetlora import HetLoRA
from fedspan.methods.la_lora import LALoRA
from fedspan.methods.local_only import LocalOnly
from fedspan.methods.lora_a2 import LoRAA2
from fedspan.methods.lora_fair import LoRAFAIR
from fedspan.methods.mfedloru import MFedLoRU
from fedspan.methods.pfedlora import PFedLoRA
from fedspan.methods.pfedloru import PFedLoRU
from fedspan.methods.ravan import RAVAN
from fedspan.methods.rolora import RoLoRA
from fedspan.methods.slora import SLoRA
from fedspan.packages import load_installed

ENTRY_POINTS = "fedspan.methods"
"""Group of the entry points."""
_RESERVED = {"all"}
_KEY = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

_methods: dict[str, type[RegisteredMethod]] = {
    "fed-sb": FedSB,
    "fedask": FedASK,
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
    "florist": FLoRIST,
    "fr-lora": FRLoRA,
    "hetlora": HetLoRA,
    "la-lora": LALoRA,
    "local-only": LocalOnly,
    "lora-a2": LoRAA2,
    "lora-fair": LoRAFAIR,
    "mfedloru": MFedLoRU,
    "pfedlora": PFedLoRA,
    "pfedloru": PFedLoRU,
    "ravan": RAVAN,
    "rolora": RoLoRA,
    "slora": SLoRA,
}
METHODS: Mapping[str, type[RegisteredMethod]] = MappingProxyType(_methods)


def register(key: str, cls: type[RegisteredMethod]) -> None:
    """Register a method of your own in this process, for configs, comparisons and plans.

    Args:
        key: Value of ``method.name``, in lower case with hyphens.
        cls: Frozen dataclass derived from ``fedspan.core.method.RegisteredMethod`` that declares its ``claims``. Its
            fields are the options of ``method:``.

    Examples:
        >>> fedspan.register("my-method", MyMethod)

    Raises:
        FedspanError: If the key is invalid or belongs to another class, here or in an installed package, or the class
            is not a method.
    """
    if not _KEY.fullmatch(key) or key in _RESERVED:
        raise FedspanError(
            "method.name",
            key,
            "lower case letters and digits, with hyphens between words, and not the word all",
        )
    if _methods.get(key, cls) is not cls:
        raise FedspanError("method.name", key, problem=f"{key!r} is already the key of {_methods[key].__qualname__}")
    installed = None if key in _methods else load_installed(ENTRY_POINTS, key, "method.name")
    if installed is not None and installed[1] is not cls:
        raise FedspanError("method.name", key, problem=f"{key!r} is already the key of {installed[0]}")
    _require_method(key, cls)
    _methods[key] = cls


def _require_method(key: str, cls: Any) -> None:
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if not (isinstance(cls, type) and issubclass(cls, RegisteredMethod)) or missing:
        missing_text = f" (it lacks {', '.join(missing)})" if missing else ""
        problem = f"{cls!r} is not a method{missing_text}"
        raise FedspanError("method.name", key, "a subclass of fedspan.core.method.RegisteredMethod", problem=problem)
    if "__dataclass_fields__" not in vars(cls):  # its base is frozen, so it must be too
        raise FedspanError("method.name", key, problem=f"{cls!r} lacks @dataclass(frozen=True, kw_only=True)")
    if not isinstance(getattr(cls, "claims", None), Claims):
        raise FedspanError("method.name", key, problem=f"{cls!r} declares no claims (a ClassVar[Claims])")


def get_method_class(key: str, field: str = "method.name") -> type[RegisteredMethod]:
    """Return the class registered under a key, here or by an installed package.

    Raises:
        FedspanError: If the key is unknown (the message lists the nearest known ones) or its package cannot be loaded.
    """
    if key not in METHODS:
        installed = load_installed(ENTRY_POINTS, key, field)
        if installed is not None:
            register(key, installed[1])
            return METHODS[key]
        raise FedspanError(field, key, problem=f"no method is named {key!r}. {suggest_nearest(key, METHODS)}")
    return METHODS[key]
