"""fedspan: federated fine-tuning of pretrained models with low-rank updates.

>>> import fedspan
>>> report = fedspan.run("config.yaml", "runs/first")            # doctest: +SKIP
>>> fedspan.predict("runs/first", ["can I move my appointment?"])  # doctest: +SKIP
[('reschedule_appointment', 0.93)]

Names are loaded when they are first used, so the import itself takes no torch and no time.
"""

import logging
import os
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Where bitsandbytes is installed, PEFT imports it, and it warns that it found no kernels on a hub. Its int8 layers warn
# in every pass over float32 inputs, which are the rule on a CPU.
for _name in ("bitsandbytes.backends.cpu.ops", "bitsandbytes.autograd._functions"):
    logging.getLogger(_name).setLevel(logging.ERROR)

# GNU OpenMP's threads spin while they wait for each other. By default they do so for so long that, beside other work,
# the threads that they wait for get no processor. GNU OpenMP reads the variable when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

_HOMES = {
    "CompareReport": "fedspan.experiments.comparison",
    "Diagnosis": "fedspan.diagnostics.round_diagnosis",
    "FedspanError": "fedspan.errors",
    "Listener": "fedspan.progress.listener",
    "Metric": "fedspan.tasks.metrics",
    "Plan": "fedspan.planning.plan",
    "RunConfig": "fedspan.config",
    "RunReport": "fedspan.runs.report",
    "SweepReport": "fedspan.experiments.search",
    "TaskDefinition": "fedspan.tasks.definition",
    "TorchTrainer": "fedspan.training.trainers.torch_loop",
    "TrainingRound": "fedspan.training.trainers.torch_loop",
    "Watcher": "fedspan.experiments.series",
    "compare": "fedspan.experiments.run_comparison",
    "diagnose": "fedspan.runs.diagnose",
    "dry_run": "fedspan.reproduction.rehearsal",
    "evaluate": "fedspan.serving.evaluate",
    "export": "fedspan.serving.export",
    "harness": "fedspan.serving.harness",
    "join": "fedspan.deployment.deploy",
    "list_datasets": "fedspan.data.catalogue",
    "list_methods": "fedspan.methods.describe",
    "list_tasks": "fedspan.tasks.registry",
    "list_wrappers": "fedspan.wrappers.describe",
    "load_config": "fedspan.config",
    "plan": "fedspan.planning.estimate",
    "predict": "fedspan.serving.load",
    "read_notes": "fedspan.assembly.task",
    "read_report": "fedspan.runs.report",
    "register": "fedspan.methods.registry",
    "register_metrics": "fedspan.tasks.metrics",
    "register_task": "fedspan.tasks.registry",
    "report": "fedspan.reports.render",
    "reproduce": "fedspan.reproduction.reproduce",
    "resolve_model": "fedspan.models.names",
    "resume": "fedspan.runs.train",
    "resume_compare": "fedspan.experiments.run_comparison",
    "resume_reproduction": "fedspan.reproduction.reproduce",
    "resume_sweep": "fedspan.experiments.run_search",
    "run": "fedspan.runs.train",
    "simulate": "fedspan.runs.train",
    "sweep": "fedspan.experiments.run_search",
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
