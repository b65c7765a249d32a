"""The documentation page that explains a mistake."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

__all__ = ["PAGES", "find_page"]

PAGES = {
    "audit log": "deployment.md#audit-logs",
    "baselines": "config.md#top-level",
    "certificates": "deployment.md#renewing-certificates",
    "cluster": "cluster.md",
    "config": "config.md",
    "data": "config.md#data",
    "data.dataset": "data.md",
    "engine": "config.md#engine",
    "evaluation": "config.md#evaluation",
    "evaluation.diagnostics": "diagnostics.md",
    "federation": "config.md#federation",
    "federation.ranks": "faq.md#how-do-i-give-clients-different-ranks",
    "federation.secure": "secure-aggregation.md",
    "good replies": "deployment.md#which-replies-count",
    "limits": "node.md#limits",
    "limits.approve": "own-a-node.md#how-do-i-approve-a-run",
    "method": "config.md#method",
    "method.name": "choosing.md",
    "model": "config.md#model",
    "partition": "config.md#partition",
    "preset": "reproducing.md",
    "privacy": "privacy.md",
    "run folder": "first-hour.md#the-run",
    "server": "deployment.md",
    "simulation": "simulation.md",
    "task": "tasks.md",
    "web": "monitoring.md",
    "task_options": "tasks.md",
    "training": "config.md#training",
    "--methods": "choosing.md",
    "--over": "comparing.md",
}
"""Pages of docs/, with the heading, by an error's field or its prefix."""


def find_page(field: str) -> str | None:
    """Return the path of the page about an error's field, with the heading; None if no page explains it.

    Args:
        field: The field as the error names it: ``training.lr``. The longest matching entry counts.
    """
    parts = field.split(".")
    for count in range(len(parts), 0, -1):
        if (page := PAGES.get(".".join(parts[:count]))) is not None:
            return f"{_find_docs() / page}"
    return None


def _find_docs() -> Path:
    """Return the folder of the pages: a wheel has them in the package, a checkout has them beside ``src``."""
    package = Path(str(files("fedspan")))
    installed = package / "docs"
    return installed if installed.is_dir() else package.parents[1] / "docs"
