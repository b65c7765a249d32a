"""fedspan: federated fine-tuning of pretrained models with low-rank updates.

>>> import fedspan
>>> report = fedspan.run("config.yaml", "runs/first")            # doctest: +SKIP
>>> fedspan.predict("runs/first", ["can I move my appointment?"])  # doctest: +SKIP
[('reschedule_appointment', 0.93)]

Names are loaded when they are first used, so the import itself takes no torch and no time.
"""

import logging
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Where bitsandbytes is installed, PEFT imports it, and it warns that it found no kernels on a hub: no news to a user.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

_HOMES = {
    "CompareReport": "fedspan.runs.comparing",
    "Diagnosis": "fedspan.runs.diagnosing",
    "FedspanError": "fedspan.errors",
    "Listener": "fedspan.runs.listener",
    "Plan": "fedspan.runs.plans",
    "RunConfig": "fedspan.config",
    "RunReport": "fedspan.runs.session",
    "SweepReport": "fedspan.runs.sweeping",
    "Watcher": "fedspan.runs.series",
    "compare": "fedspan.api",
    "diagnose": "fedspan.api",
    "evaluate": "fedspan.api",
    "export": "fedspan.api",
    "harness": "fedspan.api",
    "list_datasets": "fedspan.data.catalogue",
    "list_methods": "fedspan.methods.describe",
    "list_wrappers": "fedspan.wrappers.describe",
    "load_config": "fedspan.config",
    "plan": "fedspan.api",
    "predict": "fedspan.api",
    "register": "fedspan.methods.registry",
    "report": "fedspan.api",
    "resolve_model": "fedspan.models.names",
    "resume": "fedspan.api",
    "resume_compare": "fedspan.api",
    "resume_sweep": "fedspan.api",
    "run": "fedspan.api",
    "sweep": "fedspan.api",
}

__all__ = ["__version__", *sorted(_HOMES)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedspan' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
