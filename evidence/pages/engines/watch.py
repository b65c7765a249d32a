"""How long a federation's engine works, and how long the federation around it."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any


class Watch:
    """Counts the seconds within an engine's ``train_all`` and ``predict``.

    Of ``train_all``, what the federation does when it is called back (messages, the method's two ends, the reduction)
    is not the engine's time. Several workers call back while others train: such a second counts as one divided by
    their number.

    Args:
        engine: Any engine; its methods are replaced on the object.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._within = self._called_back = 0.0
        self._lock = Lock()
        train_all, predict = engine.train_all, engine.predict

        def watched(examples: Any, sizes: Any, opened: Callable[..., Any], finished: Callable[..., Any]) -> None:
            with self._counted("_within"):
                train_all(examples, sizes, self._back(opened), self._back(finished))

        def predicted(*args: Any, **options: Any) -> Any:
            with self._counted("_within"):
                return predict(*args, **options)

        engine.train_all, engine.predict = watched, predicted

    @contextmanager
    def _counted(self, name: str) -> Generator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            with self._lock:
                setattr(self, name, getattr(self, name) + spent)

    def _back(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            with self._counted("_called_back"):
                return call(*args)

        return timed

    def take(self) -> float:
        """The engine's seconds since the last call."""
        stacking = getattr(self.engine, "stacking", None)
        workers = 1 if stacking is None else stacking.workers
        seconds = self._within - self._called_back / workers
        self._within = self._called_back = 0.0
        return seconds


def peak() -> int:
    """Peak of resident memory since the start or the last reset, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def reset_peak() -> None:
    """Forget the peak."""
    Path("/proc/self/clear_refs").write_text("5")
