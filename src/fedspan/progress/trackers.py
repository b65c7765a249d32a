"""Tracking of a run's numbers in TensorBoard, Weights & Biases, MLflow or Trackio, with Accelerate's trackers.

Numbers are sent when their round is committed, so a resumed run repeats none. No data are sent; client names are sent
only with the worst client's score.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fedspan.errors import FedspanError
from fedspan.progress.listener import Listener, Listeners

if TYPE_CHECKING:
    from fedspan.assembly.run import Prepared

_PROJECT = "fedspan"

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""Names of the trackers, which are also their package names."""


def require_trackers(names: Sequence[str]) -> None:
    """Check that trackers are known and installed."""
    for name in names:
        if name not in TRACKERS:
            raise FedspanError("track", name, f"one of {', '.join(TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise FedspanError("track", name, problem=f"the package {name} is missing. Run: pip install {name}")


def _create_tracker(name: str, folder: Path) -> Any:
    from accelerate import tracking

    match name:
        case "tensorboard":
            return tracking.TensorBoardTracker(".", folder / "tensorboard")
        case "wandb":
            return tracking.WandBTracker(_PROJECT, name=folder.name, dir=str(folder))
        case "mlflow":
            return tracking.MLflowTracker(_PROJECT, run_name=folder.name)
        case _:
            return tracking.TrackioTracker(_PROJECT, name=folder.name)


class TrackingListener(Listeners):
    """Sends numbers to trackers and forwards all events to another listener."""

    def __init__(self, inner: Listener, names: Sequence[str], folder: Path) -> None:
        require_trackers(names)
        super().__init__(inner)
        self.inner, self.names, self.folder = inner, tuple(names), folder
        self._trackers: dict[str, Any] = {}

    def on_start(self, prepared: Prepared, done: int, resumed: bool) -> None:
        super().on_start(prepared, done, resumed)
        from accelerate.state import PartialState  # takes seconds, and the command line imports this module

        PartialState()  # Accelerate's trackers ask it whether they are the main process
        config = _flatten(prepared.config.model_dump(mode="json"))

        def start_tracker(name: str) -> None:
            tracker = _create_tracker(name, self.folder)
            tracker.start()
            if not resumed:
                tracker.store_init_configuration(config)
            self._trackers[name] = tracker

        for name in self.names:
            self._try(name, lambda name=name: start_tracker(name))

    def on_round_finish(self, row: Mapping[str, Any]) -> None:
        values = select_numbers(row)
        for name, tracker in list(self._trackers.items()):
            self._try(name, lambda tracker=tracker: tracker.log(values, step=int(row["round"])))
        super().on_round_finish(row)

    def close(self) -> None:
        """Flush and close the trackers; to be called whether or not the run succeeded."""
        for name, tracker in list(self._trackers.items()):
            self._try(name, tracker.finish)
        self._trackers.clear()

    def _try(self, name: str, call: Callable[[], None]) -> None:
        """Call a tracker; if it fails, the run continues without it: the run folder has all numbers."""
        try:
            call()
        except Exception as error:  # from any of four libraries, their networks and disks
            self._trackers.pop(name, None)
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            self.inner.on_note(f"{name} does not follow this run any more ({reason}); metrics.jsonl has all numbers")


def select_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a line of metrics.jsonl, by path: ``test/accuracy``."""
    flat = {name: value for name, value in _flatten(row, "/").items() if isinstance(value, int | float)}
    return {
        name: float(value)
        for name, value in flat.items()
        if name != "round" and not isinstance(value, bool) and math.isfinite(value)
    }


def _flatten(values: Mapping[str, Any], joined: str = ".", prefix: str = "") -> dict[str, Any]:
    """Flatten nested values by path; values that are neither number nor text are converted to text."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(cast("Mapping[str, Any]", value), joined, f"{prefix}{key}{joined}")
        elif isinstance(value, str | int | float):
            flat[f"{prefix}{key}"] = value
        elif value is not None:
            flat[f"{prefix}{key}"] = str(value)
    return flat
