"""The live view of a run: a line for every round, and in a terminal a footer with the current progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from fedspan.assembly.run import Prepared
from fedspan.logs import read_lines
from fedspan.progress.bar import ProgressBar
from fedspan.progress.formatting import format_duration, format_number, format_score, format_size, shorten
from fedspan.progress.remaining_time import STAGES, get_unrepeated_name
from fedspan.run_folder import RunFolder
from fedspan.tasks.metrics import METRICS
from fedspan.training.stages import Stage, StageName

_WORST = 4  # the cell with the worst client
_SHORT = 1.0  # seconds; shorter stages before the first round are not printed


class RunView(ProgressBar):
    """Shows a run while it is entered as a context manager.

    Args:
        out: The console; if it is not a terminal, only the lines are printed. None: standard error.
    """

    def __init__(self, out: Console | None, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(out, clock)
        self._live.transient = out is not None  # a command's summary follows
        self._folder = folder
        self._one_time: dict[StageName, float] = {}  # seconds of one-time stages that are not printed yet
        self._since = self._began  # when the current stage began

    def on_environment_change(self, changes: Mapping[str, tuple[object, object]]) -> None:
        text = ", ".join(f"{name} was {before} and is {after}" for name, (before, after) in changes.items())
        self._print(Text(f"note: {text}; the last bits of the result may differ", "yellow"))

    def on_note(self, text: str) -> None:
        self._print(Text(f"note: {text}", "yellow"))

    def on_start(self, prepared: Prepared, done: int, resumed: bool) -> None:
        super().on_start(prepared, done, resumed)
        config, federation = prepared.config, prepared.federation
        clients = len(federation.clients)
        cohort = federation.settings.clients_per_round or clients
        parts, data_by_client = prepared.partition, federation.clients
        client_examples = sum(data.client.examples for data in data_by_client.values()) if parts is None else 0
        examples = client_examples if parts is None else int(parts.parts.sizes[:, 0].sum())
        cohort_text = f", {cohort} a round" if cohort < clients else ""
        self._print(
            Text.assemble(
                (config.method.title, "bold"),
                f" on {config.model.name.removeprefix('builtin:')} ({prepared.engine.adapted.device.type}): "
                f"{clients} clients{cohort_text}, {examples} training examples"
                + (f", {len(prepared.labels)} labels" if prepared.labels else "")
                + f"; measured by {METRICS[prepared.task.metric].title}",
            )
        )
        self._print(Text(f"run folder {self._folder}", "dim"))
        for note in prepared.notes:
            self._print(Text(f"note: {note}", "yellow"))
        self._print(
            self._format_line(("round", "loss", "validation", "test", "worst client", "down", "up", "time"), "dim")
        )
        if resumed:
            for row in read_lines(RunFolder(self._folder).metrics):
                self._print(self._render_row(row, "dim"))
            self._print(Text(f"resumed after round {done} of {self.rounds}", "dim"))

    def on_stage_change(self, stage: Stage | None) -> None:
        before, now = self._stage, self._clock()
        if (once := get_unrepeated_name(before)) != get_unrepeated_name(stage):
            if once is not None:
                self._one_time[once] = self._one_time.get(once, 0.0) + now - self._since
            self._since = now
        super().on_stage_change(stage)

    def on_start_scores(self, scores: Mapping[str, Any]) -> None:
        seconds = self._clock() - self._began
        self._print(self._render_row({"round": 0, **scores, "bytes": {"down": 0, "up": 0}, "seconds": seconds}))

    def on_round_finish(self, row: Mapping[str, Any]) -> None:
        super().on_round_finish(row)
        once = [
            f"{STAGES[name]} {format_duration(seconds)}"
            for name, seconds in self._one_time.items()
            if seconds >= _SHORT
        ]
        self._one_time.clear()
        if once and self.done < 2:
            self._print(Text(f"before the first round: {', '.join(once)}", "dim"))
        self._print(self._render_row(row))
        for failure in row.get("failures") or ():
            self._print(Text(f"  {failure['client']}: {failure['reason']}", "yellow"))
        if late := row.get("late"):
            self._print(Text(f"  late, not waited for: {', '.join(late)}", "dim"))
        for event in ("joined", "left"):
            if clients := row.get(event):
                self._print(Text(f"  {event} before this round: {', '.join(clients)}", "dim"))

    def on_baseline_round(self, name: str, round: int, loss: float) -> None:
        super().on_baseline_round(name, round, loss)
        assert self._baseline is not None
        if round == self._baseline[2]:
            self._print(Text(f"baseline {name}: {round} epochs, loss {format_number(loss)}", "dim"))

    def _compute_widths(self) -> list[int]:
        """Compute the widths of eight cells, in 80 to 92 columns."""
        widths = [max(6, 2 * len(str(self.rounds)) + 2), 8, 11, 7, 0, 9, 9, 8]
        widths[_WORST] = max(12, min(self._out.width, 92) - sum(widths))
        return widths

    def _format_line(self, cells: tuple[str, ...], style: str = "") -> Text:
        widths = self._compute_widths()
        shown = "".join(shorten(cell, width - 1).rjust(width) for cell, width in zip(cells, widths, strict=True))
        return Text(shown, style)

    def _render_row(self, row: Mapping[str, Any], style: str = "") -> Text:
        assert self._prepared is not None
        metric = self._prepared.task.metric
        validation, test = row.get("validation") or {}, row.get("test") or {}
        worst = (row.get("clients") or {}).get("worst")
        if validation and row.get("best_round") == row["round"]:
            style = f"bold {style}"
        traffic, name_width = row["bytes"], self._compute_widths()[_WORST] - 8
        cells = (
            f"{row['round']}/{self.rounds}" if row["round"] else "start",
            format_number(row["loss"]) if "loss" in row else "-",
            format_score(metric, validation.get(metric)),
            format_score(metric, test.get(metric)),
            "-" if worst is None else f"{shorten(worst['client'], name_width)} {format_score(metric, worst[metric])}",
            format_size(traffic["down"]),
            format_size(traffic["up"]),
            format_duration(row["seconds"]),
        )
        return self._format_line(cells, style)
